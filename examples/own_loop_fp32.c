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

typedef float real;                     /* of activations, their gradients, and weights */

typedef struct MLP {
    int32_t targets[B];
    real inputs[B * PIXELS], hidden[B * HIDDEN], logits[B * CLASSES], dhidden[B * HIDDEN], dlogits[B * CLASSES];
    real params[PARAMS];
    float probs[B * CLASSES], grads[PARAMS], m[PARAMS], v[PARAMS];
    int step;
} MLP;

/* out[B,OC] = inp[B,C] weight[OC,C]^T + bias[OC] */
static void matmul_forward(real* out, const real* inp, const real* weight, const real* bias, int C, int OC) {
    for (int b = 0; b < B; b++)
        for (int o = 0; o < OC; o++) {
            float sum = bias[o];
            for (int i = 0; i < C; i++) sum += inp[b * C + i] * weight[o * C + i];
            out[b * OC + o] = sum;
        }
}

/* dweight[OC,C] += dout^T inp; dbias[OC] += column sums of dout; dinp[B,C] += dout weight, or NULL */
static void matmul_backward(real* dinp, float* dweight, float* dbias, const real* dout, const real* inp,
                            const real* weight, int C, int OC) {
    for (int b = 0; b < B; b++)
        for (int o = 0; o < OC; o++) {
            float d = dout[b * OC + o];
            dbias[o] += d;
            for (int i = 0; i < C; i++) dweight[o * C + i] += d * inp[b * C + i];
            for (int i = 0; dinp && i < C; i++) dinp[b * C + i] += d * weight[o * C + i];
        }
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
        dlogits[i] = dloss * (probs[i] - (targets[i / CLASSES] == i % CLASSES ? 1.0f : 0.0f));
}

static void mlp_load(MLP* m, const data_set* d, int first) {
    data_batch(d, NULL, first, B, 28, m->inputs, m->targets);
}

static float mlp_forward(MLP* m) {
    matmul_forward(m->hidden, m->inputs, m->params + W1, m->params + B1, PIXELS, HIDDEN);
    for (int i = 0; i < B * HIDDEN; i++) m->hidden[i] = m->hidden[i] > 0.0f ? m->hidden[i] : 0.0f;
    matmul_forward(m->logits, m->hidden, m->params + W2, m->params + B2, HIDDEN, CLASSES);
    memcpy(m->probs, m->logits, sizeof m->probs);
    return crossentropy_forward(m->probs, m->targets);
}

static void mlp_backward(MLP* m, float dloss) {
    memset(m->grads, 0, sizeof m->grads);
    memset(m->dhidden, 0, sizeof m->dhidden);
    crossentropy_backward(m->dlogits, m->probs, m->targets, dloss);
    matmul_backward(m->dhidden, m->grads + W2, m->grads + B2, m->dlogits, m->hidden, m->params + W2, HIDDEN, CLASSES);
    for (int i = 0; i < B * HIDDEN; i++) m->dhidden[i] = m->hidden[i] > 0.0f ? m->dhidden[i] : 0.0f;
    matmul_backward(NULL, m->grads + W1, m->grads + B1, m->dhidden, m->inputs, m->params + W1, PIXELS, HIDDEN);
}

/* AdamW: lr 0.001, beta 0.9 and 0.999, eps 1e-8, weight decay 0.01 */
static void mlp_update(MLP* m) {
    float c1 = 1.0f - powf(0.9f, (float)++m->step), c2 = 1.0f - powf(0.999f, (float)m->step);
    for (int i = 0; i < PARAMS; i++) {
        m->m[i] = 0.9f * m->m[i] + 0.1f * m->grads[i];
        m->v[i] = 0.999f * m->v[i] + 0.001f * m->grads[i] * m->grads[i];
        m->params[i] -= 0.001f * (m->m[i] / c1 / (sqrtf(m->v[i] / c2) + 1e-8f) + 0.01f * m->params[i]);
    }
}

static void mlp_init(MLP* m) {
    for (int i = 0; i < PARAMS; i++) m->params[i] = 0.1f * (amp_random_uniform(7, (uint64_t)i) - 0.5f);
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
    mlp_init(&m);
    for (int step = 1; step <= STEPS; step++) {
        mlp_load(&m, &train, step * B);
        float loss = mlp_forward(&m);
        mlp_backward(&m, 1.0f / B);
        mlp_update(&m);
        if (step % 50 == 0) printf("step %3d  loss %.4f\n", step, (double)loss);
    }
    for (int first = 0; first < TEST; first += B) {
        mlp_load(&m, &test, first);
        mlp_forward(&m);
        correct += mlp_correct(&m);
    }
    printf("accuracy %.2f %%\n", 100.0 * correct / TEST);
    data_free(&train);
    data_free(&test);
    return 0;
}
