/* test_parts.c - the parts of a step: amp_forward, amp_backward, amp_update; outputs whose gradients the caller gives,
   gradients that are read, written and clipped between them. */
#include "small_model.h"
#include <math.h>

enum { SIDE = TOY_SIDE, PIXELS = SIDE * SIDE, SAMPLES = 12, CLASSES = TOY_CLASSES };
static float pictures[SAMPLES * PIXELS], wishes[SAMPLES * CLASSES];
static int32_t labels[SAMPLES];

static void make_pictures(void) {
    int i;
    test_seed = 21;
    for (i = 0; i < SAMPLES * PIXELS; i++) pictures[i] = test_uniform();
    for (i = 0; i < SAMPLES; i++) labels[i] = i % CLASSES;
    for (i = 0; i < SAMPLES * CLASSES; i++) wishes[i] = test_uniform();
}
static amp_batch batch_of(int first, int n, const void* targets) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n;
    b.inputs[0] = pictures + first * PIXELS;
    b.targets[0] = targets;
    return b;
}
static amp_batch labelled(int first, int n) { return batch_of(first, n, labels + first); }

/* A step in parts has the bits of amp_train_step: weights, scale, and what is told of it; micro-batches, steps that
   overflow and dropout too. */
static void test_parts_are_the_step(void) {
    static const struct { amp_level level; amp_dtype low; int accumulate; float scale; } kinds[] = {
        { AMP_O0, AMP_F16, 1, 0.0f }, { AMP_O1, AMP_F16, 1, 0.0f }, { AMP_O2, AMP_F16, 2, 0.0f },
        { AMP_O2, AMP_BF16, 3, 0.0f }, { AMP_O2, AMP_F16, 2, 1073741824.0f /* overflows at first */ } };
    int k, step, micro;
    for (k = 0; k < COUNT(kinds); k++) {
        amp_model_desc d = model_desc(4, kinds[k].level, kinds[k].low);
        amp_scaler_desc scaler;
        amp_step_info a, b;
        toy whole, parts;
        float loss;
        memset(&scaler, 0, sizeof scaler);
        scaler.init_scale = kinds[k].scale;
        if (kinds[k].scale != 0.0f) d.scaler = &scaler;
        d.accumulate = kinds[k].accumulate;
        d.optimizer.momentum = 0.9f;
        whole = make_toy(&d, 1, 0.25f);
        parts = make_toy(&d, 1, 0.25f);
        for (step = 0; step < 12; step++) {
            memset(&a, 0, sizeof a);
            memset(&b, 0, sizeof b);
            for (micro = 0; micro < kinds[k].accumulate; micro++) {
                amp_batch batch = labelled((step + micro) % 3 * 4, micro ? 3 : 4);
                CHECK(amp_train_step(whole.m, &batch, &a) == AMP_OK);
                CHECK(amp_forward(parts.m, &batch, &loss) == AMP_OK);
                CHECK_MSG(to_bits(loss) == to_bits(a.loss), "%g, not %g", (double)loss, (double)a.loss);
                CHECK(amp_backward(parts.m, NULL) == AMP_OK);
            }
            CHECK(amp_update(parts.m, step % 2 ? NULL : &b) == AMP_OK);
            if (step % 2) CHECK(amp_train_read(parts.m, &b) == AMP_OK);
            CHECK_MSG(a.outcome == b.outcome && a.step == b.step && a.skipped == b.skipped
                && to_bits(a.scale_after) == to_bits(b.scale_after) && memcmp(&a.grad_norm, &b.grad_norm, 8) == 0,
                "case %d, step %d: %s, not %s", k, step, amp_outcome_name(b.outcome), amp_outcome_name(a.outcome));
            CHECK(same_weights(whole.m, parts.m));
        }
        CHECK(kinds[k].scale == 0.0f || b.skipped > 0);
        amp_model_destroy(whole.m);
        amp_model_destroy(parts.m);
    }
}

/* The toy's layers with two dense ones, up to its logits. */
static amp_value logits_of(amp_model* m) {
    amp_value x = amp_input(m, 1, SIDE, SIDE);
    x = amp_relu(m, amp_conv2d(m, x, 4, 3, 1, 1));
    x = amp_linear(m, amp_max_pool2d(m, x, 2), 16);
    return amp_linear(m, amp_flatten(m, amp_tanh(m, x)), CLASSES);
}

/* A squared error computed by the caller, from the output's value, trains as amp_mse does: at each level, scaled here or
   there, in micro-batches. */
