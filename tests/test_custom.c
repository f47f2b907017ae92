/* test_custom.c - operators and losses of a caller's own in a graph, layers that are used more than once, the mean as a
   loss. */
#include "small_model.h"
#include <math.h>

enum { IN = 12, OUT = 5, SAMPLES = 8 };
static float rows[SAMPLES * IN], wishes[SAMPLES * OUT];
static int32_t labels[SAMPLES];

static void make_data(void) {
    int i;
    test_seed = 33;
    for (i = 0; i < SAMPLES * IN; i++) rows[i] = test_uniform();
    for (i = 0; i < SAMPLES * OUT; i++) wishes[i] = test_uniform();
    for (i = 0; i < SAMPLES; i++) labels[i] = i % OUT;
}
static amp_batch batch_of(int first, int n, const void* targets) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n;
    b.inputs[0] = rows + first * IN;
    b.targets[0] = targets;
    return b;
}

/* --- an operator that amp has, too ---------------------------------------------------------------- */

/* What a dense layer of IN inputs and OUT outputs computes, with weight and bias. */
static amp_result dense_forward(const amp_custom_call* c) {
    CHECK(c->y.dtype == c->dtype && c->x[0].dtype == c->dtype && !c->dy.data && !c->dx[0].data && !c->dw[0].data);
    return amp_linear_forward(c->x[0], c->w[0], c->w[1], c->y, (size_t)c->n, IN, OUT, c->exec);
}
static amp_result dense_backward(const amp_custom_call* c) {
    CHECK(c->dy.dtype == c->dtype && (!c->dx[0].data || c->dx[0].dtype == c->dtype));
    return amp_linear_backward(c->dy, c->x[0], c->w[0], c->dx[0], c->dw[0], c->dw[1],
        c->add_dw ? AMP_ACCUMULATE_PARAMS : 0, (size_t)c->n, IN, OUT, c->exec);
}
static amp_value own_dense(amp_model* m, amp_value x) {
    static const amp_rule as_linear[] = { AMP_RULE_FP32, AMP_RULE_LOW, AMP_RULE_LOW, AMP_RULE_LOW };
    const amp_custom_param params[] = { { "weight", IN * OUT, AMP_INIT_TORCH, IN, OUT, 0.0f },
                                        { "bias", OUT, AMP_INIT_TORCH, IN, OUT, 0.0f } };
    amp_custom_desc d;
    memset(&d, 0, sizeof d);
    d.name = "own_dense";
    d.channels = OUT; d.height = d.width = 1;
    d.rules = as_linear;
    d.params = params;
    d.param_count = 2;
    d.forward = dense_forward;
    d.backward = dense_backward;
    return amp_custom(m, &x, 1, &d);
}

/* Between other layers it trains as amp's own, bit for bit: at each level, in micro-batches, frozen, skipping. */
static void test_custom_is_a_layer(void) {
    static const struct { amp_level level; amp_dtype low; int accumulate, frozen; float scale; } kinds[] = {
        { AMP_O0, AMP_F16, 1, 0, 0.0f }, { AMP_O1, AMP_F16, 1, 0, 0.0f }, { AMP_O1, AMP_BF16, 2, 0, 0.0f },
        { AMP_O2, AMP_F16, 1, 1, 0.0f }, { AMP_O2, AMP_F16, 2, 0, 4294967296.0f }, { AMP_O3, AMP_F16, 1, 0, 0.0f } };
    int k, own, step, micro;
    for (k = 0; k < COUNT(kinds); k++) {
        amp_model_desc d = model_desc(4, kinds[k].level, kinds[k].low);
        static const amp_param_group groups[2] = { { 0.0f, 0.0f, 0, NULL }, { 0.0f, 0.0f, 1, NULL } };
        amp_scaler_desc scaler;
        amp_model* m[2];
        amp_step_info info[2];
        memset(&scaler, 0, sizeof scaler);
        scaler.init_scale = kinds[k].scale;
        if (kinds[k].scale != 0.0f) d.scaler = &scaler;
        d.accumulate = kinds[k].accumulate;
        d.optimizer.momentum = 0.9f;
        d.optimizer.groups = groups;
        d.optimizer.group_count = 2;
        for (own = 0; own < 2; own++) {
            amp_value x, y;
            m[own] = new_model(&d);
            x = amp_relu(m[own], amp_linear(m[own], amp_input(m[own], IN, 1, 1), IN));
            y = own ? own_dense(m[own], x) : amp_linear(m[own], x, OUT);
            amp_name(m[own], y, "dense");
            if (kinds[k].frozen) amp_group(m[own], y, 1);
            amp_softmax_cross_entropy(m[own], amp_linear(m[own], amp_tanh(m[own], y), OUT));
            CHECK_MSG(amp_model_finalize(m[own]) == AMP_OK, "%s", heard);
        }
        CHECK(same_weights(m[0], m[1]));
        for (step = 0; step < 8; step++) {
            for (micro = 0; micro < kinds[k].accumulate; micro++) {
                amp_batch b = batch_of(step % 2 * 4, 4 - micro, labels + step % 2 * 4);
                for (own = 0; own < 2; own++) CHECK(amp_train_step(m[own], &b, &info[own]) == AMP_OK);
            }
            CHECK_MSG(same_weights(m[0], m[1]) && info[0].outcome == info[1].outcome, "case %d, step %d", k, step);
        }
        CHECK(kinds[k].scale == 0.0f || info[1].skipped > 0);
        CHECK(amp_model_layer(m[1], 3)->op == AMP_OP_CUSTOM && amp_model_layer(m[1], 3)->parameters == IN * OUT + OUT);
        for (own = 0; own < 2; own++) amp_model_destroy(m[own]);
    }
}

