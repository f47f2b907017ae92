/* prove_training.c - the claims about training, on real data: prove_training [SEEDS [DIRECTORY OF MNIST FILES]]
   0. A first program, in which nothing is set but the network, the loss and the rate, learns in 600 steps of 32 images;
      ten seeds, or as many as are asked for.
   1. LeNet-5, three seeds, three epochs: O1 and O2 end within 0.3 points of O0's mean accuracy, O0 above 98.5 %.
   2. Six dense layers whose loss is averaged over 1.6e7 terms: FP16 without loss scaling loses its gradients and
      stays at chance; with a static or a dynamic scale it ends where FP32 does.
   3. Learning rate 5e-6: FP16 weights without masters stand still; with masters they learn as FP32 does.
   Without a directory it uses drawn digits, a smaller run, and leaves out the figure that is MNIST's own. */
#include "test.h"
#include "../examples/data.h"

static data_set train_set, test_set;
static int real_data, side, first_seeds = 10;

typedef struct run_desc {
    amp_policy_desc precision;
    amp_scaler_desc scaler;          /* preset STATIC with init_scale 0 = the level's own */
    amp_optimizer_desc optimizer;
    float loss_weight;
    int lenet, mse, epochs, batch, samples;
    int hidden[5];                   /* of the network that is not LeNet-5; 0 = no such layer */
    amp_init init;                   /* and how its weights start */
    uint64_t seed;
} run_desc;

typedef struct run_result { double accuracy; float loss, scale; long applied, skipped; } run_result;

static amp_value build_lenet(amp_model* m) {
    amp_value x = amp_input(m, 1, 32, 32);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 6, 5, 1, 0)), 2);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 16, 5, 1, 0)), 2);
    x = amp_relu(m, amp_linear(m, x, 120));
    x = amp_relu(m, amp_linear(m, x, 84));
    return amp_linear(m, x, 10);
}

static amp_value build_mlp(amp_model* m, const run_desc* d) {
    amp_linear_desc l;
    amp_value x = amp_input(m, 1, 28, 28);
    int i;
    memset(&l, 0, sizeof l);
    l.init = d->init;
    for (i = 0; i < 5 && (l.out_features = d->hidden[i]) != 0; i++) x = amp_relu(m, amp_linear_with(m, x, &l));
    l.out_features = 10;
    return amp_linear_with(m, x, &l);
}

static amp_model* build(const run_desc* d, amp_value* logits) {
    amp_model_desc md;
    amp_loss_desc loss;
    amp_model* m = NULL;
    memset(&md, 0, sizeof md);
    memset(&loss, 0, sizeof loss);
    md.batch = d->batch;
    md.precision = d->precision;
    md.optimizer = d->optimizer;
    md.seed = d->seed;
    md.logger.log = amp_log_stderr;
    if (d->scaler.init_scale != 0.0f) md.scaler = &d->scaler;
    if (amp_model_create(&m, &md) != AMP_OK) return NULL;
    loss.weight = d->loss_weight;
    *logits = d->lenet ? build_lenet(m) : build_mlp(m, d);
    if (d->mse) amp_mse_with(m, *logits, &loss);
    else amp_softmax_cross_entropy_with(m, *logits, &loss);
    if (amp_model_finalize(m) != AMP_OK) { amp_model_destroy(m); return NULL; }
    return m;
}

static int best_of(const float* row) {
    int k, best = 0;
    for (k = 1; k < 10; k++) if (row[k] > row[best]) best = k;
    return best;
}

static double accuracy(amp_model* m, amp_value logits, int batch, float* x, int32_t* labels) {
    float* out = (float*)malloc((size_t)batch * 10 * sizeof *out);
    int first, i, correct = 0, *order = (int*)malloc((size_t)test_set.count * sizeof *order);
    for (first = 0; first < test_set.count; first++) order[first] = first;
    for (first = 0; first < test_set.count; first += batch) {
        amp_batch b;
        memset(&b, 0, sizeof b);
        b.n = test_set.count - first < batch ? test_set.count - first : batch;
        b.inputs[0] = x;
        data_batch(&test_set, order, first, b.n, side, x, labels);
        if (amp_predict(m, &b, logits, out) != AMP_OK) break;
        for (i = 0; i < b.n; i++) correct += best_of(out + i * 10) == labels[i];
    }
    free(out);
    free(order);
    return 100.0 * correct / test_set.count;
}

