/* impl_avx512.c - the implementation for tests of the code for AVX-512 on an x86-64 processor that has none:
   tests/avx512.sh builds it. SIMDe has most of its intrinsics in C for AVX2; those that it lacks, or has otherwise than
   Intel's SDM says, are here. gcc, -mavx2 -mfma -mf16c. */
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define HELPER static __attribute__((unused))

/* The lanes of a vector: of 32 and 64 bits, floats, words. */
typedef union lanes {
    __m512i i;
    __m512 f;
    __m512d d;
    __m256i half;
    __m256 half_f;
    float floats[16];
    double doubles[8];
    uint16_t words[32];
    int16_t signed_words[32];
    uint32_t ints[16];
    int32_t signed_ints[16];
    uint64_t longs[8];
} lanes;

/* Comparisons: a bit for each lane. */
#define COMPARE(name, mask, n, field, op)                                                 \
    HELPER mask name(__m512i a, __m512i b) {                                              \
        const lanes x = { a }, y = { b };                                                 \
        mask m = 0;                                                                       \
        int k;                                                                            \
        for (k = 0; k < n; k++) if (x.field[k] op y.field[k]) m |= (mask)((mask)1 << k);  \
        return m;                                                                         \
    }
COMPARE(equal_16, __mmask32, 32, words, ==)
COMPARE(greater_16, __mmask32, 32, signed_words, >)
COMPARE(less_u16, __mmask32, 32, words, <)
COMPARE(differ_32, __mmask16, 16, ints, !=)
COMPARE(common_32, __mmask16, 16, ints, &)
COMPARE(less_32, __mmask16, 16, signed_ints, <)
COMPARE(at_least_32, __mmask16, 16, signed_ints, >=)
COMPARE(less_u32, __mmask16, 16, ints, <)
COMPARE(greater_u32, __mmask16, 16, ints, >)
#undef _mm512_cmpeq_epi16_mask
#undef _mm512_cmpgt_epi16_mask
#undef _mm512_cmplt_epu16_mask
#undef _mm512_cmplt_epi32_mask
#undef _mm512_cmplt_epu32_mask
#undef _mm512_cmpgt_epu32_mask
#undef _mm512_mask_cmpge_epi32_mask
#define _mm512_cmpeq_epi16_mask equal_16
#define _mm512_cmpgt_epi16_mask greater_16
#define _mm512_cmplt_epu16_mask less_u16
#define _mm512_cmpneq_epi32_mask differ_32
#define _mm512_cmplt_epi32_mask less_32
#define _mm512_cmplt_epu32_mask less_u32
#define _mm512_cmpgt_epu32_mask greater_u32
#define _mm512_mask_cmpge_epi32_mask(m, a, b) ((__mmask16)((m) & at_least_32(a, b)))
#define _mm512_mask_cmp_ps_mask(m, a, b, how) ((__mmask16)((m) & _mm512_cmp_ps_mask(a, b, how)))
#define _mm512_testn_epi32_mask(a, b) ((__mmask16)~common_32(a, b))
#define _knot_mask16(m) ((__mmask16)~(m))

/* Which floats are NaNs: all that is asked for, by the classes 0x81. */
HELPER __mmask16 nan_lanes(__m512 a) {
    lanes x;
    __mmask16 m = 0;
    int k;
    x.f = a;
    for (k = 0; k < 16; k++) m |= (__mmask16)((unsigned)((x.ints[k] & 0x7fffffffu) > 0x7f800000u) << k);
    return m;
}
#define _mm512_fpclass_ps_mask(a, classes) ((classes) == 0x81 ? nan_lanes(a) : (abort(), (__mmask16)0))

