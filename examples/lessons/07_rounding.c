/* 07_rounding.c - lesson 7: can rounding be lucky?                                     Run:  make lesson N=7

   In lesson 6 a weight of 1 in BF16 ignored a thousand updates of 0.0001: its next neighbour is 0.0078 away, and each
   sum was rounded back to 1. Two cures need no FP32 copy. Stochastic rounding throws dice: a sum that lies 1 % of the
   way to the upper neighbour goes there in 1 % of the cases, so that the mean is right though each path is rough.
   Kahan's sum keeps a second BF16 number beside the weight, which collects what the weight was too coarse to take. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include "../data.h"
enum { STEPS = 1000, COUNT = 4096, SHOWN = 20, ALL = SHOWN * (STEPS + 2), SIZE = 784 * 64 + 64 + 64 * 10 + 10 };
enum { FP32, MASTERS, NEAREST, STOCHASTIC, KAHAN, WAYS };                     /* ways to keep weights */
static const char* const names[] = { "FP32", "BF16 + FP32", "nearest", "stochastic", "Kahan", NULL };
static const amp_level levels[WAYS] = { AMP_O0, AMP_O2, AMP_O3, AMP_O2, AMP_O2 };
static float dice[ALL], dice_step[ALL], fp32[STEPS + 1], nearest[STEPS + 1], kahan[STEPS + 1], lucky[COUNT], rest;
static const float update = 1e-4f;           /* try 0.00002 to 0.003 */
static int stop(const char* why) { return fprintf(stderr, "07_rounding: %s\n", why), 1; }
static float bf16(float x) { return amp_bfloat16_to_float(amp_bfloat16_from_float(x)); }
/* w + x in BF16. What the sum loses by rounding stays in *more, a BF16 number too. */
static float kahan_add(float w, float x, float* more) {
    *more = bf16(*more + x);
    float sum = bf16(w + *more);
    *more = bf16(*more + bf16(w - sum));
    return sum;
}
/* Rounds n floats to BF16 by dice. Element i takes random number offset + i: no number comes twice. */
static void stochastic(float* w, size_t n, uint64_t offset) {
    static amp_bfloat16 low[SIZE];
    amp_convert_desc how = { .rounding = AMP_ROUND_STOCHASTIC, .seed = 7, .offset = offset };
    amp_convert_with(amp_bf16(low), amp_f32(w), n, &how);
    amp_convert(amp_f32(w), amp_bf16(low), n);
}

/* Moves the weight 1 in every way, 4096 times by dice. */
static void walk(void) {
    for (int i = 0; i < ALL; i++) { dice[i] = NAN; dice_step[i] = (float)(i % (STEPS + 2)); }    /* NAN: a gap */
    for (int s = 0; s <= STEPS; s++) {
        fp32[s] = s ? fp32[s - 1] + update : 1.0f;
        nearest[s] = s ? bf16(nearest[s - 1] + update) : 1.0f;
        kahan[s] = s ? kahan_add(kahan[s - 1], update, &rest) : 1.0f;
        for (int i = 0; i < COUNT; i++) lucky[i] = s ? lucky[i] + update : 1.0f;
        stochastic(lucky, COUNT, (uint64_t)s * COUNT);
        for (int k = 0; k < SHOWN; k++) dice[k * (STEPS + 2) + s] = lucky[k];
    }
}

/* 1000 steps of Adam. Returns the percentage of unseen digits that come out right, and the bytes of a parameter. For
   the cures masters are scratch: they are BF16 numbers before and after each step. */
static double train(int way, const data_set* d, float* bytes) {
    static float before[SIZE], more[SIZE];
    amp_model_desc desc = { .batch = 64, .seed = 3, .precision = { .level = levels[way], .low_dtype = AMP_BF16 },
                            .optimizer = { .kind = AMP_ADAM, .lr = 1e-4f }, .logger = { .log = amp_log_stderr },
                            .grad_dtype = way == FP32 ? AMP_F32 : AMP_BF16 };
    amp_data unseen = { 2000, { d->pixels + 4000 * 784 }, AMP_U8, { d->labels + 4000 }, .label_dtype = AMP_U8 };
    amp_model* m;
    amp_memory b;
    amp_eval_info score;
    int count, k, cure = way == STOCHASTIC || way == KAHAN;
    amp_model_create(&m, &desc);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, amp_input(m, 1, 28, 28), 64)), 10));
    if (amp_model_finalize(m) != AMP_OK) exit(1);
    amp_param* p = amp_model_params(m, &count);
    for (int s = 0; s < STEPS; s++) {
        size_t at = 0, i, first = (size_t)(s * 64 % 3968);
        amp_batch batch = { 64, { d->pixels + first * 784 }, AMP_U8, { d->labels + first }, .label_dtype = AMP_U8 };
        for (k = 0; cure && k < count; at += p[k++].count) memcpy(before + at, p[k].master, p[k].count * sizeof(float));
        if (amp_train_step(m, &batch, NULL) != AMP_OK) exit(1);
        for (k = 0, at = 0; cure && k < count; at += p[k++].count)
            if (way == STOCHASTIC) stochastic(p[k].master, p[k].count, (uint64_t)s * SIZE + at);
            else for (i = 0; i < p[k].count; i++)
                p[k].master[i] = kahan_add(before[at + i], p[k].master[i] - before[at + i], &more[at + i]);
        amp_model_sync_params(m);
        chart_progress(names[way], s + 1, STEPS);
    }
    if (amp_evaluate_data(m, &unseen, &score) != AMP_OK || amp_model_memory(m, &b) != AMP_OK) exit(1);
    amp_model_destroy(m);
    *bytes = (float)(b.parameter_bytes + b.low_parameter_bytes + b.gradient_bytes + b.optimizer_bytes) / SIZE;
    return 100.0 * (double)score.correct / 2000.0;
}