/* --- an activation in two lines -------------------------------------------------------------------- */

static void leaky(const float* dy, const float* x, float* y, size_t n, void* slope) {
    size_t i;
    for (i = 0; i < n; i++) y[i] = (dy ? dy[i] : x[i]) * (x[i] > 0.0f ? 1.0f : *(const float*)slope);
}
static amp_result map_forward(const amp_custom_call* c) {
    CHECK(c->count == (size_t)c->n * (size_t)c->positions * IN && !c->dy.data);
    return amp_map(leaky, c->user_data, AMP_NONE, c->x[0], c->y, c->count, c->exec);
}
static amp_result map_backward(const amp_custom_call* c) {
    CHECK(c->count == (size_t)c->n * (size_t)c->positions * IN);
    return amp_map(leaky, c->user_data, c->dy, c->x[0], c->dx[0], c->count, c->exec);
}
/* By amp_map it trains as amp's own leaky ReLU, bit for bit: FP32 and both 16-bit types, images and sequences. */
static void test_custom_map(void) {
    static const amp_rule low[] = { AMP_RULE_FP32, AMP_RULE_LOW, AMP_RULE_LOW, AMP_RULE_LOW };
    static const int32_t classes[SAMPLES] = { 0, 1, 2, 3, 4, 0, 1, 2 };
    static float slope = 0.3f;
    int k, own, step;
    for (k = 0; k < 6; k++) {
        amp_model_desc d = model_desc(4, k < 2 ? AMP_O0 : AMP_O2, k < 4 ? AMP_F16 : AMP_BF16);
        amp_model* m[2];
        for (own = 0; own < 2; own++) {
            amp_value x;
            amp_custom_desc c;
            memset(&c, 0, sizeof c);
            c.rules = low;
            c.forward = map_forward;
            c.backward = map_backward;
            c.user_data = &slope;
            m[own] = new_model(&d);
            x = amp_input(m[own], k % 2 ? 3 : IN, 1, k % 2 ? 4 : 1);
            if (k % 2) x = amp_linear(m[own], amp_to_positions(m[own], x), IN);
            else x = amp_linear(m[own], x, IN);
            x = own ? amp_custom(m[own], &x, 1, &c) : amp_leaky_relu(m[own], x, slope);
            if (k % 2) x = amp_to_image(m[own], x, 1, 4);
            amp_softmax_cross_entropy(m[own], amp_linear(m[own], x, OUT));
            CHECK_MSG(amp_model_finalize(m[own]) == AMP_OK, "%s", heard);
        }
        for (step = 0; step < 6; step++) {
            const int n = step == 4 ? 3 : 4;
            const amp_batch b = batch_of(step % 2 * 4, n, classes + step % 2 * 4);
            for (own = 0; own < 2; own++) CHECK_MSG(amp_train_step(m[own], &b, NULL) == AMP_OK, "%s", heard);
            CHECK_MSG(same_weights(m[0], m[1]), "case %d, step %d", k, step);
        }
        for (own = 0; own < 2; own++) amp_model_destroy(m[own]);
    }
}

