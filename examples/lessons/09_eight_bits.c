/* 09_eight_bits.c - lesson 9: eight bits?                                             Run:  make lesson N=9

   Two types of 8 bits train networks: E4M3 (4 bits of exponent, 3 of fraction, up to 448) and E5M2 (5 and 2, up to
   57344). E4M3 is finer, E5M2 reaches further; both reach so little that a tensor is multiplied by a scale before it is
   rounded, so that its largest value lands on the type's. Current scaling looks for that value in the tensor itself.
   Delayed scaling saves this pass and takes the largest of earlier steps; here one step brings values 32768 times as
   large, a spike. A value that is too large saturates: it becomes the largest. One that is too small becomes zero. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"

enum { N = 262144, SIZE = 1024, STEPS = 1400, SPIKE = 100, WAYS = 4, SHIFTS = 36, SEEDS = 41 };
typedef struct format { const char* name; int fraction, lowest; float max; } format;    /* lowest normal exponent */
static const format types[2] = { { "E4M3", 3, -6, 448.0f }, { "E5M2", 2, -14, 57344.0f } };
static double noise, zeros, saturated;       /* of the last quantize: signal to noise in dB, and shares in percent */
static float x[N], since[STEPS], scales[WAYS][STEPS], clean[2][SHIFTS], lost[2][SEEDS];    /* lost: sorted */
static unsigned char full[WAYS][STEPS];
static const int histories[WAYS] = { 0, 1, 16, 1024 };
static const char* const names[WAYS] = { "current", "history 1", "history 16", "history 1024" };
static const chart_color colors[WAYS] = { CHART_FP32, CHART_OTHER, CHART_E4M3, CHART_E4M3 };
static const int spike_power = 15;        /* try 1 to 60 */
static int stop(const char* why) { return fprintf(stderr, "09_eight_bits: %s\n", why), 1; }
/* To the nearest number of the type, ties to even; what is too large becomes the largest. */
static float round_to(const format* f, float v) {
    int exponent;
    if (!(fabsf(v) < f->max)) return amp_is_nan(amp_f32(&v)) ? v : copysignf(f->max, v);
    frexpf(v, &exponent);                    /* |v| is in [2^(exponent-1), 2^exponent) */
    float unit = ldexpf(1.0f, (exponent - 1 > f->lowest ? exponent - 1 : f->lowest) - f->fraction);
    return rintf(v / unit) * unit;
}

