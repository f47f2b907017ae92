/* soak_training.c [SECONDS] - training from end to end under conditions that spoil it elsewhere. A network like
   LeNet-5 learns drawn digits at O1 and O2 with a loss scale that begins far too high: the first steps must be
   skipped, the rest must learn. As the program stands, with subnormals flushed, and with floating-point exceptions
   that trap; check.sh builds it with -O2 and with -Ofast. With SECONDS it then goes on that long - models made,
   trained, saved, loaded, measured and destroyed, beside one that is trained throughout - and the memory in use
   may not grow. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
  #define _GNU_SOURCE                 /* feenableexcept */
#endif
#include "../helpers.h"
#include "../../examples/data.h"
#include <fenv.h>
#include <math.h>
#include <time.h>
#if defined(__linux__)
  #include <unistd.h>
#endif
#if defined(__SSE2__)
  #include <immintrin.h>
#endif

enum { BATCH = 32, SIDE = 28, STEPS = 300, HIGH = 40 /* log2 of the first scale */ };

static data_set digits, fresh;
static float pixels[BATCH * SIDE * SIDE];
static int32_t labels[BATCH];

static amp_value pooled(amp_model* m, amp_value x, int channels) {
    return amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, channels, 5, 1, 0)), 2);
}

static amp_model* build(amp_level level, amp_dtype low) {
    amp_model_desc d;
    amp_scaler_desc s;
    amp_model* m = NULL;
    amp_value x;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    s.init_scale = (float)((uint64_t)1 << HIGH);
    s.growth_interval = 50;                       /* and it comes up to its limit again and again */
    d.batch = BATCH;
    d.seed = 1;
    d.precision.level = level;
    d.precision.low_dtype = low;
    d.scaler = &s;
    d.optimizer.kind = AMP_ADAM;
    d.optimizer.lr = 0.002f;
    d.logger.log = listen;
    if (amp_model_create(&m, &d) != AMP_OK) return NULL;
    x = pooled(m, pooled(m, amp_input(m, 1, SIDE, SIDE), 6), 16);
    x = amp_relu(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 120)), 84));
    amp_softmax_cross_entropy(m, amp_linear(m, x, 10));
    if (amp_model_finalize(m) == AMP_OK) return m;
    amp_model_destroy(m);
    return NULL;
}

static amp_batch batch_at(const data_set* set, int number) {
    static int order[BATCH];
    amp_batch b;
    int i;
    for (i = 0; i < BATCH; i++) order[i] = (number * BATCH + i) % set->count;
    memset(&b, 0, sizeof b);
    b.n = BATCH;
    b.inputs[0] = pixels;
    b.targets[0] = labels;
    data_batch(set, order, 0, BATCH, SIDE, pixels, labels);
    return b;
}

static double accuracy(amp_model* m) {
    int k, correct = 0, batches = fresh.count / BATCH;
    for (k = 0; k < batches; k++) {
        amp_batch b = batch_at(&fresh, k);
        amp_eval_info e;
        CHECK(amp_evaluate(m, &b, &e) == AMP_OK && amp_is_finite(amp_f32(&e.loss)));
        correct += (int)e.correct;
    }
    return 100.0 * correct / (batches * BATCH);
}

static int weights_are_finite(amp_model* m) {
    int count, i;
    size_t k;
    amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++)
        for (k = 0; k < p[i].count; k++) if (!amp_is_finite(amp_f32(&p[i].master[k]))) return 0;
    return 1;
}

static void learn(amp_level level, amp_dtype low, const char* condition) {
    amp_model* m = build(level, low);
    amp_step_info info;
    double right;
    int k, first = -1, bad = 0;
    CHECK(m != NULL);
    if (!m) return;
    memset(&info, 0, sizeof info);
    for (k = 0; k < STEPS; k++) {
        amp_batch b = batch_at(&digits, k);
        CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        if (info.outcome == AMP_STEP_APPLIED && first < 0) first = k;
        bad += !weights_are_finite(m);
    }
    right = accuracy(m);
    printf("%-22s %s %-4s  %5.1f %% right, %d applied, %d skipped, the first %d in a row, scale 2^%.0f\n", condition,
           amp_level_name(level), amp_dtype_name(low), right, (int)info.step, (int)info.skipped, first,
           log2((double)info.scale_after));
    CHECK_MSG(bad == 0, "weights were not finite after %d steps", bad);
    CHECK_MSG(info.step + info.skipped == STEPS, "%d + %d", (int)info.step, (int)info.skipped);
    if (low == AMP_F16)
        CHECK_MSG(first >= 10 && info.skipped > first, "%d skipped first, %d in all", first, (int)info.skipped);
    CHECK_MSG(right > 85.0, "%.1f %% right", right);
    amp_model_destroy(m);
}