/* --- a loss ------------------------------------------------------------------------------------------ */

/* A sample's mean of squared differences of two inputs. */
static amp_result squares_forward(const amp_custom_call* c) {
    const float *x = (const float*)c->x[0].data, *t = (const float*)c->x[1].data;
    float* y = (float*)c->y.data;
    int i, k;
    CHECK(c->dtype == AMP_F32);
    for (i = 0; i < c->n; i++) {
        double sum = 0.0;
        for (k = 0; k < OUT; k++) sum += pow((double)x[i * OUT + k] - (double)t[i * OUT + k], 2.0);
        y[i] = (float)(sum / OUT);
    }
    return AMP_OK;
}
static amp_result squares_backward(const amp_custom_call* c) {
    const float *x = (const float*)c->x[0].data, *t = (const float*)c->x[1].data, *dy = (const float*)c->dy.data;
    float* dx = (float*)c->dx[0].data;
    int i, k;
    CHECK(!c->dx[1].data);          /* of an input without parameters */
    for (i = 0; i < c->n; i++)
        for (k = 0; k < OUT; k++)
            dx[i * OUT + k] = 2.0f * (x[i * OUT + k] - t[i * OUT + k]) / OUT * dy[i];
    return AMP_OK;
}
static void test_custom_loss(void) {
    int level, own, step, i;
    for (level = 0; level <= 2; level++) {
        amp_model_desc d = model_desc(SAMPLES, (amp_level)level, AMP_F16);
        amp_model* m[2];
        double worst = 0.0;
        d.optimizer.lr = 0.1f;
        for (own = 0; own < 2; own++) {
            amp_value v[2];
            m[own] = new_model(&d);
            v[0] = amp_linear(m[own], amp_input(m[own], IN, 1, 1), OUT);
            if (own) {
                amp_custom_desc squares;
                memset(&squares, 0, sizeof squares);
                squares.name = "squares";
                squares.channels = squares.height = squares.width = 1;
                squares.forward = squares_forward;
                squares.backward = squares_backward;
                v[1] = amp_input(m[own], OUT, 1, 1);
                amp_mean(m[own], amp_custom(m[own], v, 2, &squares));
            } else amp_mse(m[own], v[0]);
            CHECK_MSG(amp_model_finalize(m[own]) == AMP_OK, "%s", heard);
        }
        CHECK(strcmp(amp_model_layer(m[1], 3)->name, "squares1") == 0);
        for (step = 0; step < 20; step++) {
            amp_batch b = batch_of(0, SAMPLES, wishes), c = b;
            amp_step_info info[2];
            c.inputs[1] = wishes;
            c.targets[0] = NULL;
            CHECK(amp_train_step(m[0], &b, &info[0]) == AMP_OK);
            CHECK_MSG(amp_train_step(m[1], &c, &info[1]) == AMP_OK, "%s", heard);
            CHECK_MSG(fabs((double)info[0].loss - (double)info[1].loss) < 1e-3 * (double)info[0].loss, "%g, not %g",
                (double)info[1].loss, (double)info[0].loss);
        }
        for (i = 0; i < 2; i++) {
            const amp_param *p = amp_model_params(m[0], NULL) + i, *q = amp_model_params(m[1], NULL) + i;
            size_t k;
            for (k = 0; k < p->count; k++) worst = fmax(worst, fabs((double)p->master[k] - (double)q->master[k]));
        }
        CHECK_MSG(worst <= (level ? 1e-3 : 1e-6), "O%d: %g", level, worst);
        amp_model_destroy(m[0]);
        amp_model_destroy(m[1]);
    }
}

