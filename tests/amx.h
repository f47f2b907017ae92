/* amx.h - what AMP_SUMS_FAST adds up, one number at a time. */
#ifndef AMP_TEST_AMX_H
#define AMP_TEST_AMX_H

#include <math.h>
#include <stddef.h>

/* The order of AMX (Intel SDM, TDPBF16PS), as amp.h uses it: blocks of 16 pairs of BF16 numbers, the first ones and the
   second ones each in a chain of fma from 0, the sum of both added to what there is. */
static inline float amx_dot(const float* a, const float* b, size_t k) {
    volatile float sum = 0.0f, chain[2], both;
    size_t first, i;
    for (first = 0; first < k; first += 32) {
        chain[0] = chain[1] = 0.0f;
        for (i = first; i < k && i < first + 32; i++) chain[i % 2] = fmaf(a[i], b[i], chain[i % 2]);
        both = chain[0] + chain[1];
        sum += both;
    }
    return sum;
}

#endif
