/* A model on the GPU: the same network, the same data, one field changed. The CPU backend is the reference. */
#include <cuda_runtime.h>

#include "../../amp_cuda.cuh"
#include "../test.h"

#include <math.h>
#include <string>
#include <vector>

enum { SIDE = 28, PIXELS = SIDE * SIDE, CLASSES = 10, SAMPLES = 16 };

static char heard[512];
static void listen(amp_result code, const char* sentence, void* user_data) {
    (void)user_data;
    snprintf(heard, sizeof heard, "%s: %s", amp_result_string(code), sentence);
}

/* What a real device cannot be asked. */
#if defined(AMP_CUDA_EMU)
static const bool emulated = true;
#else
static const bool emulated = false;
static void emu_set_eager(int) {}
static void emu_set_schedule(int) {}
static void emu_set_device_count(int) {}
static long emu_sync_count() { return 0; }
static long emu_launch_count() { return 0; }
static long emu_alloc_count() { return 0; }
static size_t emu_live_bytes() { return 0; }
static int emu_live_objects() { return 0; }
static void emu_fail_alloc_at(long) {}
static void emu_fail_launch_at(long) {}
static void emu_fail_any_call_at(long) {}
static long emu_failures() { return 0; }
#endif

/* --- data and networks --------------------------------------------------------------------------- */

static float pictures[SAMPLES * PIXELS];
static int32_t labels[SAMPLES];

/* Each class lights up its own place. */
static void make_pictures() {
    for (int i = 0; i < SAMPLES; i++) {
        labels[i] = i * 7 % CLASSES;
        for (int p = 0; p < PIXELS; p++)
            pictures[i * PIXELS + p] = 0.25f * test_uniform() + (p / 79 == labels[i] ? 1.0f : 0.0f);
    }
}

static amp_batch batch_of(int first, int n) {
    amp_batch b = {};
    b.n = n;
    b.inputs[0] = pictures + first * PIXELS;
    b.targets[0] = b.targets[1] = labels + first;
    return b;
}

static amp_model_desc desc_of(amp_level level, amp_dtype low) {
    amp_model_desc d = {};
    d.batch = 8;
    d.precision.level = level;
    d.precision.low_dtype = low;
    d.optimizer.kind = AMP_SGD;
    d.optimizer.lr = 0.02f;
    d.optimizer.momentum = 0.9f;
    d.seed = 3;
    d.logger.log = listen;
    return d;
}

/* LeNet-5. */
static void build_lenet(amp_model* m) {
    amp_conv2d_desc c = {};
    c.out_channels = 6;
    c.kernel = 5;
    c.pad = 2;
    amp_value x = amp_max_pool2d(m, amp_relu(m, amp_conv2d_with(m, amp_input(m, 1, SIDE, SIDE), &c)), 2);
    c.out_channels = 16;
    c.pad = 0;
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d_with(m, x, &c)), 2);
    x = amp_relu(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 120)), 84));
    amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
}

/* A layer of every kind. */
static void build_zoo(amp_model* m) {
    amp_conv2d_desc c = {};
    c.out_channels = 4;
    c.kernel = 5;
    c.stride = 3;
    amp_value x = amp_batch_norm(m, amp_conv2d_with(m, amp_input(m, 1, SIDE, SIDE), &c)), y;  /* 4 x 8 x 8 */
    c.kernel = 3;
    c.stride = 1;
    c.pad = 1;
    c.groups = 2;
    y = amp_gelu(m, amp_conv2d_with(m, x, &c));
    x = amp_avg_pool2d(m, amp_concat(m, amp_add(m, x, y), amp_sigmoid(m, y)), 2);               /* 8 x 4 x 4 */
    x = amp_layer_norm(m, amp_tanh(m, amp_linear(m, x, 24)));
    x = amp_dropout(m, x, 0.2f);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_softmax(m, amp_linear(m, x, CLASSES)), CLASSES));
    amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
}

/* Smaller than both: for tests of what surrounds the layers. Its logits are the same value in every such model. */
static amp_value small_logits;
static void build_small(amp_model* m) {
    amp_conv2d_desc c = {};
    c.out_channels = 3;
    c.kernel = 5;
    c.stride = 4;
    amp_value x = amp_relu(m, amp_batch_norm(m, amp_conv2d_with(m, amp_input(m, 1, SIDE, SIDE), &c)));
    x = amp_dropout(m, amp_relu(m, amp_linear(m, x, 20)), 0.25f);
    small_logits = amp_linear(m, x, CLASSES);
    amp_softmax_cross_entropy(m, small_logits);
}

/* Without dropout, whose numbers depend on the rank. */
static void build_plain(amp_model* m) {
    amp_value x = amp_relu(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), 20));
    amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
}

typedef void (*builder)(amp_model*);
static amp_model* make(amp_model_desc d, builder build, const amp_backend* backend, int graph = 0) {
    amp_cuda_desc own = {};
    amp_model* m = NULL;
    own.graph = graph;
    d.backend = backend;
    if (backend) d.backend_desc = &own;
    amp_result r = amp_model_create(&m, &d);
    CHECK_MSG(r == AMP_OK, "%s", heard);
    if (!m) return NULL;
    build(m);
    r = amp_model_finalize(m);
    CHECK_MSG(r == AMP_OK, "%s", amp_model_error(m));
    return m;
}

/* --- looking at a model ---------------------------------------------------------------------------- */

/* All weights, in FP32. */
static std::vector<float> weights(amp_model* m) {
    std::vector<float> all;
    int count = 0;
    amp_param* p = amp_model_params(m, &count);
    for (int i = 0; i < count; i++) {
        std::vector<float> one(p[i].count);
        CHECK_MSG(amp_model_read_param(m, &p[i], one.data()) == AMP_OK, "%s", heard);
        all.insert(all.end(), one.begin(), one.end());
    }
    return all;
}
static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
static double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); i++) sum += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
    return sqrt(sum);
}

static std::string file_bytes(const char* path) {
    std::string all;
    FILE* f = fopen(path, "rb");
    int c;
    while (f && (c = fgetc(f)) != EOF) all.push_back((char)c);
    if (f) fclose(f);
    return all;
}
/* Everything a checkpoint holds: weights, moments, running statistics, scaler, counters. */
static std::string state_of(amp_model* m) {
    const char* path = "build/test_cuda_model.ckpt";
    CHECK_MSG(amp_checkpoint_save(m, path) == AMP_OK, "%s", amp_model_error(m));
    std::string all = file_bytes(path);
    remove(path);
    CHECK(all.size() > 100);
    return all;
}

static void run_steps(amp_model* m, int count, int n = 8) {
    for (int i = 0; i < count; i++) {
        amp_batch b = batch_of(i % 2 * 8, n);
        CHECK_MSG(amp_train_step(m, &b, NULL) == AMP_OK, "%s", amp_model_error(m));
    }
}

/* --- the same training ------------------------------------------------------------------------------- */

/* Sums run in another order than on the CPU. What that moves, as a part of what training has moved so far, is
   a few roundings of the type that activations have: 2^-24, 2^-11 and 2^-8, times a factor for what the layers
   and steps make of it. */
static double part_of(amp_level level, amp_dtype low) {
    double eps = level == AMP_O0 ? 5.97e-8 : low == AMP_F16 ? 4.89e-4 : 3.91e-3;
    return 16.0 * eps;
}
/* Where a network's longest sum has so many terms, as good as random: it errs by the root of them in FP32. */
static double part_of_sums(double terms) { return 5.97e-8 * sqrt(terms); }

static void compare_training(builder build, amp_level level, amp_dtype low, int n, const amp_scaler_desc* sd) {
    amp_model_desc d = desc_of(level, low);
    d.scaler = sd;
    amp_model *cpu = make(d, build, NULL), *gpu = make(d, build, amp_cuda_backend());
    if (!cpu || !gpu) return;
    double part = part_of(level, low);
    if (build == build_lenet && level == AMP_O0) part = part_of_sums(n * SIDE * SIDE);     /* of its first layer's dw */
    std::vector<float> start = weights(cpu);
    CHECK(same(start, weights(gpu)));
    for (int i = 0; i < 2; i++) {
        amp_batch b = batch_of(i % 2 * n, n);
        amp_step_info x, y;
        CHECK_MSG(amp_train_step(cpu, &b, &x) == AMP_OK, "%s", amp_model_error(cpu));
        CHECK_MSG(amp_train_step(gpu, &b, &y) == AMP_OK, "%s", amp_model_error(gpu));
        CHECK_MSG(fabs((double)x.loss - (double)y.loss) <= part * (0.1 + fabs((double)x.loss)), "step %d: %.9g, %.9g", i,
                  (double)x.loss, (double)y.loss);
        CHECK(x.outcome == y.outcome && x.step == y.step && x.skipped == y.skipped && x.lr == y.lr);
        CHECK_MSG(x.scale_before == y.scale_before && x.scale_after == y.scale_after, "step %d: %g %g, %g %g", i,
                  (double)x.scale_before, (double)x.scale_after, (double)y.scale_before, (double)y.scale_after);
        CHECK_MSG(x.outcome != AMP_STEP_APPLIED || fabs(x.grad_norm - y.grad_norm) <= part * x.grad_norm,
                  "step %d: %.9g, %.9g", i, x.grad_norm, y.grad_norm);
    }
    double moved = distance(start, weights(cpu)), apart = distance(weights(gpu), weights(cpu));
    CHECK_MSG(moved > 0.01 && apart <= part * moved, "moved %g, apart %g", moved, apart);

    amp_batch all = batch_of(8, n);
    amp_eval_info x, y;
    CHECK(amp_evaluate(cpu, &all, &x) == AMP_OK && amp_evaluate(gpu, &all, &y) == AMP_OK);
    CHECK_MSG(fabs((double)x.loss - (double)y.loss) <= part * (0.1 + fabs((double)x.loss)), "%g %g", (double)x.loss, (double)y.loss);
    CHECK(x.correct == y.correct || level != AMP_O0);
    amp_model_destroy(cpu);
    amp_model_destroy(gpu);
}

static void test_lenet_as_cpu() {
    const int n = emulated ? 2 : 8;      /* an emulated step with eight pictures takes seconds */
    compare_training(build_lenet, AMP_O0, AMP_F16, n, NULL);
    compare_training(build_lenet, AMP_O1, AMP_F16, n, NULL);
    compare_training(build_lenet, AMP_O2, AMP_F16, n, NULL);
    compare_training(build_lenet, AMP_O2, AMP_BF16, n, NULL);
}

static void test_zoo_as_cpu() {
    static const amp_level levels[] = { AMP_O0, AMP_O1, AMP_O2, AMP_O3 };
    amp_scaler_desc sd = {};
    sd.init_scale = 256.0f;
    sd.growth_interval = 2;
    for (amp_level level : levels) compare_training(build_zoo, level, AMP_F16, 8, level == AMP_O0 ? NULL : &sd);
    compare_training(build_zoo, AMP_O1, AMP_BF16, 8, NULL);
    compare_training(build_zoo, AMP_O2, AMP_BF16, 8, NULL);
}

static void test_optimizers_as_cpu() {
    static const amp_optimizer_kind kinds[] = { AMP_SGD, AMP_ADAM, AMP_ADAMW, AMP_LAMB, AMP_RMSPROP };
    for (amp_optimizer_kind kind : kinds) {
        amp_model_desc d = desc_of(AMP_O2, AMP_F16);
        d.optimizer = amp_optimizer_desc();
        d.optimizer.kind = kind;
        d.optimizer.lr = 0.002f;
        d.optimizer.clip_norm = 1.0f;
        amp_model *cpu = make(d, build_small, NULL), *gpu = make(d, build_small, amp_cuda_backend());
        if (!cpu || !gpu) return;
        std::vector<float> start = weights(cpu);
        run_steps(cpu, 5);
        run_steps(gpu, 5);
        double moved = distance(start, weights(cpu)), apart = distance(weights(gpu), weights(cpu));
        CHECK_MSG(moved > 0.0 && apart <= 0.05 * moved, "kind %d: moved %g, apart %g", (int)kind, moved, apart);
        CHECK(amp_model_optimizer(gpu)->state.step == 5);
        amp_model_destroy(cpu);
        amp_model_destroy(gpu);
    }
}

/* --- overflow ------------------------------------------------------------------------------------------- */

static amp_scaler_desc huge_scale() {
    amp_scaler_desc sd = {};
    sd.init_scale = 33554432.0f;
    sd.growth_interval = 1000;
    return sd;
}