static run_result run(const run_desc* d) {
    run_result out;
    amp_step_info info;
    amp_model* m;
    amp_value logits = { 0 };
    int epoch, first, i, *order = (int*)malloc((size_t)train_set.count * sizeof *order);
    int32_t* labels = (int32_t*)malloc((size_t)d->batch * sizeof *labels);
    float* x = (float*)malloc((size_t)d->batch * 32 * 32 * sizeof *x);
    float* one_hot = (float*)malloc((size_t)d->batch * 10 * sizeof *one_hot);
    side = d->lenet ? 32 : 28;
    memset(&out, 0, sizeof out);
    m = build(d, &logits);
    CHECK(m != NULL);
    for (epoch = 0; m && epoch < d->epochs; epoch++) {
        data_shuffle(order, d->samples < train_set.count ? d->samples : train_set.count, d->seed * 1000 + (uint64_t)epoch);
        for (first = 0; first + d->batch <= d->samples && first + d->batch <= train_set.count; first += d->batch) {
            amp_batch b;
            memset(&b, 0, sizeof b);
            b.n = d->batch;
            b.inputs[0] = x;
            b.targets[0] = d->mse ? (const void*)one_hot : labels;
            data_batch(&train_set, order, first, d->batch, side, x, labels);
            memset(one_hot, 0, (size_t)d->batch * 10 * sizeof *one_hot);
            for (i = 0; i < d->batch; i++) one_hot[i * 10 + labels[i]] = 1.0f;
            if (amp_train_step(m, &b, &info) != AMP_OK) { CHECK_MSG(0, "%s", amp_model_error(m)); epoch = d->epochs; break; }
            out.loss = info.loss;
            out.scale = info.scale_after;
            out.applied = (long)info.step;
            out.skipped = (long)info.skipped;
        }
    }
    if (m) out.accuracy = accuracy(m, logits, d->batch, x, labels);
    amp_model_destroy(m);
    free(order);
    free(labels);
    free(x);
    free(one_hot);
    return out;
}

static void print_run(const char* name, const run_result* r) {
    printf("  %-34s %6.2f %%  applied %5ld  skipped %4ld  scale %g\n", name, r->accuracy, r->applied, r->skipped, (double)r->scale);
    fflush(stdout);
}

/* The first programs of the tutorials, MindSpore's LeNet-5 with mean squared error among them. `mean` and `least` are
   per cent of MNIST's test images, over the seeds, `drawn` the least of drawn digits. PyTorch 2.15 gives, with the same
   data in FP32, 97.40 and 97.18, then 96.26 and 95.39; dense networks are there after 600 steps of SGD without momentum
   not further than 89.21 and 88.86, 88.44 and 88.12. */
typedef struct first_program { const char* name; int lenet, mse, hidden[2]; float lr, momentum; double mean, least, drawn; } first_program;

static void learns_with_nothing_set(const first_program* f, amp_level level, amp_dtype low) {
    const int seeds = real_data ? first_seeds : 2;
    double mean = 0.0, least = 100.0;
    long skipped = 0;
    int seed;
    for (seed = 1; seed <= seeds; seed++) {
        run_desc d;
        run_result r;
        memset(&d, 0, sizeof d);
        d.lenet = f->lenet; d.mse = f->mse;
        d.hidden[0] = f->hidden[0]; d.hidden[1] = f->hidden[1];
        d.precision.level = level; d.precision.low_dtype = low;
        d.optimizer.lr = f->lr; d.optimizer.momentum = f->momentum;
        d.batch = 32;
        d.epochs = real_data ? 1 : 2;
        d.samples = 19200 / d.epochs;
        d.seed = (uint64_t)seed;
        r = run(&d);
        mean += r.accuracy / seeds;
        if (least > r.accuracy) least = r.accuracy;
        if (skipped < r.skipped) skipped = r.skipped;
    }
    printf("  %-24s %s %-4s %6.2f %% mean, %6.2f %% least of %d seeds, at most %ld skipped\n", f->name, amp_level_name(level),
           amp_dtype_name(low), mean, least, seeds, skipped);
    fflush(stdout);
    CHECK_MSG(real_data ? mean >= f->mean && least >= f->least : least >= f->drawn, "%s %s %s: %.2f and %.2f", f->name, amp_level_name(level), amp_dtype_name(low), mean, least);
    CHECK_MSG(skipped <= 30, "%s skipped %ld of 600", f->name, skipped);
}

