/* 02_sums.c - lesson 2: why can't I add?                                              Run:  make lesson N=2

   A neural network is sums: each output of a layer adds up hundreds of products. In a small type a sum goes wrong long
   before it overflows. Numbers of a type lie further apart the larger they are; when the sum has grown so large that
   the next term is less than half of the distance to the next number, adding it changes nothing, now and for ever.
   This program adds 0.01 again and again, then 1 + 1/2 + 1/3 + ..., then ones, and keeps each sum in FP16, in BF16, and
   in FP32. The cure is the third line of each group: terms in FP16, the sum in FP32. Matrix units of GPUs compute so,
   and so does amp_gemm. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"

enum { TERMS = 10000, SUMS = 3, WAYS = 4 };
static const double little = 0.01;    /* try 0.001 to 1 */
static char littles[40];                /* "0.01 + 0.01 + ..." */

static float always(int k) { (void)k; return (float)little; }
static float harmonic(int k) { return 1.0f / (float)k; }
static float one(int k) { (void)k; return 1.0f; }

static const struct { const char* name; float (*term)(int k); } sums[SUMS] = {
    { littles, always }, { "1 + 1/2 + 1/3 + ...", harmonic }, { "1 + 1 + 1 + ...", one } };
static const struct { const char* name; amp_dtype term, sum; chart_color color; } ways[WAYS] = {
    { "BF16", AMP_BF16, AMP_BF16, CHART_BF16 }, { "FP16", AMP_F16, AMP_F16, CHART_FP16 },
    { "FP16 terms, FP32 sum", AMP_F16, AMP_F32, CHART_OTHER }, { "FP32", AMP_F32, AMP_F32, CHART_FP32 } };

static float path[SUMS][WAYS][TERMS];   /* the sum after each term */
static int last[SUMS][WAYS];            /* the last term that changed the sum */
static float terms[TERMS];

/* What a variable of this type holds after x was assigned to it. */
static float stored(amp_dtype type, float x) {
    if (type == AMP_F16) return amp_half_to_float(amp_half_from_float(x));
    return type == AMP_BF16 ? amp_bfloat16_to_float(amp_bfloat16_from_float(x)) : x;
}

static void add(int s, int w) {
    float sum = 0.0f;
    int k;
    for (k = 1; k <= TERMS; k++) {
        float before = sum;
        sum = stored(ways[w].sum, sum + stored(ways[w].term, sums[s].term(k)));
        if (sum != before) last[s][w] = k;
        path[s][w][k - 1] = sum;
        terms[k - 1] = (float)k;
    }
}

static void print(int s) {
    double truth[2] = { 0.0, 0.0 };
    int k, w;
    for (k = 1; k <= TERMS; k++) truth[k > 1000] += s == 0 ? little : 1.0 / (s == 1 ? k : 1.0);
    printf("%-22s  %14s  %14s  %s\n", sums[s].name, "1000 terms", "10000 terms", "stands still after term");
    for (w = 0; w < WAYS; w++) {
        printf("  %-20s  %14.6f  %14.6f  ", ways[w].name, (double)path[s][w][999], (double)path[s][w][TERMS - 1]);
        if (last[s][w] < TERMS) printf("%d\n", last[s][w]); else printf("-\n");
    }
    printf("  %-20s  %14.6f  %14.6f\n\n", "truth", truth[0], truth[0] + truth[1]);
}

/* The first sum of 1000 terms as a matrix product of one row and one column: FP16 goes in, amp_gemm adds in FP32. */
static float by_product(void) {
    const amp_gemm_shape shape = { .m = 1, .n = 1, .k = 1000 };
    amp_half row[1000], column[1000];
    float sum = 0.0f;
    int k;
    for (k = 0; k < 1000; k++) {
        row[k] = amp_half_from_float((float)little);
        column[k] = amp_half_from_float(1.0f);
    }
    return amp_gemm(&shape, 1.0f, amp_f16(row), amp_f16(column), 0.0f, amp_f32(&sum), NULL) == AMP_OK ? sum : 0.0f;
}

static int draw(int argc, char** argv) {
    chart_series lines[2][WAYS];
    chart_note stops[2][2];
    char title[80], texts[2][2][40];
    int s, w;
    for (s = 0; s < 2; s++)
        for (w = 0; w < WAYS; w++)
            lines[s][WAYS - 1 - w] = (chart_series){ .name = ways[w].name, .color = ways[w].color, .opacity = 1,
                .width = w == 3 ? 7 : 2.6, .x = terms, .y = path[s][w], .count = s == 0 ? 5000 : TERMS };
    for (s = 0; s < 2; s++)
        for (w = 0; w < 2; w++) {               /* below its line */
            const double end = (double)path[s][w][TERMS - 1], top = (double)path[s][3][s == 0 ? 4999 : TERMS - 1];
            snprintf(texts[s][w], 40, "%sstops at %.5g", s ? "" : w ? "FP16 " : "BF16 ", end);
            stops[s][w] = (chart_note){ s == 0 ? 4980 : 9900, end - 0.055 * top, texts[s][w], "end" };
            if (last[s][w] == TERMS) stops[s][w].text = "";
        }
    snprintf(title, sizeof title, "%s:\na sum in 16 bits stands still", littles);
    const chart_panel panels[] = {
        { .title = title, .x_label = "terms added", .y_label = "sum",
          .series = lines[0], .series_count = WAYS, .notes = stops[0], .note_count = 2 },
        { .title = "1 + 1/2 + 1/3 + ...:\nso does this one", .x_label = "terms added", .y_label = "sum", .log_x = 1,
          .series = lines[1], .series_count = WAYS, .notes = stops[1], .note_count = 2 } };
    return chart_save(argc, argv, "02_sums", "Why can't I add?", panels, 2);
}

int main(int argc, char** argv) {
    double fp16, bf16, mixed, product = (double)by_product();
    int s, w;
    snprintf(littles, sizeof littles, "%g + %g + ...", little, little);
    for (s = 0; s < SUMS; s++) {
        for (w = 0; w < WAYS; w++) add(s, w);
        print(s);
    }
    bf16 = (double)path[0][0][999];
    fp16 = (double)path[0][1][999];
    mixed = (double)path[0][2][999];
    printf("check: %g a thousand times is %.6f in FP16 (run: 9.953125), %g in BF16\n"
           "       (4), %.6f with an FP32 sum (10.002136) and the same by amp_gemm;\n"
           "       1 + 1/2 + ... stops at %.4f in FP16 (7.0859) and %.4f in BF16\n"
           "       (5.0625), ones stop at %g (2048) and %g (256)\n", little, fp16, bf16, mixed,
           (double)path[1][1][TERMS - 1], (double)path[1][0][TERMS - 1], (double)path[2][1][TERMS - 1],
           (double)path[2][0][TERMS - 1]);
    if (!draw(argc, argv)) return 1;
    if (fp16 == 9.953125 && bf16 == 4.0 && fabs(mixed - 10.002136) < 1e-6 && product == mixed) return 0;
    return fprintf(stderr, "02_sums: the sums of 0.01 are others, or amp_gemm does not add in FP32\n"), 1;
}