static void test_overflow_skips() {
    static const amp_level levels[] = { AMP_O1, AMP_O2 };
    for (amp_level level : levels) {
        amp_scaler_desc sd = huge_scale();
        amp_model_desc d = desc_of(level, AMP_F16);
        d.scaler = &sd;
        amp_model* m = make(d, build_zoo, amp_cuda_backend());
        if (!m) return;
        amp_batch b = batch_of(0, 8);
        amp_step_info info;
        std::vector<float> before = weights(m);
        CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        CHECK_MSG(info.outcome == AMP_STEP_SKIPPED_OVERFLOW && info.step == 0 && info.skipped == 1, "%s",
                  amp_outcome_name(info.outcome));
        CHECK(info.scale_before == 33554432.0f && info.scale_after == 16777216.0f);
        CHECK(info.overflow.found_inf && info.overflow.first_tensor >= 0 && isinf(info.grad_norm));
        CHECK_MSG(strstr(info.message, "weight") || strstr(info.message, "bias"), "%s", info.message);
        CHECK(same(before, weights(m)));
        int tries = 0;
        while (amp_train_step(m, &b, &info) == AMP_OK && info.outcome != AMP_STEP_APPLIED && tries++ < 30)
            CHECK(same(before, weights(m)));
        CHECK_MSG(info.outcome == AMP_STEP_APPLIED && info.step == 1, "%d tries, scale %g", tries, (double)info.scale_after);
        CHECK(!same(before, weights(m)));
        amp_model_destroy(m);
    }
}

/* Blots out the text under a key of a file. */
static void forget(std::string& file, const std::string& key) {
    size_t at = file.find("\"" + key + "\":\"");
    CHECK(at != std::string::npos);
    if (at == std::string::npos) return;
    for (at += key.size() + 4; at < file.size() && file[at] != '"'; at++) file[at] = '?';
}

/* After a skip, moments and running statistics are what they were. */
static void test_overflow_leaves_no_trace() {
    amp_scaler_desc high = huge_scale(), low = huge_scale();
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    low.init_scale = 128.0f;
    d.scaler = &high;
    amp_model* m = make(d, build_small, amp_cuda_backend());
    d.scaler = &low;
    amp_model* calm = make(d, build_small, amp_cuda_backend());
    if (!m || !calm) return;
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    amp_model_scaler(m)->state = amp_model_scaler(calm)->state;      /* by hand */
    std::string tried = state_of(m), untried = state_of(calm);
    for (std::string* file : { &tried, &untried }) {      /* the number of passes differs, and so its checksum */
        forget(*file, "amp.pass");
        forget(*file, "amp.crc32");
    }
    CHECK(tried == untried);
    amp_model_destroy(m);
    amp_model_destroy(calm);
}

static void test_replays() {
    amp_scaler_desc sd = huge_scale();
    amp_model_desc d = desc_of(AMP_O1, AMP_F16);
    d.scaler = &sd;
    d.max_replays = 40;
    amp_model* m = make(d, build_small, amp_cuda_backend());
    if (!m) return;
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED && info.attempts > 1);
    CHECK(info.skipped == info.attempts - 1 && info.step == 1);
    amp_model_destroy(m);
}

/* A loss that is not finite is told apart on the device, without a look by the host: all as on the CPU, also in a graph and
   within micro-batches, of which the second is at fault. */