static void first_programs_train(void) {
    static const first_program programs[] = {
        { "LeNet-5, MSE", 1, 1, { 0, 0 }, 0.1f, 0.9f, 95.0, 92.0, 92.0 },
        { "LeNet-5", 1, 0, { 0, 0 }, 0.01f, 0.9f, 95.0, 92.0, 90.0 },
        { "784-512-512-10", 0, 0, { 512, 512 }, 0.01f, 0.0f, 88.7, 88.0, 70.0 },
        { "784-256-128-10", 0, 0, { 256, 128 }, 0.01f, 0.0f, 87.9, 87.2, 68.0 },
    };
    size_t i;
    for (i = 0; i < sizeof programs / sizeof programs[0]; i++) {
        learns_with_nothing_set(&programs[i], AMP_O0, AMP_DTYPE_DEFAULT);
        learns_with_nothing_set(&programs[i], AMP_O1, AMP_F16);
        learns_with_nothing_set(&programs[i], AMP_O1, AMP_BF16);
        learns_with_nothing_set(&programs[i], AMP_O2, AMP_F16);
        learns_with_nothing_set(&programs[i], AMP_O2, AMP_BF16);
    }
}

static void lenet_loses_nothing(void) {
    static const char* const names[] = { "LeNet-5 O0", "LeNet-5 O1", "LeNet-5 O2", "LeNet-5 O2 bf16" };
    double mean[4] = { 0, 0, 0, 0 };
    int seed, k, seeds = real_data ? 3 : 1;
    for (seed = 1; seed <= seeds; seed++)
        for (k = 0; k < 4; k++) {
            run_desc d;
            run_result r;
            memset(&d, 0, sizeof d);
            d.lenet = 1;
            d.precision.level = (amp_level)(k < 3 ? k : 2);
            d.precision.low_dtype = k < 3 ? AMP_F16 : AMP_BF16;
            d.optimizer.kind = AMP_ADAM;
            d.optimizer.lr = 0.002f;
            d.optimizer.schedule.kind = AMP_SCHEDULE_COSINE;
            d.epochs = 3;
            d.batch = 64;
            d.samples = train_set.count;
            d.optimizer.schedule.total_steps = 3 * (d.samples / d.batch);
            d.seed = (uint64_t)seed;
            r = run(&d);
            print_run(names[k], &r);
            mean[k] += r.accuracy / seeds;
            CHECK_MSG(r.skipped < r.applied / 10, "%s skipped %ld of %ld", names[k], r.skipped, r.applied);
        }
    for (k = 0; k < 4; k++) printf("  %-34s %6.2f %%  mean over %d seeds\n", names[k], mean[k], seeds);
    if (real_data) CHECK_MSG(mean[0] > 98.5, "O0 ends at %.2f %%", mean[0]);
    for (k = 1; k < 4; k++) CHECK_MSG(mean[k] > mean[0] - (real_data ? 0.3 : 1.0), "%s: %.2f %%, O0: %.2f %%", names[k], mean[k], mean[0]);
}

static run_desc mlp_desc(amp_level level) {
    run_desc d;
    int i;
    memset(&d, 0, sizeof d);
    for (i = 0; i < 5; i++) d.hidden[i] = 256;
    d.init = AMP_INIT_HE;
    d.precision.level = level;
    d.batch = 100;
    d.epochs = 3;
    d.seed = 1;
    d.samples = 10000;
    d.loss_weight = 1.0f;
    return d;
}

