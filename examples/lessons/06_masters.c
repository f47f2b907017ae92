/* 06_masters.c - lesson 6: why an FP32 copy?                                           Run:  make lesson N=6

   Training moves a weight by small updates: learning rate times gradient. Between 1 and 2 the halves lie 2^-10 apart,
   so a weight of 1 loses an update below 2^-11 to rounding, and the next one, and all others: training stands still,
   although each gradient is right. The remedy is an FP32 copy of the weight, its master, in which updates add up; the
   16-bit weight is rounded from it after each step. This program sees it on one weight, and on a small network. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include "../data.h"

static const float RATE = 2e-4f;           /* try 0.00001 to 0.1 */
#define SCALE 1024.0f                       /* of the loss */
enum { FP32, FP16, BF16, TYPES, COPY = TYPES, LINES };
enum { ADDITIONS = 1000, RATES = 37, BATCH = 8, DIGITS = 6400, TEST = 1000, EPOCHS = 16 };
static const amp_dtype types[TYPES] = { AMP_F32, AMP_F16, AMP_BF16 };
static data_set digits, test;
static float path[LINES][ADDITIONS + 1], rate[RATES], dead[TYPES][RATES];

/* What is left of x when it is stored in a type. */
static double store(amp_dtype type, double x) {
    uint32_t memory;
    amp_convert(amp_ref_of(&memory, type), amp_ref_of(&x, AMP_F64), 1);
    amp_convert(amp_ref_of(&x, AMP_F64), amp_ref_of(&memory, type), 1);
    return x;
}

/* Adds 0.0001 to 1 in each type, and rounds a BF16 copy from the FP32 weight. */
static void add_up(void) {
    double w[TYPES] = { 1.0, 1.0, 1.0 };
    for (int i = 0; i <= ADDITIONS; i++) {
        path[COPY][i] = (float)store(AMP_BF16, w[FP32]);
        for (int t = 0; t < TYPES; t++) {
            path[t][i] = (float)w[t];
            w[t] = store(types[t], w[t] + 1e-4);
        }
    }
}

/* Of a layer's weights with a gradient: the share that learning rate times gradient does not move, in percent. */
static float dead_share(const amp_param* p, amp_dtype type, float lr) {
    const float* grad = (const float*)p->grad;
    int moved = 0, all = 0;
    for (size_t k = 0; k < p->count; k++) {
        double w = store(type, (double)p->master[k]);
        all += grad[k] != 0.0f;
        moved += store(type, w - (double)(lr * grad[k] / SCALE)) != w;
    }
    return 100.0f - 100.0f * (float)moved / (float)all;
}

/* Trains at O0 (FP32), O2 (16 bits with masters) or O3 (16 bits alone), always from the same start. Returns the
   accuracy in percent. At O0 also finds the dead shares of the largest layer, with the last step's gradients. */
static double train(amp_level level, amp_dtype low) {
    amp_data seen = { DIGITS, { digits.pixels }, AMP_U8, { digits.labels }, .label_dtype = AMP_U8 };
    amp_data unseen = { TEST, { test.pixels }, AMP_U8, { test.labels }, .label_dtype = AMP_U8 };
    amp_scaler_desc scaler = { .preset = AMP_SCALER_STATIC, .init_scale = SCALE };
    amp_model_desc desc = { .batch = BATCH, .precision = { .level = level, .low_dtype = low }, .scaler = &scaler,
                            .optimizer = { .kind = AMP_SGD, .lr = RATE, .momentum = 0.9f }, .seed = 1,
                            .logger = { amp_log_stderr, NULL } };
    amp_fit_desc fit = { .epochs = EPOCHS, .evaluation = &unseen };
    amp_fit_info info;
    amp_model* m;
    static int trainings = 0;
    if (amp_model_create(&m, &desc) != AMP_OK) exit(1);         /* the logger has said why */
    amp_value x = amp_avg_pool2d(m, amp_input(m, 1, DATA_SIDE, DATA_SIDE), 2);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 8, 3, 1, 0)), 2);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 32)), 10));
    if (amp_model_finalize(m) != AMP_OK || amp_fit(m, &seen, &fit, &info) != AMP_OK) exit(1);
    for (int i = 0; i < RATES && level == AMP_O0; i++) {
        rate[i] = powf(10.0f, -7.0f + (float)i / 6.0f);
        for (int t = 0; t < TYPES; t++)
            dead[t][i] = dead_share(amp_model_find_param(m, "linear1.weight"), types[t], rate[i]);
    }
    amp_model_destroy(m);
    chart_progress("five trainings", ++trainings, 5);
    return 100.0 * info.last.accuracy;
}