static void test_dead_model() {
    for (int kind = 0; kind < 3; kind++) {
        amp_model_desc d = desc_of(AMP_O2, AMP_F16);
        d.accumulate = kind == 2 ? 3 : 1;
        amp_model *cpu = make(d, build_small, NULL), *gpu = make(d, build_small, amp_cuda_backend(), kind == 1);
        if (!cpu || !gpu) return;
        std::vector<float> bad(pictures, pictures + 8 * PIXELS), before;
        bad[7] = INFINITY;
        amp_batch sound = batch_of(0, 8), b = sound;
        b.inputs[0] = bad.data();
        amp_result r = AMP_OK;
        for (amp_model* m : { cpu, gpu }) {
            for (int i = 0; i < d.accumulate; i++) CHECK(amp_train_step(m, &sound, NULL) == AMP_OK);
            if (m == gpu) before = weights(gpu);
            for (int step = 0; step < 22; step++)
                for (int i = 0; i < d.accumulate; i++) {
                    r = amp_train_step(m, d.accumulate == 1 || i == 1 ? &b : &sound, NULL);
                    CHECK(r == (m == cpu && step >= 20 && i == d.accumulate - 1 ? AMP_ERR_OVERFLOW : AMP_OK));
                }
            amp_step_info info;
            CHECK(amp_train_read(m, &info) == AMP_ERR_OVERFLOW && strstr(amp_model_error(m), "max_unsound is 20"));
            CHECK(amp_model_scaler(m)->state.consecutive_unsound == 22 && amp_model_scaler(m)->state.scale == 65536.0f);
        }
        CHECK(memcmp(&amp_model_scaler(cpu)->state, &amp_model_scaler(gpu)->state, offsetof(amp_scaler_state, scale_in_use)) == 0);
        CHECK(same(before, weights(gpu)) && amp_model_scaler(gpu)->state.skipped == 22);
        amp_step_info info;
        for (int i = 0; i < d.accumulate; i++) r = amp_train_step(gpu, i == d.accumulate - 1 ? &b : &sound, &info);
        CHECK(r == AMP_ERR_OVERFLOW && info.outcome == AMP_STEP_SKIPPED_MODEL && info.scale_after == info.scale_before);
        CHECK_MSG(strstr(info.message, "'input1'"), "%s", info.message);
        for (int i = 0; i < d.accumulate; i++) CHECK(amp_train_step(gpu, &sound, NULL) == AMP_OK);
        CHECK(amp_train_read(gpu, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
        amp_model_destroy(cpu);
        amp_model_destroy(gpu);
    }
}

/* Right answers are those of the CPU for each kind of loss: labels and elements on either side. */
static void build_losses(amp_model* m) {
    amp_value x = amp_linear(m, amp_input(m, 1, SIDE, SIDE), 200);
    amp_bce_with_logits(m, x);
    amp_mse(m, x);
    amp_softmax_cross_entropy(m, x);
}
static void test_right_answers() {
    amp_model_desc d = desc_of(AMP_O0, AMP_F16);
    amp_model *cpu = make(d, build_losses, NULL), *gpu = make(d, build_losses, amp_cuda_backend());
    if (!cpu || !gpu) return;
    std::vector<float> targets(8 * 200);
    for (float& t : targets) t = test_uniform() > 0.0f ? 1.0f : 0.0f;
    amp_batch b = batch_of(0, 8);
    b.targets[0] = b.targets[1] = targets.data();
    b.targets[2] = labels;
    amp_eval_info x = {}, y = {};
    CHECK(amp_evaluate(cpu, &b, &x) == AMP_OK && amp_evaluate(gpu, &b, &y) == AMP_OK);
    CHECK(x.predictions == 8 * 200 + 8 && y.predictions == x.predictions);
    CHECK_MSG(x.correct > 600 && y.correct == x.correct, "%d, %d", (int)x.correct, (int)y.correct);
    std::vector<float> bad(pictures, pictures + 8 * PIXELS);
    bad[5 * PIXELS + 3] = NAN;
    b.inputs[0] = bad.data();
    CHECK(amp_evaluate(gpu, &b, &y) == AMP_OK && !amp_is_finite(amp_f32(&y.loss)) && strcmp(y.culprit, "input1") == 0);
    CHECK_MSG(strstr(y.message, "first in the output of 'input1', element 3 of sample 5"), "%s", y.message);
    amp_model_destroy(cpu);
    amp_model_destroy(gpu);
}

/* A first micro-batch with inf, a second with a bad label: the fit leaves no trace of the step that they began, with and
   without a graph. */
static void test_failed_fit() {
    for (int graph = 0; graph < 2; graph++) {
        amp_model_desc d = desc_of(AMP_O2, AMP_F16);
        d.accumulate = 2;
        amp_model *never = make(d, build_small, amp_cuda_backend(), graph), *fit = make(d, build_small, amp_cuda_backend(), graph);
        if (!never || !fit) return;
        std::vector<float> bad(pictures, pictures + SAMPLES * PIXELS);
        std::vector<int32_t> wrong(labels, labels + SAMPLES);
        bad[7] = INFINITY;
        wrong[9] = CLASSES;
        amp_data data = {};
        data.count = SAMPLES;
        data.inputs[0] = bad.data();
        data.targets[0] = wrong.data();
        amp_fit_desc f = {};
        f.in_order = 1;
        CHECK(amp_fit(fit, &data, &f, NULL) == AMP_ERR_ARGUMENT);
        CHECK(amp_model_scaler(fit)->state.found_inf == 0 && amp_model_scaler(fit)->state.unsound == 0);
        CHECK(state_of(never) == state_of(fit));
        data.inputs[0] = pictures;
        data.targets[0] = labels;
        CHECK(amp_fit(never, &data, &f, NULL) == AMP_OK && amp_fit(fit, &data, &f, NULL) == AMP_OK);
        CHECK(state_of(never) == state_of(fit) && amp_model_optimizer(fit)->state.step == 1);
        amp_model_destroy(never);
        amp_model_destroy(fit);
    }
}

/* amp_fit on the GPU does what a loop of steps does there; the evaluation is amp_evaluate's. */
static void test_fit() {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    amp_model *loop = make(d, build_small, amp_cuda_backend()), *fit = make(d, build_small, amp_cuda_backend());
    if (!loop || !fit) return;
    amp_data data = {};
    data.count = 12;                      /* batches of 8 and 4 */
    data.inputs[0] = pictures;
    data.targets[0] = labels;
    amp_fit_desc f = {};
    f.epochs = 2;
    f.in_order = 1;
    f.evaluation = &data;
    amp_fit_info told;
    CHECK_MSG(amp_fit(fit, &data, &f, &told) == AMP_OK && told.epochs == 2, "%s", amp_model_error(fit));
    amp_eval_info a = {}, b = {};
    amp_batch first = batch_of(0, 8), second = batch_of(8, 4);
    for (int epoch = 0; epoch < 2; epoch++)
        CHECK(amp_train_step(loop, &first, NULL) == AMP_OK && amp_train_step(loop, &second, NULL) == AMP_OK);
    CHECK(same(weights(loop), weights(fit)) && told.last.steps == 2);
    CHECK(amp_evaluate(loop, &first, &a) == AMP_OK && amp_evaluate(loop, &second, &b) == AMP_OK);
    CHECK(told.last.eval_loss == (float)((8.0 * (double)a.loss + 4.0 * (double)b.loss) / 12.0) && told.last.accuracy == (double)(a.correct + b.correct) / 12.0);
    amp_model_destroy(loop);
    amp_model_destroy(fit);
}

static void test_limits() {
    amp_scaler_desc sd = huge_scale();
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    sd.max_skips = 2;
    d.scaler = &sd;
    amp_model* m = make(d, build_small, amp_cuda_backend());
    if (!m) return;
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    amp_result r = AMP_OK;
    int i;
    for (i = 0; i < 4 && r == AMP_OK; i++) r = amp_train_step(m, &b, &info);
    CHECK_MSG(r == AMP_ERR_OVERFLOW && info.outcome == AMP_STEP_SKIPPED_OVERFLOW, "%s after %d", amp_result_string(r), i);
    amp_model_destroy(m);
}

/* --- nothing waits ----------------------------------------------------------------------------------------- */

static void test_no_waiting() {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    amp_model* m = make(d, build_zoo, amp_cuda_backend());
    if (!m) return;
    emu_set_eager(1);
    run_steps(m, 10);                     /* the pinned buffers get their sizes */
    long waits = emu_sync_count(), memory = emu_alloc_count();
    run_steps(m, 5);
    CHECK_MSG(emu_sync_count() == waits, "%ld", emu_sync_count() - waits);
    CHECK(emu_alloc_count() == memory);
    amp_step_info info;
    CHECK(amp_train_read(m, &info) == AMP_OK && info.step == 15);
    CHECK(!emulated || emu_sync_count() > waits);
    emu_set_eager(0);
    amp_model_destroy(m);
}

/* While the device is behind, too, nothing is left of what the library asks it: the last error is the caller's own. */
static void test_no_error_is_left() {
    amp_model* m = make(desc_of(AMP_O1, AMP_F16), build_plain, amp_cuda_backend());
    if (!m) return;
    cudaGetLastError();
    run_steps(m, 12);
    CHECK(cudaGetLastError() == cudaSuccess);
    amp_model_destroy(m);
}

/* A caller may write on its memory as soon as the call is over. */
static void test_batch_is_free_at_once() {
    amp_model_desc d = desc_of(AMP_O1, AMP_F16);
    amp_model *kept = make(d, build_small, amp_cuda_backend()), *spoilt = make(d, build_small, amp_cuda_backend());
    if (!kept || !spoilt) return;
    std::vector<float> x(8 * PIXELS);
    int32_t y[8];
    for (int i = 0; i < 3; i++) {
        amp_batch b = batch_of(0, 8);
        CHECK(amp_train_step(kept, &b, NULL) == AMP_OK);
        memcpy(x.data(), pictures, x.size() * sizeof(float));
        memcpy(y, labels, sizeof y);
        b.inputs[0] = x.data();
        b.targets[0] = y;
        CHECK(amp_train_step(spoilt, &b, NULL) == AMP_OK);
        memset(x.data(), 0xff, x.size() * sizeof(float));
        memset(y, 0xff, sizeof y);
    }
    CHECK(state_of(kept) == state_of(spoilt));
    amp_model_destroy(kept);
    amp_model_destroy(spoilt);
}

/* The same steps from memory that holds 8 pictures and their labels. */
static void check_batch_there(void* x, void* y) {
    amp_model_desc d = desc_of(AMP_O2, AMP_BF16);
    amp_model *host = make(d, build_small, amp_cuda_backend()), *device = make(d, build_small, amp_cuda_backend());
    if (!host || !device) return;
    amp_batch b = batch_of(0, 8), there = b;
    CHECK(cudaMemcpy(x, pictures, 8 * PIXELS * sizeof(float), cudaMemcpyDefault) == cudaSuccess);
    CHECK(cudaMemcpy(y, labels, 8 * sizeof(int32_t), cudaMemcpyDefault) == cudaSuccess);
    there.inputs[0] = x;
    there.targets[0] = y;
    there.on_device = 1;
    for (int i = 0; i < 3; i++) {
        CHECK(amp_train_step(host, &b, NULL) == AMP_OK);
        CHECK_MSG(amp_train_step(device, &there, NULL) == AMP_OK, "%s", amp_model_error(device));
    }
    CHECK(state_of(host) == state_of(device));
    amp_model_destroy(host);
    amp_model_destroy(device);
}
static void test_batch_on_device() {
    void *x = NULL, *y = NULL;
    CHECK(cudaMalloc(&x, 8 * PIXELS * sizeof(float)) == cudaSuccess && cudaMalloc(&y, 8 * sizeof(int32_t)) == cudaSuccess);
    check_batch_there(x, y);
    cudaFree(x);
    cudaFree(y);
}
/* Images of bytes, floats, half and double, with a mean and a deviation for each channel, and labels of every type: from
   either memory the GPU's model sees the bits that the CPU's sees. */
static amp_value normal_input;
static float input_scale;
static void build_normal(amp_model* m) {
    static const float mean[2] = { 0.485f, -3.7f }, std[2] = { 0.229f, 1.7f };
    amp_input_desc d = {};
    d.channels = 2;
    d.height = SIDE;
    d.width = SIDE / 2;
    d.scale = input_scale;
    d.mean = mean;
    d.std = std;
    normal_input = amp_input_with(m, &d);
    amp_softmax_cross_entropy(m, amp_linear(m, normal_input, CLASSES));
}
static void check_types_of_batch(amp_level level, amp_dtype images, amp_dtype labels_type) {
    const amp_model_desc d = desc_of(level, AMP_F16);
    amp_model *models[3] = { make(d, build_normal, NULL), make(d, build_normal, amp_cuda_backend()),
                             make(d, build_normal, amp_cuda_backend()) };
    std::vector<unsigned char> x(8 * PIXELS * amp_dtype_size(images)), y(8 * amp_dtype_size(labels_type));
    std::vector<float> seen[3];
    amp_eval_info eval[3] = {};
    void *there_x = NULL, *there_y = NULL;
    for (int i = 0; i < 8 * PIXELS; i++) {
        const uint8_t v = (uint8_t)(i * 37 % 251);
        const double wide = v;
        if (images == AMP_U8) x[(size_t)i] = v;
        else amp_convert(amp_ref_of(x.data() + (size_t)i * amp_dtype_size(images), images),
            amp_ref_of(&wide, AMP_F64), 1);
    }
    for (int i = 0; i < 8; i++) {
        if (labels_type == AMP_U8) y[(size_t)i] = (unsigned char)labels[i];
        else if (labels_type == AMP_I64) reinterpret_cast<int64_t*>(y.data())[i] = labels[i];
        else reinterpret_cast<int32_t*>(y.data())[i] = labels[i];
    }
    CHECK(cudaMalloc(&there_x, x.size()) == cudaSuccess && cudaMalloc(&there_y, y.size()) == cudaSuccess);
    CHECK(cudaMemcpy(there_x, x.data(), x.size(), cudaMemcpyDefault) == cudaSuccess);
    CHECK(cudaMemcpy(there_y, y.data(), y.size(), cudaMemcpyDefault) == cudaSuccess);
    for (int k = 0; k < 3 && models[0] && models[1] && models[2]; k++) {
        amp_batch b = {};
        b.n = 8;
        b.on_device = k == 2;
        b.inputs[0] = k == 2 ? there_x : x.data();
        b.targets[0] = k == 2 ? there_y : y.data();
        b.input_dtype = images;
        b.label_dtype = labels_type;
        seen[k].resize(8 * PIXELS);
        CHECK_MSG(amp_predict(models[k], &b, normal_input, seen[k].data()) == AMP_OK, "%s", amp_model_error(models[k]));
        CHECK(amp_evaluate(models[k], &b, &eval[k]) == AMP_OK && amp_train_step(models[k], &b, NULL) == AMP_OK);
        CHECK(memcmp(seen[k].data(), seen[0].data(), seen[0].size() * sizeof(float)) == 0);
        CHECK_MSG(eval[k].correct == eval[0].correct && fabsf(eval[k].loss - eval[0].loss) < 1e-4f * eval[0].loss, "%g %g",
                  (double)eval[k].loss, (double)eval[0].loss);
    }
    CHECK(state_of(models[1]) == state_of(models[2]));
    for (amp_model* m : models) amp_model_destroy(m);
    cudaFree(there_x);
    cudaFree(there_y);
}
static void test_types_of_batch() {
    for (int scaled = 0; scaled < 2; scaled++) {
        input_scale = scaled ? 0.0123f : 0.0f;
        check_types_of_batch(AMP_O0, AMP_U8, AMP_I64);
        check_types_of_batch(AMP_O2, AMP_U8, AMP_U8);
        check_types_of_batch(AMP_O0, AMP_F32, AMP_U8);
        check_types_of_batch(AMP_O2, AMP_F16, AMP_I64);
        check_types_of_batch(AMP_O0, AMP_F64, AMP_I32);
    }
}
/* A label that does not fit 32 bits is of no class: the loss is NaN, and the step is skipped. */
static void test_far_label_there() {
    amp_model* m = make(desc_of(AMP_O1, AMP_BF16), build_small, amp_cuda_backend());
    if (!m) return;
    const int64_t far[8] = { 0, 1, 2, 4294967296, 3, 4, 5, 6 };
    amp_batch b = batch_of(0, 8);
    amp_step_info info;
    void *x = NULL, *y = NULL;
    CHECK(cudaMalloc(&x, 8 * PIXELS * sizeof(float)) == cudaSuccess && cudaMalloc(&y, sizeof far) == cudaSuccess);
    CHECK(cudaMemcpy(x, pictures, 8 * PIXELS * sizeof(float), cudaMemcpyDefault) == cudaSuccess);
    CHECK(cudaMemcpy(y, far, sizeof far, cudaMemcpyDefault) == cudaSuccess);
    b.inputs[0] = x;
    b.targets[0] = y;
    b.label_dtype = AMP_I64;
    b.on_device = 1;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
    b = batch_of(0, 8);
    b.targets[0] = far;
    b.label_dtype = AMP_I64;
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_ARGUMENT && strstr(amp_model_error(m), "label 4294967296 of sample 3"));
    amp_model_destroy(m);
    cudaFree(x);
    cudaFree(y);
}
/* Kernels reach pinned memory, so a batch may lie there. */
static void test_batch_in_pinned_memory() {
    void *x = NULL, *y = NULL;
    CHECK(cudaMallocHost(&x, 8 * PIXELS * sizeof(float)) == cudaSuccess && cudaMallocHost(&y, 8 * sizeof(int32_t)) == cudaSuccess);
    check_batch_there(x, y);
    cudaFreeHost(x);
    cudaFreeHost(y);
}

/* --- graphs, schedules ----------------------------------------------------------------------------------------- */

/* Dropout, batch norm, overflows on the way, two batch sizes. */
static std::string train_mixed(int graph, int accumulate, long* launches) {
    amp_scaler_desc sd = huge_scale();
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    sd.init_scale = 1048576.0f;
    sd.backoff_factor = 0.03125;
    d.scaler = &sd;
    d.accumulate = accumulate;
    amp_model* m = make(d, build_small, amp_cuda_backend(), graph);
    if (!m) return std::string();
    run_steps(m, 6, 8);
    run_steps(m, 6, 5);
    amp_step_info info;
    CHECK(amp_train_read(m, &info) == AMP_OK);
    CHECK_MSG(info.skipped > 0 && info.step > 1, "%d skipped, %d applied", (int)info.skipped, (int)info.step);
    *launches = emu_launch_count();
    run_steps(m, 2, 8);
    *launches = emu_launch_count() - *launches;
    std::string all = state_of(m);
    amp_model_destroy(m);
    return all;
}
static void test_graph() {
    for (int accumulate = 1; accumulate <= 2; accumulate++) {
        long eager = 0, replayed = 0;
        std::string a = train_mixed(0, accumulate, &eager), b = train_mixed(1, accumulate, &replayed);
        CHECK(a == b);
        CHECK_MSG(!emulated || (replayed == 2 && eager > 40), "%ld launches, %ld in a graph", eager, replayed);
    }
}

/* What the host changes between replays reaches the device. */
static void test_graph_obeys() {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    amp_model *eager = make(d, build_small, amp_cuda_backend(), 0), *graph = make(d, build_small, amp_cuda_backend(), 1);
    if (!eager || !graph) return;
    amp_model* both[] = { eager, graph };
    for (amp_model* m : both) {
        run_steps(m, 4);
        CHECK(amp_scaler_set_scale(amp_model_scaler(m), 64.0f) == AMP_OK);
        CHECK(amp_optimizer_set_lr(amp_model_optimizer(m), 0.5f) == AMP_OK);
        amp_step_info info;
        amp_batch b = batch_of(0, 8);
        CHECK_MSG(amp_train_step(m, &b, &info) == AMP_OK, "%s", amp_model_error(m));
        CHECK_MSG(info.scale_before == 64.0f && info.lr == 0.5f, "%g %g", (double)info.scale_before, (double)info.lr);
        run_steps(m, 2);
    }
    CHECK(state_of(eager) == state_of(graph));
    amp_model_destroy(eager);
    amp_model_destroy(graph);
}

/* So does a group's own rate, and one that no step may use is refused. Without groups in the desc too. */
static void test_group_rates() {
    amp_param_group group = {};
    amp_model_desc d = desc_of(AMP_O2, AMP_BF16);
    d.optimizer.kind = AMP_ADAM;
    d.optimizer.groups = &group;
    for (int k = 0; k < 4; k++) {
        int graph = k % 2;
        d.optimizer.group_count = k / 2;
        amp_model* m = make(d, build_plain, amp_cuda_backend(), graph);
        if (!m) return;
        run_steps(m, 3);
        amp_model_optimizer(m)->groups[0].frozen = 1;
        std::vector<float> before = weights(m);
        run_steps(m, 2);
        CHECK(same(before, weights(m)) && amp_model_optimizer(m)->groups[0].frozen == 1);
        CHECK(amp_model_optimizer(m)->state.step == 5 && amp_model_optimizer(m)->state.frozen_steps[0] == 2);
        amp_batch b = batch_of(0, 8);
        amp_model_optimizer(m)->groups[0].lr = -2.0f;
        CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_ARGUMENT);
        CHECK_MSG(strstr(amp_model_error(m), "groups[0].lr -2"), "%s", amp_model_error(m));
        amp_model_optimizer(m)->groups[0].lr = 0.5f;
        amp_model_optimizer(m)->groups[0].frozen = 0;
        run_steps(m, 1);
        CHECK(!same(before, weights(m)) && amp_model_optimizer(m)->state.frozen_steps[0] == 2);
        amp_model_optimizer(m)->state.frozen_steps[0] = 6;      /* what the host writes reaches the device */
        amp_model_optimizer(m)->groups[0].frozen = 1;
        run_steps(m, 1);
        CHECK(amp_model_optimizer(m)->state.step == 7 && amp_model_optimizer(m)->state.frozen_steps[0] == 7);
        amp_model_destroy(m);
    }
}