/* The mean of any value as a loss, against sums in double: values, gradients, weights of losses. */
static void test_mean(void) {
    int t, n;
    for (t = 0; t < 3; t++)
        for (n = 1; n <= 7; n += 3) {
            amp_model_desc d = model_desc(7, t ? AMP_O2 : AMP_O0, TYPES[t]);
            amp_loss_desc loss;
            amp_model* m;
            amp_value x, v;
            amp_batch b = batch_of(0, n, NULL);
            float value, y[7 * IN], dx[7 * IN];
            double sum = 0.0;
            int i;
            memset(&loss, 0, sizeof loss);
            loss.weight = 3.0f;
            m = new_model(&d);
            x = amp_input(m, IN, 1, 1);
            v = amp_linear(m, x, IN);
            amp_output(m, v);
            amp_retain_gradient(m, v);
            amp_mean_with(m, v, &loss);
            CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
            CHECK(amp_forward(m, &b, &value) == AMP_OK && amp_model_read_value(m, v, y) == AMP_OK);
            CHECK(amp_backward(m, NULL) == AMP_OK && amp_model_read_gradient(m, v, dx) == AMP_OK);
            for (i = 0; i < n * IN; i++) sum += (double)y[i];
            CHECK_MSG(fabs((double)value - 3.0 * sum / (n * IN)) < 1e-6, "%g, not %g", (double)value, 3.0 * sum / (n * IN));
            for (i = 0; i < n * IN; i++)
                CHECK_MSG(fabs((double)dx[i] * n * IN / 3.0 - 1.0) < (t == 2 ? 4e-3 : 5e-4), "%g", (double)dx[i]);
            amp_model_destroy(m);
        }
}

/* --- what an operator gets ------------------------------------------------------------------------------ */

enum { KEPT = 3, SCRATCH = 4096 };
static int kept_training, kept_forward, kept_backward;
/* y = x0 + 2 x1 + 3 x2 + 4 x0, and three doubles a sample that are kept for the backward pass. */
static amp_result keeper_forward(const amp_custom_call* c) {
    double* kept = (double*)c->saved;
    size_t i;
    CHECK(c->user_data == (void*)rows && (uintptr_t)c->saved % 64 == 0 && c->exec->workspace_size >= SCRATCH);
    memset(c->exec->workspace, 0x55, SCRATCH);
    for (i = 0; i < (size_t)c->n * KEPT; i++) kept[i] = (double)i + 0.5;
    for (i = 0; i < (size_t)c->n * IN; i++)
        put_value(c->y.data, c->dtype, i, value_at(c->x[0].data, c->dtype, i) + 2 * value_at(c->x[1].data, c->dtype, i)
            + 3 * value_at(c->x[2].data, c->dtype, i) + 4 * value_at(c->x[3].data, c->dtype, i));
    kept_training = c->training;
    kept_forward++;
    return AMP_OK;
}
static amp_result keeper_backward(const amp_custom_call* c) {
    const double* kept = (const double*)c->saved;
    size_t i;
    int j;
    for (i = 0; i < (size_t)c->n * KEPT; i++) CHECK(kept[i] == (double)i + 0.5);
    for (j = 0; j < 4; j++)
        for (i = 0; c->dx[j].data && i < (size_t)c->n * IN; i++)
            put_value(c->dx[j].data, c->dtype, i, (j + 1) * value_at(c->dy.data, c->dtype, i));
    CHECK(c->dx[0].data && c->dx[1].data && !c->dx[2].data && c->dx[3].data);
    kept_backward++;
    return AMP_OK;
}

/* Four inputs of which two are the same value and one has no parameters, in each type; saved memory stays while other
   layers run; gradients of a value with several readers add. FP32 operators get FP32, whatever the values are kept in. */
