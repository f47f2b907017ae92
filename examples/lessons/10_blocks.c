/* 10_blocks.c - lesson 10: one scale per block?                                       Run:  make lesson N=10

   Types of 8 bits (E4M3) or 4 (E2M1) cover few powers of two, so values are divided by a scale before they are rounded.
   One scale for a whole tensor must fit its largest value, and what is far smaller becomes zero. Therefore each block
   of 16, 32 or 128 neighbours has a scale of its own, mostly a power of two. OCP's rule rounds that power down (FLOOR):
   the largest values of some blocks do not fit. NVIDIA's rounds UP. A product then adds thousands of such numbers. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
enum { SIDE = 512, ALL = SIDE * SIDE, N = 7, PAIRS = 200 };
static const int every = 128;                 /* try 32 to 4096 */
typedef struct format { int fraction, lowest, highest; float max; } format;   /* bits, two exponents, largest value */
typedef enum rule { FLOOR, UP, NV } rule;                                     /* of a block's scale */
static const format E4M3 = { 3, -6, 8, 448.0f }, E2M1 = { 1, 0, 2, 6.0f };
static float gauss[ALL], turned[ALL], tail[ALL], q[ALL], q_turned[ALL];       /* SIDE x SIDE; turned: transposed */
static double saturated, zeros;               /* by the last quantise: blocks and values, in percent */
/* To nearest even, in units of the last fraction bit; the unit stays below the lowest exponent. */
static float round_to(const format* f, float x) {
    const int e = ilogbf(x);                  /* |x| is in [2^e, 2^(e+1)) */
    const float unit = ldexpf(1.0f, (e > f->lowest ? e : f->lowest) - f->fraction);
    return fmaxf(-f->max, fminf(f->max, nearbyintf(x / unit) * unit));
}

/* The scale of a block, from the largest |x| in it and in the tensor. */
static float scale_of(const format* f, rule r, float most, float most_of_all) {
    const float ratio = r == FLOOR ? ldexpf(most, -f->highest) : most / f->max, tensor = most_of_all / (448 * f->max);
    if (r == NV) return round_to(&E4M3, ratio / tensor) * tensor;     /* an E4M3 times a scale of the tensor */
    return ldexpf(1.0f, r == UP && ratio > ldexpf(1.0f, ilogbf(ratio)) ? ilogbf(ratio) + 1 : ilogbf(ratio));
}

/* Blocks of `width` neighbours; returns the ratio of signal to noise in decibels: a bit more gives 6. */
static float quantise(const format* f, rule r, int width, const float* x, float* y) {
    float most_of_all = 0.0f;
    double signal = 0.0, noise = 0.0;
    saturated = zeros = 0.0;
    for (int i = 0; i < ALL; i++) most_of_all = fmaxf(most_of_all, fabsf(x[i]));
    for (int first = 0; first < ALL; first += width) {
        float most = 0.0f;
        for (int i = first; i < first + width; i++) most = fmaxf(most, fabsf(x[i]));
        const float scale = scale_of(f, r, most, most_of_all);
        saturated += most / scale > f->max ? 100.0 * width / ALL : 0.0;
        for (int i = first; i < first + width; i++) {
            y[i] = scale > 0.0f ? round_to(f, x[i] / scale) * scale : 0.0f;
            zeros += y[i] == 0.0f ? 100.0 / ALL : 0.0;
            signal += pow((double)x[i], 2.0);
            noise += pow((double)y[i] - (double)x[i], 2.0);
        }
    }
    return (float)(10.0 * log10(signal / noise));
}

/* A line of the table. Last: values that differ if the matrix is transposed before it is quantised, not after. */
static double row(const char* name, const format* f, rule r, int width) {
    int differ = 0;
    quantise(f, r, width, turned, q_turned);
    const double db = (double)quantise(f, r, width, gauss, q), blocks = saturated;
    for (int i = 0; i < ALL; i++) differ += q[i] != q_turned[i % SIDE * SIDE + i / SIDE];
    quantise(f, r, width, tail, q_turned);
    printf("%-27s %8.1f dB %9.1f %% %9.2f %% %9.2f %%\n", name, db, blocks, zeros, 100.0 * differ / ALL);
    return blocks;
}
static float cut14(float x) { return ldexpf(truncf(ldexpf(x, 13 - ilogbf(x))), ilogbf(x) - 13); }   /* to 14 bits */

