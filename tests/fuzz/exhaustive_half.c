/* exhaustive_half.c - amp_convert on all 2^32 floats and all 2^16 halves and bfloat16s, on every instruction
   set of this machine. Usage: exhaustive_half [stride]; a stride of s looks at each s-th block of 65,536.
   float -> half is compared with the F16C instruction where compiler and processor have it; elsewhere, and
   for bfloat16, with integer formulas of another kind than the library's: they compare the magnitude with the
   midpoint of two neighbours, and never add a rounding bit. No float arithmetic at all, so that the program
   means the same under -Ofast. */
#include "../../amp.h"
#include "../test.h"

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__) && !defined(__TINYC__)
  #define HAVE_F16C 1
  #include <cpuid.h>
  #include <immintrin.h>
#else
  #define HAVE_F16C 0
#endif

#define BLOCK 65536u
static uint32_t in[BLOCK];
static float floats[BLOCK];
static uint16_t want_half[BLOCK], want_bf16[BLOCK], out[BLOCK];

/* The bits of the float that has the value of a finite half; bits 0x7c00 count as 65536. */
static uint32_t float_of_half(uint32_t h) {
    uint32_t e = h >> 10, f = h & 0x3ffu;
    if (e > 0) return (e + 112u) << 23 | f << 13;
    if (f == 0) return 0;
    for (e = 113; !(f & 0x400u); e--) f <<= 1;
    return e << 23 | (f & 0x3ffu) << 13;
}
/* Float bits rise with the value, but not in equal steps: the midpoint of the subnormals is taken on
   integers in units of 2^-25, the others on the bits. */
static uint32_t middle_after(uint32_t h) {
    uint32_t m = 2u * h + 1u, e;                              /* (h + 1/2) * 2^-24 = m * 2^-25, m < 2^11 */
    if (h >= 0x400u) return float_of_half(h) + 0x1000u;
    for (e = 113; !(m & 0x800u); e--) m <<= 1;                /* m = 2^11 is 2^-14 */
    return e << 23 | (m & 0x7ffu) << 12;
}
static uint32_t nan_bits(uint32_t mag, uint32_t inf, uint32_t quiet, uint32_t shift) {
    return inf | quiet | (mag & 0x7fffffu) >> shift;
}

/* Magnitudes of a block rise by one, so the nearest half is found by walking. */
static void expect_half(uint32_t first) {
    uint32_t i, h, mag = first & 0x7fffffffu, sign = first >> 16 & 0x8000u, low = 0, high = 0x7c00u;
    while (low < high) {
        uint32_t mid = (low + high + 1) / 2;
        if (float_of_half(mid) <= mag) low = mid;
        else high = mid - 1;
    }
    for (i = 0, h = low; i < BLOCK; i++, mag++) {
        uint32_t middle, r;
        while (h < 0x7c00u && float_of_half(h + 1) <= mag) h++;
        middle = h < 0x7c00u ? middle_after(h) : 0xffffffffu;
        r = mag > middle || (mag == middle && (h & 1u)) ? h + 1 : h;
        want_half[i] = (uint16_t)(sign | (mag > 0x7f800000u ? nan_bits(mag, 0x7c00u, 0x200u, 13) : r));
    }
}
/* A block shares its upper 16 bits: the two candidates are those bits and the next. */
static void expect_bf16(uint32_t first) {
    uint32_t i, upper = first >> 16, odd = upper & 1u;
    for (i = 0; i < BLOCK; i++) {
        uint32_t mag = (first & 0x7fffffffu) | i;
        uint32_t r = i > 0x8000u || (i == 0x8000u && odd) ? upper + 1 : upper;
        want_bf16[i] = (uint16_t)(mag > 0x7f800000u ? upper | 0x40u : r);
    }
}

#if HAVE_F16C
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29)) && (c & (1u << 28)) && (c & (1u << 27));
}
__attribute__((target("avx,f16c"))) static void hardware_half(void) {
    uint32_t i;
    for (i = 0; i < BLOCK; i += 8) {
        __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(floats + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i*)(void*)(want_half + i), h);
    }
}
__attribute__((target("avx,f16c"))) static void hardware_float(const uint16_t* halves, uint32_t* result) {
    uint32_t i;
    for (i = 0; i < BLOCK; i += 8) {
        __m256 f = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(const void*)(halves + i)));
        _mm256_storeu_si256((__m256i*)(void*)(result + i), _mm256_castps_si256(f));
    }
}
#else
static int has_f16c(void) { return 0; }
static void hardware_half(void) { }
static void hardware_float(const uint16_t* halves, uint32_t* result) { (void)halves; (void)result; }
#endif