static void test_operands(void) {
    static const amp_rule follow[] = { AMP_RULE_FOLLOW, AMP_RULE_FOLLOW, AMP_RULE_FOLLOW, AMP_RULE_FOLLOW };
    int level, rule, i, k;
    for (level = 0; level <= 2; level++)
        for (rule = 0; rule < 2; rule++) {
            amp_model_desc d = model_desc(2, (amp_level)level, AMP_F16);
            amp_model* m = new_model(&d);
            amp_custom_desc keeper;
            amp_value x = amp_input(m, IN, 1, 1), v[4], y;
            amp_batch b = batch_of(0, 2, labels);
            amp_eval_info eval;
            float da[2 * IN], dy[2 * IN], db[2 * IN];
            memset(&keeper, 0, sizeof keeper);
            keeper.rules = rule ? follow : NULL;
            keeper.saved_bytes = KEPT * sizeof(double);
            keeper.workspace_bytes = SCRATCH;
            keeper.forward = keeper_forward;
            keeper.backward = keeper_backward;
            keeper.user_data = rows;
            v[0] = v[3] = amp_linear(m, x, IN);
            v[1] = amp_linear(m, amp_relu(m, v[0]), IN);
            v[2] = x;
            y = amp_custom(m, v, 4, &keeper);
            amp_softmax_cross_entropy(m, amp_linear(m, amp_tanh(m, amp_linear(m, y, IN)), OUT));
            amp_retain_gradient(m, v[0]);
            amp_retain_gradient(m, v[1]);
            amp_retain_gradient(m, y);
            CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
            CHECK(amp_model_layer(m, amp_model_layer_of(m, y))->compute_dtype == (rule && level ? AMP_F16 : AMP_F32));
            kept_forward = kept_backward = 0;
            CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
            CHECK(kept_forward == 1 && kept_backward == 1 && kept_training == 1);
            CHECK(amp_model_read_gradient(m, v[1], db) == AMP_OK && amp_model_read_gradient(m, y, dy) == AMP_OK);
            for (i = 0; i < 2 * IN; i++)
                CHECK_MSG(fabs((double)db[i] - 2.0 * (double)dy[i]) <= 1e-3 * fabs((double)dy[i]), "%g from %g",
                    (double)db[i], (double)dy[i]);
            CHECK(amp_model_read_gradient(m, v[0], da) == AMP_OK);
            {   /* 1 and 4 times dy, and what comes through ReLU and the layer behind it */
                float w[IN * IN], h[2 * IN];
                CHECK(amp_discard(m) == AMP_OK && amp_predict(m, &b, v[0], h) == AMP_OK);
                CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear2.weight"), w) == AMP_OK);
                for (i = 0; i < 2 * IN; i++) {
                    double want = 5.0 * (double)dy[i], size = 6.0 * fabs((double)dy[i]);
                    for (k = 0; k < IN && h[i] > 0.0f; k++) {
                        want += (double)db[i / IN * IN + k] * (double)w[k * IN + i % IN];
                        size += fabs((double)db[i / IN * IN + k] * (double)w[k * IN + i % IN]);
                    }
                    CHECK_MSG(fabs((double)da[i] - want) <= (level ? 3e-3 : 1e-6) * size, "%g, not %g", (double)da[i], want);
                }
            }
            CHECK(amp_evaluate(m, &b, &eval) == AMP_OK && kept_training == 0);
            amp_model_destroy(m);
        }
}

/* --- layers used again ------------------------------------------------------------------------------------ */

/* The mean over the outputs of one dense layer on two inputs: in closed form. Micro-batches add as well. */
static void test_reuse_adds(void) {
    int order, step, i, k;
    for (order = 0; order < 2; order++) {
        amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
        amp_model* m;
        amp_value x, z, v;
        float dw[IN * OUT], db[OUT];
        d.accumulate = 2;
        m = new_model(&d);
        x = amp_input(m, IN, 1, 1);
        z = amp_input(m, IN, 1, 1);
        v = amp_linear(m, x, OUT);
        v = amp_add(m, amp_reuse(m, v, z), order ? amp_add(m, v, amp_reuse(m, v, x)) : v);
        amp_mean(m, v);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        amp_model_params(m, &k);
        CHECK_MSG(k == 2 && strcmp(amp_model_layer(m, 3)->name, "linear2") == 0, "%d parameters", k);
        for (step = 0; step < 2; step++) {
            amp_batch b = batch_of(2 * step, 2, NULL);
            b.inputs[1] = rows + 4 * IN;
            CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
        }
        CHECK(amp_model_read_param_gradient(m, amp_model_params(m, NULL), dw) == AMP_OK);
        CHECK(amp_model_read_param_gradient(m, amp_model_params(m, NULL) + 1, db) == AMP_OK);
        for (k = 0; k < OUT; k++) CHECK_MSG(fabs((double)db[k] - (2.0 + order) / OUT) < 1e-6, "%g", (double)db[k]);
        for (i = 0; i < IN; i++) {
            double want = 0.0;
            for (k = 0; k < 4; k++)
                want += ((1.0 + order) * (double)rows[k * IN + i] + (double)rows[(4 + k % 2) * IN + i]) / (4.0 * OUT);
            for (k = 0; k < OUT; k++) CHECK_MSG(fabs((double)dw[k * IN + i] - want) < 1e-6, "%g, not %g", (double)dw[k * IN + i], want);
        }
        amp_model_destroy(m);
    }
}