/* Error of dot products of length k: a part keeps 14 bits after each 32 products, and goes to FP32 after `wait`. */
static float dot_error(int k, int wait) {
    double size = 0.0, error = 0.0;           /* sums of squares */
    for (int pair = 0; pair < PAIRS; pair++) {
        const float *a = q + pair * 512, *b = a + ALL / 2;
        float sum = 0.0f, part = 0.0f;
        double exact = 0.0;
        for (int i = 0; i < k; i++) {
            exact += (double)a[i] * (double)b[i];
            part += a[i] * b[i];
            if (i % 32 == 31) part = cut14(part);
            if (i % wait == wait - 1) sum += part, part = 0.0f;
        }
        size += pow(exact, 2.0);
        error += pow((double)(sum + part) - exact, 2.0);
    }
    return (float)(100.0 * sqrt(error / size));
}
int main(int argc, char** argv) {
    static const float size[N] = { 4, 8, 16, 32, 64, 128, 256 }, k[N] = { 128, 256, 512, 1024, 2048, 4096, 8192 };
    static const rule rules[4] = { UP, FLOOR, FLOOR, NV };
    static float db[4][N], bits14[N], fp32[N];
    char title[99], name[40];
    for (int i = 0; i < ALL; i++) gauss[i] = turned[i % SIDE * SIDE + i / SIDE] = amp_random_normal(1, (uint64_t)i);
    for (int i = 0; i < ALL; i++) tail[i] = gauss[i] * expf(2.0f * amp_random_normal(2, (uint64_t)i));
    puts("type, numbers to a scale, rule    noise    saturated     tail to 0   transposed");
    row("E2M1, 16, in E4M3 (NVFP4)", &E2M1, NV, 16);
    row("E2M1, 32, floor (MX by OCP)", &E2M1, FLOOR, 32);
    const double floored = row("E4M3, 32, floor (MX by OCP)", &E4M3, FLOOR, 32);
    const double up = row("E4M3, 32, up (MX by NVIDIA)", &E4M3, UP, 32);
    row("E4M3, all, up", &E4M3, UP, ALL);
    row("E4M3, 128, up (DeepSeek-V3)", &E4M3, UP, 128);             /* and gauss in this form is in q now */
    printf("\nerror of a sum of k products   14 bits   FP32 each %d\n", every);
    for (int i = 0; i < N; i++) {
        for (int w = 0; w < 4; w++) db[w][i] = quantise(w < 2 ? &E4M3 : &E2M1, rules[w], 4 << i, gauss, q_turned);
        bits14[i] = dot_error(128 << i, 128 << i), fp32[i] = dot_error(128 << i, every);
        printf("  %7g %26.3f %% %13.3f %%\n", (double)k[i], (double)bits14[i], (double)fp32[i]);
    }
    snprintf(name, sizeof name, "14 bits, FP32 each %d", every);
    snprintf(title, sizeof title, "A long sum in 14 bits goes wrong,\nunless FP32 takes over every %d products", every);
    chart_series ratios[4] = {
        chart_curve("E4M3, up", CHART_E4M3, size, db[0], N), chart_curve("E4M3, floor", CHART_E4M3, size, db[1], N),
        chart_curve("E2M1, floor", CHART_OTHER, size, db[2], N), chart_curve("NVFP4", CHART_OTHER, size, db[3], N) };
    ratios[1].dash = ratios[2].dash = "7 5";
    const chart_series sums[2] = { chart_curve("14 bits", CHART_FAULT, k, bits14, N),
                                   chart_curve(name, CHART_FP32, k, fp32, N) };
    const chart_wall walls[3] = { { 16, "NVFP4" }, { 32, "MX" }, { 128, "1x128" } };
    const chart_panel panels[2] = {
        { "Small blocks and fine scales help 4 bits;\n8 bits need only a scale rounded up",
          "numbers that share a scale", "signal to noise, dB", 2, .series = ratios, .series_count = 4, .walls = walls,
          .wall_count = 3 },
        { title, "k, the number of products", "error of the sum, %", 2, 1, .series = sums, .series_count = 2 } };
    if (!chart_save(argc, argv, "10_blocks", "One scale per block?", panels, 2)) return 1;
    printf("check: %.1f %% of MX's blocks saturate by floor (run: 16.5), %.1f by up (0)\n", floored, up);
    if (fabs(floored - 16.5) < 1.5 && up == 0.0 && bits14[5] > 4.0f * fp32[5]) return 0;
    return fprintf(stderr, "10_blocks: other blocks saturate, or a sum of 14 bits is as good as one in FP32\n"), 1;
}