/* Frozen groups: a stem with a frozen batch norm, then two dense layers, each in a group of its own. */
static void build_tuned(amp_model* m) {
    amp_conv2d_desc c = {};
    amp_norm_desc frozen = {};
    c.out_channels = 3;
    c.kernel = 5;
    c.stride = 4;
    frozen.frozen = 1;
    amp_value x = amp_conv2d_with(m, amp_input(m, 1, SIDE, SIDE), &c), y = amp_batch_norm_with(m, x, &frozen);
    amp_group(m, x, 1);
    amp_group(m, y, 1);
    x = amp_linear(m, amp_relu(m, y), 20);
    amp_group(m, x, 2);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, x), CLASSES));
}
/* As the CPU does it: frozen weights stay, the norm is that of the others, and their gradients are back after it. With
   `launches`: kernels of an unfrozen step, a frozen one, and a replayed one. */
static std::string train_tuned(const amp_backend* backend, int graph, amp_optimizer_kind kind, int accumulate, double norms[9],
                               long launches[3]) {
    amp_param_group groups[3] = {};
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    d.optimizer.kind = kind;
    if (kind != AMP_SGD) d.optimizer.momentum = 0.0f;
    d.optimizer.groups = groups;
    d.optimizer.group_count = 3;
    d.optimizer.clip_norm = 0.5f;
    d.accumulate = accumulate;
    amp_model* m = make(d, build_tuned, backend, graph);
    if (!m) return std::string();
    int count;
    amp_param* p = amp_model_params(m, &count);
    std::vector<float> start = weights(m);
    const size_t stem = p[0].count + p[1].count + p[2].count + p[3].count;
    for (int i = 0; i < 9; i++) {      /* three steps each: stem frozen, all free, stem and first dense layer frozen */
        amp_step_info info;
        amp_batch b = batch_of(i % 2 * 8, 8);
        amp_optimizer* o = amp_model_optimizer(m);
        const int frozen = i / 3 == 0 ? 4 : i / 3 == 1 ? 0 : 6;
        o->groups[1].frozen = frozen >= 4;
        o->groups[2].frozen = frozen >= 6;
        const long before = emu_launch_count();
        for (int k = 0; k < accumulate; k++) CHECK_MSG(amp_train_step(m, &b, &info) == AMP_OK, "%s", amp_model_error(m));
        if (launches && i > 2 && (i % 3 == 0 || i == 8)) launches[i == 3 ? 0 : i == 6 ? 1 : 2] = emu_launch_count() - before;
        CHECK(info.outcome == AMP_STEP_APPLIED);
        norms[i] = info.grad_norm;
        for (int k = 0; k < count; k++) CHECK((p[k].grad == NULL) == (k < frozen));
        if (i == 2) CHECK(memcmp(weights(m).data(), start.data(), stem * sizeof(float)) == 0);
    }
    CHECK(memcmp(weights(m).data(), start.data(), stem * sizeof(float)) != 0);
    std::string all = state_of(m);
    amp_model_destroy(m);
    return all;
}
static void test_frozen_groups() {
    for (amp_optimizer_kind kind : { AMP_SGD, AMP_ADAMW, AMP_LAMB })
        for (int accumulate : { 1, 2 }) {
            double cpu[9], eager[9], replayed[9];
            long launches[3] = {}, recorded[3] = {};
            train_tuned(NULL, 0, kind, accumulate, cpu, NULL);
            std::string a = train_tuned(amp_cuda_backend(), 0, kind, accumulate, eager, launches);
            std::string b = train_tuned(amp_cuda_backend(), 1, kind, accumulate, replayed, recorded);
            CHECK(a == b && memcmp(eager, replayed, sizeof eager) == 0);
            for (int i = 0; i < 9; i++)
                CHECK_MSG(fabs(cpu[i] / eager[i] - 1) < 0.02, "step %d: norm %g, on the CPU %g", i, eager[i], cpu[i]);
            CHECK_MSG(!emulated || (launches[0] >= launches[1] + 4 * accumulate && launches[2] == launches[1]
                                    && recorded[2] == accumulate),
                      "%ld %ld %ld launches, %ld in graphs", launches[0], launches[1], launches[2], recorded[2]);
        }
}
/* Unfreezing within a step of micro-batches is refused. */
static void test_frozen_window() {
    amp_param_group groups[3] = {};
    amp_model_desc d = desc_of(AMP_O1, AMP_BF16);
    d.optimizer.groups = groups;
    d.optimizer.group_count = 3;
    d.accumulate = 2;
    amp_model* m = make(d, build_tuned, amp_cuda_backend());
    if (!m) return;
    amp_batch b = batch_of(0, 8);
    amp_model_optimizer(m)->groups[1].frozen = 1;
    CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
    amp_model_optimizer(m)->groups[1].frozen = 0;
    CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_STATE);
    CHECK_MSG(strstr(amp_model_error(m), "was frozen when this step began"), "%s", amp_model_error(m));
    amp_model_optimizer(m)->groups[1].frozen = 1;
    CHECK(amp_train_step(m, &b, NULL) == AMP_OK && amp_model_optimizer(m)->state.step == 1);
    amp_model_destroy(m);
}

/* Sequences: 28 positions of 28 features, of which batches have fewer, or lengths leave some out. */
static void build_sequence(amp_model* m) {
    amp_input_desc d = {};
    d.channels = SIDE;
    d.height = d.width = 1;
    d.positions = SIDE;
    amp_value x = amp_linear(m, amp_position_embedding(m, amp_input_with(m, &d)), 12);
    x = amp_add(m, x, amp_linear(m, amp_gelu(m, amp_layer_norm(m, x)), 12));
    amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
}
/* The same with a loss that runs sample by sample where there are lengths. */
static void build_sequence_of_floats(amp_model* m) {
    build_sequence(m);
    amp_input_desc d = {};
    d.channels = SIDE;
    d.height = d.width = 1;
    d.positions = SIDE;
    amp_mse(m, amp_linear(m, amp_tanh(m, amp_linear(m, amp_input_with(m, &d), 5)), 1));
}
static std::vector<float> train_sequences(builder build, const amp_backend* backend, int graph) {
    static const int32_t lengths[2][8] = { { 1, 28, 3, 17, 28, 2, 9, 20 }, { 28, 28, 1, 1, 5, 6, 7, 8 } };
    static int32_t words[8 * SIDE];
    amp_model* m = make(desc_of(AMP_O0, AMP_F16), build, backend, graph);
    std::vector<float> all;
    if (!m) return all;
    for (int i = 0; i < 8 * SIDE; i++) words[i] = i * 5 % CLASSES;
    for (int i = 0; i < 12; i++) {
        amp_batch b = batch_of(0, 8);
        amp_step_info info;
        amp_eval_info e;
        b.inputs[1] = pictures + PIXELS;
        b.targets[0] = words;
        b.targets[1] = pictures;
        b.positions = i % 3 == 1 ? 11 : 0;
        b.lengths = i % 3 == 2 ? lengths[i / 3 % 2] : NULL;
        CHECK_MSG(amp_train_step(m, &b, &info) == AMP_OK, "%s", amp_model_error(m));
        CHECK_MSG(amp_evaluate(m, &b, &e) == AMP_OK, "%s", amp_model_error(m));
        all.push_back(info.loss);
        all.push_back(e.loss);
        all.push_back((float)e.predictions);
    }
    std::vector<float> w = weights(m);
    all.insert(all.end(), w.begin(), w.end());
    amp_model_destroy(m);
    return all;
}
static void test_sequences() {
    for (int k = 0; k < 2; k++) {
        builder build = k ? build_sequence_of_floats : build_sequence;
        std::vector<float> cpu = train_sequences(build, NULL, 0), gpu = train_sequences(build, amp_cuda_backend(), 0);
        CHECK(cpu.size() > 100 && cpu.size() == gpu.size());
        for (size_t i = 0; i < cpu.size(); i++)
            CHECK_MSG(fabs((double)cpu[i] - (double)gpu[i]) <= 1e-4 * (0.1 + fabs((double)cpu[i])), "%d: %.9g, %.9g", (int)i, (double)cpu[i],
                      (double)gpu[i]);
        CHECK(same(gpu, train_sequences(build, amp_cuda_backend(), 1)));
    }
}

/* Three kinds of micro-batch in eight sizes are more steps than there are places for graphs: the rest run as ever. */
static std::string train_all_sizes(int graph, long* replayed, long* late) {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    d.accumulate = 3;
    amp_model* m = make(d, build_plain, amp_cuda_backend(), graph);
    if (!m) return std::string();
    for (int n = 1; n <= 8; n++) run_steps(m, 6, n);
    long before = emu_launch_count();
    run_steps(m, 3, 1);
    *replayed = emu_launch_count() - before;
    run_steps(m, 3, 8);
    *late = emu_launch_count() - before - *replayed;
    std::string all = state_of(m);
    amp_model_destroy(m);
    return all;
}
static void test_more_steps_than_graphs() {
    long replayed = 0, late = 0, eager = 0;
    std::string graphs = train_all_sizes(1, &replayed, &late);
    CHECK_MSG(!emulated || (replayed == 3 && late > 30), "%ld launches, %ld without a graph", replayed, late);
    CHECK(graphs == train_all_sizes(0, &eager, &eager));
}

static void test_every_order_of_threads() {
    std::string first;
    for (int schedule = 0; schedule < 4; schedule++) {
        emu_set_schedule(schedule);
        amp_model* m = make(desc_of(AMP_O1, AMP_F16), build_zoo, amp_cuda_backend());
        if (!m) return;
        run_steps(m, 2);
        std::string now = state_of(m);
        if (schedule == 0) first = now;
        CHECK(now == first);
        amp_model_destroy(m);
    }
    emu_set_schedule(0);
}

/* --- checkpoints, parameters ------------------------------------------------------------------------------------- */

static void test_checkpoints_travel() {
    const char* path = "build/test_cuda_model.amp";
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    amp_model *cpu = make(d, build_small, NULL), *gpu = make(d, build_small, amp_cuda_backend());
    amp_model* again = make(d, build_small, amp_cuda_backend(), 1);
    if (!cpu || !gpu || !again) return;
    run_steps(gpu, 3);
    CHECK(amp_checkpoint_save(gpu, path) == AMP_OK);
    CHECK_MSG(amp_checkpoint_load(cpu, path) == AMP_OK, "%s", amp_model_error(cpu));
    CHECK(state_of(cpu) == state_of(gpu));
    run_steps(again, 3);                                /* a graph that exists when the state changes */
    CHECK_MSG(amp_checkpoint_load(again, path) == AMP_OK, "%s", amp_model_error(again));
    run_steps(gpu, 3);
    run_steps(again, 3);
    CHECK(state_of(again) == state_of(gpu));
    run_steps(cpu, 1);
    CHECK(amp_checkpoint_save(cpu, path) == AMP_OK && amp_checkpoint_load(gpu, path) == AMP_OK);
    CHECK(state_of(cpu) == state_of(gpu));
    int count = 0, loaded = 0;
    amp_param *from = amp_model_params(cpu, &count), *to = amp_model_params(again, &count);
    CHECK(amp_checkpoint_load_weights(again, path, &loaded) == AMP_OK && loaded >= count);
    for (int i = 0; i < count; i++) {
        std::vector<float> a(from[i].count), b(to[i].count);
        CHECK(amp_model_read_param(cpu, &from[i], a.data()) == AMP_OK && amp_model_read_param(again, &to[i], b.data()) == AMP_OK);
        CHECK_MSG(a == b, "%s", from[i].name);
    }
    remove(path);
    amp_model_destroy(cpu);
    amp_model_destroy(gpu);
    amp_model_destroy(again);
}

