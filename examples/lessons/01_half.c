/* 01_half.c - lesson 1: what is a half?                                               Run:  make lesson N=1

   A float has 32 bits: one for the sign, 8 for the exponent (which power of two), 23 for the fraction (where between
   that power and the next). A half (FP16) keeps 5 and 10 of them, a bfloat16 (BF16) 8 and 7, and the small types E4M3,
   E5M2 and E2M1 are named after theirs. Exponent bits buy range, fraction bits buy digits, and there are only 16, 8 or
   4 bits to spend. So few codes can be walked through one by one, and this program does so: it works out the number
   behind every code, and sees where they lie. Then it stores one number, 0.3952, in each type. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"

/* A code is exponent and fraction beside each other, read as one whole number. Codes above `largest` are infinity and
   "not a number" (NaN). */
typedef struct format { const char* name; int exponent_bits, fraction_bits, largest; chart_color color; } format;
static const format formats[] = { { "E2M1", 2,  1, 0x7,    CHART_OTHER },
                                  { "E5M2", 5,  2, 0x7b,   CHART_E5M2 },
                                  { "E4M3", 4,  3, 0x7e,   CHART_E4M3 },
                                  { "BF16", 8,  7, 0x7f7f, CHART_BF16 },
                                  { "FP16", 5, 10, 0x7bff, CHART_FP16 } };
enum { FORMATS = 5, FP16 = 4, CODES = 32768 };
static const char* const names[] = { "E2M1", "E5M2", "E4M3", "BF16", "FP16" };
static const double number = 0.3952;    /* try 0.001 to 400 */

static float values[FORMATS][CODES], powers[FORMATS][CODES], row[FORMATS][CODES], stored[FORMATS];
static double below_one[FORMATS];

/* The number behind a code. The exponent counts from -bias; the fraction is what follows "1.". With exponent 0 it
   follows "0." instead: these are the subnormal numbers, which fill the gap down to zero. */
static double value(const format* f, int code) {
    int fraction = code & ((1 << f->fraction_bits) - 1), exponent = code >> f->fraction_bits;
    int bias = (1 << (f->exponent_bits - 1)) - 1;
    if (exponent == 0) return ldexp(fraction, 1 - bias - f->fraction_bits);
    return ldexp(fraction + (1 << f->fraction_bits), exponent - bias - f->fraction_bits);
}

/* The code whose number is nearest to x; of two equally near ones the even code, as IEEE 754 asks. */
static int nearest(const format* f, double x) {
    int best = 0, code;
    for (code = 1; code <= f->largest; code++) {
        double off = fabs(value(f, code) - x), best_off = fabs(value(f, best) - x);
        if (off < best_off || (off == best_off && code % 2 == 0)) best = code;
    }
    return best;
}

/* The next whole number is tried as long as there is a code for it. */
static void walk(int which) {
    const format* f = &formats[which];
    int below = 0, whole = 0, code;
    for (code = 1; code <= f->largest; code++) {
        double v = value(f, code);
        values[which][code] = (float)v;
        powers[which][code] = (float)log2(v);
        row[which][code] = (float)which;
        below += v < 1.0;
        whole += v == whole + 1.0;
    }
    below_one[which] = 100.0 * below / f->largest;
    stored[which] = (float)value(f, nearest(f, number));
    printf("%-5s %3d %7d %10.5g %8.3g %8.3g %5.1f %% %6d  %8.6f %5.2f %%\n", f->name,
           1 + f->exponent_bits + f->fraction_bits, f->largest, value(f, f->largest), value(f, 1 << f->fraction_bits),
           value(f, 1), below_one[which], whole, (double)stored[which],
           100.0 * fabs((double)stored[which] - number) / number);
}

/* The codes whose numbers lie from low to high, as strokes. */
static chart_series strokes(int which, double low, double high, const float* x) {
    int first = 1, last = formats[which].largest;
    while (first <= last && (double)values[which][first] < low) first++;
    while ((double)values[which][last] > high) last--;
    return (chart_series){ .color = formats[which].color, .width = 0.5, .opacity = 0.8, .x = x + first,
                           .y = &row[which][first], .count = last - first + 1, .style = CHART_TICKS };
}

/* amp.h has FP16 and BF16: it must read each code as it was read here. */
static int amp_agrees(void) {
    int code, same = 1;
    for (code = 1; code <= formats[FP16].largest; code++)
        same &= amp_half_to_float((amp_half){ (uint16_t)code }) == values[FP16][code];
    for (code = 1; code <= formats[FP16 - 1].largest; code++)
        same &= amp_bfloat16_to_float((amp_bfloat16){ (uint16_t)code }) == values[FP16 - 1][code];
    return same && amp_half_to_float(amp_half_from_double(number)) == stored[FP16];
}

static int draw(int argc, char** argv) {
    chart_series all[FORMATS], near[2 * FORMATS];
    char name[16], title[80];
    const chart_wall one = { 0.0, "1" }, truth = { number, name };
    int i;
    snprintf(name, sizeof name, "%g", number);
    snprintf(title, sizeof title, "Fraction bits buy digits:\n%g goes to the nearest number (square)", number);
    for (i = 0; i < FORMATS; i++) {
        all[i] = strokes(i, 0.0, ldexp(1.0, 128), powers[i]);
        near[i] = strokes(i, 0.75 * number, 1.4 * number, values[i]);
        near[FORMATS + i] = (chart_series){ .color = formats[i].color, .width = 10, .opacity = 1, .x = &stored[i],
                                            .y = &row[i][1], .count = 1, .style = CHART_POINTS };
    }
    const chart_panel panels[] = {
        { .title = "Exponent bits buy range:\nall positive numbers of each type", .x_label = "the number",
          .x_prefix = "2^", .y_names = names, .series = all, .series_count = FORMATS, .walls = &one, .wall_count = 1 },
        { .title = title, .x_label = "the number", .y_names = names, .series = near,
          .series_count = 2 * FORMATS, .walls = &truth, .wall_count = 1 } };
    return chart_save(argc, argv, "01_half", "What is a half?", panels, 2);
}

int main(int argc, char** argv) {
    const double check = value(&formats[FP16], nearest(&formats[FP16], 0.3952));
    int i;
    printf("type bits numbers    largest   normal smallest   below  whole %9g   wrong\n"
           "            above               from                1 numbers  becomes      by\n"
           "                0                                          to\n", number);
    for (i = FORMATS - 1; i >= 0; i--) walk(i);
    printf("\ncheck: of FP16's positive numbers %.1f %% lie below 1 (run: 48.4 %%), the\n"
           "       largest is %g (IEEE 754: 65504), the smallest 2^%g (2^-24);\n"
           "       0.3952 becomes %.6f (run: 0.395264)\n", below_one[FP16],
           (double)values[FP16][formats[FP16].largest], (double)powers[FP16][1], check);
    if (!draw(argc, argv)) return 1;
    if (fabs(below_one[FP16] - 48.4) < 0.05 && fabs(check - 0.395264) < 1e-6 && amp_agrees()) return 0;
    return fprintf(stderr, "01_half: amp.h reads a code otherwise, or there are other codes\n"), 1;
}
