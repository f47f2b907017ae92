/* train_small.c - the smallest complete program: a network learns, in half, which points lie inside a circle.
   Run:  make examples && build/train_small                                                               */
#define AMP_IMPLEMENTATION
#include "../amp.h"

int main(void) {
    static float points[256][2];
    static int32_t inside[256];
    for (int i = 0; i < 256; i++) {
        for (int k = 0; k < 2; k++)
            points[i][k] = 2.0f * amp_random_uniform(1, (uint64_t)(2 * i + k)) - 1.0f;
        inside[i] = points[i][0] * points[i][0] + points[i][1] * points[i][1] < 0.6f;
    }
    amp_model_desc desc = { .batch = 256, .precision = { .level = AMP_O2 },
                            .optimizer = { .kind = AMP_ADAM, .lr = 0.01f },
                            .logger = { .log = amp_log_stderr } };
    amp_model* m;
    amp_model_create(&m, &desc);
    amp_value x = amp_relu(m, amp_linear(m, amp_input(m, 2, 1, 1), 32));
    amp_softmax_cross_entropy(m, amp_linear(m, x, 2));
    if (amp_model_finalize(m) != AMP_OK) return 1;
    for (int step = 0; step <= 500; step++) {
        amp_step_info info;
        amp_batch batch = { .n = 256, .inputs = { points }, .targets = { inside } };
        if (amp_train_step(m, &batch, &info) != AMP_OK) return 1;
        if (step % 250 == 0)
            printf("step %3d  loss %.4f  scale %g\n", step, (double)info.loss,
                   (double)info.scale_before);
    }
    amp_model_destroy(m);
    return 0;
}
