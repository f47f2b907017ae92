/* own_loop_fp32.c, own_loop.c - one training loop twice: as many C programs have it, and in mixed precision.

   A small MLP (784 -> 128 -> 10) learns drawn digits with AdamW. The first program is flat arrays and plain loops, all
   of it FP32 (amp.h serves data.h only). The second has weights and activations in half, with the raw-pointer calls of
   amp.h. `diff examples/own_loop_fp32.c examples/own_loop.c` shows every change. Half is a struct: after the typedef
   was changed, the compiler listed the other places.

   Run:  make examples, then build/own_loop_fp32 and build/own_loop

   Letters: B rows of a batch, C inputs of a layer, OC outputs of a layer. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "data.h"
#include <math.h>

enum { B = 32, PIXELS = 28 * 28, HIDDEN = 128, CLASSES = 10, STEPS = 500, TRAIN = 8000, TEST = 1024 };

/* Where each tensor begins in the flat arrays. */
enum { W1 = 0, B1 = W1 + HIDDEN * PIXELS, W2 = B1 + HIDDEN, B2 = W2 + CLASSES * HIDDEN, PARAMS = B2 + CLASSES };

typedef amp_half real;                  /* of activations, their gradients, and weights */

typedef struct MLP {
    int32_t targets[B];
    real inputs[B * PIXELS], hidden[B * HIDDEN], logits[B * CLASSES], dhidden[B * HIDDEN], dlogits[B * CLASSES];
    real params[PARAMS];
    float probs[B * CLASSES], grads[PARAMS];
    float pixels[B * PIXELS]; amp_mixed mixed;   /* with FP32 master weights, moments, the loss scale */
} MLP;

/* out[B,OC] = inp[B,C] weight[OC,C]^T + bias[OC] */
static void matmul_forward(real* out, const real* inp, const real* weight, const real* bias, int C, int OC) {
    amp_linear_forward(amp_f16(inp), amp_f16(weight), amp_f16(bias), amp_f16(out), B, (size_t)C,
        (size_t)OC, NULL);
}

/* dweight[OC,C] += dout^T inp; dbias[OC] += column sums of dout; dinp[B,C] += dout weight, or NULL */
static void matmul_backward(real* dinp, float* dweight, float* dbias, const real* dout, const real* inp,
                            const real* weight, int C, int OC) {
    amp_linear_backward(amp_f16(dout), amp_f16(inp), amp_f16(weight), amp_f16(dinp),
        amp_f32(dweight), amp_f32(dbias), 1, B, (size_t)C, (size_t)OC, NULL);
}

/* Turns logits into probabilities, in place; returns the mean of -log(probability of the target). */
static float crossentropy_forward(float* probs, const int32_t* targets) {
    float loss = 0.0f;
    for (int b = 0; b < B; b++) {
        float* p = probs + b * CLASSES;
        float largest = p[0], sum = 0.0f;
        for (int i = 1; i < CLASSES; i++) largest = p[i] > largest ? p[i] : largest;
        for (int i = 0; i < CLASSES; i++) sum += p[i] = expf(p[i] - largest);
        for (int i = 0; i < CLASSES; i++) p[i] /= sum;
        loss -= logf(p[targets[b]] + 1e-20f) / B;
    }
    return loss;
}

/* dlogits = dloss * (probs - one-hot target): the gradient of a sum, so the loop gives 1/B. With
   amp_softmax_cross_entropy_backward, the gradient of a mean, it gives 1. */
static void crossentropy_backward(real* dlogits, const float* probs, const int32_t* targets, float dloss) {
    for (int i = 0; i < B * CLASSES; i++)
        dlogits[i] = amp_half_from_float(dloss * (probs[i] - (targets[i / CLASSES] == i % CLASSES ? 1.0f : 0.0f)));
}

static void mlp_load(MLP* m, const data_set* d, int first) {
    data_batch(d, NULL, first, B, 28, m->pixels, m->targets);
    amp_convert(amp_f16(m->inputs), amp_f32(m->pixels), B * PIXELS);
}

