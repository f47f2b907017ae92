/* 08_levels.c - lesson 8: which layers may be half?                                   Run:  make lesson N=8

   A level says which layers run in half (FP16). O0: none. O1: matrix products, while softmax, layer norms and losses
   run in FP32, and others take what comes. O2: all but norms and losses. O3: all but losses, without FP32 weights. This
   network has a layer of each kind; the weights of its second convolution are multiplied by 300, then by 90000. The
   batch norm behind it divides by the spread of its input: in FP32 the factor is gone again, and nothing happens. In
   half what exceeds 65504 is infinite, and inf / inf is NaN ("not a number"), in all layers behind. A norm also squares
   its input: amp.h in FP32 at every level; column "by hand", the network by raw calls in half (by_hand.h), in half. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include "../data.h"
#include "by_hand.h"
enum { LAYERS = BY_HAND_LAYERS, LEVELS = 4, COLUMNS = 5, GAINS = 2, BATCH = BY_HAND_BATCH };
enum { IN_FP32, IN_HALF, OVERFLOWED, SPOILT, STATES };       /* of a layer; spoilt: NaN, or (by hand) 1 % wrong */
static const char *const state_names[STATES] = { "FP32", "half", "overflowed", "spoilt" }, letters[] = "3hOs";
static const chart_color colors[STATES] = { CHART_FP32, CHART_FP16, CHART_FAULT, CHART_OTHER };
static const char* const columns[COLUMNS + 1] = { "O0", "O1", "O2", "O3", "by hand", NULL };
static const float gain = 300.0f;       /* try 1 to 20000 */
static float targets[BATCH * 10], loss_by_hand[2];           /* 1 for the right digit, else 0; in FP32, in half */
/* One layer of each kind. */
static void build(amp_model* m) {
    amp_conv2d_desc conv = { .out_channels = 8, .kernel = 3, .pad = 1, .init = AMP_INIT_HE };
    amp_value x = amp_input(m, 1, 28, 28), shortcut;
    shortcut = x = amp_max_pool2d(m, amp_relu(m, amp_conv2d_with(m, x, &conv)), 2);
    x = amp_conv2d_with(m, x, &conv);
    x = amp_relu(m, amp_add(m, amp_batch_norm(m, x), shortcut));       /* a residual connection */
    x = amp_gelu(m, amp_layer_norm(m, amp_linear(m, x, 64)));
    amp_mse(m, amp_softmax(m, amp_linear(m, x, 10)));
}

/* One forward and backward pass at a level: the state of each layer, and the largest value of its output. At O0 also
   the states by hand, in the last column, and their loss. Returns the bytes of activations and gradients. */
static size_t look(const data_set* d, int level, float by, int (*state)[LAYERS], float* largest, const char** names) {
    static float weights[8 * 8 * 9];
    amp_model_desc desc = { .batch = BATCH, .seed = 1, .logger = { .log = amp_log_stderr },
                            .precision.level = (amp_level)level };
    amp_batch batch = { .n = BATCH, .inputs = { d->pixels }, .input_dtype = AMP_U8, .targets = { targets } };
    amp_layer_stats s[LAYERS];
    amp_memory memory;
    amp_model* m;
    double error[LAYERS];
    int infinite[LAYERS];
    amp_model_create(&m, &desc);
    build(m);
    if (amp_model_finalize(m) != AMP_OK || amp_model_memory(m, &memory) != AMP_OK) exit(1);
    amp_param* p = amp_model_find_param(m, "conv2d2.weight");
    amp_model_read_param(m, p, weights);
    for (size_t i = 0; i < p->count; i++) weights[i] *= by;
    amp_model_write_param(m, p, weights);
    if (level == 0) by_hand_compare(m, d->pixels, targets, error, infinite, loss_by_hand);
    if (amp_model_stats(m, &batch, s, LAYERS) != AMP_OK) exit(1);
    for (int i = 0; i < LAYERS; i++) {
        const amp_layer* l = amp_model_layer(m, i);
        const amp_stats* out = i < LAYERS - 1 ? &s[i].output : &s[i - 1].output_gradient;        /* of the loss */
        state[level][i] = out->infs ? OVERFLOWED : out->nans ? SPOILT : l->compute_dtype == AMP_F32 ? IN_FP32 : IN_HALF;
        if (level == 0) state[LEVELS][i] = infinite[i] ? OVERFLOWED : !(error[i] < 0.01) ? SPOILT
                                           : i % (LAYERS - 1) ? IN_HALF : IN_FP32;
        largest[i] = i < LAYERS - 1 ? out->largest : loss_by_hand[0];
        names[LAYERS - 1 - i] = amp_op_name(l->op);
    }
    amp_model_destroy(m);
    return memory.activation_bytes;
}