/* The mean over a batch of 100 becomes a mean over 1.6e7 terms by a weight of 100 / 1.6e7; the learning rate makes up
   for it. A step that is lost in FP16 is lost because its gradients, about 6e-8 times smaller, round to zero. */
static run_result tiny_gradients(amp_level level, float scale) {
    run_desc d = mlp_desc(level);
    d.loss_weight = 100.0f / 1.6e7f;
    d.optimizer.lr = 0.02f / d.loss_weight;
    if (scale != 0.0f) { d.scaler.preset = AMP_SCALER_STATIC; d.scaler.init_scale = scale; }
    return run(&d);
}

static void without_scaling_it_collapses(void) {
    run_result f32 = tiny_gradients(AMP_O0, 0.0f), one = tiny_gradients(AMP_O2, 1.0f), fixed = tiny_gradients(AMP_O2, 65536.0f);
    run_result dynamic = tiny_gradients(AMP_O2, 0.0f), high = tiny_gradients(AMP_O2, 4398046511104.0f);
    print_run("tiny gradients FP32", &f32);
    print_run("tiny gradients FP16 scale 1", &one);
    print_run("tiny gradients FP16 scale 2^16", &fixed);
    print_run("tiny gradients FP16 dynamic", &dynamic);
    print_run("tiny gradients FP16 scale 2^42", &high);
    CHECK_MSG(f32.accuracy > (real_data ? 85.0 : 50.0), "%.2f", f32.accuracy);
    CHECK_MSG(one.accuracy < 25.0, "scale 1 ends at %.2f %%, which is not a collapse", one.accuracy);
    CHECK_MSG(fixed.accuracy > f32.accuracy - 1.0, "%.2f against %.2f", fixed.accuracy, f32.accuracy);
    CHECK_MSG(dynamic.accuracy > f32.accuracy - 1.0, "%.2f against %.2f", dynamic.accuracy, f32.accuracy);
    CHECK_MSG(high.applied == 0 && high.skipped == 300, "2^42 applied %ld steps", high.applied);
}

static run_result small_updates(amp_level level) {
    run_desc d = mlp_desc(level);
    d.optimizer.kind = AMP_ADAM;
    d.optimizer.lr = 5e-6f;
    d.samples = train_set.count;
    d.epochs = real_data ? 3 : 15;               /* 1800 updates */
    if (level == AMP_O3) { d.scaler.preset = AMP_SCALER_PYTORCH; d.scaler.init_scale = 65536.0f; }
    return run(&d);
}

static void without_masters_it_stalls(void) {
    run_result f32 = small_updates(AMP_O0), masters = small_updates(AMP_O2), none = small_updates(AMP_O3);
    print_run("lr 5e-6 FP32", &f32);
    print_run("lr 5e-6 FP16 with masters", &masters);
    print_run("lr 5e-6 FP16 without masters", &none);
    CHECK_MSG(f32.accuracy > (real_data ? 80.0 : 40.0), "%.2f", f32.accuracy);
    CHECK_MSG(masters.accuracy > f32.accuracy - 1.0, "%.2f against %.2f", masters.accuracy, f32.accuracy);
    CHECK_MSG(none.accuracy < f32.accuracy - 20.0, "%.2f against %.2f: no stall", none.accuracy, f32.accuracy);
}

int main(int argc, char** argv) {
    char error[DATA_ERROR] = "";
    if (argc > 1 && atoi(argv[1]) > 0) first_seeds = atoi(argv[1]);
    real_data = argc > 2 && argv[2][0];
    if (real_data ? !data_load_both(&train_set, &test_set, argv[2], error)
                  : !data_digits(&train_set, 12000, 1, error) || !data_digits(&test_set, 2000, 2, error)) {
        fprintf(stderr, "%s\n", error);
        return 2;
    }
    TEST(first_programs_train);
    TEST(lenet_loses_nothing);
    TEST(without_scaling_it_collapses);
    TEST(without_masters_it_stalls);
    data_free(&train_set);
    data_free(&test_set);
    TEST_END();
}
