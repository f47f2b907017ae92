/* fgsm.c - the fast gradient sign method: each input moves by EPS to where the loss grows, by the
   sign of the input's gradient. One pixel tells the class in nine samples of ten, the others tell
   it weakly: those are what fools a classifier that has learnt from all.
   Run:  make examples && build/fgsm                                                            */
#define AMP_IMPLEMENTATION
#include "../amp.h"
enum { PIXELS = 64, BATCH = 128, STEPS = 400, TESTS = 20 };
static const float EPS = 0.5f;
static float clean[BATCH * PIXELS], moved[BATCH * PIXELS], slope[BATCH * PIXELS];
static int32_t labels[BATCH];
static uint64_t drawn;
static void draw_batch(void) {
    for (int i = 0; i < BATCH * PIXELS; i++) {
        const int label = labels[i / PIXELS] = i / PIXELS % 2;
        const float side = label ? 1.0f : -1.0f;
        if (i % PIXELS) clean[i] = 0.3f * side + amp_random_normal(1, drawn++);
        else clean[i] = amp_random_uniform(1, drawn++) < 0.9f ? side : -side;
    }
}
/* moved = clean + EPS * sign of the gradient, by the parts of a step, which is dropped. */
static int attack(amp_model* m, amp_value input) {
    amp_batch b = { .n = BATCH, .inputs = { clean }, .targets = { labels } };
    int ok = amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK
        && amp_model_read_gradient(m, input, slope) == AMP_OK;
    for (int i = 0; i < BATCH * PIXELS; i++)
        moved[i] = clean[i] + (slope[i] > 0.0f ? EPS : slope[i] < 0.0f ? -EPS : 0.0f);
    return amp_discard(m) == AMP_OK && ok;
}
/* Trains on clean or moved inputs, then tells the accuracy on both; returns that on moved ones. */
static double train(int adversarial) {
    int64_t correct[2] = { 0, 0 };
    amp_model* m;
    amp_model_create(&m, &(amp_model_desc){ .batch = BATCH, .precision = { .level = AMP_O2 },
        .optimizer = { .kind = AMP_ADAM, .lr = 0.003f }, .logger = { .log = amp_log_stderr } });
    amp_value x = amp_input(m, PIXELS, 1, 1);
    amp_retain_gradient(m, x);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 32)), 2));
    if (amp_model_finalize(m) != AMP_OK) return -1.0;
    for (int step = 0; step < STEPS + TESTS; step++) {
        amp_batch b = { .n = BATCH, .inputs = { clean }, .targets = { labels } };
        draw_batch();
        if (!attack(m, x)) return -1.0;
        if (adversarial) b.inputs[0] = moved;
        for (int i = 0; step >= STEPS && i < 2; i++) {
            amp_eval_info told;
            b.inputs[0] = i ? moved : clean;
            if (amp_evaluate(m, &b, &told) != AMP_OK) return -1.0;
            correct[i] += told.correct;
        }
        if (step < STEPS && amp_train_step(m, &b, NULL) != AMP_OK) return -1.0;
    }
    amp_model_destroy(m);
    printf("trained on %s inputs: accuracy %.3f, attacked %.3f\n", adversarial ? "moved" : "clean",
        (double)correct[0] / (TESTS * BATCH), (double)correct[1] / (TESTS * BATCH));
    return (double)correct[1] / (TESTS * BATCH);
}
int main(void) {
    const double before = train(0), after = train(1);
    return before < 0.0 || after < before + 0.2;
}