static int stop(const char* why) { return fprintf(stderr, "08_levels: %s\n", why), 1; }
int main(int argc, char** argv) {
    static float x[GAINS][STATES][COLUMNS * LAYERS], y[GAINS][STATES][COLUMNS * LAYERS];
    static const char overflow[] = "Times 90000: in half the layer overflows\nat every level, and spoils all behind it";
    const float gains[GAINS] = { gain, 90000.0f };
    const char *picture = argc > 1 ? argv[1] : "08_levels.svg", *names[LAYERS + 1] = { NULL };
    char title[120], error[CHART_ERROR] = "at most one argument, the picture's path";
    static const int expected[GAINS][COLUMNS] = { { 0, 0, 0, 0, 1 }, { 0, 1, 1, 1, 1 } };      /* overflows */
    int state[COLUMNS][LAYERS], count[GAINS][STATES] = { { 0 } }, red[GAINS][COLUMNS] = { { 0 } };
    chart_series series[GAINS][STATES];
    chart_panel panels[GAINS];
    float largest[LEVELS][LAYERS], finite = 0.0f;
    size_t bytes[LEVELS];
    data_set d;
    if (argc > 2 || !chart_try(picture, error) || !data_digits(&d, BATCH, 1, error)) return stop(error);
    for (int i = 0; i < BATCH; i++) targets[i * 10 + d.labels[i]] = 1.0f;
    for (int g = 0; g < GAINS; g++) {
        printf("weights * %-5g  largest", (double)gains[g]);
        for (int c = 0; c < COLUMNS; c++) {
            if (c < LEVELS) bytes[c] = look(&d, c, gains[g], state, largest[c], names);
            printf(" %-10s", columns[c]);
        }
        for (int i = 0; i < LAYERS; i++) {
            printf("\n%-13s %9.5g", names[LAYERS - 1 - i], (double)largest[0][i]);
            for (int c = 0; c < COLUMNS; c++) {
                int now = state[c][i], k = count[g][now]++;
                x[g][now][k] = (float)c;
                y[g][now][k] = (float)(LAYERS - 1 - i);          /* the input on top */
                red[g][c] += now == OVERFLOWED;
                printf(" %-10s", state_names[now]);
            }
        }
        printf("\nloss by hand: %.4f in FP32, %.4f in half\n\n", (double)loss_by_hand[0], (double)loss_by_hand[1]);
        for (int k = 0; k < STATES; k++)
            series[g][k] = (chart_series){ state_names[k], colors[k], NULL, 15, 1, y[g][k], x[g][k], NULL, count[g][k],
                                           CHART_POINTS, letters[k] };
        panels[g] = (chart_panel){ g ? overflow : title, "level", .x_names = columns, .y_names = names,
                                   .series = series[g], .series_count = STATES };
    }
    snprintf(title, sizeof title, "Weights times %g: a norm that squares in\nFP32 (amp.h) bears it, one in half %s",
             (double)gain, red[0][LEVELS] ? "does not" : "does, too");
    printf("%-23s", "bytes with gradients");
    for (int c = 0; c < LEVELS; c++) printf(" %-10lu", (unsigned long)bytes[c]);
    for (amp_half h = { 0 }, square = h; amp_is_finite(amp_f16(&square)); h.bits++) {
        float v = amp_half_to_float(h);
        square = amp_half_from_float(v * v);
        finite = amp_is_finite(amp_f16(&square)) ? v : finite;
    }
    printf("\ncheck: no half above 256 has a square (run): the last that has one is %g\n"
           "check: a product of T5 reached 66246 (transformers, issue 5651): %g\n", (double)finite,
           (double)largest[0][4]);
    if (!chart_write(picture, "Which layers may be half?", panels, GAINS, error)) return stop(error);
    if (memcmp(red, expected, sizeof red) == 0 && finite == 255.875f) return 0;
    return stop("the findings of this lesson did not come out");
}
