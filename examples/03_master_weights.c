/* 03_master_weights.c - lesson 3: why weights are kept twice.

   A weight near 0.1 has a neighbour in half 0.00006 away. An update smaller than half of that is rounded away,
   and so is the next one, and the next: training stands still although each gradient is right. With an FP32
   master copy small updates add up; the half copy is made from it after each step, and follows when the sum has
   become large enough.

   Each row takes 200 steps of plain gradient descent with the gradient 1 for all of 1000 weights, so that every
   weight should travel 200 times the learning rate. The same optimizer runs three times: on FP32 weights, on
   half weights with masters, on half weights alone.

   Run:  make examples && build/03_master_weights                                                         */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <stdlib.h>

enum { COUNT = 1000, STEPS = 200 };

static float start[COUNT], master[COUNT], gradient[COUNT];
static amp_half low[COUNT];

static double distance(int use_low) {
    double sum = 0.0;
    for (int i = 0; i < COUNT; i++) {
        float now = use_low ? amp_half_to_float(low[i]) : master[i];
        sum += (double)start[i] - (double)now;
    }
    return sum / COUNT;
}

/* Mean distance travelled. The optimizer's parameter says which copies exist. */
static double travel(float lr, int use_master, int use_low) {
    amp_param p = { .master = use_master ? master : NULL, .low = use_low ? low : NULL, .low_dtype = AMP_F16,
                    .grad = gradient, .grad_dtype = AMP_F32, .count = COUNT, .name = "weights" };
    amp_logger logger = { amp_log_stderr, NULL };
    amp_optimizer_desc desc = { .kind = AMP_SGD, .lr = lr, .logger = &logger };
    amp_optimizer optimizer;
    for (int i = 0; i < COUNT; i++) {
        master[i] = start[i];
        low[i] = amp_half_from_float(start[i]);
        gradient[i] = 1.0f;
    }
    if (amp_optimizer_init(&optimizer, &desc, &p, 1) != AMP_OK) exit(1);
    for (int step = 0; step < STEPS; step++) amp_optimizer_step(&optimizer, NULL, NULL);
    return distance(use_low);
}

int main(void) {
    static const float rates[] = { 1e-2f, 1e-3f, 1e-4f, 5e-5f, 2e-5f, 5e-6f };
    for (int i = 0; i < COUNT; i++)                       /* 0.07 .. 0.12: exact in half, so that all start alike */
        start[i] = amp_half_to_float(amp_half_from_float(0.07f + 0.05f * (float)i / COUNT));
    printf("distance travelled in %d steps, in percent of what it should be\n\n", STEPS);
    printf("  learning rate      FP32   half + master   half only\n");
    for (size_t i = 0; i < sizeof rates / sizeof rates[0]; i++) {
        double expected = STEPS * (double)rates[i];
        printf("  %13g  %6.1f %%   %11.1f %%   %7.1f %%\n", (double)rates[i],
               100.0 * travel(rates[i], 1, 0) / expected, 100.0 * travel(rates[i], 1, 1) / expected,
               100.0 * travel(rates[i], 0, 1) / expected);
    }
    printf("\nNear 0.1 halves are 0.000061 apart; an update of less than half of that, 0.00003, does nothing.\n");
    return 0;
}
