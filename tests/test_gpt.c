/* test_gpt.c - the examples' GPT beside one in plain loops and double precision: the loss and, by finite differences of
   that one, the gradient of every parameter; then half and bfloat16 beside FP32. */
#include "../amp.h"
#include "bench/gpt.h"
#include "test.h"

enum { B = 2, T = 5, C = 8, HEADS = 2, BLOCKS = 2, V = 11, D = C / HEADS, R = B * T };

static int32_t tokens[R], targets[R];

/* --- the network once more, in double: reads the masters of g, with `added` added to one of them --- */

typedef struct reference {
    const gpt* g;
    int param;
    size_t element;
    double added;
} reference;

static double weight(const reference* r, int param, size_t element) {
    return (double)r->g->params[param].master[element] + (param == r->param && element == r->element ? r->added : 0.0);
}
static void norm(const reference* r, int param, const double* x, double* y) {
    for (int i = 0; i < R; i++) {
        double mean = 0.0, variance = 0.0;
        for (int c = 0; c < C; c++) mean += x[i * C + c] / (double)C;
        for (int c = 0; c < C; c++) variance += (x[i * C + c] - mean) * (x[i * C + c] - mean) / (double)C;
        for (int c = 0; c < C; c++)
            y[i * C + c] = (x[i * C + c] - mean) / sqrt(variance + 1e-5) * weight(r, param, (size_t)c)
                         + weight(r, param + 1, (size_t)c);
    }
}
/* y = x w^T + b; without a bias if b < 0 */
static void dense(const reference* r, int w, int b, const double* x, double* y, int in, int out) {
    for (int i = 0; i < R; i++)
        for (int o = 0; o < out; o++) {
            double sum = b < 0 ? 0.0 : weight(r, b, (size_t)o);
            for (int k = 0; k < in; k++) sum += x[i * in + k] * weight(r, w, (size_t)(o * in + k));
            y[i * out + o] = sum;
        }
}
/* Row i of a sequence that begins at row `first`, one head: the weighted mean of the values up to i. */
static void attend(const double* qkv, int first, int i, int head, double* mixed) {
    double e[T], sum = 0.0;
    const double* q = qkv + i * 3 * C + head * D;
    for (int u = first; u <= i; u++) {
        double score = 0.0;
        for (int d = 0; d < D; d++) score += q[d] * qkv[u * 3 * C + C + head * D + d];
        sum += e[u - first] = exp(score / sqrt(D));
    }
    for (int d = 0; d < D; d++) {
        double value = 0.0;
        for (int u = first; u <= i; u++) value += e[u - first] / sum * qkv[u * 3 * C + 2 * C + head * D + d];
        mixed[i * C + head * D + d] = value;
    }
}
static double gelu(double x) {
    return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}

static void block(const reference* r, int p, double* stream) {
    double y[R * C], qkv[R * 3 * C], mixed[R * C], up[R * 4 * C];
    norm(r, p + 0, stream, y);
    dense(r, p + 2, p + 3, y, qkv, C, 3 * C);
    for (int i = 0; i < R; i++)
        for (int head = 0; head < HEADS; head++) attend(qkv, i / T * T, i, head, mixed);
    dense(r, p + 4, p + 5, mixed, y, C, C);
    for (int i = 0; i < R * C; i++) stream[i] += y[i];
    norm(r, p + 6, stream, y);
    dense(r, p + 8, p + 9, y, up, C, 4 * C);
    for (int i = 0; i < R * 4 * C; i++) up[i] = gelu(up[i]);
    dense(r, p + 10, p + 11, up, y, 4 * C, C);
    for (int i = 0; i < R * C; i++) stream[i] += y[i];
}
static double reference_loss(const gpt* g, int param, size_t element, double added) {
    const reference r = { g, param, element, added };
    double stream[R * C], y[R * C], logits[R * V], loss = 0.0;
    for (int i = 0; i < R * C; i++)
        stream[i] = weight(&r, 0, (size_t)(tokens[i / C] * C + i % C)) + weight(&r, 1, (size_t)(i / C % T * C + i % C));
    for (int i = 0; i < BLOCKS; i++) block(&r, 2 + 12 * i, stream);
    norm(&r, 2 + 12 * BLOCKS, stream, y);
    dense(&r, 0, -1, y, logits, C, V);
    for (int i = 0; i < R; i++) {
        double sum = 0.0;
        for (int v = 0; v < V; v++) sum += exp(logits[i * V + v]);
        loss += (log(sum) - logits[i * V + targets[i]]) / (double)R;
    }
    return loss;
}

/* --- ours --- */

/* Weights so large that every part of the network counts, and of 8 bits, so that every type holds them. */
static void start(gpt* g, amp_dtype low, amp_optimizer* optimizer) {
    const gpt_shape shape = { B, T, C, HEADS, BLOCKS, V, low };
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.kind = AMP_ADAMW;
    d.weight_decay = 0.01f;
    d.groups = gpt_groups;
    d.group_count = 2;
    if (!gpt_create(g, &shape)) exit(1);
    test_seed = 1;
    for (int i = 0; i < g->count; i++)
        for (size_t k = 0; k < g->params[i].count; k++) {
            float* w = &g->params[i].master[k];
            *w = amp_bfloat16_to_float(amp_bfloat16_from_float(*w + 0.4f * test_uniform()));
        }
    for (int i = 0; i < R; i++) {
        tokens[i] = (int32_t)(test_random() % V);
        targets[i] = (int32_t)(test_random() % V);
    }
    CHECK(amp_optimizer_init(optimizer, &d, g->params, g->count) == AMP_OK);
}