/* A convolution on images of two sizes, a norm and a custom operator used again; training goes down, and a checkpoint has
   each weight once. */
static void test_reuse_kinds(void) {
    static float images[4 * 3 * 36];
    amp_model_desc d = model_desc(4, AMP_O2, AMP_F16);
    amp_model *m = new_model(&d), *other;
    amp_step_info first, info;
    amp_batch b;
    int i, pass, count;
    amp_model* both[2];
    d.optimizer.lr = 0.05f;
    test_seed = 5;
    for (i = 0; i < COUNT(images); i++) images[i] = test_uniform();
    amp_model_destroy(m);
    for (pass = 0; pass < 2; pass++) {
        amp_value x, y, v;
        m = both[pass] = new_model(&d);
        x = amp_conv2d(m, amp_input(m, 3, 6, 6), 4, 3, 1, 1);
        v = amp_conv2d(m, x, 4, 3, 1, 1);
        y = amp_reuse(m, v, amp_max_pool2d(m, v, 2));
        CHECK(amp_model_error(m)[0] == 0);
        v = amp_linear(m, amp_concat(m, amp_global_avg_pool2d(m, v), amp_global_avg_pool2d(m, y)), IN);
        x = amp_layer_norm(m, v);
        x = amp_reuse(m, x, amp_tanh(m, x));
        y = own_dense(m, x);
        amp_softmax_cross_entropy(m, amp_add(m, y, amp_reuse(m, y, amp_sigmoid(m, x))));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
    }
    amp_model_params(m, &count);
    CHECK_MSG(count == 10, "%d", count);
    m = both[0];
    other = both[1];
    memset(&b, 0, sizeof b);
    b.n = 4; b.inputs[0] = images; b.targets[0] = labels;
    CHECK(amp_train_step(m, &b, &first) == AMP_OK);
    for (i = 0; i < 100; i++) CHECK(amp_train_step(m, &b, &info) == AMP_OK);
    CHECK_MSG(info.loss < 0.5f * first.loss, "%g, then %g", (double)first.loss, (double)info.loss);
    CHECK(!same_weights(m, other));
    CHECK(amp_checkpoint_save(m, "build/reuse.safetensors") == AMP_OK);
    CHECK_MSG(amp_checkpoint_load(other, "build/reuse.safetensors") == AMP_OK, "%s", heard);
    CHECK(same_weights(m, other));
    CHECK(amp_train_step(m, &b, &first) == AMP_OK && amp_train_step(other, &b, &info) == AMP_OK);
    CHECK(to_bits(first.loss) == to_bits(info.loss) && same_weights(m, other));
    remove("build/reuse.safetensors");
    amp_model_destroy(m);
    amp_model_destroy(other);
}

/* A checkpoint of a graph that is wired otherwise, in the third input or in what is used again, is refused. */
static void test_wiring_is_checked(void) {
    const char* path = "build/wiring.safetensors";
    amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
    int kind;
    for (kind = 0; kind < 4; kind++) {
        amp_model* m = new_model(&d);
        amp_value x = amp_input(m, IN, 1, 1), a = amp_linear(m, x, IN), b = amp_linear(m, x, IN), v[3];
        amp_custom_desc c;
        memset(&c, 0, sizeof c);
        c.forward = keeper_forward;
        c.backward = keeper_backward;
        v[0] = v[1] = x;
        v[2] = kind % 2 ? a : b;
        x = amp_add(m, amp_custom(m, v, 3, &c), amp_reuse(m, kind / 2 ? a : b, amp_tanh(m, amp_add(m, a, b))));
        amp_mean(m, x);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        if (kind == 0) CHECK(amp_checkpoint_save(m, path) == AMP_OK);
        CHECK_MSG((amp_checkpoint_load(m, path) == AMP_OK) == (kind == 0), "%d", kind);
        amp_model_destroy(m);
    }
    remove(path);
}

/* --- mistakes ----------------------------------------------------------------------------------------------- */

