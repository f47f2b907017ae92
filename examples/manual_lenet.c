/* manual_lenet.c - precision set by hand: LeNet-5 in half, but its last dense layer in FP32.

   This is the manual case of MindSpore's mixed-precision guide (the network to float16, one cell back to FP32),
   written with amp.h: no level chooses anything, a region says "half", and what is built outside it stays FP32.
   Loss: mean squared error against one-hot targets, always FP32. Optimizer: SGD, lr 0.1, momentum 0.9. Loss
   scale: fixed at 128.

   Run:  make examples && build/manual_lenet                                                              */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "data.h"

enum { BATCH = 32, SIDE = 32, CLASSES = 10, STEPS = 600, TRAIN = 8000, TEST = 1024 };

static float images[BATCH * SIDE * SIDE], one_hot[BATCH * CLASSES], outputs[BATCH * CLASSES];
static int32_t labels[BATCH];

static void load(const data_set* d, int first) {
    data_batch(d, NULL, first, BATCH, SIDE, images, labels);
    for (int i = 0; i < BATCH * CLASSES; i++) one_hot[i] = labels[i / CLASSES] == i % CLASSES ? 1.0f : 0.0f;
}

static amp_value convolution(amp_model* m, amp_value x, int out_channels) {
    return amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, out_channels, 5, 1, 0)), 2);
}

static amp_value dense(amp_model* m, amp_value x, int out) {
    return amp_linear(m, x, out);
}

/* Returns the output layer; the model's errors wait for amp_model_finalize. */
static amp_value build(amp_model* m) {
    amp_autocast_push(m, AMP_F16);                        /* from here on half ... */
    amp_value x = amp_input(m, 1, SIDE, SIDE);
    x = convolution(m, x, 6);
    x = convolution(m, x, 16);
    x = amp_relu(m, dense(m, x, 120));
    x = amp_relu(m, dense(m, x, 84));
    amp_autocast_pop(m);                                  /* ... to here; the level, O0, makes the rest FP32 */
    x = dense(m, x, CLASSES);
    amp_name(m, x, "fc3");
    amp_mse(m, x);
    return x;
}

static int argmax(const float* p) {
    int best = 0;
    for (int i = 1; i < CLASSES; i++) best = p[i] > p[best] ? i : best;
    return best;
}

static amp_result train_and_test(amp_model* m, amp_value output, const data_set* train, const data_set* test) {
    amp_batch batch = { .n = BATCH, .inputs = { images }, .targets = { one_hot } };
    amp_result r = AMP_OK;
    int correct = 0;
    for (int step = 1; step <= STEPS && r == AMP_OK; step++) {
        amp_step_info info;
        load(train, step * BATCH);
        r = amp_train_step(m, &batch, &info);
        if (r == AMP_OK && step % 100 == 0)
            printf("step %3d  loss %.4f  scale %g  gradient norm %.3f  %s\n", step, (double)info.loss,
                   (double)info.scale_before, info.grad_norm, amp_outcome_name(info.outcome));
    }
    for (int first = 0; first < TEST && r == AMP_OK; first += BATCH) {
        load(test, first);
        r = amp_predict(m, &batch, output, outputs);
        for (int i = 0; i < BATCH; i++) correct += argmax(outputs + i * CLASSES) == labels[i];
    }
    if (r == AMP_OK) printf("accuracy %.2f %%\n", 100.0 * correct / TEST);
    return r;
}

int main(void) {
    amp_scaler_desc fixed = { .preset = AMP_SCALER_MINDSPORE_FIXED };
    amp_model_desc desc = {
        .batch = BATCH, .precision = { .level = AMP_O0 }, .scaler = &fixed, .seed = 1,
        .optimizer = { .kind = AMP_SGD, .lr = 0.1f, .momentum = 0.9f }, .logger = { .log = amp_log_stderr }
    };
    data_set train = {0}, test = {0};
    char error[DATA_ERROR] = "";
    amp_model* m = NULL;
    int ok = data_digits(&train, TRAIN, 1, error) && data_digits(&test, TEST, 2, error);
    if (!ok) fprintf(stderr, "%s\n", error);
    if (ok && amp_model_create(&m, &desc) == AMP_OK) {
        amp_value output = build(m);
        ok = amp_model_finalize(m) == AMP_OK && amp_model_print(m, stdout) == AMP_OK &&
             train_and_test(m, output, &train, &test) == AMP_OK;
    }
    amp_model_destroy(m);
    data_free(&train);
    data_free(&test);
    return ok && m ? 0 : 1;
}