static void test_writing_parameters() {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    amp_model* m = make(d, build_small, amp_cuda_backend());
    if (!m) return;
    int count = 0;
    amp_param* p = amp_model_params(m, &count);
    std::vector<float> values(p[0].count), back(p[0].count);
    std::vector<uint16_t> low(p[0].count);
    for (size_t i = 0; i < values.size(); i++) values[i] = test_uniform();
    CHECK(amp_model_write_param(m, &p[0], values.data()) == AMP_OK);
    CHECK(amp_model_read_param(m, &p[0], back.data()) == AMP_OK && back == values);
    CHECK(cudaDeviceSynchronize() == cudaSuccess && p[0].low_dtype == AMP_F16);
    CHECK(cudaMemcpy(low.data(), p[0].low, low.size() * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (size_t i = 0; i < low.size(); i++) CHECK(low[i] == amp_half_from_float(values[i]).bits);
    amp_model_destroy(m);
}

static void test_predictions_and_statistics() {
    amp_model_desc d = desc_of(AMP_O1, AMP_F16);
    amp_model *cpu = make(d, build_small, NULL), *gpu = make(d, build_small, amp_cuda_backend());
    if (!cpu || !gpu) return;
    amp_batch b = batch_of(0, 8);
    amp_layer_stats x[16], y[16];
    memset(x, 0, sizeof x);
    memset(y, 0, sizeof y);
    CHECK(amp_model_stats(cpu, &b, x, 16) == AMP_OK);
    CHECK_MSG(amp_model_stats(gpu, &b, y, 16) == AMP_OK, "%s", amp_model_error(gpu));
    for (int i = 0; i < amp_model_layer_count(gpu); i++) {
        const amp_stats* both[4][2] = { { &x[i].output, &y[i].output }, { &x[i].output_gradient, &y[i].output_gradient },
                                        { &x[i].weight_gradient, &y[i].weight_gradient }, { &x[i].weight, &y[i].weight } };
        for (auto& pair : both) {
            CHECK(pair[0]->count == pair[1]->count && pair[0]->infs == pair[1]->infs && pair[0]->nans == pair[1]->nans);
            CHECK_MSG(fabs((double)pair[0]->largest - (double)pair[1]->largest) <= 0.01 * (double)pair[0]->largest, "layer %d: %g, %g", i,
                      (double)pair[0]->largest, (double)pair[1]->largest);
        }
    }
    char told[2][20000] = { "", "" };
    for (int i = 0; i < 2; i++)
        if (FILE* f = tmpfile()) {
            CHECK(amp_report_print(i ? gpu : cpu, &b, f) == AMP_OK);
            rewind(f);
            told[i][fread(told[i], 1, sizeof told[i] - 1, f)] = 0;
            fclose(f);
        }
    const char *on_cpu = strstr(told[0], "loss scale "), *on_gpu = strstr(told[1], "loss scale ");
    CHECK_MSG(on_cpu && on_gpu && strcmp(on_cpu, on_gpu) == 0, "%s %s", told[0], told[1]);
    float p[8 * CLASSES], q[8 * CLASSES];
    CHECK(amp_predict(cpu, &b, small_logits, p) == AMP_OK && amp_predict(gpu, &b, small_logits, q) == AMP_OK);
    for (int i = 0; i < 8 * CLASSES; i++)
        CHECK_MSG(fabs((double)p[i] - (double)q[i]) <= 4e-3 * (1.0 + fabs((double)p[i])), "%g, %g", (double)p[i], (double)q[i]);
    amp_model_destroy(cpu);
    amp_model_destroy(gpu);
}

/* Without a loss: no gradients and no moments on the device either; weights can be read, written and loaded. */
static void test_predictions_alone() {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    builder build = [](amp_model* m) { small_logits = amp_linear(m, amp_relu(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), 20)), CLASSES); };
    amp_model *cpu = make(d, build, NULL), *gpu = make(d, build, amp_cuda_backend());
    if (!cpu || !gpu) return;
    amp_batch b = batch_of(0, 8);
    amp_memory memory;
    float p[8 * CLASSES], q[8 * CLASSES];
    CHECK(amp_model_memory(gpu, &memory) == AMP_OK && memory.gradient_bytes == 0 && memory.optimizer_bytes == 0);
    CHECK(amp_train_step(gpu, &b, NULL) == AMP_ERR_STATE);
    std::vector<float> all = weights(gpu), half(amp_model_params(cpu, NULL)->count, 0.5f);
    CHECK(same(all, weights(cpu)) && amp_model_write_param(gpu, amp_model_params(gpu, NULL), half.data()) == AMP_OK);
    CHECK(amp_checkpoint_save(cpu, "build/test_cuda_model.ckpt") == AMP_OK);
    CHECK_MSG(amp_checkpoint_load(gpu, "build/test_cuda_model.ckpt") == AMP_OK && same(all, weights(gpu)), "%s", amp_model_error(gpu));
    remove("build/test_cuda_model.ckpt");
    CHECK(amp_predict(cpu, &b, small_logits, p) == AMP_OK && amp_predict(gpu, &b, small_logits, q) == AMP_OK);
    for (int i = 0; i < 8 * CLASSES; i++)
        CHECK_MSG(fabs((double)p[i] - (double)q[i]) <= 4e-3 * (1.0 + fabs((double)p[i])), "%g, %g", (double)p[i], (double)q[i]);
    amp_model_destroy(cpu);
    amp_model_destroy(gpu);
}

/* Running statistics that stay are told as on the CPU, also by a step read later and by one replayed from a graph. */
static void test_held_statistics() {
    amp_model_desc d = desc_of(AMP_O0, AMP_DTYPE_DEFAULT);
    builder build = [](amp_model* m) {
        amp_value x = amp_batch_norm(m, amp_linear(m, amp_batch_norm(m, amp_input(m, 3, 2, 1)), 5));
        amp_softmax_cross_entropy(m, amp_linear(m, x, CLASSES));
    };
    for (int graph = 0; graph < 2; graph++) {
        amp_model *cpu = make(d, build, NULL), *gpu = make(d, build, amp_cuda_backend(), graph);
        if (!cpu || !gpu) return;
        for (int step = 0; step < 5; step++) {
            float x[8 * 6];
            for (int i = 0; i < 8 * 6; i++) x[i] = (float)(i * 7 % 11) * (step % 2 == 0 && i / 2 % 3 > 0 ? 1e21f : 1.0f);
            amp_batch b = batch_of(0, 8);
            amp_step_info on_cpu, on_gpu;
            b.inputs[0] = x;
            heard[0] = 0;
            CHECK(amp_train_step(cpu, &b, &on_cpu) == AMP_OK);
            CHECK(amp_train_step(gpu, &b, step == 4 ? NULL : &on_gpu) == AMP_OK);
            if (step == 4) CHECK(amp_train_read(gpu, &on_gpu) == AMP_OK);
            CHECK(on_cpu.outcome == AMP_STEP_APPLIED && on_gpu.outcome == AMP_STEP_APPLIED);
            CHECK_MSG(on_gpu.held_statistics == (step % 2 ? 0u : 2u) && on_cpu.held_statistics == on_gpu.held_statistics,
                      "step %d: %d, %d", step, (int)on_cpu.held_statistics, (int)on_gpu.held_statistics);
            CHECK_MSG(strcmp(on_cpu.message, on_gpu.message) == 0 && strcmp(on_cpu.culprit, on_gpu.culprit) == 0, "%s", on_gpu.message);
            CHECK((step == 0) == (heard[0] != 0));
        }
        amp_model_destroy(cpu);
        amp_model_destroy(gpu);
    }
}

/* --- the parts of a step, operators of one's own ------------------------------------------------------------ */

/* A step in parts has the bits of amp_train_step, also of one that a graph replays: skipped steps, micro-batches, discarded
   ones, and told of at once or later. */
static void test_parts_are_the_step() {
    static const struct { amp_level level; amp_dtype low; int accumulate, graph; float scale; } kinds[] = {
        { AMP_O1, AMP_F16, 1, 0, 0.0f }, { AMP_O2, AMP_BF16, 2, 0, 0.0f }, { AMP_O2, AMP_F16, 1, 1, 1048576.0f },
        { AMP_O2, AMP_F16, 2, 1, 1048576.0f } };
    for (auto& kind : kinds) {
        amp_model_desc d = desc_of(kind.level, kind.low);
        amp_scaler_desc sd = huge_scale();
        sd.init_scale = kind.scale;
        sd.backoff_factor = 0.03125;
        sd.growth_interval = 2;
        if (kind.scale != 0.0f) d.scaler = &sd;
        d.accumulate = kind.accumulate;
        amp_model *whole = make(d, build_small, amp_cuda_backend(), kind.graph);
        amp_model *parts = make(d, build_small, amp_cuda_backend());
        if (!whole || !parts) return;
        amp_step_info a, b;
        for (int step = 0; step < 6; step++) {
            if (step == 3) {
                amp_batch dropped = batch_of(0, 4);
                CHECK(amp_forward(parts, &dropped, NULL) == AMP_OK && amp_backward(parts, NULL) == AMP_OK);
                CHECK(amp_discard(parts) == AMP_OK);
            }
            for (int micro = 0; micro < kind.accumulate; micro++) {
                amp_batch batch = batch_of((step + micro) % 2 * 8, micro ? 5 : 8);
                float loss;
                CHECK(amp_train_step(whole, &batch, &a) == AMP_OK);
                CHECK_MSG(amp_forward(parts, &batch, step % 3 ? NULL : &loss) == AMP_OK, "%s", heard);
                CHECK(step % 3 || loss == a.loss);
                CHECK_MSG(amp_backward(parts, NULL) == AMP_OK, "%s", heard);
            }
            CHECK_MSG(amp_update(parts, step % 2 ? NULL : &b) == AMP_OK, "%s", heard);
            if (step % 2) CHECK(amp_train_read(parts, &b) == AMP_OK);
            CHECK_MSG(a.outcome == b.outcome && a.step == b.step && a.skipped == b.skipped && a.grad_norm == b.grad_norm
                      && a.loss == b.loss && a.scale_before == b.scale_before && a.scale_after == b.scale_after,
                      "step %d: %s, not %s", step, amp_outcome_name(b.outcome), amp_outcome_name(a.outcome));
            CHECK(same(weights(whole), weights(parts)));
        }
        CHECK(kind.scale == 0.0f || b.skipped > 0);
        CHECK(state_of(whole) == state_of(parts));
        amp_model_destroy(whole);
        amp_model_destroy(parts);
    }
}

/* The small network up to its logits, which are an output. */
static void build_open(amp_model* m) {
    amp_value x = amp_tanh(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), 20));
    small_logits = amp_linear(m, x, CLASSES);
    amp_output(m, small_logits);
    amp_retain_gradient(m, small_logits);
}

/* The gradient of half the squares of y - 1/2, at each level: seeds in host memory, in the device's, and multiplied by the
   caller have the same bits; all as on the CPU. The scale moves by itself, by hand, and by a checkpoint. */
static void test_seeds() {
    for (int level = 0; level <= 2; level++) {
        enum { CPU, HOST, DEVICE, SCALED, ALL };
        amp_scaler_desc sd = huge_scale();
        amp_model_desc d = desc_of((amp_level)level, AMP_F16);
        amp_model* m[ALL];
        std::vector<float> y(8 * CLASSES), dy(8 * CLASSES), back(8 * CLASSES);
        void* there = NULL;
        sd.init_scale = 1024.0f;
        sd.growth_interval = 2;
        if (level) d.scaler = &sd;
        d.accumulate = 2;
        for (int k = 0; k < ALL; k++) if (!(m[k] = make(d, build_open, k == CPU ? NULL : amp_cuda_backend()))) return;
        CHECK(cudaMalloc(&there, dy.size() * sizeof(float)) == cudaSuccess);
        for (int step = 0; step < 5; step++)
            for (int k = 0; k < ALL; k++) {
                if (step == 2 && level) CHECK(amp_scaler_set_scale(amp_model_scaler(m[k]), 256.0f) == AMP_OK);
                for (int micro = 0; micro < 2; micro++) {
                    amp_batch b = batch_of(micro * 8, 8);
                    amp_seeds seeds = {};
                    CHECK_MSG(amp_forward(m[k], &b, NULL) == AMP_OK, "%s", heard);
                    CHECK(amp_model_read_value(m[k], small_logits, y.data()) == AMP_OK);
                    float factor = k == SCALED ? 0.5f * amp_model_scaler(m[k])->state.scale_in_use : 1.0f;
                    for (size_t i = 0; i < dy.size(); i++) dy[i] = (y[i] - 0.5f) / 80.0f * factor;
                    seeds.gradients[0] = amp_f32(dy.data());
                    seeds.scaled = k == SCALED;
                    if (k == DEVICE) {
                        CHECK(cudaMemcpy(there, dy.data(), dy.size() * sizeof(float), cudaMemcpyDefault) == cudaSuccess);
                        seeds.gradients[0] = amp_f32((const float*)there);
                        seeds.on_device = 1;
                    }
                    CHECK_MSG(amp_backward(m[k], &seeds) == AMP_OK, "%s", heard);
                    if (k != DEVICE) memset(dy.data(), 0x7f, dy.size() * sizeof(float));    /* the caller's again */
                    CHECK(amp_model_read_gradient(m[k], small_logits, back.data()) == AMP_OK);
                    for (size_t i = 0; i < dy.size(); i++) {
                        const double want = ((double)y[i] - 0.5) / 160.0;
                        CHECK_MSG(fabs((double)back[i] - want) <= 1e-3 * fabs(want), "%g, not %g", (double)back[i], want);
                    }
                }
                CHECK(amp_update(m[k], NULL) == AMP_OK);
            }
        CHECK(state_of(m[HOST]) == state_of(m[DEVICE]) && state_of(m[HOST]) == state_of(m[SCALED]));
        CHECK(amp_model_scaler(m[HOST])->state.scale == amp_model_scaler(m[CPU])->state.scale);
        CHECK_MSG(distance(weights(m[HOST]), weights(m[CPU])) < (level ? 5e-4 : 1e-5), "O%d: %g", level,
                  distance(weights(m[HOST]), weights(m[CPU])));

        /* Another scale comes with a checkpoint; host memory is refused where the device's belongs. */
        const char* path = "build/test_cuda_model.seeds";
        if (level) CHECK(amp_scaler_set_scale(amp_model_scaler(m[HOST]), 8.0f) == AMP_OK);
        CHECK(amp_checkpoint_save(m[HOST], path) == AMP_OK && amp_checkpoint_load(m[DEVICE], path) == AMP_OK);
        remove(path);
        amp_batch b = batch_of(0, 8);
        amp_seeds seeds = {};
        for (float& g : dy) g = 0.125f;
        seeds.gradients[0] = amp_f32(dy.data());
        seeds.on_device = 1;
        CHECK(amp_forward(m[DEVICE], &b, NULL) == AMP_OK && amp_backward(m[DEVICE], &seeds) == AMP_ERR_ARGUMENT);
        CHECK_MSG(strstr(heard, "gradients[0] is not memory of the backend 'cuda'"), "%s", heard);
        seeds.on_device = 0;
        CHECK(amp_backward(m[DEVICE], &seeds) == AMP_OK);
        CHECK(amp_model_read_gradient(m[DEVICE], small_logits, back.data()) == AMP_OK && back[3] == 0.0625f);
        for (amp_model* model : m) amp_model_destroy(model);
        cudaFree(there);
    }
}