static float mlp_forward(MLP* m) {
    matmul_forward(m->hidden, m->inputs, m->params + W1, m->params + B1, PIXELS, HIDDEN);
    amp_activation_forward(AMP_RELU, amp_f16(m->hidden), amp_f16(m->hidden), B * HIDDEN, NULL);
    matmul_forward(m->logits, m->hidden, m->params + W2, m->params + B2, HIDDEN, CLASSES);
    amp_convert(amp_f32(m->probs), amp_f16(m->logits), B * CLASSES);
    return crossentropy_forward(m->probs, m->targets);
}

static void mlp_backward(MLP* m, float dloss) {
    memset(m->grads, 0, sizeof m->grads);
    memset(m->dhidden, 0, sizeof m->dhidden);
    crossentropy_backward(m->dlogits, m->probs, m->targets, dloss);
    matmul_backward(m->dhidden, m->grads + W2, m->grads + B2, m->dlogits, m->hidden, m->params + W2, HIDDEN, CLASSES);
    amp_activation_backward(AMP_RELU, amp_f16(m->dhidden), amp_f16(m->hidden),
        amp_f16(m->dhidden), 0, B * HIDDEN, NULL);
    matmul_backward(NULL, m->grads + W1, m->grads + B1, m->dhidden, m->inputs, m->params + W1, PIXELS, HIDDEN);
}

/* AdamW: lr 0.001, beta 0.9 and 0.999, eps 1e-8, weight decay 0.01 */
static void mlp_update(MLP* m) {
    amp_mixed_step(&m->mixed, NULL);
}

static int mlp_init(MLP* m) {
    const amp_param all = { .low = m->params, .low_dtype = AMP_F16, .grad = m->grads, .count = PARAMS, .name = "mlp" };
    for (int i = 0; i < PARAMS; i++) m->params[i] = amp_half_from_float(amp_random_uniform(7, (size_t)i) / 10 - 0.05f);
    return amp_mixed_init(&m->mixed, &(amp_mixed_desc){ .params = &all, .count = 1,
        .optimizer = { .kind = AMP_ADAMW, .weight_decay = 0.01f }, .logger = &(amp_logger){ amp_log_stderr, NULL },
        .scaler = { .init_scale = 16777216.0f, .growth_interval = 100 } }) == AMP_OK;
}

static int mlp_correct(const MLP* m) {
    int correct = 0;
    for (int b = 0; b < B; b++) {
        const float* p = m->probs + b * CLASSES;
        int best = 0;
        for (int i = 1; i < CLASSES; i++) best = p[i] > p[best] ? i : best;
        correct += best == m->targets[b];
    }
    return correct;
}

int main(void) {
    static MLP m;
    data_set train, test;
    char error[DATA_ERROR];
    int correct = 0;
    if (!data_digits(&train, TRAIN, 1, error)) return fprintf(stderr, "%s\n", error), 1;
    if (!data_digits(&test, TEST, 2, error)) return fprintf(stderr, "%s\n", error), data_free(&train), 1;
    if (!mlp_init(&m)) return data_free(&train), data_free(&test), 1;
    for (int step = 1; step <= STEPS; step++) {
        mlp_load(&m, &train, step * B);
        float loss = mlp_forward(&m);
        mlp_backward(&m, amp_mixed_scale(&m.mixed, loss, 1.0f / B));
        mlp_update(&m);
        if (step % 50 == 0) printf("step %3d  loss %.4f\n", step, (double)loss);
    }
    for (int first = 0; first < TEST; first += B) {
        mlp_load(&m, &test, first);
        mlp_forward(&m);
        correct += mlp_correct(&m);
    }
    printf("loss scale %g, %d steps skipped\n", (double)m.mixed.scaler.state.scale, (int)m.mixed.scaler.state.skipped);
    printf("accuracy %.2f %%\n", 100.0 * correct / TEST);
    amp_mixed_free(&m.mixed);
    data_free(&train);
    data_free(&test);
    return 0;
}
