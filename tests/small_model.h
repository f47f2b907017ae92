/* small_model.h - the model of tests to which it does not matter which: a layer of each common kind. */
#ifndef AMP_TEST_SMALL_MODEL_H
#define AMP_TEST_SMALL_MODEL_H

#include "helpers.h"

/* A desc whose logger listens. At O0 there is no low type. */
static inline amp_model_desc model_desc(int batch, amp_level level, amp_dtype low) {
    amp_model_desc d;
    memset(&d, 0, sizeof d);
    d.batch = batch;
    d.precision.level = level;
    d.precision.low_dtype = level == AMP_O0 ? AMP_DTYPE_DEFAULT : low;
    d.logger.log = listen;
    d.seed = 42;
    return d;
}

/* A model without layers. */
static inline amp_model* new_model(const amp_model_desc* d) {
    amp_model* m = NULL;
    CHECK_MSG(amp_model_create(&m, d) == AMP_OK, "%s", heard);
    return m;
}

/* Input of 8x8 pixels, conv, batch norm or tanh, relu, pool, conv, relu, dense, sigmoid, dropout, dense; three classes.
   The values are kept for predictions. */
enum { TOY_SIDE = 8, TOY_CLASSES = 3, TOY_VALUES = 11 };
typedef struct toy { amp_model* m; amp_value v[TOY_VALUES]; } toy;

static inline toy make_toy(const amp_model_desc* d, int norm, float dropout) {
    toy t;
    int i = 0;
    t.m = new_model(d);
    t.v[i] = amp_input(t.m, 1, TOY_SIDE, TOY_SIDE); i++;
    t.v[i] = amp_conv2d(t.m, t.v[i - 1], 4, 3, 1, 0); i++;
    t.v[i] = norm ? amp_batch_norm(t.m, t.v[i - 1]) : amp_tanh(t.m, t.v[i - 1]); i++;
    t.v[i] = amp_relu(t.m, t.v[i - 1]); i++;
    t.v[i] = amp_max_pool2d(t.m, t.v[i - 1], 2); i++;
    t.v[i] = amp_conv2d(t.m, t.v[i - 1], 8, 3, 1, 1); i++;
    t.v[i] = amp_relu(t.m, t.v[i - 1]); i++;
    t.v[i] = amp_linear(t.m, t.v[i - 1], 16); i++;
    t.v[i] = amp_sigmoid(t.m, t.v[i - 1]); i++;
    t.v[i] = amp_dropout(t.m, t.v[i - 1], dropout); i++;
    t.v[i] = amp_linear(t.m, t.v[i - 1], TOY_CLASSES); i++;
    amp_softmax_cross_entropy(t.m, t.v[i - 1]);
    CHECK_MSG(amp_model_finalize(t.m) == AMP_OK, "%s", amp_model_error(t.m));
    return t;
}

/* Have both models equal weights, bit for bit? */
static inline int same_weights(amp_model* a, amp_model* b) {
    int i, count, others, equal = 1;
    amp_param *p = amp_model_params(a, &count), *q = amp_model_params(b, &others);
    CHECK(count == others);
    for (i = 0; i < count; i++) {
        float *x = malloc(p[i].count * sizeof *x), *y = malloc(p[i].count * sizeof *y);
        CHECK(p[i].count == q[i].count);
        equal &= amp_model_read_param(a, &p[i], x) == AMP_OK && amp_model_read_param(b, &q[i], y) == AMP_OK
            && memcmp(x, y, p[i].count * sizeof *x) == 0;
        free(x); free(y);
    }
    return equal;
}

#endif