/* A retained gradient, of the input too: as on the CPU, before the update and behind it, whatever the scale has become.
   After an overflow there is none. */
static amp_value kept_input, kept_inside;
static void build_kept(amp_model* m) {
    kept_input = amp_input(m, 1, SIDE, SIDE);
    kept_inside = amp_linear(m, kept_input, 20);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, kept_inside), CLASSES));
    amp_retain_gradient(m, kept_input);
    amp_retain_gradient(m, kept_inside);
}
static void test_retained_gradients() {
    amp_scaler_desc sd = huge_scale();
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    std::vector<float> dx[2], dh[2];
    sd.init_scale = 512.0f;
    sd.growth_interval = 1;
    d.scaler = &sd;
    for (int k = 0; k < 2; k++) {
        amp_model* m = make(d, build_kept, k ? amp_cuda_backend() : NULL);
        amp_batch b = batch_of(0, 8);
        if (!m) return;
        dx[k].resize(8 * PIXELS);
        dh[k].resize(8 * 20);
        CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
        CHECK_MSG(amp_model_read_gradient(m, kept_input, dx[k].data()) == AMP_OK, "%s", heard);
        CHECK(amp_model_read_gradient(m, kept_inside, dh[k].data()) == AMP_OK);
        CHECK(amp_update(m, NULL) == AMP_OK);
        std::vector<float> later(8 * PIXELS);
        CHECK(amp_model_scaler(m)->state.scale == 1024.0f);
        CHECK(amp_model_read_gradient(m, kept_input, later.data()) == AMP_OK && same(later, dx[k]));
        CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK && amp_discard(m) == AMP_OK);
        CHECK(amp_model_read_gradient(m, kept_input, later.data()) == AMP_ERR_STATE);

        CHECK(amp_scaler_set_scale(amp_model_scaler(m), 33554432.0f) == AMP_OK);
        CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
        CHECK(amp_model_read_gradient(m, kept_input, later.data()) == AMP_ERR_OVERFLOW);
        CHECK_MSG(strstr(heard, "gradients overflow at this loss scale"), "%s", heard);
        amp_step_info info;
        CHECK(amp_update(m, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
        amp_model_destroy(m);
    }
    for (int i = 0; i < 2; i++) {
        const std::vector<float>*both = i ? dh : dx, zero(both[0].size());
        CHECK_MSG(distance(both[0], both[1]) < 0.01 * distance(both[0], zero), "%g", distance(both[0], both[1]));
    }
}

/* Gradients between backward and update: read, written, clipped, measured, as on the CPU. */
static void test_gradients_between() {
    amp_scaler_desc sd = huge_scale();
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    sd.init_scale = 256.0f;
    sd.growth_interval = 1;
    d.scaler = &sd;
    d.optimizer.momentum = 0.0f;
    amp_model *cpu = make(d, build_plain, NULL), *gpu = make(d, build_plain, amp_cuda_backend());
    if (!cpu || !gpu) return;
    for (int step = 0; step < 3; step++) {
        double norm[2][3];
        std::vector<float> w[2], clipped[2];
        for (amp_model* m : { cpu, gpu }) {
            amp_batch b = batch_of(0, 8);
            const amp_param* p = amp_model_params(m, NULL);
            double* n = norm[m == gpu];
            CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
            std::vector<float> g(p[0].count), hand(p[1].count);
            CHECK(amp_model_gradient_norm(m, NULL, &n[0]) == AMP_OK && amp_model_gradient_norm(m, &p[0], &n[1]) == AMP_OK);
            CHECK(amp_model_clip_gradients(m, 0.0078125f) == AMP_OK);
            CHECK(amp_model_read_param_gradient(m, &p[0], g.data()) == AMP_OK);
            n[2] = 0.0;
            for (float x : g) { CHECK(fabsf(x) <= 0.0078125f); n[2] += fabsf(x) == 0.0078125f; }
            for (size_t i = 0; i < hand.size(); i++) hand[i] = (float)(i + 1);
            std::vector<float> before(hand.size()), after(hand.size());
            CHECK(amp_model_read_param(m, &p[1], before.data()) == AMP_OK);
            CHECK(amp_model_write_param_gradient(m, &p[1], hand.data()) == AMP_OK);
            CHECK(amp_update(m, NULL) == AMP_OK);
            CHECK(amp_model_read_param(m, &p[1], after.data()) == AMP_OK);
            for (size_t i = 0; i < hand.size(); i++)
                CHECK_MSG(fabsf(before[i] - 0.02f * hand[i] - after[i]) < 1e-6f, "%g from %g", (double)after[i], (double)before[i]);
            CHECK(amp_model_read_param_gradient(m, &p[0], g.data()) == AMP_ERR_STATE);
        }
        for (int i = 0; i < 2; i++)
            CHECK_MSG(fabs(norm[0][i] / norm[1][i] - 1.0) < 0.01, "step %d: %g, on the CPU %g", step, norm[1][i], norm[0][i]);
        CHECK_MSG(norm[1][2] > 10 && fabs(norm[0][2] / norm[1][2] - 1.0) < 0.05, "%g clipped, on the CPU %g", norm[1][2], norm[0][2]);
    }
    CHECK(amp_model_optimizer(gpu)->state.step == 3 && amp_model_scaler(gpu)->state.scale == 2048.0f);
    amp_model_destroy(cpu);
    amp_model_destroy(gpu);
}

/* The mean as a loss, in each type and in sizes of one block and of several: value and gradient. */
static amp_value averaged;
static int averaged_size;
static void build_mean(amp_model* m) {
    amp_loss_desc loss = {};
    loss.weight = 3.0f;
    averaged = amp_linear(m, amp_avg_pool2d(m, amp_input(m, 1, SIDE, SIDE), 7), averaged_size);
    amp_output(m, averaged);
    amp_retain_gradient(m, averaged);
    amp_mean_with(m, averaged, &loss);
}
static void test_mean() {
    static const amp_dtype types[] = { AMP_F32, AMP_F16, AMP_BF16 };
    for (amp_dtype t : types)
        for (int size : { 5, 3000 }) {
            amp_model_desc d = desc_of(t == AMP_F32 ? AMP_O0 : AMP_O2, t == AMP_F32 ? AMP_DTYPE_DEFAULT : t);
            averaged_size = size;
            amp_model* m = make(d, build_mean, amp_cuda_backend());
            if (!m) return;
            const size_t n = 7 * (size_t)size;
            std::vector<float> y(n), dy(n);
            amp_batch b = batch_of(0, 7);
            float loss;
            double sum = 0.0;
            CHECK_MSG(amp_forward(m, &b, &loss) == AMP_OK && amp_model_read_value(m, averaged, y.data()) == AMP_OK, "%s", heard);
            CHECK(amp_backward(m, NULL) == AMP_OK && amp_model_read_gradient(m, averaged, dy.data()) == AMP_OK);
            for (float x : y) sum += (double)x;
            CHECK_MSG(fabs((double)loss - 3.0 * sum / (double)n) < 1e-5, "%g, not %g", (double)loss, 3.0 * sum / (double)n);
            for (float g : dy)
                CHECK_MSG(fabs((double)g * (double)n / 3.0 - 1.0) < (t == AMP_BF16 ? 4e-3 : 5e-4), "%g", (double)g);
            amp_eval_info eval;
            CHECK(amp_discard(m) == AMP_OK && amp_evaluate(m, &b, &eval) == AMP_OK);
            CHECK(eval.loss == loss && eval.predictions == 0);
            amp_model_destroy(m);
        }
}

/* y = gate * x^2 element by element, with x^2 kept for backward: by kernels of the test, and on the CPU by loops. */
enum { GATED = 20 };
static __global__ void gate_forward_kernel(const float* x, const float* gate, float* squares, float* y, int count) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count) return;
    squares[i] = x[i] * x[i];
    y[i] = gate[i % GATED] * squares[i];
}
static __global__ void gate_backward_kernel(const float* dy, const float* x, const float* gate, const float* squares,
                                            float* dx, float* dgate, int add, int n) {
    const int k = (int)threadIdx.x;      /* a thread for each gate */
    float sum = dgate && add ? dgate[k] : 0.0f;
    for (int i = k; i < n * GATED; i += GATED) {
        if (dx) dx[i] = 2.0f * gate[k] * x[i] * dy[i];
        sum += squares[i] * dy[i];
    }
    if (dgate) dgate[k] = sum;
}
static amp_result gate_launched(cudaError_t e) { return e == cudaSuccess ? AMP_OK : AMP_ERR_DEVICE; }
static int gate_calls, gate_fails_at;
static amp_result gate_forward(const amp_custom_call* c) {
    const float *x = (const float*)c->x[0].data, *gate = (const float*)c->w[0].data;
    float *squares = (float*)c->saved, *y = (float*)c->y.data;
    CHECK(c->dtype == AMP_F32 && c->w[0].dtype == AMP_F32 && c->exec->workspace_size >= 1024);
    if (++gate_calls == gate_fails_at) return AMP_ERR_MEMORY;
    if (!c->user_data) {
        for (int i = 0; i < c->n * GATED; i++) {
            squares[i] = x[i] * x[i];
            y[i] = gate[i % GATED] * squares[i];
        }
        return AMP_OK;
    }
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)(c->n * GATED + 63) / 64);
    how.blockDim = dim3(64);
    how.stream = (cudaStream_t)c->exec->stream;
    return gate_launched(cudaLaunchKernelEx(&how, gate_forward_kernel, x, gate, squares, y, c->n * GATED));
}
static amp_result gate_backward(const amp_custom_call* c) {
    const float *dy = (const float*)c->dy.data, *x = (const float*)c->x[0].data, *gate = (const float*)c->w[0].data;
    const float* squares = (const float*)c->saved;
    float *dx = (float*)c->dx[0].data, *dgate = (float*)c->dw[0].data;
    if (!c->user_data) {
        for (int k = 0; k < GATED; k++) {
            float sum = dgate && c->add_dw ? dgate[k] : 0.0f;
            for (int i = k; i < c->n * GATED; i += GATED) {
                if (dx) dx[i] = 2.0f * gate[k] * x[i] * dy[i];
                sum += squares[i] * dy[i];
            }
            if (dgate) dgate[k] = sum;
        }
        return AMP_OK;
    }
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3(1);
    how.blockDim = dim3(GATED);
    how.stream = (cudaStream_t)c->exec->stream;
    return gate_launched(cudaLaunchKernelEx(&how, gate_backward_kernel, dy, x, gate, squares, dx, dgate, c->add_dw, c->n));
}
static void* gate_data;      /* not NULL = kernels */
static amp_value add_gate(amp_model* m, amp_value x) {
    const amp_custom_param gate = { "gate", GATED, AMP_INIT_ZERO, 0, 0, 0.75f };
    amp_custom_desc c = {};
    c.name = "gate";
    c.params = &gate;
    c.param_count = 1;
    c.saved_bytes = GATED * sizeof(float);
    c.workspace_bytes = 1024;
    c.forward = gate_forward;
    c.backward = gate_backward;
    c.user_data = gate_data;
    return amp_custom(m, &x, 1, &c);
}
static void build_gated(amp_model* m) {
    amp_value y = add_gate(m, amp_tanh(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), GATED)));
    amp_softmax_cross_entropy(m, amp_linear(m, y, CLASSES));
}
/* Such an operator trains as on the CPU at each level, frozen too; its kernels are recorded into graphs with those of the
   library, so that a replay calls no function. */
