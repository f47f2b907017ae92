/* by_hand.h - the network of lesson 8 once more, by raw calls, with norms whose squares are stored in the type of all
   other numbers. Each result is stored in that type; sums are FP32, as everywhere in amp.h. */
#ifndef LESSONS_BY_HAND_H
#define LESSONS_BY_HAND_H

#include "../../amp.h"
#include <math.h>

enum { BY_HAND_LAYERS = 14, BY_HAND_BATCH = 64, BY_HAND_MOST = BY_HAND_BATCH * 8 * 28 * 28 };

/* What becomes of x[n] in type t. */
static inline void by_hand_store(amp_dtype t, float* x, size_t n) {
    static float stored[BY_HAND_MOST];
    amp_convert(amp_ref_of(stored, t), amp_f32(x), n);
    amp_convert(amp_f32(x), amp_ref_of(stored, t), n);
}

/* y = (x - mean) / sqrt(mean of squares - mean^2 + 1e-5). Each group has statistics of its own; it is `parts` pieces of
   `length` neighbours, and pieces of all groups take turns. Returns how many groups have finite numbers and an infinite
   square: all their results are 0. */
static inline int by_hand_norm(amp_dtype t, const float* x, float* y, int groups, int parts, int length) {
    const float count = (float)(parts * length);
    int infinite = 0;
    for (int g = 0; g < groups; g++) {
        float sum = 0.0f, squares = 0.0f;
        for (int i = 0; i < parts * length; i++) {
            float v = x[(i / length * groups + g) * length + i % length], square = v * v;
            by_hand_store(t, &square, 1);
            sum += v;
            squares += square;
        }
        infinite += amp_is_finite(amp_f32(&sum)) && !amp_is_finite(amp_f32(&squares));
        float mean = sum / count, spread = sqrtf(squares / count - mean * mean + 1e-5f);
        for (int i = 0; i < parts * length; i++) {
            int at = (i / length * groups + g) * length + i % length;
            y[at] = (x[at] - mean) / spread;
        }
    }
    return infinite;
}

/* y[l]: the output of layer l, computed and stored in type t; the last is the loss, FP32. The weights are those of m.
   infinite[l]: what by_hand_norm returned, 0 for other layers. */
static inline void by_hand(amp_model* m, amp_dtype t, const uint8_t* pixels, const float* targets,
                           float (*y)[BY_HAND_MOST], int* infinite) {
    enum { N = BY_HAND_BATCH, LAST = BY_HAND_LAYERS - 1, LARGE = N * 8 * 28 * 28, SMALL = N * 8 * 14 * 14 };
    static const char* const names[8] = { "conv2d1.weight", "conv2d1.bias", "conv2d2.weight", "conv2d2.bias",
                                          "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias" };
    static float w[8][64 * 8 * 14 * 14];
    const amp_conv2d_shape first = { N, 1, 28, 28, 8, 3, 3, .pad_h = 1, .pad_w = 1 };
    const amp_conv2d_shape second = { N, 8, 14, 14, 8, 3, 3, .pad_h = 1, .pad_w = 1 };
    const amp_pool2d_shape pool = { .n = N, .channels = 8, .height = 28, .width = 28, .kernel_h = 2, .kernel_w = 2 };
    const amp_dtype f = AMP_F32;            /* of the memory: x and y hold numbers of type t in it */
    for (int i = 0; i < 8; i++) {
        const amp_param* p = amp_model_find_param(m, names[i]);
        amp_model_read_param(m, p, w[i]);
        by_hand_store(t, w[i], p->count);
    }
    for (int l = 0; l <= LAST; l++) {
        const float* x = y[l ? l - 1 : 0];
        infinite[l] = 0;
        switch (l) {
            case 0: for (int i = 0; i < N * 28 * 28; i++) y[l][i] = (float)pixels[i] / 255.0f; break;
            case 1: amp_conv2d_forward(&first, amp_ref_of(x, f), amp_ref_of(w[0], f),
                amp_ref_of(w[1], f), amp_ref_of(y[l], f), NULL); break;
            case 2: amp_activation_forward(AMP_RELU, amp_ref_of(x, f), amp_ref_of(y[l], f), LARGE,
                NULL); break;
            case 3: amp_pool2d_forward(&pool, amp_ref_of(x, f), amp_ref_of(y[l], f), NULL); break;
            case 4: amp_conv2d_forward(&second, amp_ref_of(x, f), amp_ref_of(w[2], f),
                amp_ref_of(w[3], f), amp_ref_of(y[l], f), NULL); break;
            case 5: infinite[l] = by_hand_norm(t, x, y[l], 8, N, 14 * 14); break;
            case 6: amp_add_forward(amp_ref_of(x, f), amp_ref_of(y[3], f), amp_ref_of(y[l], f),
                SMALL, NULL); break;
            case 7: amp_activation_forward(AMP_RELU, amp_ref_of(x, f), amp_ref_of(y[l], f), SMALL,
                NULL); break;
            case 8: amp_linear_forward(amp_ref_of(x, f), amp_ref_of(w[4], f), amp_ref_of(w[5], f),
                amp_ref_of(y[l], f), N, 8 * 14 * 14, 64, NULL); break;
            case 9: infinite[l] = by_hand_norm(t, x, y[l], N, 1, 64); break;
            case 10: amp_activation_forward(AMP_GELU, amp_ref_of(x, f), amp_ref_of(y[l], f),
                N * 64, NULL); break;
            case 11: amp_linear_forward(amp_ref_of(x, f), amp_ref_of(w[6], f),
                amp_ref_of(w[7], f), amp_ref_of(y[l], f), N, 64, 10, NULL); break;
            case 12: amp_softmax_forward(amp_ref_of(x, f), amp_ref_of(y[l], f), N, 10, NULL); break;
            default: amp_mse_forward(amp_ref_of(x, f), amp_ref_of(targets, f), y[l], N * 10, NULL); break;
        }
        if (l < LAST) by_hand_store(t, y[l], BY_HAND_MOST);
    }
}

/* The same in FP32 and in half. error[l]: the root of the sum of squares of the difference over that of FP32's numbers,
   NaN if one is. infinite[l]: how many outputs or squares are in half. loss: FP32's, half's. */
static inline void by_hand_compare(amp_model* m, const uint8_t* pixels, const float* targets, double* error,
                                   int* infinite, float* loss) {
    static float y[2][BY_HAND_LAYERS][BY_HAND_MOST];
    int ignored[BY_HAND_LAYERS];
    by_hand(m, AMP_F32, pixels, targets, y[0], ignored);
    by_hand(m, AMP_F16, pixels, targets, y[1], infinite);
    for (int l = 0; l < BY_HAND_LAYERS; l++) {
        double size = 0.0, wrong = 0.0;
        for (int i = 0; i < BY_HAND_MOST; i++) {
            double exact = (double)y[0][l][i], off = (double)y[1][l][i] - exact;
            infinite[l] += amp_is_inf(amp_f32(&y[1][l][i]));
            size += exact * exact;
            wrong += off * off;
        }
        error[l] = sqrt(wrong / size);
    }
    for (int t = 0; t < 2; t++) loss[t] = y[t][BY_HAND_LAYERS - 1][0];
}
#endif
