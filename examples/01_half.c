/* 01_half.c - lesson 1: what a half can hold.

   A half (IEEE binary16) has 1 sign bit, 5 exponent bits and 10 fraction bits: about three decimal digits,
   nothing above 65504, nothing below 2^-24 = 0.00000006. From each power of two to the next there are 1024
   steps, so the steps grow with the number.

   Run:  make examples && build/01_half                                                                   */
#define AMP_IMPLEMENTATION
#include "../amp.h"

/* Rounds to half and back: the value that a half variable would have. */
static float half(float x) { return amp_half_to_float(amp_half_from_float(x)); }

static void table(void) {
    static const struct { float x; const char* lesson; } rows[] = {
        { 1.0f,      "exact, as every whole number up to 2048" },
        { 0.1f,      "three digits are right" },
        { 2048.0f,   "exact" },
        { 2049.0f,   "lost: from here on the steps are 2 wide" },
        { 65504.0f,  "the largest half" },
        { 65519.0f,  "rounded down to it" },
        { 65520.0f,  "overflow: infinity" },
        { 6.1e-5f,   "the smallest normal numbers lie here" },
        { 1.0e-6f,   "subnormal: fewer digits" },
        { 6.0e-8f,   "the last one, 2^-24" },
        { 2.0e-8f,   "underflow: zero" }
    };
    printf("%12s  %12s  bits\n", "float", "as half");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        printf("%12g  %12.8g  %04x  %s\n", (double)rows[i].x, (double)half(rows[i].x),
               (unsigned)amp_half_from_float(rows[i].x).bits, rows[i].lesson);
}

/* Adds 0.01 a thousand times. In half each sum is rounded again: near 10 the steps are 1/128 = 0.0078 wide, so
   an addition can be wrong by 0.0039. With half terms and an FP32 sum only the rounding of 0.01 itself is left.
   That is how matrix products work here and on a Tensor Core: half goes in, the sum is FP32. */
static void sums(void) {
    float in_half = 0.0f, in_float = 0.0f;
    for (int i = 0; i < 1000; i++) {
        in_half = half(in_half + half(0.01f));
        in_float = in_float + half(0.01f);
    }
    printf("\n0.01 a thousand times:  half sum %.4f   FP32 sum of half terms %.4f   truth 10\n", (double)in_half,
           (double)in_float);
}

/* 1 + 1/2 + 1/3 + ... grows for ever, but in half it stops as soon as the next term is less than half a step. */
static void harmonic(void) {
    float sum = 0.0f, before = -1.0f;
    int terms = 0;
    while (sum > before) {
        before = sum;
        sum = half(sum + half(1.0f / (float)(terms + 1)));
        terms++;
    }
    printf("1 + 1/2 + 1/3 + ...:    stops in half at %.4f after %d terms; the true sum has no limit\n", (double)sum,
           terms - 1);
}

int main(void) {
    table();
    sums();
    harmonic();
    return 0;
}