static int draw(const char* to, char* error) {
    static const char *const names[LINES] = { "FP32", "FP16 alone", "BF16 alone", "BF16 copy of FP32" };
    static const chart_color colors[LINES] = { CHART_FP32, CHART_FP16, CHART_BF16, CHART_BF16 };
    chart_series way[LINES], share[TYPES];
    chart_panel panels[2] = {
        { "1 + 0.0001 + 0.0001 + ...: without FP32\na weight in 16 bits never moves", "additions", "weight",
          .series = way, .series_count = LINES },
        { "At small learning rates 16 bits lose nearly\nall updates, BF16 more than FP16", "learning rate",
          "updates lost, %", .log_x = 1, .series = share, .series_count = TYPES } };
    for (int i = 0; i < LINES; i++)
        way[i] = (chart_series){ names[i], colors[i], i == BF16 ? "9 7" : NULL, i < BF16 ? 6 : i == BF16 ? 4 : 2, 1,
                                 path[i], .count = ADDITIONS + 1 };
    for (int t = 0; t < TYPES; t++)
        share[t] = (chart_series){ names[t], colors[t], NULL, 3, 1, dead[t], rate, .count = RATES };
    return chart_write(to, "Why an FP32 copy?", panels, 2, error);
}

int main(int argc, char** argv) {
    const char* to = argc > 1 ? argv[1] : "06_masters.svg";
    char error[DATA_ERROR] = "one argument at most, the path of the picture";
    if (argc > 2 || !chart_try(to, error) || !data_digits(&digits, DIGITS, 1, error)
        || !data_digits(&test, TEST, 2, error)) return fprintf(stderr, "06_masters: %s\n", error), 1;
    add_up();
    double fp32 = train(AMP_O0, AMP_F16), fp16 = train(AMP_O2, AMP_F16), fp16_o3 = train(AMP_O3, AMP_F16);
    double bf16 = train(AMP_O2, AMP_BF16), bf16_o3 = train(AMP_O3, AMP_BF16);
    double f = store(AMP_F16, 1.0 + ldexp(1.0, -11)), b = store(AMP_BF16, 1.0 + ldexp(1.0, -8));
    printf("1 + 1000 * 1e-4: FP32 %.4f, BF16 copy %.4f, FP16 alone %.4f, BF16 %.4f\n\n"
           "learning rate   updates lost:  FP32      FP16      BF16\n", (double)path[FP32][ADDITIONS],
           (double)path[COPY][ADDITIONS], (double)path[FP16][ADDITIONS], (double)path[BF16][ADDITIONS]);
    for (int i = 0; i < RATES; i += 6)
        printf("%13g %19.1f %% %7.1f %% %7.1f %%\n", (double)rate[i], (double)dead[FP32][i], (double)dead[FP16][i],
               (double)dead[BF16][i]);
    printf("\naccuracy at %g: FP32 %.1f %%;\n  FP16 %.1f %%, alone %.1f %%; BF16 %.1f %%, alone %.1f %%\n\ncheck: "
           "1 + 2^-11 stays %g in FP16, 1 + 2^-8 stays %g in BF16 (IEEE 754: half a\n       spacing, ties to even)\n"
           "       without masters %.0f %% of the accuracy is lost in FP16, %.0f %% in BF16\n"
           "       (Micikevicius et al., speech recognition in FP16: 80 %%)\n", (double)RATE, fp32, fp16, fp16_o3,
           bf16, bf16_o3, f, b, 100.0 - 100.0 * fp16_o3 / fp32, 100.0 - 100.0 * bf16_o3 / fp32);
    if (!draw(to, error)) return fprintf(stderr, "06_masters: %s\n", error), 1;
    if (f == 1 && b == 1 && fabs(fp16 - fp32) < 2 && fabs(bf16 - fp32) < 2 && fp16_o3 < 40 && bf16_o3 < 20) return 0;
    return fprintf(stderr, "06_masters: masters make less of a difference than in the unchanged lesson\n"), 1;
}
