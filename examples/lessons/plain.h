/* plain.h - attention as it is written in books, beside which lesson 11 works in tiles. */
#ifndef LESSONS_PLAIN_H
#define LESSONS_PLAIN_H

#include "../../amp.h"

enum { OUT, DQ, DK, DV, RESULTS, D = 64, SIZES = 6, LONGEST = 128 << (SIZES - 1), MANY = LONGEST * D };
enum { PLAIN, TILES, OPERATOR, WAYS };
static float q[MANY], k[MANY], v[MANY], dout[MANY], found[WAYS][RESULTS][MANY];
static float scale = 0.125f;            /* 1 / sqrt(D) */

/* SCORES: c[n,n] = a[n,D] b[n,D]^T. MIX: c[n,D] = a[n,n] b[n,D]. TURNED: the same with a^T. Times alpha, plus old c.
   a has type t. */
typedef enum kind { SCORES, MIX, TURNED } kind;
static inline void product(kind of, size_t n, float alpha, const float* a, amp_dtype t, const float* b, float old,
                           float* c) {
    const amp_gemm_shape s = { .trans_a = of == TURNED ? AMP_TRANS : AMP_NO_TRANS, .m = n, .n = of == SCORES ? n : D,
                               .trans_b = of == SCORES ? AMP_TRANS : AMP_NO_TRANS, .k = of == SCORES ? D : n };
    amp_gemm(&s, alpha, amp_ref_of(a, t), amp_f32(b), old, amp_f32(c), NULL);
}

/* Forward and backward. Returns the bytes that it needs beside inputs and results. */
static inline size_t attend_plainly(size_t T) {
    static float scores[LONGEST * LONGEST], shares[LONGEST * LONGEST], dshares[LONGEST * LONGEST];
    float (*const plain)[MANY] = found[PLAIN];
    product(SCORES, T, scale, q, AMP_F32, k, 0.0f, scores);
    amp_softmax_forward(amp_f32(scores), amp_f32(shares), T, T, NULL);
    product(MIX, T, 1.0f, shares, AMP_F32, v, 0.0f, plain[OUT]);
    product(TURNED, T, 1.0f, shares, AMP_F32, dout, 0.0f, plain[DV]);
    product(SCORES, T, 1.0f, dout, AMP_F32, v, 0.0f, dshares);
    amp_softmax_backward(amp_f32(dshares), amp_f32(shares), amp_f32(scores), 0, T, T, NULL);
    product(MIX, T, scale, scores, AMP_F32, k, 0.0f, plain[DQ]);
    product(TURNED, T, scale, scores, AMP_F32, q, 0.0f, plain[DK]);
    return 3 * T * T * sizeof(float);
}

#endif