static void test_custom_kernels() {
    for (int level = 0; level <= 2; level++)
        for (int accumulate = 1; accumulate <= 2; accumulate++) {
            amp_model_desc d = desc_of((amp_level)level, AMP_F16);
            std::string state[2];
            d.accumulate = accumulate;
            gate_data = NULL;
            amp_model* cpu = make(d, build_gated, NULL);
            if (!cpu) return;
            std::vector<float> start = weights(cpu);
            run_steps(cpu, 4 * accumulate);
            for (int graph = 0; graph < 2; graph++) {
                gate_data = &gate_calls;
                amp_model* gpu = make(d, build_gated, amp_cuda_backend(), graph);
                if (!gpu) return;
                CHECK(same(start, weights(gpu)));
                gate_calls = 0;
                run_steps(gpu, 4 * accumulate);
                CHECK_MSG(gate_calls == (graph ? 2 : 4) * accumulate, "%d calls", gate_calls);
                const double moved = distance(start, weights(cpu)), apart = distance(weights(gpu), weights(cpu));
                CHECK_MSG(apart <= 2 * part_of((amp_level)level, AMP_F16) * moved, "O%d: moved %g, apart %g", level, moved, apart);
                state[graph] = state_of(gpu);
                amp_model_destroy(gpu);
            }
            CHECK(state[0] == state[1]);
            amp_model_destroy(cpu);
        }
}

/* A function that fails, while its step is recorded too, ends the step with a sentence, and leaves nothing. */
static void test_custom_fails() {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    gate_data = &gate_calls;
    amp_model *calm = make(d, build_gated, amp_cuda_backend()), *m = make(d, build_gated, amp_cuda_backend(), 1);
    if (!calm || !m) return;
    for (int step = 0; step < 4; step++) {
        amp_batch b = batch_of(0, 8);
        gate_fails_at = 1;
        for (int failure = 0; failure < 2 && step == 0; failure++) {      /* the second one within a record */
            gate_calls = 0;
            CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_MEMORY);
            CHECK_MSG(strstr(heard, "layer 'gate1': its forward function says: "), "%s", heard);
        }
        gate_fails_at = 0;
        CHECK_MSG(amp_train_step(m, &b, NULL) == AMP_OK && amp_train_step(calm, &b, NULL) == AMP_OK, "%s", heard);
        CHECK(same(weights(m), weights(calm)));
    }
    amp_model_destroy(calm);
    amp_model_destroy(m);
}

/* Layers that are used again: a convolution, on another size too, a dense layer, a norm, and the operator above. */
static void build_reused(amp_model* m) {
    amp_conv2d_desc c = {};
    c.out_channels = 3;
    c.kernel = 5;
    c.stride = 4;
    amp_value x = amp_conv2d_with(m, amp_input(m, 1, SIDE, SIDE), &c);                /* 3 x 6 x 6 */
    amp_value y = amp_conv2d(m, x, 3, 3, 1, 1), z = amp_reuse(m, y, amp_max_pool2d(m, amp_reuse(m, y, amp_tanh(m, y)), 2));
    x = amp_linear(m, amp_concat(m, amp_global_avg_pool2d(m, y), amp_flatten(m, amp_global_avg_pool2d(m, z))), GATED);
    x = amp_add(m, amp_reuse(m, x, amp_concat(m, amp_global_avg_pool2d(m, z), amp_global_avg_pool2d(m, y))), x);
    y = amp_layer_norm(m, x);
    y = amp_reuse(m, y, amp_sigmoid(m, y));
    y = add_gate(m, y);
    y = amp_add(m, amp_reuse(m, y, amp_tanh(m, y)), y);
    amp_softmax_cross_entropy(m, amp_linear(m, y, CLASSES));
}
static void test_reuse() {
    static const amp_dtype lows[] = { AMP_F16, AMP_F16, AMP_F16, AMP_BF16 };
    for (int k = 0; k < 4; k++) {
        amp_model_desc d = desc_of(k == 3 ? AMP_O2 : (amp_level)k, lows[k]);
        d.accumulate = 2;
        gate_data = NULL;
        amp_model* cpu = make(d, build_reused, NULL);
        gate_data = &gate_calls;
        amp_model *gpu = make(d, build_reused, amp_cuda_backend()), *graph = make(d, build_reused, amp_cuda_backend(), 1);
        if (!cpu || !gpu || !graph) return;
        std::vector<float> start = weights(cpu);
        for (amp_model* m : { cpu, gpu, graph }) run_steps(m, 6);
        const double moved = distance(start, weights(cpu)), apart = distance(weights(gpu), weights(cpu));
        CHECK_MSG(moved > 0.01 && apart <= 2 * part_of(d.precision.level, lows[k]) * moved, "%d: moved %g, apart %g", k, moved, apart);
        CHECK(state_of(gpu) == state_of(graph));
        amp_model_destroy(cpu);
        amp_model_destroy(gpu);
        amp_model_destroy(graph);
    }
}

/* Two losses with a scaler each, and a layer that is frozen. */
static float second_scale;
static amp_scaler_limit second_at_min;
static amp_value own_losses[2];
static void build_own_scalers(amp_model* m) {
    amp_scaler_desc scaler = {};
    amp_loss_desc loss = {};
    amp_value x = amp_relu(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), 20)), y = amp_linear(m, x, 20);
    amp_group(m, y, 1);
    loss.scaler = &scaler;
    scaler.init_scale = 1024.0f;
    scaler.growth_interval = 4;
    own_losses[0] = amp_softmax_cross_entropy_with(m, amp_linear(m, amp_tanh(m, y), CLASSES), &loss);
    scaler.init_scale = second_scale;
    scaler.min_scale = second_scale / 2;
    scaler.at_min = second_at_min;
    own_losses[1] = amp_softmax_cross_entropy_with(m, amp_linear(m, x, CLASSES), &loss);
}
/* They train as on the CPU, scales and skipped steps included; what is no scale's fault moves none. */
static void test_loss_scalers() {
    static const float scales[] = { 256.0f, 1125899906842624.0f };
    static const amp_level levels[] = { AMP_O0, AMP_O2 };
    static const amp_param_group groups[2] = { { 0.0f, 0.0f, 0, NULL }, { 0.0f, 0.0f, 1, NULL } };
    for (int kind = 0; kind < 4; kind++) {
        amp_model_desc d = desc_of(levels[kind & 1], AMP_F16);
        const bool overflows = kind == 3;
        d.accumulate = 2;
        d.optimizer.groups = groups;
        d.optimizer.group_count = 2;
        second_scale = scales[kind >> 1];
        second_at_min = AMP_LIMIT_CLAMP;
        amp_model *cpu = make(d, build_own_scalers, NULL), *gpu = make(d, build_own_scalers, amp_cuda_backend()),
                  *graph = make(d, build_own_scalers, amp_cuda_backend(), 1);
        if (!cpu || !gpu || !graph) return;
        std::vector<float> start = weights(cpu);
        for (amp_model* m : { cpu, gpu, graph }) run_steps(m, 12);
        const double moved = distance(start, weights(cpu)), apart = distance(weights(gpu), weights(cpu));
        CHECK_MSG(overflows ? moved == 0.0 : moved > 0.01, "%d: moved %g", kind, moved);
        CHECK_MSG(apart <= 2 * part_of(d.precision.level, AMP_F16) * moved, "%d: moved %g, apart %g", kind, moved, apart);
        CHECK(state_of(gpu) == state_of(graph));
        for (amp_value loss : own_losses)
            CHECK(!memcmp(&amp_model_loss_scaler(cpu, loss)->state, &amp_model_loss_scaler(gpu, loss)->state,
                          sizeof(amp_scaler_state)));
        CHECK(amp_model_loss_scaler(gpu, own_losses[0])->state.scale == 2048.0f);

        amp_step_info info;
        amp_batch b = batch_of(0, 8);
        CHECK(amp_train_step(gpu, &b, NULL) == AMP_OK && amp_train_step(gpu, &b, &info) == AMP_OK);
        CHECK_MSG((info.outcome == AMP_STEP_SKIPPED_OVERFLOW) == overflows, "%s", info.message);
        CHECK_MSG(!overflows || strstr(info.message, "is not finite with its loss scale"), "%s", info.message);
        std::vector<float> bad((const float*)b.inputs[0], (const float*)b.inputs[0] + 8 * SIDE * SIDE);
        const float before = amp_model_loss_scaler(gpu, own_losses[0])->state.scale;
        bad[5] = NAN;
        b.inputs[0] = bad.data();
        CHECK(amp_train_step(gpu, &b, NULL) == AMP_OK && amp_train_step(gpu, &b, &info) == AMP_OK);
        CHECK(info.outcome == AMP_STEP_SKIPPED_MODEL);
        CHECK(amp_model_loss_scaler(gpu, own_losses[0])->state.scale == before);
        for (amp_model* m : { cpu, gpu, graph }) amp_model_destroy(m);
    }

    amp_model_desc d = desc_of(AMP_O2, AMP_F16);        /* a limit of such a scale is an error, once it is reached */
    amp_step_info info;
    amp_batch b = batch_of(0, 8);
    d.optimizer.groups = groups;
    d.optimizer.group_count = 2;
    second_at_min = AMP_LIMIT_ERROR;
    amp_model* m = make(d, build_own_scalers, amp_cuda_backend());
    if (!m) return;
    CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_OVERFLOW && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
    amp_model_destroy(m);
}

/* --- ranks ---------------------------------------------------------------------------------------------------------- */

struct Ranks {
    int calls, found_inf, unsound, refused;
    float flag;      /* the largest found_inf that this rank has said: 1 after an overflow of its own */
    float refuses;   /* whether this rank has refused its last batch */
};

/* As if a second rank had the same gradients, and an overflow, an unsound window or a refused batch if these fields say so
   (once). The flags are known from the gradients by their count. */
static amp_result twice(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    Ranks* ranks = (Ranks*)user;
    std::vector<unsigned char> bytes(n * amp_dtype_size(t));
    std::vector<float> wide(n);
    ranks->calls++;
    if (cudaStreamSynchronize((cudaStream_t)stream) != cudaSuccess) return AMP_ERR_DEVICE;
    cudaMemcpy(bytes.data(), data, bytes.size(), cudaMemcpyDeviceToHost);
    amp_convert(amp_f32(wide.data()), amp_ref_of(bytes.data(), t), n);
    if (n == 2 && wide[0] > ranks->flag) ranks->flag = wide[0];
    for (float& x : wide) x *= 2.0f;
    if (n == 2 && (ranks->found_inf || ranks->unsound)) {
        wide[0] = (float)ranks->found_inf;
        wide[1] = (float)ranks->unsound;
        ranks->found_inf = ranks->unsound = 0;
    }
    if (n == 1) {
        ranks->refuses = 0.5f * wide[0];
        wide[0] = 0.5f * wide[0] + (float)ranks->refused;
        ranks->refused = 0;
    }
    amp_convert(amp_ref_of(bytes.data(), t), amp_f32(wide.data()), n);
    return cudaMemcpy(data, bytes.data(), bytes.size(), cudaMemcpyHostToDevice) == cudaSuccess ? AMP_OK : AMP_ERR_DEVICE;
}

