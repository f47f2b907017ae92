/* report.c - what each layer's numbers look like, as pictures: a healthy network, one whose gradients vanish, one that
   overflows in a named layer; and the history of a run whose loss scale starts far too high.
   Run:  make examples && build/report [FOLDER]      writes report_healthy.svg, ... there, else into build/           */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "data.h"

enum { BATCH = 64 };
static const char* folder = "build";
static amp_history history;
static float images[BATCH * 28 * 28];
static int32_t labels[BATCH];

static const char* in_folder(const char* name) {
    static char path[300];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* LeNet's first half, and two dense layers. */
static amp_value healthy(amp_model* m, amp_value x) {
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 6, 5, 1, 0)), 2);
    return amp_linear(m, amp_relu(m, amp_linear(m, x, 64)), 10);
}

/* Sigmoids, each of which makes gradients at least four times smaller. */
static amp_value vanishing(amp_model* m, amp_value x) {
    for (int i = 0; i < 6; i++) x = amp_sigmoid(m, amp_linear(m, x, 32));
    return amp_linear(m, x, 10);
}

/* One layer's weights are so large that its outputs leave half. */
static amp_value overflowing(amp_model* m, amp_value x) {
    x = amp_relu(m, amp_linear(m, x, 64));
    x = amp_linear(m, x, 64);
    amp_name(m, x, "too_large");
    return amp_linear(m, amp_relu(m, x), 10);
}

static amp_model* build(amp_value (*body)(amp_model*, amp_value), float scale) {
    amp_scaler_desc scaler = { .init_scale = scale, .growth_interval = 50 };
    amp_model_desc desc = { .batch = BATCH, .precision = { .level = AMP_O2 }, .scaler = &scaler,
                            .optimizer = { .kind = AMP_ADAM }, .logger = { .log = amp_log_stderr } };
    amp_model* m;
    if (amp_model_create(&m, &desc) != AMP_OK) return NULL;
    amp_softmax_cross_entropy(m, body(m, amp_input(m, 1, 28, 28)));
    if (amp_model_finalize(m) == AMP_OK) return m;
    amp_model_destroy(m);
    return NULL;
}

static int train(amp_model* m, int steps) {
    amp_batch batch = { .n = BATCH, .inputs = { images }, .targets = { labels } };
    for (int step = 0; step < steps; step++) {
        amp_step_info info;
        if (amp_train_step(m, &batch, &info) != AMP_OK) return 0;
        amp_history_add(&history, &info);
    }
    return 1;
}

/* Trains, then reports as a picture and as text. */
static int report(amp_model* m, int steps, const char* name) {
    amp_batch batch = { .n = BATCH, .inputs = { images }, .targets = { labels } };
    amp_param* p = m ? amp_model_find_param(m, "too_large.weight") : NULL;
    for (size_t i = 0; p && i < p->count; i++) p->master[i] *= 4e5f;
    int ok = m && amp_model_sync_params(m) == AMP_OK && train(m, steps)
             && amp_report_svg(m, &batch, in_folder(name)) == AMP_OK;
    if (ok) printf("\n%s\n", name);
    ok = ok && amp_report_print(m, &batch, stdout) == AMP_OK;
    amp_model_destroy(m);
    return ok;
}

int main(int argc, char** argv) {
    data_set digits;
    char error[DATA_ERROR];
    amp_logger logger = { amp_log_stderr, NULL };
    amp_file_desc desc = { .logger = &logger };
    if (argc > 1) folder = argv[1];
    if (!data_digits(&digits, BATCH, 1, error)) { fprintf(stderr, "%s\n", error); return 1; }
    for (int i = 0; i < BATCH * 28 * 28; i++) images[i] = (float)digits.pixels[i] / 255.0f;
    for (int i = 0; i < BATCH; i++) labels[i] = digits.labels[i];
    data_free(&digits);
    int ok = report(build(healthy, 65536.0f), 30, "report_healthy.svg")
             && report(build(vanishing, 1.0f), 0, "report_vanishing.svg")
             && report(build(overflowing, 65536.0f), 0, "report_overflow.svg");
    memset(&history, 0, sizeof history);
    amp_model* m = ok ? build(healthy, 4294967296.0f) : NULL;
    ok = m && train(m, 100) && amp_history_svg(&history, in_folder("report_history.svg"), &desc) == AMP_OK;
    if (ok) printf("\nreport_history.svg\n");
    ok = ok && amp_history_print(&history, stdout) == AMP_OK;
    amp_model_destroy(m);
    return ok ? 0 : 1;
}