static void test_own_loss(void) {
    int level, scaled, step, i, part;
    for (level = 0; level <= 2; level++)
        for (scaled = 0; scaled <= 1; scaled++) {
            amp_model_desc d = model_desc(6, (amp_level)level, AMP_F16);
            amp_model *theirs, *own;
            amp_value v;
            double worst = 0.0;
            d.accumulate = 2;
            d.optimizer.lr = 0.1f;
            theirs = new_model(&d);
            amp_mse(theirs, logits_of(theirs));
            own = new_model(&d);
            v = logits_of(own);
            amp_output(own, v);
            CHECK_MSG(amp_model_finalize(theirs) == AMP_OK && amp_model_finalize(own) == AMP_OK, "%s", heard);
            for (step = 0; step < 10; step++) {
                for (part = 0; part < 2; part++) {
                    amp_batch batch = batch_of(part * 6, 6, wishes + part * 6 * CLASSES), bare = batch_of(part * 6, 6, NULL);
                    amp_seeds seeds;
                    float y[6 * CLASSES], dy[6 * CLASSES], factor = 1.0f;
                    CHECK(amp_train_step(theirs, &batch, NULL) == AMP_OK);
                    CHECK_MSG(amp_forward(own, &bare, NULL) == AMP_OK, "%s", heard);
                    CHECK(amp_model_read_value(own, v, y) == AMP_OK);
                    if (scaled) factor = amp_model_scaler(own)->state.scale_in_use / 2;      /* two micro-batches */
                    for (i = 0; i < 6 * CLASSES; i++)
                        dy[i] = 2.0f * (y[i] - wishes[part * 6 * CLASSES + i]) / (6 * CLASSES) * factor;
                    memset(&seeds, 0, sizeof seeds);
                    seeds.gradients[0] = amp_f32(dy);
                    seeds.scaled = scaled;
                    CHECK_MSG(amp_backward(own, &seeds) == AMP_OK, "%s", heard);
                }
                CHECK(amp_update(own, NULL) == AMP_OK);
            }
            CHECK(amp_model_scaler(own)->state.skipped == amp_model_scaler(theirs)->state.skipped);
            for (i = 0; i < 6; i++) {
                const amp_param *p = amp_model_params(theirs, NULL) + i, *q = amp_model_params(own, NULL) + i;
                size_t k;
                for (k = 0; k < p->count; k++) worst = fmax(worst, fabs((double)p->master[k] - (double)q->master[k]));
            }
            /* One rounding to half differs here and there: the loss forms its gradient in another order. */
            CHECK_MSG(worst <= (level ? 2e-5 : 1e-7), "O%d: %g", level, worst);
            amp_model_destroy(theirs);
            amp_model_destroy(own);
        }
}

/* An output that other layers read, too: its gradient is theirs plus the seed. Two outputs, one without a seed, beside a
   loss. Linear layers give the reference in closed form. */
static void test_seeds_add(void) {
    amp_model_desc d = model_desc(1, AMP_O0, AMP_F16);
    amp_model* m = new_model(&d);
    const float seed[4] = { 1.0f, -2.0f, 0.5f, 3.0f }, image[3] = { 0.5f, -1.5f, 2.0f }, wish[2] = { 0.25f, -1.0f };
    amp_value x = amp_input(m, 3, 1, 1), h = amp_linear(m, x, 4), y = amp_linear(m, h, 2);
    amp_batch b;
    amp_seeds seeds;
    float w[8], v[2], db[4], dx[3], first[12];
    int i, j;
    amp_output(m, h);
    amp_output(m, y);
    amp_retain_gradient(m, x);
    amp_mse(m, y);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
    memset(&b, 0, sizeof b);
    memset(&seeds, 0, sizeof seeds);
    b.n = 1;
    b.inputs[0] = image;
    b.targets[0] = wish;
    seeds.gradients[0] = amp_f32(seed);
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_model_read_value(m, y, v) == AMP_OK);
    CHECK(amp_backward(m, &seeds) == AMP_OK);
    CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear2.weight"), w) == AMP_OK);
    CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear1.weight"), first) == AMP_OK);
    CHECK(amp_model_read_param_gradient(m, amp_model_find_param(m, "linear1.bias"), db) == AMP_OK);
    CHECK(amp_model_read_gradient(m, x, dx) == AMP_OK);
    for (j = 0; j < 3; j++) {
        double want = 0.0;
        for (i = 0; i < 4; i++) {
            const double dh = (double)seed[i] + (double)w[i] * ((double)v[0] - (double)wish[0])
                + (double)w[4 + i] * ((double)v[1] - (double)wish[1]);
            if (j == 0) CHECK_MSG(fabs((double)db[i] - dh) < 1e-6, "%g, not %g", (double)db[i], dh);
            want += (double)first[i * 3 + j] * dh;
        }
        CHECK_MSG(fabs((double)dx[j] - want) < 1e-6, "%g, not %g", (double)dx[j], want);
    }
    amp_model_destroy(m);
}

/* An output that no layer reads, with other layers and a loss built after it: its seed lies untouched until its turn. */
static void test_output_before_a_loss(void) {
    static const float seed[12] = { 1, -2, 3, -4, 5, -6, 7, -8, 9, -10, 11, -12 };
    const amp_model_desc d = model_desc(1, AMP_O0, AMP_F16);
    amp_model* m = new_model(&d);
    amp_value u = amp_linear(m, amp_input(m, 12, 1, 1), 12), v;
    float db[12], dx[12], w[144], later[144];
    amp_batch b = batch_of(0, 1, NULL);
    amp_seeds seeds;
    int i, j;
    amp_retain_gradient(m, u);
    v = amp_linear(m, u, 12);
    amp_output(m, v);
    amp_mean(m, amp_linear(m, u, 12));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
    memset(&seeds, 0, sizeof seeds);
    seeds.gradients[0] = amp_f32(seed);
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, &seeds) == AMP_OK);
    CHECK(amp_model_read_param_gradient(m, amp_model_find_param(m, "linear2.bias"), db) == AMP_OK);
    CHECK(memcmp(db, seed, sizeof db) == 0);
    CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear2.weight"), w) == AMP_OK);
    CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear3.weight"), later) == AMP_OK);
    CHECK(amp_model_read_gradient(m, u, dx) == AMP_OK);
    for (j = 0; j < 12; j++) {
        double want = 0.0;
        for (i = 0; i < 12; i++) want += (double)seed[i] * (double)w[i * 12 + j] + (double)later[i * 12 + j] / 12.0;
        CHECK_MSG(fabs((double)dx[j] - want) < 1e-5, "%g, not %g", (double)dx[j], want);
    }
    amp_model_destroy(m);
}