int main(int argc, char** argv) {
    const char* picture = argc > 1 ? argv[1] : "07_rounding.svg";
    char error[CHART_ERROR] = "at most one argument, the picture's path", percent[WAYS][8], title[99];
    double mean = 0.0, square = 0.0, right[WAYS];
    float bytes[WAYS];
    chart_note notes[WAYS];
    data_set d;
    if (argc > 2 || !chart_try(picture, error) || !data_digits(&d, 6000, 1, error)) return stop(error);
    walk();
    for (int i = 0; i < COUNT; i++) mean += (double)lucky[i] / COUNT, square += pow((double)lucky[i], 2.0) / COUNT;
    double deviation = sqrt(square - mean * mean);
    const float end[WAYS] = { fp32[STEPS], bf16(fp32[STEPS]), nearest[STEPS], (float)mean, kahan[STEPS] };
    snprintf(title, sizeof title, "1 + %g + ... in BF16: nearest stops,\nby dice the mean is right, Kahan follows",
             (double)update);
    printf("weights        1 + 1000 * %-9gbytes each   digits right\n", (double)update);
    for (int way = 0; way < WAYS; way++) {
        right[way] = train(way, &d, &bytes[way]);
        if (way >= STOCHASTIC) bytes[way] = bytes[NEAREST] + (way == KAHAN ? 2.0f : 0.0f);
        notes[way] = (chart_note){ way, (double)bytes[way] + 0.6, percent[way], "middle" };
        snprintf(percent[way], 8, "%.1f", right[way]);
        printf("%-13s %18.4f %12.1f %12.2f %%\n", names[way], (double)end[way], (double)bytes[way], right[way]);
    }
    const double lost[3] = { right[0] - right[NEAREST], right[0] - right[STOCHASTIC], right[0] - right[KAHAN] };
    printf("check: by dice 1.0999, deviation 0.028, Kahan 1.1016 + 0.0012 (run):\n       %.4f, %.4f, %.4f + %.4f\n"
           "check: nearest loses up to 7 %%, the cures at most 0.2 %% (arXiv 2010.06192):\n       %.2f, %.2f, %.2f\n",
           mean, deviation, (double)kahan[STEPS], (double)rest, lost[0], lost[1], lost[2]);
    chart_series s[] = { { "20 by dice", CHART_OTHER, NULL, 1.2, 0.8, dice, dice_step, .count = ALL },
                         { "Kahan", CHART_BF16, NULL, 2.5, 1, kahan, .count = STEPS + 1 },
                         { "nearest", CHART_FAULT, NULL, 2.5, 1, nearest, .count = STEPS + 1 },
                         { "FP32", CHART_FP32, "6 4", 2, 1, fp32, .count = STEPS + 1 },
                         { NULL, CHART_BF16, NULL, 40, 1, bytes, .count = WAYS, .style = CHART_BARS } };
    chart_panel panels[] = {
        { title, "step", "weight", .steps = 1, .series = s, .series_count = 4 },
        { "Both cures save bytes a parameter, lose nothing\n(above each bar: % of digits right)", "weights", "bytes",
          .x_names = names, .series = s + 4, .series_count = 1, .notes = notes, .note_count = WAYS } };
    if (!chart_write(picture, "Can rounding be lucky?", panels, 2, error)) return stop(error);
    if (fabs(mean - 1.1) < 0.002 && fabs(deviation - 0.028) < 0.001 && kahan[STEPS] == 1.1015625f
        && nearest[STEPS] == 1.0f && lost[0] > 1 && lost[1] < 0.25 && lost[2] < 0.25) return 0;
    return stop("the findings of this lesson did not come out");
}
