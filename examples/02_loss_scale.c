/* 02_loss_scale.c - lesson 2: gradients that vanish in half, and the loss scale that saves them.

   Gradients are small: many lie below 2^-24, where half ends. They are also linear in the loss: multiply the
   loss by S and each gradient grows by S. So one multiplication before the backward pass moves all of them into
   the range of half, and one division in FP32 before the weights are updated takes it out again. Too large an S,
   and the largest become infinite.

   Run:  make examples && build/02_loss_scale                                                             */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>

enum { COUNT = 50000 };
static float gradients[COUNT], scaled[COUNT];

/* Like real gradients, these spread over many powers of two: around 2^-26, two thirds within a factor of 16. */
static void make_gradients(void) {
    for (int i = 0; i < COUNT; i++) {
        float size = exp2f(-26.0f + 4.0f * amp_random_normal(1, (uint64_t)i));
        gradients[i] = i % 2 ? size : -size;
    }
}

/* What becomes of them when they are multiplied by 2^exponent and stored in half. */
static void row(int exponent) {
    amp_stats s;
    for (int i = 0; i < COUNT; i++) scaled[i] = ldexpf(gradients[i], exponent);
    amp_stats_collect(&s, scaled, AMP_F32, COUNT, AMP_F16, 0);
    printf("  2^%-4d  %8.2f %%  %10.2f %%  %9lu   %s\n", exponent, 100.0 * (double)s.would_underflow / COUNT,
           100.0 * (double)s.would_be_subnormal / COUNT, (unsigned long)s.would_overflow,
           s.would_overflow ? "step skipped" : s.would_underflow > COUNT / 20 ? "much is lost" : "good");
}

/* The scaler finds a good scale by itself: halved after an overflow (that step is skipped), doubled after a
   number of clean steps in a row. */
static int search(void) {
    amp_logger logger = { amp_log_stderr, NULL };
    amp_scaler scaler;
    amp_scaler_desc desc = { .init_scale = 1099511627776.0f,                           /* 2^40, far too high */
                             .growth_interval = 10, .logger = &logger };
    amp_tensor tensor = { scaled, AMP_F16, COUNT, "gradients" };
    if (amp_scaler_init(&scaler, &desc) != AMP_OK) return 0;
    for (int step = 0; step < 60; step++) {
        float scale = amp_scaler_scale_loss(&scaler, 1.0f);
        for (int i = 0; i < COUNT; i++) scaled[i] = gradients[i] * scale;
        amp_convert(scaled, AMP_F16, scaled, AMP_F32, COUNT);  /* as a backward pass would leave them */
        amp_scaler_check(&scaler, &tensor, 1, NULL);
        amp_scaler_update(&scaler);
    }
    printf("\nA dynamic scaler that started at 2^40 stands at 2^%g after 60 steps, %d of them skipped.\n",
           log2((double)scaler.state.scale), (int)scaler.state.skipped);
    return 1;
}

int main(void) {
    static const int exponents[] = { 0, 4, 8, 12, 16, 20, 24, 26, 30, 36 };
    amp_stats s;
    make_gradients();
    amp_stats_collect(&s, gradients, AMP_F32, COUNT, AMP_F16, 0);
    printf("%d gradients, the largest %.3g, the smallest %.3g. Stored in half after scaling:\n\n", COUNT,
           (double)s.largest, (double)s.smallest);
    printf("  scale   become zero  lose digits   infinite\n");
    for (size_t i = 0; i < sizeof exponents / sizeof exponents[0]; i++) row(exponents[i]);
    printf("\nThe largest power of two that leaves a factor of 2 to spare: 2^%g\n",
           log2((double)s.suggested_scale));
    return search() ? 0 : 1;
}