/* n elements of `size` bytes to or from memory, those that the mask has; zeros for the others. */
HELPER void move_lanes(void* to, const void* from, uint64_t m, size_t n, size_t size) {
    size_t k;
    for (k = 0; k < n; k++) if (m >> k & 1) memcpy((char*)to + k * size, (const char*)from + k * size, size);
}
#define LOAD_AND_STORE(load, store, type, n, size)                                      \
    HELPER type load(uint64_t m, const void* p) {                                       \
        type v;                                                                         \
        memset(&v, 0, sizeof v);                                                        \
        move_lanes(&v, p, m, n, size);                                                  \
        return v;                                                                       \
    }                                                                                   \
    HELPER void store(void* p, uint64_t m, type v) { move_lanes(p, &v, m, n, size); }
LOAD_AND_STORE(load_16, store_16, __m512i, 32, 2)
LOAD_AND_STORE(load_32, store_32, __m512i, 16, 4)
LOAD_AND_STORE(load_floats, store_floats, __m512, 16, 4)
LOAD_AND_STORE(load_half_16, store_half_16, __m256i, 16, 2)
HELPER __m256i load_into_half_16(__m256i v, uint64_t m, const void* p) {
    move_lanes(&v, p, m, 16, 2);
    return v;
}
#define _mm256_mask_loadu_epi16 load_into_half_16
#define _mm512_maskz_loadu_epi16 load_16
#define _mm512_mask_storeu_epi16 store_16
#define _mm512_maskz_loadu_epi32 load_32
#define _mm512_mask_storeu_epi32 store_32
#define _mm512_maskz_loadu_ps load_floats
#define _mm512_mask_storeu_ps store_floats
#define _mm256_maskz_loadu_epi16 load_half_16
#define _mm256_mask_storeu_epi16 store_half_16

/* What there is without a mask. */
#define _mm512_mask_slli_epi32(s, m, a, n) _mm512_mask_mov_epi32(s, m, _mm512_slli_epi32(a, n))
#define _mm512_mask_srli_epi32(s, m, a, n) _mm512_mask_mov_epi32(s, m, _mm512_srli_epi32(a, n))
#define _mm512_maskz_slli_epi32(m, a, n) _mm512_maskz_mov_epi32(m, _mm512_slli_epi32(a, n))
#define _mm512_maskz_srli_epi32(m, a, n) _mm512_maskz_mov_epi32(m, _mm512_srli_epi32(a, n))
#define _mm512_maskz_srli_epi64(m, a, n) _mm512_maskz_mov_epi64(m, _mm512_srli_epi64(a, n))
#define _mm512_mask_sub_epi16(s, m, a, b) _mm512_mask_mov_epi16(s, m, _mm512_sub_epi16(a, b))

