/* amx.h - what AMP_SUMS_FAST adds up, one number at a time. */
#ifndef AMP_TEST_AMX_H
#define AMP_TEST_AMX_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The order of AMX (Intel SDM, TDPBF16PS), as amp.h uses it: blocks of 16 words of two BF16 numbers, the first ones
   and the second ones each in a chain of fma from 0, the sum of both added to what there is. A BF16 operand's words
   are pairs of neighbours; an F16 element x = high + low makes the words (high, low) x (high, high) and
   (high, low) x (low, low). */
static inline float high_part(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    u &= 0xffff0000u;
    memcpy(&x, &u, sizeof x);
    return x;
}
static inline float amx_dot(const float* a, const float* b, size_t k, int halves) {
    volatile float sum = 0.0f, chain[2], both;
    size_t block = halves ? 8 : 32, first, i, l;
    for (first = 0; first < k; first += block) {
        chain[0] = chain[1] = 0.0f;
        for (i = first; i < k && i < first + block; i++) {
            float ah = high_part(a[i]), bh = high_part(b[i]);
            if (!halves) chain[i % 2] = fmaf(a[i], b[i], chain[i % 2]);
            for (l = 0; halves && l < 2; l++) {
                float y = l == 0 ? bh : b[i] - bh;
                chain[0] = fmaf(ah, y, chain[0]);
                chain[1] = fmaf(a[i] - ah, y, chain[1]);
            }
        }
        both = chain[0] + chain[1];
        sum += both;
    }
    return sum;
}

#endif