static long mismatches(const uint16_t* want, const char* what, amp_isa isa) {
    long bad = 0;
    uint32_t i;
    if (memcmp(want, out, sizeof out) == 0) return 0;
    for (i = 0; i < BLOCK; i++)
        if (want[i] != out[i] && bad++ == 0)
            CHECK_MSG(0, "%s, %s: %08x gave %04x, wanted %04x", amp_isa_name(isa), what, in[i], out[i],
                      want[i]);
    return bad;
}

static void all_floats(const amp_isa* isas, int count, uint32_t stride, int hardware) {
    uint32_t block, i;
    long bad = 0;
    int k;
    for (block = 0; block < 65536u; block += stride) {
        for (i = 0; i < BLOCK; i++) in[i] = block << 16 | i;
        memcpy(floats, in, sizeof floats);
        if (hardware) hardware_half();
        else expect_half(block << 16);
        expect_bf16(block << 16);
        for (k = 0; k < count; k++) {
            amp_cpu_force_isa(isas[k]);
            amp_convert(amp_ref_of(out, AMP_F16), amp_f32(floats), BLOCK);
            bad += mismatches(want_half, "half", isas[k]);
            amp_convert(amp_ref_of(out, AMP_BF16), amp_f32(floats), BLOCK);
            bad += mismatches(want_bf16, "bfloat16", isas[k]);
        }
    }
    CHECK_MSG(bad == 0, "%ld wrong", bad);
}

/* The formulas above against the hardware: if they disagree, the machines without F16C test nothing. */
static void formulas_agree(void) {
    static uint16_t formula[BLOCK];
    uint32_t block, i;
    long bad = 0;
    for (block = 0; block < 65536u; block += 7) {
        for (i = 0; i < BLOCK; i++) in[i] = block << 16 | i;
        memcpy(floats, in, sizeof floats);
        expect_half(block << 16);
        memcpy(formula, want_half, sizeof formula);
        hardware_half();
        bad += memcmp(formula, want_half, sizeof formula) != 0;
    }
    CHECK_MSG(bad == 0, "%ld blocks", bad);
}

static void all_halves(amp_isa isa, int hardware) {
    static uint16_t halves[BLOCK];
    static uint32_t want[BLOCK], got[BLOCK];
    uint32_t h;
    long bad = 0;
    amp_cpu_force_isa(isa);
    for (h = 0; h < BLOCK; h++) halves[h] = (uint16_t)h;
    for (h = 0; h < BLOCK; h++) {
        uint32_t mag = h & 0x7fffu, f = float_of_half(mag);
        if (mag >= 0x7c00u) f = 0x7f800000u | (mag & 0x3ffu) << 13 | (mag > 0x7c00u ? 0x400000u : 0u);
        want[h] = (h & 0x8000u) << 16 | f;
    }
    amp_convert(amp_f32(floats), amp_ref_of(halves, AMP_F16), BLOCK);
    memcpy(got, floats, sizeof got);
    bad += memcmp(got, want, sizeof got) != 0;
    if (hardware) {
        hardware_float(halves, want);
        bad += memcmp(got, want, sizeof got) != 0;
    }
    for (h = 0; h < BLOCK; h++) want[h] = h << 16 | ((h & 0x7fffu) > 0x7f80u ? 0x400000u : 0u);
    amp_convert(amp_f32(floats), amp_ref_of(halves, AMP_BF16), BLOCK);
    memcpy(got, floats, sizeof got);
    bad += memcmp(got, want, sizeof got) != 0;
    CHECK_MSG(bad == 0, "on %s", amp_isa_name(isa));
}

int main(int argc, char** argv) {
    static const amp_isa candidates[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    amp_isa isas[4];
    int i, count = 0, hardware = has_f16c();
    long stride = argc > 1 ? strtol(argv[1], NULL, 10) : 1;
    if (stride < 1 || stride > 65536) stride = 1;
    for (i = 0; i < 4; i++)
        if (amp_cpu_force_isa(candidates[i]) == AMP_OK) isas[count++] = candidates[i];
    printf("%ld floats on:", 65536L * ((65535 + stride) / stride));
    for (i = 0; i < count; i++) printf(" %s", amp_isa_name(isas[i]));
    printf("\n");
    if (hardware) formulas_agree();
    else TEST_SKIP("no F16C here: halves are compared with the formulas alone");
    for (i = 0; i < count; i++) all_halves(isas[i], hardware);
    all_floats(isas, count, (uint32_t)stride, hardware);
    TEST_END();
}
