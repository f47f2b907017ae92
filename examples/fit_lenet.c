/* fit_lenet.c - LeNet-5 in half on MNIST: amp_fit does the epochs, the shuffling and the evaluation.
   Run:  make examples && build/fit_lenet DIR      (the four files of MNIST; without DIR drawn digits) */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "chart.h"
#include "data.h"

int main(int argc, char** argv) {
    static data_set train, test;
    static char error[DATA_ERROR];
    int read = argc > 1 ? data_load_both(&train, &test, argv[1], error)
                        : data_digits(&train, 2000, 1, error) && data_digits(&test, 500, 2, error);
    if (!read) return puts(error), 1;
    amp_model* m;
    amp_model_create(&m, &(amp_model_desc){ .batch = 64, .precision.level = AMP_O2, .optimizer.kind = AMP_ADAM,
                                            .logger.log = amp_log_stderr });
    amp_value x = amp_input(m, 1, train.height, train.width);
    x = amp_relu(m, amp_conv2d(m, x, 6, 5, 1, 2));
    x = amp_relu(m, amp_conv2d(m, amp_max_pool2d(m, x, 2), 16, 5, 1, 0));
    x = amp_relu(m, amp_linear(m, amp_relu(m, amp_linear(m, amp_max_pool2d(m, x, 2), 120)), 84));
    amp_softmax_cross_entropy(m, amp_linear(m, x, 10));
    if (amp_model_finalize(m) != AMP_OK) return 1;
    amp_data digits = { .count = train.count, .inputs = { train.pixels }, .input_dtype = AMP_U8,
                        .targets = { train.labels }, .label_dtype = AMP_U8 };
    amp_data unseen = { .count = test.count, .inputs = { test.pixels }, .input_dtype = AMP_U8,
                        .targets = { test.labels }, .label_dtype = AMP_U8 };
    amp_fit_desc fit = { .epochs = 3, .evaluation = &unseen, .print = amp_print_stdout,
                         .terminal = chart_is_terminal() };
    return amp_fit(m, &digits, &fit, NULL) != AMP_OK;
}