static amp_result fails_at, fails_back;
static amp_result maybe_forward(const amp_custom_call* c) {
    if (fails_at != AMP_OK) return fails_at;
    return amp_activation_forward(AMP_TANH, c->x[0], c->y, (size_t)c->n * IN, c->exec);
}
static amp_result maybe_backward(const amp_custom_call* c) {
    if (fails_back != AMP_OK) return fails_back;
    return amp_activation_backward(AMP_TANH, c->dy, c->y, c->dx[0], 0, (size_t)c->n * IN, c->exec);
}

/* A function that fails ends the step, which leaves nothing. */
static void test_failing_functions(void) {
    amp_model_desc d = model_desc(4, AMP_O2, AMP_F16);
    amp_model *m = new_model(&d), *other;
    amp_batch b = batch_of(0, 4, labels);
    amp_model* both[2];
    float out[4 * IN];
    int i;
    amp_value v;
    amp_model_destroy(m);
    for (i = 0; i < 2; i++) {
        amp_custom_desc maybe;
        memset(&maybe, 0, sizeof maybe);
        maybe.forward = maybe_forward;
        maybe.backward = maybe_backward;
        m = both[i] = new_model(&d);
        v = amp_linear(m, amp_input(m, IN, 1, 1), IN);
        v = amp_custom(m, &v, 1, &maybe);
        amp_softmax_cross_entropy(m, amp_linear(m, v, OUT));
        CHECK(amp_model_finalize(m) == AMP_OK);
    }
    m = both[0]; other = both[1];
    fails_at = AMP_ERR_MEMORY;
    check_refused(amp_train_step(m, &b, NULL), AMP_ERR_MEMORY, "layer 'custom1': its forward function says: the allocator returned NULL");
    check_refused(amp_predict(m, &b, v, out), AMP_ERR_MEMORY, "layer 'custom1': its forward function says: the allocator returned NULL");
    check_refused(amp_forward(m, &b, NULL), AMP_ERR_MEMORY, "layer 'custom1': its forward function says: the allocator returned NULL");
    fails_at = AMP_OK;
    fails_back = AMP_ERR_SHAPE;
    CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_SHAPE);
    CHECK_MSG(strstr(heard, "layer 'custom1': its backward function says: ") == heard, "%s", heard);
    fails_back = AMP_OK;
    for (i = 0; i < 3; i++) CHECK(amp_train_step(m, &b, NULL) == AMP_OK && amp_train_step(other, &b, NULL) == AMP_OK);
    CHECK(same_weights(m, other));
    amp_model_destroy(m);
    amp_model_destroy(other);
}

