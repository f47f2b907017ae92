/* amx.h - what AMP_SUMS_FAST adds up, one number at a time. */
#ifndef AMP_TEST_AMX_H
#define AMP_TEST_AMX_H

#include <math.h>
#include <stddef.h>

/* The order of AMX (Intel SDM, TDPBF16PS), as amp.h uses it: blocks of 16 pairs of BF16 numbers, the first ones and the
   second ones each in a chain of fma from 0, the sum of both added to what there is. */
typedef struct amx_sum { float sum, chain[2]; size_t count; } amx_sum;

static inline float amx_total(const amx_sum* s) {
    volatile float both = s->chain[0] + s->chain[1], sum = s->sum;
    return s->count % 32 == 0 && s->count > 0 ? sum : sum + both;
}
static inline void amx_add(amx_sum* s, float a, float b) {
    float* const chain = &s->chain[s->count % 2];
    *chain = fmaf(a, b, *chain);
    s->count++;
    if (s->count % 32 != 0) return;
    {
        volatile float both = s->chain[0] + s->chain[1];
        s->sum += both;
    }
    s->chain[0] = s->chain[1] = 0.0f;
}
static inline float amx_dot(const float* a, const float* b, size_t k) {
    amx_sum s = { 0.0f, { 0.0f, 0.0f }, 0 };
    size_t i;
    for (i = 0; i < k; i++) amx_add(&s, a[i], b[i]);
    return amx_total(&s);
}

#endif