/* A gradient from outside that is inf or NaN by itself is no reason for a lower loss scale. */
static void test_bad_seeds(void) {
    static const uint32_t bits[] = { 0x7f800000u, 0x7fc00000u };
    int i;
    for (i = 0; i < 4; i++) {
        amp_model_desc d = model_desc(1, AMP_O2, AMP_F16);
        amp_model* m = new_model(&d);
        amp_value y = amp_linear(m, amp_input(m, 1, SIDE, SIDE), 3);
        amp_batch b = labelled(0, 1);
        amp_seeds seeds;
        amp_step_info info;
        float g[3] = { 0.125f, 0.25f, 0.0f };
        b.targets[0] = NULL;
        memset(&seeds, 0, sizeof seeds);
        amp_output(m, y);
        amp_output(m, amp_tanh(m, y));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        CHECK(amp_forward(m, &b, NULL) == AMP_OK);
        check_refused(amp_backward(m, NULL), AMP_ERR_ARGUMENT,
            "backward: the model has no loss, and seeds is NULL: all gradients would be 0");
        put_bits(&g[2], bits[i % 2]);
        seeds.gradients[1] = amp_f32(g);
        seeds.scaled = i / 2;
        CHECK_MSG(amp_backward(m, &seeds) == AMP_OK && amp_update(m, &info) == AMP_OK, "%s", heard);
        CHECK(info.scale_after == (seeds.scaled ? 32768.0f : 65536.0f));
        CHECK(info.outcome == (seeds.scaled ? AMP_STEP_SKIPPED_OVERFLOW : AMP_STEP_SKIPPED_MODEL));
        if (!seeds.scaled)
            CHECK_MSG(strcmp(info.message, "gradients[1], given for the output 'tanh1', is not finite at element 2; a lower "
                "loss scale does not help") == 0 && strstr(heard, info.message), "%s", info.message);
        g[2] = 0.5f;
        seeds.scaled = 0;
        CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, &seeds) == AMP_OK && amp_update(m, &info) == AMP_OK);
        CHECK(info.outcome == AMP_STEP_APPLIED);
        amp_model_destroy(m);
    }
}

/* The gradient of the pixels at each level: W^T db of a first layer that is dense. The loss scale does not show. */
static void test_input_gradient(void) {
    int level, i, k;
    for (level = 0; level <= 2; level++) {
        amp_model_desc d = model_desc(1, (amp_level)level, AMP_F16);
        amp_model* m = new_model(&d);
        amp_value x = amp_input(m, 1, SIDE, SIDE);
        amp_batch b = labelled(0, 1);
        float w[8 * PIXELS], db[8], dx[PIXELS];
        amp_retain_gradient(m, amp_flatten(m, x));
        amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 8)), CLASSES));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
        CHECK_MSG(amp_model_read_gradient(m, x, dx) == AMP_OK, "%s", heard);
        CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear1.weight"), w) == AMP_OK);
        CHECK(amp_model_read_param_gradient(m, amp_model_find_param(m, "linear1.bias"), db) == AMP_OK);
        for (i = 0; i < PIXELS; i++) {
            double want = 0.0, size = 0.0;
            for (k = 0; k < 8; k++) {
                want += (double)w[k * PIXELS + i] * (double)db[k];
                size += fabs((double)w[k * PIXELS + i] * (double)db[k]);
            }
            CHECK_MSG(fabs((double)dx[i] - want) <= (level ? 2e-3 : 1e-6) * size, "%g, not %g", (double)dx[i], want);
        }
        CHECK(amp_discard(m) == AMP_OK);
        amp_model_destroy(m);
    }
}

/* Gradients between backward and update: read, written, clipped by value, measured. What was written is what is stepped on;
   an inf that is written is seen. */