/* Each mistake of a graph with its sentence. */
static void test_refused(void) {
    amp_model_desc d = model_desc(2, AMP_O1, AMP_F16);
    static const amp_rule bad_rules[4] = { AMP_RULE_FP32, (amp_rule)9, AMP_RULE_FP32, AMP_RULE_FP32 };
    static const char* const said[] = {
        "custom: value 0 is not one of this model", "custom after 'linear1': the desc is NULL",
        "custom after 'linear1': 5 inputs, at most 4 can be", "custom after 'linear1': forward is NULL",
        "custom after 'linear1': its output 3x0x1 is not a size that can be had",
        "custom after 'linear1': rule 9 of O1 does not exist",
        "custom after 'linear1': param_count 5 must lie in 0..4, with params given",
        "custom after 'linear1': the name of parameter 0 must have 1 to 7 bytes of UTF-8",
        "custom after 'linear1': parameter 'w' has 0 elements",
        "custom after 'linear1': its name must have 1 to 20 bytes of UTF-8",
        "layer 'custom1' has no backward function, but a loss depends on it",
        "custom after 'linear1': nothing can be built on a loss",
        "relu after 'linear1': 'relu1' is no layer that can be used again",
        "batch_norm after 'linear1': 'batch_norm1' is no layer that can be used again",
        "linear after 'input1': 'linear2' takes 12x1x1, not 3x2x2",
        "group of 'linear2': its weights are another layer's",
        "conv2d after 'input1': 'conv2d1' takes 2x2x2, not 3x2x2",
        "custom after 'linear1': saved_bytes or workspace_bytes is too large",
        "custom after 'linear1': init 7 does not exist",
        "custom after 'linear1': its name 'conv2d' is that of amp's own operator",
        "custom after 'linear1': parameter 'w' has the value nan",
        "custom after 'linear1': parameter 'w' has the value -1",
        "custom after 'linear1': there are two parameters 'w'",
    };
    int k;
    for (k = 0; k < COUNT(said); k++) {
        amp_model* m = new_model(&d);
        amp_value x = amp_input(m, 3, 2, 2), v[5], y;
        amp_custom_desc c;
        amp_custom_param p, pair[2];
        amp_result r;
        memset(&c, 0, sizeof c);
        memset(&p, 0, sizeof p);
        p.name = "w"; p.count = 4;
        if (k == 20) p.value = NAN;
        if (k == 21) { p.init = AMP_INIT_NORMAL; p.value = -1.0f; }
        pair[0] = pair[1] = p;
        if (k >= 20) { c.params = pair; c.param_count = k == 22 ? 2 : 1; }
        c.forward = maybe_forward;
        c.backward = maybe_backward;
        v[0] = v[1] = v[2] = v[3] = v[4] = amp_linear(m, x, IN);
        if (k == 0) v[0].id = 0;
        if (k == 3) c.forward = NULL;
        if (k == 4) { c.channels = 3; c.width = 1; }
        if (k == 5) c.rules = bad_rules;
        if (k == 6) c.param_count = 5;
        if (k == 7) p.name = "weightsx";
        if (k == 8) p.count = 0;
        if (k == 7 || k == 8 || k == 18) { c.params = &p; c.param_count = 1; }
        if (k == 9) c.name = "a name that is too long";
        if (k == 10) c.backward = NULL;
        if (k == 11) v[1] = amp_mse(m, v[0]);
        if (k == 17) c.saved_bytes = SIZE_MAX / 16;
        if (k == 18) p.init = (amp_init)7;
        if (k == 19) c.name = "conv2d";
        if (k < 12 || k >= 17) y = amp_custom(m, v, k == 2 ? 5 : k == 11 ? 2 : 1, k == 1 ? NULL : &c);
        else y = v[0];
        if (k == 12) { y = amp_relu(m, v[0]); y = amp_reuse(m, y, v[0]); }
        if (k == 13) { y = amp_batch_norm(m, v[0]); y = amp_reuse(m, y, v[0]); }
        if (k == 14) { y = amp_linear(m, v[0], 3); y = amp_reuse(m, y, x); }
        if (k == 15) { y = amp_reuse(m, v[0], x); amp_group(m, y, 0); }
        if (k == 16) { y = amp_conv2d(m, amp_input(m, 2, 2, 2), 1, 1, 1, 0); y = amp_reuse(m, y, x); }
        amp_mse(m, y);
        r = amp_model_finalize(m);
        CHECK_MSG(r != AMP_OK && strcmp(amp_model_error(m), said[k]) == 0, "%d: \"%s\"", k, amp_model_error(m));
        amp_model_destroy(m);
    }
}

/* A failed allocation anywhere in the building of such a graph leaks nothing. */
static void test_memory(void) {
    long k;
    for (k = 1; k < 60; k++) {
        amp_model_desc d = model_desc(2, AMP_O2, AMP_F16);
        amp_model* m = NULL;
        d.allocator.alloc = failing_alloc;
        d.allocator.free = failing_free;
        fail_at_call(k);
        if (amp_model_create(&m, &d) == AMP_OK) {
            amp_value v = own_dense(m, amp_linear(m, amp_input(m, IN, 1, 1), IN));
            amp_mean(m, amp_reuse(m, v, amp_linear(m, v, IN)));
            amp_model_finalize(m);
        }
        amp_model_destroy(m);
        CHECK_MSG(alloc_live == 0 && alloc_wrong_frees == 0, "%ld blocks are left after call %ld failed", alloc_live, k);
    }
    fail_at_call(0);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    make_data();
    TEST(test_custom_is_a_layer);
    TEST(test_custom_map);
    TEST(test_custom_loss);
    TEST(test_mean);
    TEST(test_operands);
    TEST(test_reuse_adds);
    TEST(test_reuse_kinds);
    TEST(test_wiring_is_checked);
    TEST(test_failing_functions);
    TEST(test_refused);
    TEST(test_memory);
    TEST_END();
}