static void free_all(gpt* g, int count) { while (count-- > 0) gpt_free(&g[count]); }

static void test_gradients(void) {
    const double step = 1e-4;
    const float eight = 8.0f;
    amp_optimizer optimizer;
    gpt g;
    start(&g, AMP_F32, &optimizer);
    gpt_forward(&g, tokens, B);
    CHECK(fabs((double)gpt_loss(&g, targets) - reference_loss(&g, 0, 0, 0.0)) < 1e-6);
    gpt_backward(&g, tokens, targets, NULL);
    gpt_backward(&g, tokens, targets, &eight);        /* overwrites */
    for (int i = 0; i < g.count; i++) {
        double error = 0.0, size = 0.0;
        for (size_t k = 0; k < g.params[i].count; k++) {
            const double slope = (reference_loss(&g, i, k, step) - reference_loss(&g, i, k, -step)) / (2.0 * step);
            const double off = (double)((const float*)g.params[i].grad)[k] / 8.0 - slope;
            error += off * off;
            size += slope * slope;
        }
        CHECK_MSG(error < 1e-10 * size, "%s (%d): off by %g of %g", g.params[i].name, i, sqrt(error), sqrt(size));
    }
    gpt_free(&g);
}

/* A gradient has come through some twenty roundings to the low type, each off by half a unit at most; as a random walk
   that is sqrt(20) / 2 = 2.2 units. */
static void test_low_types(void) {
    static const amp_dtype types[3] = { AMP_F32, AMP_F16, AMP_BF16 };
    static const double unit[3] = { 0.0, 1.0 / 1024.0, 1.0 / 128.0 };
    amp_optimizer optimizer;
    gpt g[3];
    const float scale = 1024.0f;
    float loss[3];
    for (int t = 0; t < 3; t++) {
        start(&g[t], types[t], &optimizer);
        gpt_forward(&g[t], tokens, B);
        loss[t] = gpt_loss(&g[t], targets);
        gpt_backward(&g[t], tokens, targets, &scale);
        CHECK_MSG(fabs((double)(loss[t] - loss[0])) <= 3.0 * unit[t], "%s: %g, %g",
            amp_dtype_name(types[t]), (double)loss[t], (double)loss[0]);
        for (int i = 0; i < g[t].count; i++) {
            const float *low = (const float*)g[t].params[i].grad, *full = (const float*)g[0].params[i].grad;
            double error = 0.0, size = 0.0;
            for (size_t k = 0; k < g[t].params[i].count; k++) {
                error += ((double)low[k] - (double)full[k]) * ((double)low[k] - (double)full[k]);
                size += (double)full[k] * (double)full[k];
            }
            CHECK_MSG(sqrt(error) <= 3.0 * unit[t] * sqrt(size), "%s, %s (%d): off by %g of %g",
                      amp_dtype_name(types[t]), g[t].params[i].name, i, sqrt(error), sqrt(size));
        }
    }
    free_all(g, 3);
}

/* No logit depends on a later token, nor on another sequence; a smaller batch gives the same bits. */
static void test_order(void) {
    float before[R * V];
    amp_optimizer optimizer;
    gpt g;
    start(&g, AMP_F16, &optimizer);
    gpt_forward(&g, tokens, B);
    memcpy(before, g.logits, sizeof before);
    tokens[3] = (tokens[3] + 1) % V;
    gpt_forward(&g, tokens, B);
    CHECK(memcmp(before, g.logits, 3 * V * sizeof(float)) == 0);
    CHECK(memcmp(before + 3 * V, g.logits + 3 * V, V * sizeof(float)) != 0);
    CHECK(memcmp(before + 4 * V, g.logits + 4 * V, V * sizeof(float)) != 0);
    CHECK(memcmp(before + T * V, g.logits + T * V, T * V * sizeof(float)) == 0);
    gpt_forward(&g, tokens + T, B - 1);
    CHECK(memcmp(before + T * V, g.logits, T * V * sizeof(float)) == 0);
    gpt_free(&g);
}

/* It learns one batch by heart, in every type. */
static void test_training(void) {
    for (amp_dtype low = AMP_F32; low <= AMP_BF16; low = (amp_dtype)(low + 1)) {
        amp_optimizer optimizer;
        amp_scaler scaler;
        float first = 0.0f, loss = 0.0f;
        gpt g;
        start(&g, low, &optimizer);
        amp_optimizer_set_lr(&optimizer, 0.02f);
        amp_scaler_init(&scaler, NULL);
        for (int step = 0; step < 60; step++) {
            gpt_forward(&g, tokens, B);
            loss = gpt_loss(&g, targets);
            if (step == 0) first = loss;
            float scale = amp_scaler_scale_loss(&scaler, 1.0f);
            gpt_backward(&g, tokens, targets, &scale);
            CHECK(amp_optimizer_step(&optimizer, &scaler, NULL) == AMP_OK && amp_scaler_update(&scaler) == AMP_OK);
        }
        CHECK_MSG(loss < 0.1f * first, "%s: loss %g, first %g", amp_dtype_name(low), (double)loss, (double)first);
        gpt_free(&g);
    }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_gradients);
    TEST(test_low_types);
    TEST(test_order);
    TEST(test_training);
    TEST_END();
}
