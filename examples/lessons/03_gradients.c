/* 03_gradients.c - lesson 3: where do gradients live?                                 Run:  make lesson N=3

   Training changes each weight a little, against its gradient: how much the loss grows when the weight grows. All
   gradients are found by going backwards through the layers (the backward pass). This program trains a small network on
   digits in FP32, stops, and looks at each: which power of two is it? Below 2^-14 a half has fewer bits, below 2^-25
   it is 0, and nothing is learnt. With the loss times a constant, the loss scale, all gradients grow by that factor. */
#define AMP_IMPLEMENTATION
#include "../chart.h"
#include "../data.h"
enum { BATCH = 64, SIDE = 28, DIGITS = 12800, STEPS = 400, LOOKS = 16, LAYERS = 4, ALL = LAYERS, MAX_LAYERS = 32 };
enum { LOWEST = -56, BINS = 73 };       /* powers of two in the picture */
static const float SCALE = 65536.0f;    /* try 1 to 16777216 */
/* Counts of gradients that are not 0 in FP32, and of those that are; what half would make of the former. */
typedef struct sums { double values, zeros, lost, subnormal, infinite, at[BINS]; } sums;
static sums seen[2][LAYERS + 1][2];     /* without and with the scale; each layer and all; outputs and weights */
static const char* const names[LAYERS + 1] = { "conv2d1", "conv2d2", "linear1", "linear2", "all" };
static float pixels[BATCH * SIDE * SIDE];
static int32_t labels[BATCH];
static const amp_batch batch = { .n = BATCH, .inputs = { pixels }, .targets = { labels } };

/* Two convolutions and two linear layers, all in FP32 (AMP_O0). */
static amp_model* build(void) {
    amp_model* m;
    amp_model_create(&m, &(amp_model_desc){ .batch = BATCH, .precision = { .level = AMP_O0 }, .seed = 1,
                                            .optimizer = { .kind = AMP_SGD, .lr = 0.05f, .momentum = 0.9f },
                                            .logger = { .log = amp_log_stderr } });
    amp_value x = amp_input(m, 1, SIDE, SIDE);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 6, 5, 1, 0)), 2);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 16, 5, 1, 0)), 2);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 100)), 10));
    return amp_model_finalize(m) == AMP_OK ? m : NULL;
}

static void add(sums* s, const amp_stats* from) {
    s->values += (double)(from->count - from->zeros);
    s->zeros += (double)from->zeros;
    s->lost += (double)from->would_underflow;
    s->subnormal += (double)from->would_be_subnormal;
    s->infinite += (double)from->would_overflow;
    for (int b = 0; b < BINS; b++) s->at[b] += (double)from->histogram[b + LOWEST - AMP_STATS_MIN_EXPONENT];
}

/* Backward passes without a step; amp_model_stats tells what half would make of their gradients. */
static int look(amp_model* m, const data_set* digits, float scale, sums layers[LAYERS + 1][2]) {
    static amp_layer_stats stats[MAX_LAYERS];
    amp_model_scaler(m)->state.scale = scale;
    for (int k = 0; k < LOOKS; k++) {
        data_batch(digits, NULL, k * BATCH, BATCH, SIDE, pixels, labels);
        if (amp_model_stats(m, &batch, stats, MAX_LAYERS) != AMP_OK) return 0;
        for (int i = 0, at = 0; i < amp_model_layer_count(m); i++) {
            if (amp_model_layer(m, i)->parameters == 0) continue;
            add(&layers[at][0], &stats[i].output_gradient);
            add(&layers[at++][1], &stats[i].weight_gradient);
            add(&layers[ALL][0], &stats[i].output_gradient);
            add(&layers[ALL][1], &stats[i].weight_gradient);
        }
    }
    return 1;
}