/* Lanes of other widths, moved or computed: `value` for each lane k of the mask, 0 for the others. */
#define LANES(n, field, value) for (k = 0; k < (n); k++) r.field[k] = m >> k & 1 ? (value) : 0
HELPER __m256i narrow_32(__mmask16 m, __m512i a) {
    const lanes x = { a };
    lanes r;
    int k;
    LANES(16, words, (uint16_t)x.ints[k]);
    return r.half;
}
HELPER __m256i narrow_64(__mmask8 m, __m512i a) {
    const lanes x = { a };
    lanes r;
    int k;
    LANES(8, ints, (uint32_t)x.longs[k]);
    return r.half;
}
HELPER __m512i widen_u16(__mmask16 m, __m256i a) {
    lanes x, r;
    int k;
    x.half = a;
    LANES(16, ints, x.words[k]);
    return r.i;
}
HELPER __m512d widen_floats(__mmask8 m, __m256 a) {
    lanes x, r;
    int k;
    x.half_f = a;
    LANES(8, doubles, (double)x.floats[k]);
    return r.d;
}
HELPER __m512 widen_halves(__mmask16 m, __m256i a) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    lanes x, r;
    int k;
    memcpy(x.floats, &low, sizeof low);
    memcpy(x.floats + 8, &high, sizeof high);
    LANES(16, ints, x.ints[k]);
    return r.f;
}
HELPER __m256i to_halves(__mmask16 m, __m512 a) {
    lanes x, r;
    __m128i low, high;
    int k;
    x.f = a;
    low = _mm256_cvtps_ph(_mm256_loadu_ps(x.floats), 0);
    high = _mm256_cvtps_ph(_mm256_loadu_ps(x.floats + 8), 0);
    memcpy(x.words, &low, sizeof low);
    memcpy(x.words + 8, &high, sizeof high);
    LANES(16, words, x.words[k]);
    return r.half;
}
HELPER __m512 roots(__mmask16 m, __m512 a) {
    lanes x, r;
    int k;
    x.f = a;
    LANES(16, floats, sqrtf(x.floats[k]));
    return r.f;
}
HELPER __m256 half_of(__mmask8 m, __m512 a, int upper) {
    lanes x, r;
    int k;
    x.f = a;
    LANES(8, ints, x.ints[8 * upper + k]);
    return r.half_f;
}
HELPER __m512i shifted_lanes(__mmask16 m, __m512i a, __m512i b, int n) {
    const lanes x = { a }, y = { b };
    lanes r;
    int k;
    LANES(16, ints, k + n < 16 ? y.ints[k + n] : x.ints[k + n - 16]);
    return r.i;
}
HELPER __m512i shuffled_fours(__mmask16 m, __m512i a, __m512i b, int how) {
    const lanes x = { a }, y = { b };
    lanes r;
    int k;
    LANES(16, ints, (k < 8 ? &x : &y)->ints[4 * (how >> 2 * (k / 4) & 3) + k % 4]);
    return r.i;
}
HELPER __m512 mixed_floats(__mmask16 m, __m512 a, __m512 b, int how) {
    lanes x, y, r;
    int k;
    x.f = a;
    y.f = b;
    LANES(16, ints, (k % 4 < 2 ? &x : &y)->ints[k / 4 * 4 + (how >> 2 * (k % 4) & 3)]);
    return r.f;
}
HELPER float first_float(__m512 a) {
    lanes x;
    x.f = a;
    return x.floats[0];
}
#define _mm512_maskz_cvtepi32_epi16 narrow_32
#define _mm512_maskz_cvtepi64_epi32 narrow_64
#define _mm512_maskz_cvtepu16_epi32 widen_u16
#define _mm512_maskz_cvtps_pd widen_floats
#define _mm512_maskz_cvtph_ps widen_halves
#define _mm512_maskz_cvtps_ph(m, a, how) to_halves(m, a)
#define _mm512_maskz_sqrt_ps roots
#define _mm512_maskz_extractf32x8_ps half_of
#define _mm512_maskz_alignr_epi32 shifted_lanes
#define _mm512_maskz_shuffle_i32x4 shuffled_fours
#define _mm512_maskz_shuffle_ps mixed_floats
#define _mm512_maskz_shuffle_f32x4(m, a, b, how) \
    _mm512_castsi512_ps(shuffled_fours(m, _mm512_castps_si512(a), _mm512_castps_si512(b), how))
#define _mm512_cvtss_f32 first_float

/* vdpbf16ps: an fma of the words' upper halves, then one of the lower ones; subnormal numbers are zeros (Intel SDM). SIMDe
   adds the lower ones first. */
HELPER float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
HELPER float half_word(uint32_t word, int upper) {
    const uint32_t u = upper ? word & 0xffff0000u : word << 16;
    float x;
    memcpy(&x, &u, sizeof x);
    return flushed(x);
}
HELPER __m512 add_pairs(__m512 sum, const void* a, const void* b) {
    lanes x, y, r = { 0 };
    int k, upper;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    r.f = sum;
    for (k = 0; k < 16; k++)
        for (upper = 1; upper >= 0; upper--)
            r.floats[k] = flushed(fmaf(half_word(x.ints[k], upper), half_word(y.ints[k], upper), flushed(r.floats[k])));
    return r.f;
}
HELPER __m512 add_products_of_pairs(__m512 sum, __m512bh a, __m512bh b) { return add_pairs(sum, &a, &b); }
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps add_products_of_pairs

#define AMP_IMPLEMENTATION
#include "amp.h"
