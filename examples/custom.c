/* custom.c - operators of your own in a graph: a focal loss, the activation Mish, and a filter of
   frequencies by a small FFT. Squeeze-and-excite needs none: layers that amp has and amp_mul are simpler. The network
   learns in half which frequency a noisy signal has; finite differences check its gradients first.
   Run:  make examples && build/custom                                                          */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>

enum { LENGTH = 32, CHANNELS = 6, CLASSES = 3, BATCH = 48 };
static const double ALPHA = 0.5, GAMMA = 2.0, PI = 3.14159265358979323846;

/* Focal loss of a sample: -ALPHA (1 - p)^GAMMA log p, with p the probability of its label. */
static amp_result focal_forward(const amp_custom_call* c) {     /* x: logits, labels */
    const float* labels = c->x[1].data;
    float *p = c->saved, *loss = c->y.data;                     /* p is kept for backward */
    amp_result r = amp_softmax_forward(c->x[0], amp_f32(p), (size_t)c->n, CLASSES, c->exec);
    for (int i = 0; i < c->n; i++) {
        const double hit = fmax((double)p[i * CLASSES + (int)labels[i]], 1e-30);
        loss[i] = (float)(-ALPHA * pow(1.0 - hit, GAMMA) * log(hit));
    }
    return r;
}
static amp_result focal_backward(const amp_custom_call* c) {
    const float *labels = c->x[1].data, *dloss = c->dy.data, *p = c->saved;
    float* dlogits = c->dx[0].data;
    for (int i = 0; i < c->n * CLASSES; i++) {
        const int n = i / CLASSES, label = (int)labels[n];
        const double hit = fmax((double)p[n * CLASSES + label], 1e-30), miss = 1.0 - hit;
        const double slope = ALPHA * pow(miss, GAMMA - 1.0) * (GAMMA * hit * log(hit) - miss);
        dlogits[i] = (float)(slope * ((i % CLASSES == label) - (double)p[i]) * (double)dloss[n]);
    }
    return AMP_OK;
}

/* Mish, x tanh(log(1 + e^x)), or dy times its derivative; amp_map brings it to the types in use. */
static void mish(const float* dy, const float* x, float* y, size_t n, void* user_data) {
    (void)user_data;
    for (size_t i = 0; i < n; i++) {
        const float t = tanhf(log1pf(expf(fminf(x[i], 20.0f)))), s = 1.0f / (1.0f + expf(-x[i]));
        y[i] = dy ? dy[i] * (t + x[i] * s * (1.0f - t * t)) : x[i] * t;
    }
}
static amp_result mish_forward(const amp_custom_call* c) {
    return amp_map(mish, NULL, AMP_NONE, c->x[0], c->y, c->count, c->exec);
}
static amp_result mish_backward(const amp_custom_call* c) {
    return amp_map(mish, NULL, c->dy, c->x[0], c->dx[0], c->count, c->exec);
}

/* The transform of x[0], x[step], ...: n complex numbers; with sign 1 its inverse, times n. */
typedef struct { double re, im; } number;
static void fft(const number* x, number* y, int n, int step, double sign) {
    if (n == 1) { *y = *x; return; }
    fft(x, y, n / 2, 2 * step, sign);
    fft(x + step, y + n / 2, n / 2, 2 * step, sign);
    for (number *even = y, *odd = y + n / 2; even < y + n / 2; even++, odd++) {
        const double angle = 2.0 * PI * (double)(even - y) / n;
        const double c = cos(angle), s = sign * sin(angle);
        const number a = *even, b = { odd->re * c - odd->im * s, odd->re * s + odd->im * c };
        *even = (number){ a.re + b.re, a.im + b.im };
        *odd = (number){ a.re - b.re, a.im - b.im };
    }
}
/* y is x with each frequency k of its spectrum multiplied by gain[k]. */
static void filter(const float* x, const float* gain, float* y, number* spectrum) {
    number a[LENGTH], b[LENGTH];
    for (int k = 0; k < LENGTH; k++) a[k] = (number){ (double)x[k], 0.0 };
    fft(a, spectrum, LENGTH, 1, -1.0);
    for (int k = 0; k < LENGTH; k++)
        a[k] = (number){ (double)gain[k] * spectrum[k].re, (double)gain[k] * spectrum[k].im };
    fft(a, b, LENGTH, 1, 1.0);
    for (int k = 0; k < LENGTH; k++) y[k] = (float)(b[k].re / LENGTH);
}
static amp_result filter_forward(const amp_custom_call* c) {    /* each row of LENGTH values */
    const float* x = c->x[0].data;
    float* y = c->y.data;
    for (int i = 0; i < c->n * CHANNELS * LENGTH; i += LENGTH)
        filter(x + i, c->w[0].data, y + i, (number*)c->saved + i);
    return AMP_OK;
}
static amp_result filter_backward(const amp_custom_call* c) {   /* dx is dy, filtered alike */
    const float* dy = c->dy.data;
    float *dx = c->dx[0].data, *dgain = c->dw[0].data;
    for (int k = 0; k < LENGTH && !c->add_dw; k++) dgain[k] = 0.0f;
    for (int i = 0; i < c->n * CHANNELS * LENGTH; i += LENGTH) {
        const number* x = (const number*)c->saved + i;
        number d[LENGTH];
        filter(dy + i, c->w[0].data, dx + i, d);
        for (int k = 0; k < LENGTH; k++)
            dgain[k] += (float)((x[k].re * d[k].re + x[k].im * d[k].im) / LENGTH);
    }
    return AMP_OK;
}