static float largest(size_t n) {
    float most = 0.0f;
    for (size_t i = 0; i < n; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}

/* Rounds x * scale and divides by the scale again: what a product of such numbers computes with. */
static void quantize(const format* f, float scale, size_t n) {
    double signal = 0.0, wrong = zeros = saturated = 0.0, share = 100.0 / (double)n;
    for (size_t i = 0; i < n; i++) {
        float v = x[i], error = (x[i] = round_to(f, v * scale) / scale) - v;
        signal += (double)v * (double)v;
        wrong += (double)error * (double)error;
        zeros += x[i] == 0.0f && v != 0.0f ? share : 0.0;
        saturated += fabsf(v * scale) > f->max * 1.001f ? share : 0.0;
    }
    noise = 10.0 * log10(signal / wrong);
}

/* Fills x. A bell curve; with a tail, each number times e^(2 * another), so that sizes spread as those of gradients. */
static void bell(uint64_t s, int tail) {
    for (uint64_t i = N; i-- > 0;) x[i] = amp_random_normal(s, i) * (tail ? expf(2 * amp_random_normal(s + 1, i)) : 1);
}

/* A tensor a step, rounded to E4M3 with the scale of its own largest value (history 0), or of the last steps'. */
static void spike(int way, int history) {
    static float most[STEPS];
    float scale = 1.0f;
    int saturates = 0;
    for (int s = 0; s < STEPS; s++) {
        float recent = 0.0f;
        for (int i = 0; i < SIZE; i++)
            x[i] = ldexpf(amp_random_normal(3, (uint64_t)(s * SIZE + i)), s == SPIKE ? spike_power : 0);
        most[s] = largest(SIZE);
        for (int back = history > 0; back <= history && back <= s; back++) recent = fmaxf(recent, most[s - back]);
        if (recent > 0.0f) scale = types[0].max / recent;
        quantize(&types[0], scale, SIZE);
        saturates += s > 0 && saturated > 0.0;
        since[s] = (float)(s - SPIKE + 1);      /* the picture shows what is above 0 */
        scales[way][s] = log2f(scale);
        full[way][s] = saturated > 50.0;
        if (s == SPIKE) printf("%-12s %16.1f %%", names[way], saturated);
        if (s == SPIKE + 1) printf(" %14.1f dB %7.1f %%", noise, zeros);
    }
    printf(" %17.1f %%\n", 100.0 * saturates / STEPS);
}
int main(int argc, char** argv) {
    const char* picture = argc > 1 ? argv[1] : "09_eight_bits.svg";
    char error[CHART_ERROR] = "at most one argument, the picture's path";
    chart_series s[WAYS + 2];
    if (argc > 2 || !chart_try(picture, error)) return stop(error);
    printf("      bell: s/n     zeros   tail: s/n     zeros   %d seeds: 5 %% median     95 %%", SEEDS);
    for (int t = 0; t < 2; t++) {
        for (int k = SHIFTS - 1; k >= 0; k--) {                     /* the scale that fits comes last */
            bell(1, 0);
            quantize(&types[t], ldexpf(types[t].max / largest(N), -k), N);
            clean[t][k] = (float)noise;
        }
        printf("\n%-5s %6.1f dB %7.4f %%", types[t].name, noise, zeros);
        for (int k = SEEDS - 1, at; k >= 0; k--) {
            bell(2 * (uint64_t)k + 1, 1);
            quantize(&types[t], types[t].max / largest(N), N);
            for (at = k; at + 1 < SEEDS && lost[t][at + 1] < (float)zeros; at++) lost[t][at] = lost[t][at + 1];
            lost[t][at] = (float)zeros;
            chart_progress("long tails", SEEDS - k, SEEDS);
        }
        printf(" %8.1f dB %7.4f %%%14.4f %8.4f %8.4f", noise, zeros, (double)lost[t][2],
               (double)lost[t][20], (double)lost[t][38]);
        s[4 + t] = (chart_series){ types[t].name, t ? CHART_E5M2 : CHART_E4M3, NULL, 3, 1, clean[t], .count = SHIFTS };
    }
    printf("\n\nscaling        saturated, spike  s/n a step later    zeros steps that saturate\n");
    for (int w = 0; w < WAYS; w++) {
        spike(w, histories[w]);
        s[w] = (chart_series){ names[w], colors[w], w == 3 ? "6 4" : NULL, 8 - 2 * w, 1, scales[w], since, full[w],
                                .count = STEPS };
    }
    chart_panel p[] = { { "A spike leaves the scale too small\nfor as long as the history", "step from the spike on",
                          "scale of E4M3", 1, .y_prefix = "2^", .steps = 1, .mark_name = "saturated", .series = s,
                          .series_count = WAYS },
                        { "E4M3 is finer,\nE5M2 bears a scale that is far too small",
                          "powers of two that the scale is too small", "signal to noise, dB", .series = s + WAYS,
                          .series_count = 2 } };
    if (!chart_write(picture, "Eight bits?", p, 2, error)) return stop(error);
    printf("check: bell curve 31.6 and 25.6 dB, tail 7.8 and 0.001 %% zeros (run):\n       %.1f, %.1f, %.1f, %.4f\n",
           (double)clean[0][0], (double)clean[1][0], (double)lost[0][20], (double)lost[1][20]);
    if (fabsf(clean[0][0] - 31.6f) < 0.2f && fabsf(clean[1][0] - 25.6f) < 0.2f && lost[0][2] < 7.8f
        && lost[0][38] > 7.8f && lost[1][38] < 0.01f && !full[0][SPIKE] && full[3][SPIKE]) return 0;
    return stop("the findings of this lesson did not come out");
}