static void test_gradients_between(void) {
    amp_model_desc d = model_desc(4, AMP_O2, AMP_F16);
    amp_model* m = new_model(&d);
    amp_value y = amp_input(m, 1, SIDE, SIDE);
    amp_batch b = labelled(0, 4);
    amp_step_info info;
    amp_param* p;
    double sum = 0.0, norm;
    float g[PIXELS * CLASSES], before[CLASSES], after[CLASSES];
    int i, clipped = 0;
    d.optimizer.lr = 0.5f;
    y = amp_linear(m, y, CLASSES);
    amp_softmax_cross_entropy(m, y);
    CHECK(amp_model_finalize(m) == AMP_OK);

    /* The norm, of one and of all; clipping. */
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
    p = amp_model_params(m, NULL);
    CHECK(amp_model_read_param_gradient(m, &p[0], g) == AMP_OK);
    for (i = 0; i < PIXELS * CLASSES; i++) sum += (double)g[i] * (double)g[i];
    CHECK(amp_model_gradient_norm(m, &p[0], &norm) == AMP_OK);
    CHECK_MSG(fabs(norm - sqrt(sum)) < 1e-6 * norm, "%g, not %g", norm, sqrt(sum));
    CHECK(amp_model_read_param_gradient(m, &p[1], before) == AMP_OK);
    for (i = 0; i < CLASSES; i++) sum += (double)before[i] * (double)before[i];
    CHECK(amp_model_gradient_norm(m, NULL, &norm) == AMP_OK && fabs(norm - sqrt(sum)) < 1e-6 * norm);
    CHECK(amp_model_clip_gradients(m, 0.03125f) == AMP_OK);
    CHECK(amp_model_read_param_gradient(m, &p[0], g) == AMP_OK);
    for (i = 0; i < PIXELS * CLASSES; i++) {
        CHECK(fabsf(g[i]) <= 0.03125f);
        clipped += fabsf(g[i]) == 0.03125f;
    }
    CHECK_MSG(clipped > 3 && clipped < PIXELS * CLASSES, "%d", clipped);

    /* A gradient by hand. */
    CHECK(amp_model_read_param(m, &p[1], before) == AMP_OK);
    for (i = 0; i < CLASSES; i++) after[i] = (float)(1 << i);
    CHECK(amp_model_write_param_gradient(m, &p[1], after) == AMP_OK);
    CHECK(amp_update(m, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
    CHECK(amp_model_read_param(m, &p[1], after) == AMP_OK);
    for (i = 0; i < CLASSES; i++)
        CHECK_MSG(after[i] == before[i] - 0.01f * (float)(1 << i), "%g from %g", (double)after[i], (double)before[i]);

    /* inf is not clipped away. */
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
    put_bits(&after[1], 0x7f800000u);
    CHECK(amp_model_write_param_gradient(m, &p[1], after) == AMP_OK);
    CHECK(amp_model_clip_gradients(m, 1.0f) == AMP_OK);
    CHECK(amp_update(m, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK(info.scale_after < info.scale_before);
    amp_model_destroy(m);
}

/* NaN in the data: the step is the model's fault, as amp_train_step says, though the batch is gone by the time of the
   update. */
static void test_trouble_in_parts(void) {
    amp_model_desc d = model_desc(4, AMP_O2, AMP_F16);
    toy t = make_toy(&d, 1, 0.0f);
    amp_step_info info;
    float* data = malloc(4 * PIXELS * sizeof *data);
    amp_batch b = labelled(0, 4);
    const float scale = amp_model_scaler(t.m)->state.scale;
    memcpy(data, pictures, 4 * PIXELS * sizeof *data);
    put_bits(&data[70], 0x7fc00000u);
    b.inputs[0] = data;
    CHECK(amp_forward(t.m, &b, NULL) == AMP_OK);
    memset(&b, 0x55, sizeof b);                 /* the struct is the caller's again, its data is not yet */
    CHECK(amp_backward(t.m, NULL) == AMP_OK);
    memset(data, 0xff, 4 * PIXELS * sizeof *data);
    free(data);
    CHECK(amp_update(t.m, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
    CHECK_MSG(strstr(info.message, "first in the output of 'input1', element 70") != NULL, "%s", info.message);
    CHECK(amp_model_scaler(t.m)->state.scale == scale);
    amp_model_destroy(t.m);
}

/* Gradients that overflow, and a batch that the caller has overwritten before the update: the loss scale is to blame. */
static void test_overflow_in_parts(void) {
    amp_model_desc d = model_desc(4, AMP_O2, AMP_F16);
    amp_scaler_desc scaler;
    amp_step_info info;
    float data[4 * PIXELS];
    amp_batch b = labelled(0, 4);
    toy t;
    memset(&scaler, 0, sizeof scaler);
    scaler.init_scale = 1073741824.0f;
    d.scaler = &scaler;
    t = make_toy(&d, 1, 0.0f);
    memcpy(data, pictures, sizeof data);
    b.inputs[0] = data;
    CHECK(amp_forward(t.m, &b, NULL) == AMP_OK && amp_backward(t.m, NULL) == AMP_OK);
    memset(data, 0xff, sizeof data);
    CHECK(amp_update(t.m, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK_MSG(info.scale_after == info.scale_before / 2, "%g", (double)info.scale_after);
    amp_model_destroy(t.m);
}

/* Values and gradients that the caller may read lie apart from those of layers that work in place, and stay through the
   backward pass while the memory of others is used again: one alone has the bits that it has among all. */
static void test_what_is_kept(void) {
    enum { WIDE = 32, N = 4, KEPT = 4 };
    static float alone[2][N * WIDE], among[KEPT][2][N * WIDE];
    amp_batch b = labelled(0, N);
    int only, k, i;
    for (only = -1; only < 2 * KEPT; only++) {          /* -1: all */
        amp_model_desc d = model_desc(N, AMP_O0, AMP_F16);
        amp_model* m = new_model(&d);
        amp_value v[KEPT], x = amp_input(m, 1, SIDE, SIDE);
        v[0] = amp_linear(m, x, WIDE);
        v[1] = amp_relu(m, v[0]);
        v[2] = amp_linear(m, v[1], WIDE);
        v[3] = amp_tanh(m, v[2]);
        x = amp_linear(m, amp_relu(m, amp_linear(m, v[3], WIDE)), WIDE);
        amp_softmax_cross_entropy(m, amp_linear(m, amp_sigmoid(m, x), CLASSES));
        for (k = 0; k < KEPT; k++) {
            if (only < 0 || only == 2 * k) amp_output(m, v[k]);
            if (only < 0 || only == 2 * k + 1) amp_retain_gradient(m, v[k]);
        }
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
        for (k = 0; k < KEPT; k++)
            for (i = 0; i < 2; i++) {
                float* to = only < 0 ? among[k][i] : alone[i];
                if (only >= 0 && only != 2 * k + i) continue;
                CHECK((i ? amp_model_read_gradient : amp_model_read_value)(m, v[k], to) == AMP_OK);
                if (only >= 0) CHECK_MSG(memcmp(to, among[k][i], sizeof alone[i]) == 0, "value %d, %d", k, i);
            }
        amp_model_destroy(m);
    }
    for (i = 0; i < N * WIDE; i++) {
        CHECK(among[1][0][i] == (among[0][0][i] > 0.0f ? among[0][0][i] : 0.0f));
        CHECK(among[0][1][i] == (among[0][0][i] > 0.0f ? among[1][1][i] : 0.0f));
    }
}

/* A step that is discarded, before or behind its backward pass, leaves nothing. */
static void test_discard(void) {
    amp_model_desc d = model_desc(4, AMP_O2, AMP_F16);
    toy a, b;
    amp_batch batch = labelled(0, 4);
    int i;
    d.accumulate = 2;
    a = make_toy(&d, 1, 0.25f);
    b = make_toy(&d, 1, 0.25f);
    for (i = 0; i < 6; i++) {
        CHECK(amp_forward(b.m, &batch, NULL) == AMP_OK);
        if (i % 3) CHECK(amp_backward(b.m, NULL) == AMP_OK);
        if (i % 3 == 2) CHECK(amp_forward(b.m, &batch, NULL) == AMP_OK);
        CHECK(amp_discard(b.m) == AMP_OK);
        CHECK(amp_train_step(a.m, &batch, NULL) == AMP_OK && amp_train_step(a.m, &batch, NULL) == AMP_OK);
        CHECK(amp_train_step(b.m, &batch, NULL) == AMP_OK && amp_train_step(b.m, &batch, NULL) == AMP_OK);
        CHECK(same_weights(a.m, b.m));
    }
    CHECK(amp_discard(b.m) == AMP_OK);  /* nothing is open */
    {
        float x[4 * CLASSES], y[4 * CLASSES];           /* running statistics */
        CHECK(amp_predict(a.m, &batch, a.v[10], x) == AMP_OK && amp_predict(b.m, &batch, b.v[10], y) == AMP_OK);
        CHECK(memcmp(x, y, sizeof x) == 0);
    }
    amp_model_destroy(a.m);
    amp_model_destroy(b.m);
}

/* Calls out of order, and arguments that are wrong: a sentence, and the step goes on as if they had not been. */
static void test_refused_parts(void) {
    amp_model_desc d = model_desc(4, AMP_O1, AMP_F16);
    amp_model* m;
    amp_value x, h, y, foreign = { 77, 5 };
    amp_batch b = labelled(0, 4);
    amp_seeds seeds;
    amp_eval_info eval;
    double norm;
    float out[4 * PIXELS], g[PIXELS * CLASSES];
    d.accumulate = 2;
    m = new_model(&d);
    x = amp_input(m, 1, SIDE, SIDE);
    amp_retain_gradient(m, x);
    h = amp_relu(m, amp_linear(m, x, 8));
    y = amp_linear(m, h, CLASSES);
    amp_output(m, y);
    amp_softmax_cross_entropy(m, y);
    check_refused(amp_forward(m, &b, NULL), AMP_ERR_STATE, "forward: the model is not finalized");
    CHECK(amp_model_finalize(m) == AMP_OK);
    memset(&seeds, 0, sizeof seeds);

    check_refused(amp_backward(m, NULL), AMP_ERR_STATE, "backward: amp_forward comes first");
    check_refused(amp_update(m, NULL), AMP_ERR_STATE, "update: amp_backward comes first");
    check_refused(amp_model_clip_gradients(m, 1.0f), AMP_ERR_STATE, "clip gradients: amp_backward comes first");
    check_refused(amp_model_read_value(m, y, out), AMP_ERR_STATE,
        "read value: there is none since the model ran last; amp_forward comes first");
    check_refused(amp_model_read_value(m, h, out), AMP_ERR_ARGUMENT, "read value: 'relu1' is no output: amp_output was not called for it");
    check_refused(amp_model_read_gradient(m, y, out), AMP_ERR_ARGUMENT,
        "read gradient: amp_retain_gradient was not called for 'linear2'");
    check_refused(amp_model_read_gradient(m, foreign, out), AMP_ERR_ARGUMENT,
        "read gradient: amp_retain_gradient was not called for 'a value of another model'");

    CHECK(amp_forward(m, &b, NULL) == AMP_OK);
    check_refused(amp_forward(m, &b, NULL), AMP_ERR_STATE, "forward: amp_forward waits for amp_backward, or amp_discard");
    check_refused(amp_train_step(m, &b, NULL), AMP_ERR_STATE, "train step: amp_forward waits for amp_backward, or amp_discard");
    check_refused(amp_evaluate(m, &b, &eval), AMP_ERR_STATE, "evaluate: amp_forward waits for amp_backward, or amp_discard");
    check_refused(amp_predict(m, &b, y, out), AMP_ERR_STATE, "predict: amp_forward waits for amp_backward, or amp_discard");
    check_refused(amp_update(m, NULL), AMP_ERR_STATE, "update: amp_backward comes first");
    check_refused(amp_model_read_gradient(m, x, out), AMP_ERR_STATE,
        "read gradient: there is none since the model ran last; amp_backward comes first");
    seeds.gradients[1] = amp_f32(g);
    check_refused(amp_backward(m, &seeds), AMP_ERR_ARGUMENT, "backward: gradients[1] is given, but the model has 1 outputs");
    seeds.gradients[1] = AMP_NONE;
    seeds.gradients[0] = amp_ref_of(g, AMP_I32);
    check_refused(amp_backward(m, &seeds), AMP_ERR_DTYPE, "backward: gradients[0] is i32, not f32, f16, bf16 or f64");
    CHECK(amp_backward(m, NULL) == AMP_OK);
    CHECK(amp_model_read_value(m, y, out) == AMP_OK && amp_model_read_gradient(m, x, out) == AMP_OK);
    check_refused(amp_update(m, NULL), AMP_ERR_STATE, "update: 1 of the step's 2 micro-batches were made");
    CHECK(amp_evaluate(m, &b, &eval) == AMP_OK);        /* between passes the model is free */
    check_refused(amp_model_read_gradient(m, x, out), AMP_ERR_STATE,
        "read gradient: there is none since the model ran last; amp_backward comes first");
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
    check_refused(amp_forward(m, &b, NULL), AMP_ERR_STATE, "forward: the step waits for amp_update, or amp_discard");
    check_refused(amp_train_step(m, &b, NULL), AMP_ERR_STATE, "train step: the step waits for amp_update, or amp_discard");
    check_refused(amp_model_clip_gradients(m, 0.0f), AMP_ERR_ARGUMENT,
        "clip gradients: limit 0 must be finite and above 0");
    check_refused(amp_model_gradient_norm(m, NULL, NULL), AMP_ERR_ARGUMENT, "gradient norm: out is NULL");
    check_refused(amp_model_read_param_gradient(m, NULL, g), AMP_ERR_ARGUMENT,
        "read param gradient: p is not a parameter of this model");
    CHECK(amp_model_gradient_norm(m, NULL, &norm) == AMP_OK && norm > 0.0);
    CHECK(amp_update(m, NULL) == AMP_OK);
    CHECK(amp_model_optimizer(m)->state.step == 1);
    amp_model_destroy(m);
}

/* Mistakes of the graph. */
static void test_refused_outputs(void) {
    amp_model_desc d = model_desc(1, AMP_O0, AMP_F16);
    int i, mistake;
    for (mistake = 0; mistake < 4; mistake++) {
        static const char* const said[] = { "output: 'mse1' is a loss", "output: 'linear1' is one already",
            "output: a model has at most 8", "the gradient of 'tanh1' is to be retained, but no loss depends on it" };
        amp_model* m = new_model(&d);
        amp_value x = amp_input(m, 4, 1, 1), y = amp_linear(m, x, 2), loss = amp_mse(m, y);
        if (mistake == 0) amp_output(m, loss);
        if (mistake == 1) { amp_output(m, amp_flatten(m, y)); amp_output(m, y); }
        for (i = 0; mistake == 2 && i < 9; i++) amp_output(m, amp_tanh(m, y));
        if (mistake == 3) amp_retain_gradient(m, amp_tanh(m, x));
        CHECK(amp_model_finalize(m) != AMP_OK);
        CHECK_MSG(strcmp(amp_model_error(m), said[mistake]) == 0, "%s", amp_model_error(m));
        amp_model_destroy(m);
    }
}

/* A model for inference: the predictions and losses of the trained one, from its checkpoint, for any number of samples;
   weights that layers read in 16 bits have no masters; no step. */
static void test_inference(void) {
    const char* path = "build/inference.safetensors";
    int level, low, n;
    for (level = 0; level <= 3; level++)
        for (low = AMP_F16; low <= AMP_BF16; low++) {
            amp_model_desc d = model_desc(8, (amp_level)level, (amp_dtype)low);
            toy trained, lean;
            amp_memory full, small;
            amp_eval_info a, b;
            amp_batch batch = labelled(0, 8);
            int i, count;
            const amp_param* p;
            d.optimizer.kind = AMP_ADAM;
            trained = make_toy(&d, 1, 0.25f);
            d.inference = 1;
            d.seed = 7;
            lean = make_toy(&d, 1, 0.25f);
            for (i = 0; i < 5; i++) CHECK(amp_train_step(trained.m, &batch, NULL) == AMP_OK);
            CHECK(amp_checkpoint_save(trained.m, path) == AMP_OK);
            check_refused(amp_checkpoint_load(lean.m, path), AMP_ERR_FORMAT, "checkpoint: amp.seed is 42 in the file, "
                "but 7 in the model (for inference: see amp_checkpoint_load_weights)");
            CHECK_MSG(amp_checkpoint_load_weights(lean.m, path, &count) == AMP_OK && count == 12, "%s, %d", heard, count);
            for (n = 1; n <= 8; n += 7) {
                float x[8 * CLASSES], y[8 * CLASSES];
                batch = labelled(0, n);
                CHECK(amp_predict(trained.m, &batch, trained.v[10], x) == AMP_OK);
                CHECK(amp_predict(lean.m, &batch, lean.v[10], y) == AMP_OK);
                CHECK(memcmp(x, y, (size_t)(n * CLASSES) * sizeof *x) == 0);
                CHECK(amp_evaluate(trained.m, &batch, &a) == AMP_OK && amp_evaluate(lean.m, &batch, &b) == AMP_OK);
                CHECK(to_bits(a.loss) == to_bits(b.loss) && a.correct == b.correct);
            }
            CHECK(amp_model_memory(trained.m, &full) == AMP_OK && amp_model_memory(lean.m, &small) == AMP_OK);
            CHECK(small.gradient_bytes == 0 && small.optimizer_bytes == 0);
            CHECK(small.low_parameter_bytes == full.low_parameter_bytes);
            CHECK_MSG(small.activation_bytes * 8 < full.activation_bytes * 5, "%d of %d bytes", (int)small.activation_bytes,
                (int)full.activation_bytes);
            p = amp_model_params(lean.m, &count);
            for (i = 0; i < count; i++) CHECK(!p[i].grad && !p[i].m && !p[i].v && !p[i].master == (p[i].low != NULL));
            check_refused(amp_train_step(lean.m, &batch, NULL), AMP_ERR_STATE, "train step: the model was made for inference");
            check_refused(amp_forward(lean.m, &batch, NULL), AMP_ERR_STATE, "forward: the model was made for inference");
            amp_model_destroy(trained.m);
            amp_model_destroy(lean.m);
        }
    remove(path);
}

/* Two losses of one network. scales: the first scales of each, 0 = the model's. */
static amp_model* two_losses(amp_model_desc d, const float* scales, amp_value* loss) {
    amp_scaler_desc own[2];
    amp_loss_desc l[2];
    amp_model* m;
    amp_value x, h;
    int i;
    memset(own, 0, sizeof own);
    memset(l, 0, sizeof l);
    for (i = 0; scales && i < 2; i++) {
        own[i].init_scale = scales[i];
        own[i].growth_interval = 6;
        l[i].scaler = &own[i];
    }
    l[1].weight = 0.5f;
    m = new_model(&d);
    x = amp_input(m, 1, SIDE, SIDE);
    h = amp_tanh(m, amp_linear(m, amp_relu(m, amp_conv2d(m, x, 4, 3, 1, 1)), 16));
    loss[0] = amp_softmax_cross_entropy_with(m, amp_linear(m, h, CLASSES), &l[0]);
    loss[1] = amp_mse_with(m, amp_linear(m, h, CLASSES), &l[1]);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
    return m;
}

/* Each loss with a scaler of its own gives the gradients of one scaler for both, at any scales and in micro-batches; an
   overflow of one skips the step, halves its scale and no other's; what a checkpoint brings back goes on as before. */
static void test_loss_scalers(void) {
    static const float scales[3][2] = { { 1.0f, 1.0f }, { 65536.0f, 256.0f }, { 1024.0f, 1125899906842624.0f } };
    const char* path = "build/scalers.safetensors";
    int k, level, step, micro, i;
    for (level = 0; level <= 2; level += 2)
        for (k = 0; k < 3; k++) {
            amp_model_desc d = model_desc(4, (amp_level)level, AMP_F16);
            amp_value loss[2], none[2];
            amp_model *both, *own, *later;
            amp_step_info a, b, c;
            double worst = 0.0;
            memset(&b, 0, sizeof b);
            d.accumulate = 2;
            d.optimizer.lr = 0.05f;
            both = two_losses(d, NULL, none);
            own = two_losses(d, scales[k], loss);
            CHECK(amp_model_loss_scaler(both, none[0]) == NULL && amp_model_loss_scaler(own, loss[1]) != NULL);
            CHECK(amp_model_scaler(own)->state.scale == 1.0f && amp_model_scaler(own)->rule.is_static);
            for (step = 0; step < 24; step++) {
                const float before = amp_model_loss_scaler(own, loss[1])->state.scale;
                for (micro = 0; micro < 2; micro++) {
                    amp_batch batch = labelled(4 * micro, 4);
                    batch.targets[1] = wishes + 4 * micro * CLASSES;
                    CHECK(amp_train_step(both, &batch, &a) == AMP_OK);
                    CHECK_MSG(amp_train_step(own, &batch, &b) == AMP_OK, "%s", heard);
                }
                if (b.outcome == AMP_STEP_APPLIED) continue;
                CHECK_MSG(strcmp(b.culprit, "mse1") == 0
                    && strstr(b.message, "the loss 'mse1' is not finite with its loss scale"), "%s", b.message);
                CHECK(amp_model_loss_scaler(own, loss[1])->state.scale == before / 2);
            }
            CHECK_MSG((b.skipped > 20) == (k == 2 && level == 2), "%d", (int)b.skipped);
            CHECK(amp_model_loss_scaler(own, loss[0])->state.scale == scales[k][0] * 16.0f);    /* grows after each six */
            for (i = 0; k < 2 && i < 8; i++) {
                const amp_param *p = amp_model_params(both, NULL) + i, *q = amp_model_params(own, NULL) + i;
                size_t e;
                for (e = 0; e < p->count; e++) worst = fmax(worst, fabs((double)p->master[e] - (double)q->master[e]));
            }
            CHECK_MSG(worst < (level ? 1e-3 : 1e-6), "%g", worst);

            /* Saved and loaded, it goes on with the same bits. */
            CHECK(amp_checkpoint_save(own, path) == AMP_OK);
            later = two_losses(d, scales[k], none);
            CHECK_MSG(amp_checkpoint_load(later, path) == AMP_OK, "%s", heard);
            for (step = 0; step < 4; step++)
                for (micro = 0; micro < 2; micro++) {
                    amp_batch batch = labelled(4 * micro, 4);
                    batch.targets[1] = wishes + 4 * micro * CLASSES;
                    CHECK(amp_train_step(own, &batch, &b) == AMP_OK && amp_train_step(later, &batch, &c) == AMP_OK);
                    CHECK(b.outcome == c.outcome && same_weights(own, later));
                }
            for (i = 0; i < 2; i++)
                CHECK(memcmp(&amp_model_loss_scaler(own, loss[i])->state, &amp_model_loss_scaler(later, none[i])->state,
                    sizeof(amp_scaler_state)) == 0);
            CHECK(amp_checkpoint_load(both, path) == AMP_ERR_FORMAT);
            amp_model_destroy(later);
            amp_model_destroy(both);
            amp_model_destroy(own);
        }
    remove(path);
}

/* Outputs with seeds beside such losses; a NaN of the model is no scaler's fault; mistakes. */
static void test_loss_scalers_otherwise(void) {
    static const float scales[2] = { 4096.0f, 16.0f }, too_large[2] = { 16.0f, 1125899906842624.0f };
    amp_model_desc d = model_desc(4, AMP_O1, AMP_F16);
    amp_value loss[2];
    amp_model* m = two_losses(d, scales, loss);
    amp_batch b = labelled(0, 4);
    amp_step_info info;
    float data[4 * PIXELS];
    int mistake, i;
    memcpy(data, pictures, sizeof data);
    put_bits(&data[3], 0x7fc00000u);
    b.targets[1] = wishes;
    b.inputs[0] = data;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
    for (i = 0; i < 2; i++) CHECK(amp_model_loss_scaler(m, loss[i])->state.scale == scales[i]);
    b.inputs[0] = pictures;
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_discard(m) == AMP_OK);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
    CHECK(amp_model_loss_scaler(m, loss[0])->state.tracker == 1);
    amp_model_destroy(m);

    /* An overflow in a step that is dropped is forgotten. */
    d.precision.level = AMP_O2;
    m = two_losses(d, too_large, loss);
    CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
    CHECK(amp_model_loss_scaler(m, loss[1])->state.found_inf == 1 && amp_discard(m) == AMP_OK);
    CHECK(amp_model_loss_scaler(m, loss[1])->state.found_inf == 0);
    amp_model_destroy(m);

    /* inf in the data that tanh hides from the loss, and not from the weights' gradients. */
    {
        amp_scaler_desc own;
        amp_loss_desc l;
        amp_value v;
        memset(&own, 0, sizeof own);
        memset(&l, 0, sizeof l);
        l.scaler = &own;
        own.init_scale = 8.0f;
        d.precision.level = AMP_O0;
        d.precision.low_dtype = AMP_DTYPE_DEFAULT;
        m = new_model(&d);
        v = amp_tanh(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), 16));
        v = amp_softmax_cross_entropy_with(m, amp_linear(m, v, CLASSES), &l);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        put_bits(&data[3], 0x7f800000u);
        b.inputs[0] = data;
        CHECK(amp_train_step(m, &b, &info) == AMP_OK && amp_is_finite(amp_f32(&info.loss)));
        CHECK_MSG(info.outcome == AMP_STEP_SKIPPED_MODEL && amp_model_loss_scaler(m, v)->state.scale == 8.0f, "%s, %g",
            info.message, (double)amp_model_loss_scaler(m, v)->state.scale);
        amp_model_destroy(m);
    }

    for (mistake = 0; mistake < 4; mistake++) {
        static const char* const said[] = {
            "model: 1 of 2 losses have a scaler of their own; all need one, and the model none",
            "model: losses with a scaler of their own need grad_dtype f32",
            "model: the gradient of 'input1' cannot be retained, as losses have scalers of their own",
            "mse on 'linear1': scaler: init_scale" };
        amp_scaler_desc own;
        amp_loss_desc l;
        amp_value x, y;
        amp_model_desc e = d;
        memset(&own, 0, sizeof own);
        memset(&l, 0, sizeof l);
        l.scaler = &own;
        if (mistake == 3) own.init_scale = -1.0f;
        if (mistake == 1) e.grad_dtype = AMP_F16;
        m = new_model(&e);
        x = amp_input(m, 4, 1, 1);
        y = amp_linear(m, x, 2);
        if (mistake == 2) amp_retain_gradient(m, x);
        amp_mse_with(m, y, &l);
        if (mistake == 0) amp_mse(m, y);
        CHECK(amp_model_finalize(m) != AMP_OK);
        CHECK_MSG(strstr(amp_model_error(m), said[mistake]) == amp_model_error(m), "%s", amp_model_error(m));
        amp_model_destroy(m);
    }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    make_pictures();
    TEST(test_parts_are_the_step);
    TEST(test_own_loss);
    TEST(test_seeds_add);
    TEST(test_output_before_a_loss);
    TEST(test_bad_seeds);
    TEST(test_input_gradient);
    TEST(test_gradients_between);
    TEST(test_trouble_in_parts);
    TEST(test_overflow_in_parts);
    TEST(test_what_is_kept);
    TEST(test_discard);
    TEST(test_refused_parts);
    TEST(test_refused_outputs);
    TEST(test_inference);
    TEST(test_loss_scalers);
    TEST(test_loss_scalers_otherwise);
    TEST_END();
}