static amp_model* build(amp_level level) {
    const amp_custom_param gain = { .name = "gain", .count = LENGTH, .value = 1.0f };
    const amp_custom_desc spectral = { .name = "filter", .params = &gain, .param_count = 1,
        .saved_bytes = CHANNELS * LENGTH * sizeof(number),
        .forward = filter_forward, .backward = filter_backward };
    const amp_custom_desc focal = { .name = "focal", .channels = 1, .height = 1, .width = 1,
        .saved_bytes = CLASSES * sizeof(float),
        .forward = focal_forward, .backward = focal_backward };
    const amp_rule rules[] = { AMP_RULE_FP32, AMP_RULE_LOW, AMP_RULE_LOW, AMP_RULE_LOW };
    const amp_custom_desc activation = { .name = "mish", .rules = rules,
        .forward = mish_forward, .backward = mish_backward };
    amp_model* m;
    amp_model_create(&m, &(amp_model_desc){ .batch = BATCH, .precision = { .level = level },
        .optimizer = { .kind = AMP_ADAM, .lr = 0.01f }, .logger = { .log = amp_log_stderr } });
    amp_value x = amp_conv2d(m, amp_input(m, 1, 1, LENGTH), CHANNELS, 1, 1, 0);
    x = amp_custom(m, &x, 1, &spectral);
    x = amp_custom(m, &x, 1, &activation);
    amp_value s = amp_tanh(m, amp_linear(m, amp_global_avg_pool2d(m, x), 4));    /* squeeze, */
    x = amp_mul(m, x, amp_sigmoid(m, amp_linear(m, s, CHANNELS)));               /* and excite */
    amp_value operands[] = { amp_linear(m, x, CLASSES), amp_input(m, 1, 1, 1) };
    amp_mean(m, amp_custom(m, operands, 2, &focal));
    return amp_model_finalize(m) == AMP_OK ? m : NULL;
}

static float signals[BATCH][LENGTH], labels[BATCH];
static int train(amp_model* m, int steps, amp_step_info* told) {
    const amp_batch b = { .n = BATCH, .inputs = { signals, labels } };
    while (steps > 0 && amp_train_step(m, &b, told) == AMP_OK) steps--;
    return steps == 0;
}
/* Along a parameter's gradient g the loss has the slope |g|: by backward, and by a difference. */
static int gradients_agree(amp_model* m) {
    const amp_batch b = { .n = BATCH, .inputs = { signals, labels } };
    int count, agree;
    const amp_param* p = amp_model_params(m, &count);
    agree = amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK;
    for (const amp_param* end = p + count; agree && p < end; p++) {
        float w[CLASSES * CHANNELS * LENGTH], g[CLASSES * CHANNELS * LENGTH];
        double slope, difference = 0.0;
        amp_model_gradient_norm(m, p, &slope);
        amp_model_read_param(m, p, w);
        amp_model_read_param_gradient(m, p, g);
        for (int i = 0; i < 3; i++) {       /* to one side, to the other, and back */
            const float move = (float)(0.02 / slope) * (i == 1 ? -1.0f : 0.5f);
            amp_eval_info told = { .loss = NAN };
            for (size_t k = 0; k < p->count; k++) w[k] += move * g[k];
            amp_model_write_param(m, p, w);
            amp_evaluate(m, &b, &told);
            if (i < 2) difference += (i ? -1.0 : 1.0) * (double)told.loss / 0.02;
        }
        printf("%-15s slope %.5f, by a difference %.5f\n", p->name, slope, difference);
        agree = fabs(difference - slope) < 0.01 * slope;
    }
    amp_discard(m);
    return agree;
}

int main(void) {
    amp_step_info first, last;
    for (int i = 0; i < BATCH * LENGTH; i++) {      /* frequency 3, 4 or 5, and noise */
        const int n = i / LENGTH, k = i % LENGTH, label = n % CLASSES;
        const double phase = 6.0 * (double)amp_random_uniform(1, (uint64_t)n);
        labels[n] = (float)label;
        signals[n][k] = 2.0f * (float)sin(2.0 * PI * k * (3 + label) / LENGTH + phase)
            + amp_random_normal(2, (uint64_t)i);
    }
    amp_model *exact = build(AMP_O0), *half = build(AMP_O1);
    if (!exact || !half || !train(exact, 10, NULL) || !gradients_agree(exact)) return 1;
    if (!train(half, 1, &first) || !train(half, 199, &last)) return 1;
    printf("loss in half: %.4f, after training %.4f\n", (double)first.loss, (double)last.loss);
    amp_model_destroy(exact);
    amp_model_destroy(half);
    return last.loss > 0.1f * first.loss;
}