static void learn_each(const char* condition) {
    learn(AMP_O1, AMP_F16, condition);
    learn(AMP_O2, AMP_F16, condition);
    learn(AMP_O2, AMP_BF16, condition);
}

static void test_as_it_stands(void) { learn_each("as it stands"); }

static void test_flushed(void) {
#if defined(__SSE2__)
    unsigned old = _mm_getcsr();
    _mm_setcsr(old | 0x8040u);                     /* flush to zero, denormals are zero */
    learn_each("subnormals flushed");
    _mm_setcsr(old);
#else
    TEST_SKIP("no MXCSR here");
#endif
}

static void test_traps(void) {
#if defined(__GLIBC__) && defined(__x86_64__)
    feclearexcept(FE_ALL_EXCEPT);
    feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW);
    learn_each("exceptions trap");
    fedisableexcept(FE_ALL_EXCEPT);
#else
    TEST_SKIP("no feenableexcept here");
#endif
}

/* --- hours, in minutes ----------------------------------------------------------------------------- */

/* Kilobytes in memory, 0 where the system does not say. */
static long resident(void) {
    long pages = 0;
#if defined(__linux__)
    FILE* f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    if (f) fclose(f);
    pages *= sysconf(_SC_PAGESIZE) / 1024;
#endif
    return pages;
}

/* A whole life of a model. */
static void one_life(int round, const char* path) {
    amp_level level = round & 1 ? AMP_O1 : AMP_O2;
    amp_dtype low = round & 2 ? AMP_BF16 : AMP_F16;
    amp_model *m = build(level, low), *other = build(level, low);
    amp_layer_stats stats[16];
    amp_batch b;
    int k;
    CHECK(m && other && amp_model_layer_count(m) <= 16);
    for (k = 0; m && other && k < 20; k++) {
        b = batch_at(&digits, round * 20 + k);
        CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
    }
    b = batch_at(&digits, round);
    CHECK(amp_model_stats(m, &b, stats, 16) == AMP_OK);
    CHECK(amp_checkpoint_save(m, path) == AMP_OK && amp_checkpoint_load(other, path) == AMP_OK);
    CHECK(amp_train_step(other, &b, NULL) == AMP_OK);
    b.n = 0;
    heard_count = 0;
    CHECK(amp_train_step(m, &b, NULL) != AMP_OK && heard_count == 1);
    amp_model_destroy(m);
    amp_model_destroy(other);
}

static void soak(long seconds) {
    const char* path = "soak_training.tmp.safetensors";
    time_t start = time(NULL), now = start;
    long early = 0, late = 0, r, steps = 0;
    int round = 0;
    amp_model* m = build(AMP_O1, AMP_F16);
    amp_step_info info;
    CHECK(m != NULL);
    if (!m) return;
    for (; now - start < seconds; now = time(NULL), round++) {
        int k;
        for (k = 0; k < 100; k++, steps++) {
            amp_batch b = batch_at(&digits, (int)(steps % 100000));
            CHECK(amp_train_step(m, &b, &info) == AMP_OK);
        }
        one_life(round, path);
        r = resident();
        if (4 * (now - start) < seconds) { if (r > early) early = r; }
        else if (r > late) late = r;
    }
    printf("%ld s: %ld steps of one model (%d skipped), %d other models; %ld kB in memory early, %ld kB at most later\n",
           seconds, steps, (int)info.skipped, 2 * round, early, late);
    CHECK(weights_are_finite(m) && info.step + info.skipped == steps);
    CHECK_MSG(accuracy(m) > 90.0, "%.1f %% right", accuracy(m));
    CHECK_MSG(late <= early + 64, "memory has grown from %ld to %ld kB", early, late);
    amp_model_destroy(m);
    remove(path);
}

int main(int argc, char** argv) {
    char error[DATA_ERROR] = "";
    if (!data_digits(&digits, 6400, 1, error) || !data_digits(&fresh, 640, 2, error)) {
        fprintf(stderr, "%s\n", error);
        return 2;
    }
    TEST(test_as_it_stands);
    TEST(test_flushed);
    TEST(test_traps);
    if (argc > 1) soak(atol(argv[1]));
    data_free(&digits);
    data_free(&fresh);
    TEST_END();
}