static void test_ranks() {
    static const amp_dtype types[] = { AMP_F32, AMP_F16 };
    for (amp_dtype t : types) {
        amp_model_desc d = desc_of(AMP_O2, AMP_F16);
        Ranks ranks = { 0, 0, 0, 0, -1.0f, 0.0f };
        amp_comm comm = { twice, 0, 2, &ranks, NULL, NULL, 0 };
        d.grad_dtype = t;
        amp_model* alone = make(d, build_plain, amp_cuda_backend());
        d.comm = &comm;
        amp_model* pair = make(d, build_plain, amp_cuda_backend());
        if (!alone || !pair) return;
        amp_batch b = batch_of(0, 8);
        run_steps(alone, 3);
        run_steps(pair, 3);
        CHECK_MSG(ranks.calls >= 6 && ranks.flag == 0.0f, "%d, %g", ranks.calls, (double)ranks.flag);
        CHECK(same(weights(alone), weights(pair)));
        std::vector<float> before = weights(pair);
        amp_step_info info;
        ranks.found_inf = 1;
        CHECK(amp_train_step(pair, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
        CHECK(same(before, weights(pair)) && info.scale_after == 0.5f * info.scale_before && ranks.flag == 0.0f);
        ranks.unsound = 1;
        CHECK(amp_train_step(pair, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_MODEL);
        CHECK_MSG(strstr(info.message, "another rank") && info.scale_after == info.scale_before, "%s", info.message);
        CHECK(same(before, weights(pair)) && ranks.flag == 0.0f);
        CHECK(amp_scaler_set_scale(amp_model_scaler(pair), 1e30f) == AMP_OK);
        CHECK(amp_train_step(pair, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
        CHECK_MSG(ranks.flag == 1.0f && same(before, weights(pair)), "%g", (double)ranks.flag);
        ranks.refused = 1;
        CHECK(amp_train_step(pair, &b, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "batch of another rank was refused"));
        CHECK(ranks.refuses == 0.0f);
        b.n = 9;
        CHECK(amp_train_step(pair, &b, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "9 samples") && ranks.refuses == 1.0f);
        CHECK(same(before, weights(pair)));
        amp_model_destroy(alone);
        amp_model_destroy(pair);
    }
}

/* As train_nccl.cu sums: on a stream of its own, which waits for the model's, and the other way round. */
struct Sums {
    cudaStream_t stream;
    cudaEvent_t ready, summed;
    int started;
};
static amp_result follow(cudaStream_t to, cudaStream_t from, cudaEvent_t event) {
    cudaError_t e = cudaEventRecord(event, from);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(to, event, 0);
    return e == cudaSuccess ? AMP_OK : AMP_ERR_DEVICE;
}
static amp_result double_it(void* data, amp_dtype t, size_t n, void* stream, void*) {
    amp_exec e = {};
    e.stream = stream;
    const amp_ref x = amp_ref_of(data, t);
    return amp_cuda_backend()->add_forward(x, x, x, n, &e);
}
static amp_result start_sum(void* data, amp_dtype t, size_t n, void* stream, void* user) {
    Sums* s = (Sums*)user;
    s->started++;
    amp_result r = follow(s->stream, (cudaStream_t)stream, s->ready);
    return r == AMP_OK ? double_it(data, t, n, s->stream, NULL) : r;
}
static amp_result wait_for_sums(void* stream, void* user) {
    Sums* s = (Sums*)user;
    return follow((cudaStream_t)stream, s->stream, s->summed);
}

/* Sums that run beside the backward pass, in a recorded step too, give the weights of one rank with the same gradients. */
static void test_overlapped_sums() {
    Sums s = {};
    CHECK(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking) == cudaSuccess);
    CHECK(cudaEventCreateWithFlags(&s.ready, cudaEventDisableTiming) == cudaSuccess);
    CHECK(cudaEventCreateWithFlags(&s.summed, cudaEventDisableTiming) == cudaSuccess);
    for (int kind = 0; kind < 4; kind++) {
        amp_comm comm = { double_it, 0, 2, &s, start_sum, wait_for_sums, 1 };
        amp_model_desc d = desc_of(AMP_O2, AMP_F16);
        d.grad_dtype = kind & 2 ? AMP_F16 : AMP_F32;
        amp_model* alone = make(d, build_plain, amp_cuda_backend(), kind & 1);
        d.comm = &comm;
        amp_model* pair = make(d, build_plain, amp_cuda_backend(), kind & 1);
        if (!alone || !pair) return;
        s.started = 0;
        run_steps(alone, 5);
        run_steps(pair, 5);
        CHECK_MSG(s.started == (kind & 1 ? 2 : 5) * 2, "%d", s.started);  /* two layers; then a graph runs */
        CHECK_MSG(same(weights(alone), weights(pair)), "%d", kind);
        CHECK(amp_scaler_set_scale(amp_model_scaler(pair), 1e30f) == AMP_OK);
        std::vector<float> before = weights(pair);
        amp_step_info info;
        amp_batch b = batch_of(0, 8);
        CHECK(amp_train_step(pair, &b, &info) == AMP_OK && info.outcome == AMP_STEP_SKIPPED_OVERFLOW);
        CHECK(same(before, weights(pair)));
        amp_model_destroy(alone);
        amp_model_destroy(pair);
    }
    cudaEventDestroy(s.ready);
    cudaEventDestroy(s.summed);
    cudaStreamDestroy(s.stream);
}

/* --- failures -------------------------------------------------------------------------------------------------------- */

static void test_no_device() {
    amp_model_desc d = desc_of(AMP_O1, AMP_F16);
    amp_model* m = (amp_model*)&d;
    emu_set_device_count(0);
    d.backend = amp_cuda_backend();
    amp_result r = amp_model_create(&m, &d);
    CHECK_MSG(!m && r == AMP_ERR_UNSUPPORTED && strstr(heard, "no usable GPU"), "%s", heard);
    amp_cuda* c = NULL;
    CHECK(amp_cuda_create(&c, NULL) == AMP_ERR_UNSUPPORTED && !c);
    emu_set_device_count(1);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
}

/* Host memory where the device's belongs is told, by contexts of one's own too, and changes nothing. */
static void test_host_memory() {
    amp_logger logger = { listen, NULL };
    amp_cuda_desc desc = {};
    amp_cuda* c = NULL;
    static float host[4096];
    void* device = NULL;
    desc.logger = &logger;
    CHECK(amp_cuda_create(&c, &desc) == AMP_OK && cudaMalloc(&device, 4096) == cudaSuccess);
    amp_exec exec = amp_cuda_exec(c);
    CHECK(amp_cuda_convert(amp_ref_of(device, AMP_F16), amp_f32(host), 64, &exec) == AMP_ERR_ARGUMENT);
    CHECK_MSG(strstr(heard, "src is host memory"), "%s", heard);
    exec.workspace = host;
    exec.workspace_size = sizeof host;
    amp_gemm_shape square = {};
    square.m = square.n = square.k = 4;
    CHECK(amp_cuda_backend()->gemm(&square, 1.0f, amp_ref_of(device, AMP_F16), amp_ref_of(device, AMP_F16), 0.0f,
        amp_ref_of((char*)device + 1024, AMP_F16), &exec) == AMP_ERR_ARGUMENT);
    CHECK_MSG(strstr(heard, "the workspace is host memory"), "%s", heard);
    cudaFree(device);
    amp_cuda_destroy(c);

    amp_model* m = make(desc_of(AMP_O1, AMP_F16), build_plain, amp_cuda_backend());
    if (!m) return;
    std::vector<float> before = weights(m);
    amp_batch b = batch_of(0, 8);
    amp_eval_info eval;
    b.on_device = 1;
    CHECK(amp_train_step(m, &b, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "inputs[0] is not memory of the backend"));
    CHECK(amp_evaluate(m, &b, &eval) == AMP_ERR_ARGUMENT);
    CHECK(same(before, weights(m)));
    run_steps(m, 1);
    amp_model_destroy(m);
}

static void test_bad_desc() {
    amp_model_desc d = desc_of(AMP_O1, AMP_F16);
    amp_cuda_desc own = {};
    amp_model* m = NULL;
    d.backend = amp_cuda_backend();
    d.backend_desc = &own;
    own.graph = 2;
    CHECK(amp_model_create(&m, &d) == AMP_ERR_DESC && !m && strstr(heard, "graph"));
    own.graph = 0;
    own.gemm = (amp_cuda_gemm_engine)9;
    CHECK(amp_model_create(&m, &d) == AMP_ERR_DESC && !m && strstr(heard, "gemm"));
}

/* Every allocation on the way to a trained model fails once. */
static void test_failing_allocations() {
    size_t bytes = emu_live_bytes();
    int objects = emu_live_objects();
    long k;
    for (k = 1; k < 300; k++) {
        amp_model_desc d = desc_of(AMP_O2, AMP_F16);
        amp_model* m = NULL;
        long failures = emu_failures();
        d.backend = amp_cuda_backend();
        emu_fail_alloc_at(k);
        amp_result r = amp_model_create(&m, &d);
        if (r == AMP_OK) {
            build_small(m);
            r = amp_model_finalize(m);
        }
        for (int i = 0; i < 3 && r == AMP_OK; i++) {
            amp_batch b = batch_of(0, 8);
            r = amp_train_step(m, &b, NULL);
        }
        emu_fail_alloc_at(0);
        bool failed = emu_failures() != failures;
        CHECK_MSG(failed == (r == AMP_ERR_MEMORY), "k %ld: %s", k, amp_result_string(r));
        CHECK(!failed || heard[0]);
        amp_model_destroy(m);
        CHECK_MSG(emu_live_bytes() == bytes && emu_live_objects() == objects, "k %ld: %zu bytes, %d objects", k,
                  emu_live_bytes() - bytes, emu_live_objects() - objects);
        if (!failed) break;
    }
    CHECK(k > 5 && k < 300);
}

/* Every launch and every other call of a step fails once: a sentence (but for questions about the device, which
   have an answer that is always right), and training can go on. */
static void fail_steps(void (*fail_at)(long), int launches, int graph, int most) {
    amp_model_desc d = desc_of(AMP_O2, AMP_F16);
    long k;
    for (k = 1; k < most; k++) {
        amp_model* m = make(d, build_small, amp_cuda_backend(), graph);
        if (!m) return;
        run_steps(m, graph ? 1 : 2);
        std::vector<float> before = weights(m);
        amp_batch b = batch_of(0, 8);
        amp_step_info info;
        long failures = emu_failures();
        heard[0] = 0;
        fail_at(k);
        amp_result r = amp_train_step(m, &b, &info);
        fail_at(0);
        bool failed = emu_failures() != failures;
        CHECK_MSG(r == AMP_OK ? !failed || !launches : strstr(heard, "CUDA error") != NULL, "k %ld: %s %s", k,
                  amp_result_string(r), heard);
        for (float x : weights(m)) if (!isfinite(x)) { CHECK_MSG(0, "k %ld: weights are spoilt", k); break; }
        CHECK_MSG(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED, "k %ld: %s", k,
                  amp_model_error(m));
        CHECK(!same(before, weights(m)));
        amp_model_destroy(m);
        if (!failed) break;
    }
    CHECK_MSG(k > 3 && k < most, "%ld", k);
}
static void test_failing_launches() { fail_steps(emu_fail_launch_at, 1, 0, 200); }
static void test_failing_calls() { fail_steps(emu_fail_any_call_at, 0, 1, 300); }

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    test_seed = 11;
    make_pictures();
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        TEST_SKIP("no GPU");
        TEST_END();
    }
    TEST(test_lenet_as_cpu);
    TEST(test_zoo_as_cpu);
    TEST(test_optimizers_as_cpu);
    TEST(test_overflow_skips);
    TEST(test_overflow_leaves_no_trace);
    TEST(test_replays);
    TEST(test_limits);
    TEST(test_dead_model);
    TEST(test_right_answers);
    TEST(test_fit);
    TEST(test_failed_fit);
    TEST(test_no_waiting);
    TEST(test_no_error_is_left);
    TEST(test_batch_is_free_at_once);
    TEST(test_batch_on_device);
    TEST(test_types_of_batch);
    TEST(test_far_label_there);
    TEST(test_batch_in_pinned_memory);
    TEST(test_graph);
    TEST(test_graph_obeys);
    TEST(test_group_rates);
    TEST(test_frozen_groups);
    TEST(test_frozen_window);
    TEST(test_more_steps_than_graphs);
    TEST(test_every_order_of_threads);
    TEST(test_checkpoints_travel);
    TEST(test_writing_parameters);
    TEST(test_predictions_and_statistics);
    TEST(test_predictions_alone);
    TEST(test_held_statistics);
    TEST(test_parts_are_the_step);
    TEST(test_seeds);
    TEST(test_retained_gradients);
    TEST(test_gradients_between);
    TEST(test_mean);
    TEST(test_custom_kernels);
    TEST(test_custom_fails);
    TEST(test_reuse);
    TEST(test_sequences);
    TEST(test_loss_scalers);
    TEST(test_ranks);
    TEST(test_overlapped_sums);
    TEST(test_host_memory);
    TEST(test_bad_desc);
    if (emulated) {
        TEST(test_no_device);
        TEST(test_failing_allocations);
        TEST(test_failing_launches);
        TEST(test_failing_calls);
    }
    TEST_END();
}