static double percent(double part, const sums* s) { return 100.0 * part / s->values; }
static void print(void) {
    printf("                     0 in | others, in half    |  in half, times %g\n"
           "gradients of         FP32 |       0  subnormal |       0  subnormal  infinite\n", (double)SCALE);
    for (int row = 0; row < 2 * (LAYERS + 1); row++) {
        const sums *a = &seen[0][row / 2][row % 2], *b = &seen[1][row / 2][row % 2];
        printf("%-8s %-8s %5.1f %% | %5.2f %%   %6.2f %% | %5.2f %%   %6.2f %%  %6.3f %%\n", names[row / 2],
               row % 2 ? "weights" : "outputs", 100.0 * a->zeros / (a->values + a->zeros), percent(a->lost, a),
               percent(a->subnormal, a), percent(b->lost, b), percent(b->subnormal, b), percent(b->infinite, b));
    }
}

static int draw(int argc, char** argv) {
    static const char *const kinds[] = { "of outputs", "of weights" }, *const claims[] = {
        "FP16 loses %.1f %% of the weights' gradients\nand %.1f %% of the outputs'",
        "FP16 loses %.1f %% and %.1f %%\nwith the loss times 2^(%.3g)" };
    static char titles[2][128], scaled[32];
    static float x[BINS], y[4][BINS];
    const chart_wall walls[] = { { -25, "0 below" }, { -14, "subnormal" }, { 16, "infinite" } };
    chart_series bars[4];
    for (int i = 0; i < 4; i++) {
        const sums* s = &seen[i / 2][ALL][i % 2];
        for (int b = 0; b < BINS; b++) y[i][b] = (float)percent(s->at[b], s), x[b] = (float)(b + LOWEST) + 0.5f;
        bars[i] = (chart_series){ kinds[i % 2], i % 2 ? CHART_FP32 : CHART_OTHER, NULL, 2.4, 1, .x = x, .y = y[i],
                                  .count = BINS, .style = CHART_BARS };
    }
    chart_panel panels[2];
    for (int i = 0; i < 2; i++) {
        const sums *outputs = &seen[i][ALL][0], *weights = &seen[i][ALL][1];
        double power = log2((double)SCALE);
        snprintf(titles[i], 128, claims[i], percent(weights->lost, weights), percent(outputs->lost, outputs), power);
        snprintf(scaled, 32, "the same, times 2^(%.3g)", power);
        panels[i] = (chart_panel){ titles[i], i ? scaled : "gradient in FP32, if not 0", "share, %",
            .x_prefix = "2^", .series = bars + 2 * i, .series_count = 2, .walls = walls, .wall_count = 3 };
    }
    return chart_save(argc, argv, "03_gradients", "Where do gradients live?", panels, 2);
}

int main(int argc, char** argv) {
    char error[DATA_ERROR];
    data_set digits;
    if (!data_digits(&digits, DIGITS, 1, error)) return fprintf(stderr, "03_gradients: %s\n", error), 1;
    amp_model* m = build();
    for (int step = 0; m && step < STEPS; step++) {
        data_batch(&digits, NULL, step * BATCH % DIGITS, BATCH, SIDE, pixels, labels);
        if (amp_train_step(m, &batch, NULL) != AMP_OK) return 1;
        chart_progress("training in FP32", step + 1, STEPS);
    }
    if (!m || !look(m, &digits, 1.0f, seen[0]) || !look(m, &digits, SCALE, seen[1])) return 1;
    amp_model_destroy(m);
    data_free(&digits);
    print();
    const sums *plain = &seen[0][ALL][1], *scaled = &seen[1][ALL][1];
    printf("\ncheck: half loses %.2f %% of weight gradients (of a speech model's about 5 %%:\n"
           "       Micikevicius et al., 2018), and %.2f %% with a loss scale\n", percent(plain->lost, plain),
           percent(scaled->lost, scaled));
    if (!draw(argc, argv)) return 1;
    if (plain->lost > 0.02 * plain->values && scaled->lost < plain->lost / 4.0 && scaled->infinite <= 0.0) return 0;
    return fprintf(stderr, "03_gradients: half loses no gradients, or the scale does not save them\n"), 1;
}
