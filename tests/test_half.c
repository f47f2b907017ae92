/* test_half.c - the room `half`: conversions one by one and in bulk, on every instruction set. The reference
   is a table of all 16-bit values and exact comparisons in double with the midpoint of two neighbours. */
#include "helpers.h"
#include <fenv.h>
#include <math.h>

static uint64_t bits64(double d) { uint64_t u; memcpy(&u, &d, sizeof u); return u; }
static double float64(uint64_t u) { double d; memcpy(&d, &u, sizeof d); return d; }

/* --- the reference ------------------------------------------------------------------------ */

typedef struct format {
    amp_dtype dtype;
    int fraction_bits, bias;
    uint16_t inf;                 /* bits of infinity; all smaller bits are finite values in rising order */
    double value[0x8000];         /* of the bits b <= inf; value[inf] is where the next one would be */
} format;
static format half_format = { AMP_F16, 10, 15, 0x7c00, { 0 } };
static format bf16_format = { AMP_BF16, 7, 127, 0x7f80, { 0 } };

/* IEEE 754, 3.4: (-1)^s * 2^(e-bias) * 1.f, or 2^(1-bias) * 0.f where e is 0. */
static void format_init(format* t) {
    int b;
    for (b = 0; b <= t->inf; b++) {
        int e = b >> t->fraction_bits, f = b & ((1 << t->fraction_bits) - 1);
        t->value[b] = e == 0 ? ldexp(f, 1 - t->bias - t->fraction_bits)
                             : ldexp(f + (1 << t->fraction_bits), e - t->bias - t->fraction_bits);
    }
}

/* The largest b with value[b] <= x. */
static int format_floor(const format* t, double x) {
    int low = 0, high = t->inf;
    while (low < high) {
        int mid = (low + high + 1) / 2;
        if (t->value[mid] <= x) low = mid;
        else high = mid - 1;
    }
    return low;
}

/* The nearest of value[b] and value[b+1] to x >= 0, ties to the even one; the midpoint is exact in double. */
static int format_nearest(const format* t, int b, double x) {
    double middle;
    if (b >= t->inf) return t->inf;
    middle = (t->value[b] + t->value[b + 1]) * 0.5;
    return x > middle || (x == middle && (b & 1)) ? b + 1 : b;
}

static uint16_t narrow_nan(const format* t, int sign, uint64_t fraction52) {
    int payload = (int)(fraction52 >> (52 - t->fraction_bits)), quiet = 1 << (t->fraction_bits - 1);
    return (uint16_t)(sign << 15 | t->inf | quiet | payload);
}
static uint16_t reference_double(const format* t, double x) {
    uint64_t u = bits64(x), mag = u & 0x7fffffffffffffffu, inf = (uint64_t)0x7ff << 52;
    int sign = (int)(u >> 63);
    if (mag > inf) return narrow_nan(t, sign, mag & 0xfffffffffffffu);
    if (mag == inf) return (uint16_t)(sign << 15 | t->inf);
    return (uint16_t)(sign << 15 | format_nearest(t, format_floor(t, float64(mag)), float64(mag)));
}

/* The exact value of a float's bits, without reading it as a float: subnormals survive any processor mode. */
static double value_of_float(uint32_t mag) {
    if (mag < 0x800000u) return ldexp((double)mag, -149);
    return ldexp((double)((mag & 0x7fffffu) | 0x800000u), (int)(mag >> 23) - 150);
}
/* The bits of a float that has this value >= 0; a processor told to flush subnormals must not spoil them. */
static uint32_t bits_of_value(double x) {
    return x < ldexp(1, -126) ? (uint32_t)ldexp(x, 149) : to_bits((float)x);
}
static uint16_t reference_float(const format* t, uint32_t u) {
    double x;
    uint32_t mag = u & 0x7fffffffu;
    int sign = (int)(u >> 31);
    if (mag > 0x7f800000u) return narrow_nan(t, sign, (uint64_t)(mag & 0x7fffffu) << 29);
    if (mag == 0x7f800000u) return (uint16_t)(sign << 15 | t->inf);
    x = value_of_float(mag);
    return (uint16_t)(sign << 15 | format_nearest(t, format_floor(t, x), x));
}
/* What 16 bits are as a float: by value, or inf, or a quiet NaN with the payload on top. */
static uint32_t reference_widen(const format* t, int h) {
    int mag = h & 0x7fff;
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t fraction = ((uint32_t)mag & ((1u << t->fraction_bits) - 1u)) << (23 - t->fraction_bits);
    if (mag > t->inf) return sign | 0x7fc00000u | fraction;
    if (mag == t->inf) return sign | 0x7f800000u;
    return sign | bits_of_value(t->value[mag]);
}

static uint16_t from_float(const format* t, float f) {
    return t->dtype == AMP_F16 ? amp_half_from_float(f).bits : amp_bfloat16_from_float(f).bits;
}
static uint16_t from_double(const format* t, double d) {
    return t->dtype == AMP_F16 ? amp_half_from_double(d).bits : amp_bfloat16_from_double(d).bits;
}

static const amp_isa all_isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
/* Runs a test on each instruction set that this machine has. */
#define on_every_isa(test) run_on_every_isa(#test, test)
static void run_on_every_isa(const char* name, void (*test)(void)) {
    size_t i;
    for (i = 0; i < sizeof all_isas / sizeof *all_isas; i++) {
        long before = test_failed;
        if (amp_cpu_force_isa(all_isas[i]) != AMP_OK) continue;
        test_run(name, test);
        if (test_failed != before) printf("  on %s\n", amp_isa_name(all_isas[i]));
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* --- one value ------------------------------------------------------------------------------ */

static void check_all_16(const format* t) {
    int h, quiet = 1 << (t->fraction_bits - 1);
    for (h = 0; h <= 0xffff; h++) {
        int mag = h & 0x7fff, is_nan = mag > t->inf;
        uint32_t want = reference_widen(t, h);
        amp_half a;
        amp_bfloat16 b;
        float f;
        double d;
        a.bits = b.bits = (uint16_t)h;
        f = t->dtype == AMP_F16 ? amp_half_to_float(a) : amp_bfloat16_to_float(b);
        d = t->dtype == AMP_F16 ? amp_half_to_double(a) : amp_bfloat16_to_double(b);
        CHECK_MSG(to_bits(f) == want, "%04x gave %08x, wanted %08x", h, to_bits(f), want);
        if (mag < t->inf)
            CHECK_MSG(bits64(d) == bits64(h & 0x8000 ? -t->value[mag] : t->value[mag]), "%04x", h);
        CHECK(from_float(t, f) == (is_nan ? h | quiet : h));
        CHECK(from_double(t, d) == (is_nan ? h | quiet : h));
        CHECK(amp_is_nan(amp_ref_of(&a, t->dtype)) == is_nan);
        CHECK(amp_is_inf(amp_ref_of(&a, t->dtype)) == (mag == t->inf));
        CHECK(amp_is_finite(amp_ref_of(&a, t->dtype)) == (mag < t->inf));
        CHECK(amp_is_nan(amp_f32(&f)) == is_nan);
        CHECK(amp_is_inf(amp_f32(&f)) == (mag == t->inf));
        CHECK(amp_is_finite(amp_f32(&f)) == (mag < t->inf));
        CHECK(amp_is_nan(amp_ref_of(&d, AMP_F64)) == is_nan);
        CHECK(amp_is_inf(amp_ref_of(&d, AMP_F64)) == (mag == t->inf));
        CHECK(amp_is_finite(amp_ref_of(&d, AMP_F64)) == (mag < t->inf));
    }
}
static void test_all_16_bit_values(void) {
    check_all_16(&half_format);
    check_all_16(&bf16_format);
}

static void test_known_values(void) {
    CHECK(amp_half_from_float(1.0f).bits == 0x3c00);
    CHECK(amp_half_from_float(-2.0f).bits == 0xc000);
    CHECK(amp_half_from_float(65504.0f).bits == 0x7bff);
    CHECK(amp_half_from_float(65519.996f).bits == 0x7bff);
    CHECK(amp_half_from_float(65520.0f).bits == 0x7c00);
    CHECK(amp_half_from_float(65568.01f).bits == 0x7c00);
    CHECK(amp_half_from_float(1e-8f).bits == 0);
    CHECK(amp_half_from_float(-1e-8f).bits == 0x8000);
    CHECK(amp_half_from_float(2.98023224e-8f).bits == 0);              /* 2^-25, a tie */
    CHECK(amp_half_from_float(2.98023259e-8f).bits == 1);
    CHECK(amp_half_from_double(1.0 + ldexp(1, -11) + ldexp(1, -40)).bits == 0x3c01);     /* float: 0x3c00 */
    CHECK(amp_half_from_double(1.0 + 3 * ldexp(1, -11) - ldexp(1, -40)).bits == 0x3c01); /* float: 0x3c02 */
    CHECK(amp_bfloat16_from_float(1.0f).bits == 0x3f80);
    CHECK(amp_bfloat16_from_float(3.4028235e38f).bits == 0x7f80);
    CHECK(amp_bfloat16_from_double(1.0 + ldexp(1, -8) + ldexp(1, -40)).bits == 0x3f81);
    CHECK(AMP_HALF_MAX == amp_half_to_float(amp_half_from_float(1e4f * 6.55f)));
    CHECK(to_bits(AMP_HALF_MIN) == to_bits((float)half_format.value[0x400]));
    CHECK(to_bits(AMP_HALF_TRUE_MIN) == to_bits((float)half_format.value[1]));
}

/* --- floats --------------------------------------------------------------------------------- */

#define BATCH 4096
/* Converts a batch of float bits in bulk and, if `scalar`, one by one, and compares with want[]. */
static long check_float_batch(const format* t, const uint32_t* in, const uint16_t* want, int scalar) {
    static float f[BATCH];
    static uint16_t out[BATCH];
    long bad = 0;
    int i;
    memcpy(f, in, sizeof f);
    amp_convert(amp_ref_of(out, t->dtype), amp_f32(f), BATCH);
    for (i = 0; i < BATCH; i++) {
        if (out[i] == want[i] && (!scalar || from_float(t, f[i]) == want[i])) continue;
        if (bad++ == 0) CHECK_MSG(0, "%s of %08x gave %04x, wanted %04x", amp_dtype_name(t->dtype), in[i],
                                  out[i], want[i]);
    }
    return bad;
}

/* A sweep over the floats in steps of an odd number, rising, so that the table is walked and not searched. */
static void sweep_floats(const format* t) {
    static uint32_t in[BATCH];
    static uint16_t want[BATCH];
    uint32_t step = 1021, mag = 0;
    long bad = 0;
    int i, b = 0, done = 0, scalar = amp_cpu_isa() == AMP_ISA_SCALAR;
    while (!done) {
        for (i = 0; i < BATCH; i++) {
            uint32_t sign = (uint32_t)(i & 1) << 31;
            double x = mag < 0x7f800000u ? value_of_float(mag) : 0;
            in[i] = sign | mag;
            while (mag < 0x7f800000u && b < t->inf && t->value[b + 1] <= x) b++;
            want[i] = mag < 0x7f800000u ? (uint16_t)(format_nearest(t, b, x) | (int)(sign >> 16))
                                        : reference_float(t, in[i]);
            if (0x7fffffffu - mag < step) done = 1;
            else mag += step;
        }
        bad += check_float_batch(t, in, want, scalar);
    }
    CHECK(bad == 0);
}
static void test_float_sweep(void) {
    sweep_floats(&half_format);
    sweep_floats(&bf16_format);
}

/* Every exponent and sign with fractions at the edges of each cut: around every single bit. */
static void edge_floats(const format* t) {
    static uint32_t in[BATCH];
    static uint16_t want[BATCH];
    uint32_t fraction[192];
    int e, i, k, n = 0;
    long bad = 0;
    for (k = 0; k < 23; k++)
        for (i = -1; i <= 1; i++) {
            fraction[n++] = ((1u << k) + (uint32_t)i) & 0x7fffffu;
            fraction[n++] = (0x800000u - (1u << k) + (uint32_t)i) & 0x7fffffu;
        }
    while (n < 192) fraction[n++] = test_random() & 0x7fffffu;
    for (e = 0; e < 512; e++) {
        for (i = 0; i < BATCH; i++) {
            in[i] = (uint32_t)e << 23 | (i < 192 ? fraction[i] : test_random() & 0x7fffffu);
            want[i] = reference_float(t, in[i]);
        }
        bad += check_float_batch(t, in, want, 1);
    }
    CHECK(bad == 0);
}
/* Each 16-bit value, the midpoint to the next one, and the floats beside both: every rounding decision. */
static void neighbour_floats(const format* t) {
    static uint32_t in[BATCH];
    static uint16_t want[BATCH];
    int b, n = 0, k;
    long bad = 0;
    for (b = 0; b < t->inf; b++) {
        uint32_t value = bits_of_value(t->value[b]);
        uint32_t next = b + 1 < t->inf ? bits_of_value(t->value[b + 1]) : value;
        uint32_t middle = bits_of_value((t->value[b] + t->value[b + 1]) * 0.5);
        uint32_t around[3];
        around[0] = value; around[1] = next; around[2] = middle;
        for (k = 0; k < 18; k++) {
            in[n] = ((around[k % 3] + (uint32_t)(k / 3 % 3) - 1u) & 0x7fffffffu) | (uint32_t)(k / 9) << 31;
            want[n] = reference_float(t, in[n]);
            if (++n < BATCH) continue;
            bad += check_float_batch(t, in, want, 1);
            n = 0;
        }
    }
    CHECK(bad == 0);
}
static void test_float_edges(void) {
    edge_floats(&half_format);
    edge_floats(&bf16_format);
    neighbour_floats(&half_format);
    neighbour_floats(&bf16_format);
}

/* The bulk widening of all 65,536 values. */
static void test_widen_bulk(void) {
    static uint16_t in[65536];
    static float out[65536];
    static double wide[65536];
    int h, k;
    for (h = 0; h < 65536; h++) in[h] = (uint16_t)h;
    for (k = 0; k < 2; k++) {
        const format* t = k ? &bf16_format : &half_format;
        long bad = 0;
        CHECK(amp_convert(amp_f32(out), amp_ref_of(in, t->dtype), 65536) == AMP_OK);
        CHECK(amp_convert(amp_ref_of(wide, AMP_F64), amp_ref_of(in, t->dtype), 65536) == AMP_OK);
        for (h = 0; h < 65536; h++) {
            amp_half a;
            amp_bfloat16 b;
            a.bits = b.bits = (uint16_t)h;
            bad += to_bits(out[h]) != reference_widen(t, h);
            bad += bits64(wide[h]) != bits64(k ? amp_bfloat16_to_double(b) : amp_half_to_double(a));
        }
        CHECK_MSG(bad == 0, "%ld wrong from %s", bad, amp_dtype_name(t->dtype));
    }
}

/* --- doubles -------------------------------------------------------------------------------- */

static long check_doubles(const format* t, const double* in, int n) {
    static uint16_t out[BATCH];
    long bad = 0;
    int i;
    amp_convert(amp_ref_of(out, t->dtype), amp_ref_of(in, AMP_F64), (size_t)n);
    for (i = 0; i < n; i++) {
        uint16_t want = reference_double(t, in[i]);
        if (out[i] == want && from_double(t, in[i]) == want) continue;
        if (bad++ == 0)
            CHECK_MSG(0, "%s of %a gave %04x, wanted %04x", amp_dtype_name(t->dtype), in[i], out[i], want);
    }
    return bad;
}
/* Values, midpoints, and what lies beside them at distances that a float cannot see. */
static void neighbour_doubles(const format* t) {
    static double in[BATCH];
    int b, n = 0, k;
    long bad = 0;
    for (b = 0; b < t->inf; b++) {
        double around[2];
        around[0] = t->value[b];
        around[1] = (t->value[b] + t->value[b + 1]) * 0.5;
        for (k = 0; k < 10; k++) {
            static const int64_t shift[5] = { 0, 1, -1, (int64_t)1 << 20, -((int64_t)1 << 20) };
            uint64_t u = bits64(around[k & 1]);
            if ((int64_t)u + shift[k / 2] >= 0) u = (uint64_t)((int64_t)u + shift[k / 2]);
            in[n] = float64(u | (uint64_t)(b & 1) << 63);
            if (++n == BATCH) { bad += check_doubles(t, in, n); n = 0; }
        }
    }
    bad += check_doubles(t, in, n);
    CHECK(bad == 0);
}
static void random_doubles(const format* t) {
    static double in[BATCH];
    long bad = 0;
    int e, i;
    for (e = 0; e < 4096; e++) {                    /* every exponent and sign */
        for (i = 0; i < 64; i++) {
            uint64_t fraction = (uint64_t)test_random() << 31 ^ (uint64_t)test_random();
            if (i < 8) fraction = (uint64_t)0 - (uint64_t)(i & 1);
            if (i >= 8 && i < 16) fraction = (uint64_t)1 << (52 - i);
            in[i] = float64((uint64_t)e << 52 | (fraction & 0xfffffffffffffu));
        }
        bad += check_doubles(t, in, 64);
    }
    CHECK(bad == 0);
}
static void test_doubles(void) {
    neighbour_doubles(&half_format);
    neighbour_doubles(&bf16_format);
    random_doubles(&half_format);
    random_doubles(&bf16_format);
}

/* double -> float by comparing with the two floats beside it; the lower one is found by search. */
static uint32_t reference_double_to_float(double x) {
    uint64_t u = bits64(x), mag = u & 0x7fffffffffffffffu;
    uint32_t sign = (uint32_t)(u >> 63) << 31, low = 0, high = 0x7f800000u;
    double middle;
    if (mag > (uint64_t)0x7ff << 52) return sign | 0x7fc00000u | (uint32_t)((mag & 0xfffffffffffffu) >> 29);
    if (mag == (uint64_t)0x7ff << 52) return sign | 0x7f800000u;
    while (low < high) {
        uint32_t mid = low + (high - low + 1) / 2;
        if (value_of_float(mid) <= float64(mag)) low = mid;
        else high = mid - 1;
    }
    if (low == 0x7f800000u) return sign | low;
    middle = (value_of_float(low) + value_of_float(low + 1)) * 0.5;
    return sign | (float64(mag) > middle || (float64(mag) == middle && (low & 1)) ? low + 1 : low);
}
static void test_double_and_float(void) {
    static double in[BATCH], back[BATCH];
    static float out[BATCH], same[BATCH];
    int i, round;
    long bad = 0;
    for (round = 0; round < 24; round++) {
        for (i = 0; i < BATCH; i++) {
            uint64_t e = (uint64_t)(round < 4 ? (i & 2047) : 896 - 28 + test_random() % 320);
            uint64_t fraction = (uint64_t)test_random() << 31 ^ (uint64_t)test_random();
            if (round & 1) fraction &= ~(uint64_t)0xffffff;           /* many ties at bit 28 and near it */
            if (round & 2) fraction |= (uint64_t)1 << (28 + test_random() % 24);
            in[i] = float64((uint64_t)(i & 1) << 63 | e << 52 | (fraction & 0xfffffffffffffu));
        }
        amp_convert(amp_f32(out), amp_ref_of(in, AMP_F64), BATCH);
        amp_convert(amp_ref_of(back, AMP_F64), amp_f32(out), BATCH);
        amp_convert(amp_f32(same), amp_ref_of(back, AMP_F64), BATCH);
        for (i = 0; i < BATCH; i++) {
            uint32_t u = to_bits(out[i]), mag = u & 0x7fffffffu;
            double value = mag < 0x7f800000u ? value_of_float(mag) : 0;
            bad += u != reference_double_to_float(in[i]) || to_bits(same[i]) != u;
            if (mag < 0x7f800000u) bad += bits64(back[i]) != bits64(u >> 31 ? -value : value);
        }
    }
    CHECK_MSG(bad == 0, "%ld wrong", bad);
}

/* --- bulk: lengths, alignment, in place, all pairs --------------------------------------------- */

/* Finite test values: zeros, and in every other run of 32 also some outside half's normal range. */
static double some_value(void) {
    static int calls;
    int wild = ++calls & 32;
    int exponent = wild ? (int)(test_random() % 48) - 30 : (int)(test_random() % 24) - 10;
    double v = test_random() % 8 == 0 ? 0.0 : ldexp(1.5 + 0.4 * (double)test_uniform(), exponent);
    return test_random() & 1 ? v : -v;
}

#define GUARD 64
static void test_lengths_and_guards(void) {
    static double src_store[128], dst_store[160], want_store[160];   /* doubles for alignment */
    int s, d;
    size_t n, offset, i;
    long bad = 0;
    for (s = 0; s < 4; s++) for (d = 0; d < 4; d++)
        for (n = 0; n <= 70; n++) for (offset = 0; offset < 4; offset++) {
            size_t src_size = amp_dtype_size(TYPES[s]), dst_size = amp_dtype_size(TYPES[d]);
            char* src = (char*)src_store + offset * src_size;
            char* dst = (char*)dst_store + GUARD + (3 - offset) * dst_size;
            char* want = (char*)want_store + (dst - (char*)dst_store);
            memset(dst_store, 0xa5, sizeof dst_store);
            memset(want_store, 0xa5, sizeof want_store);
            for (i = 0; i < n; i++) {
                put_value(src, TYPES[s], i, some_value());
                put_value(want, TYPES[d], i, value_at(src, TYPES[s], i));
            }
            bad += amp_convert(amp_ref_of(dst, TYPES[d]), amp_ref_of(src, TYPES[s]), n) != AMP_OK;
            bad += memcmp(dst_store, want_store, sizeof dst_store) != 0;
        }
    CHECK_MSG(bad == 0, "%ld wrong", bad);
}

static void test_in_place(void) {
    static const size_t lengths[] = { 1, 15, 16, 17, 1023, 1024, 1025, 5000 };
    static double source[5000], buffer[5008], want[5008];
    size_t k, i;
    int s, d, with_desc;
    for (s = 0; s < 4; s++) for (d = 0; d < 4; d++) for (with_desc = 0; with_desc < 2; with_desc++)
        for (k = 0; k < sizeof lengths / sizeof *lengths; k++) {
            size_t n = lengths[k];
            size_t dst_bytes = n * amp_dtype_size(TYPES[d]), src_bytes = n * amp_dtype_size(TYPES[s]);
            size_t used = dst_bytes > src_bytes ? dst_bytes : src_bytes;
            amp_convert_desc desc;
            const amp_convert_desc* options = with_desc ? &desc : NULL;
            int clean = 1;
            memset(&desc, 0, sizeof desc);
            desc.saturate = 1;
            for (i = 0; i < n; i++) put_value(source, TYPES[s], i, some_value());
            memset(buffer, 0x5a, sizeof buffer);
            memset(want, 0x5a, sizeof want);
            memcpy(buffer, source, src_bytes);
            CHECK(amp_convert_with(amp_ref_of(want, TYPES[d]), amp_ref_of(source, TYPES[s]), n,
                options) == AMP_OK);
            CHECK(amp_convert_with(amp_ref_of(buffer, TYPES[d]), amp_ref_of(buffer, TYPES[s]), n,
                options) == AMP_OK);
            CHECK_MSG(memcmp(buffer, want, dst_bytes) == 0, "%s to %s, %u elements", amp_dtype_name(TYPES[s]),
                      amp_dtype_name(TYPES[d]), (unsigned)n);
            for (i = used; i < sizeof buffer; i++) clean &= ((const unsigned char*)buffer)[i] == 0x5a;
            for (i = dst_bytes; i < sizeof want; i++) clean &= ((const unsigned char*)want)[i] == 0x5a;
            CHECK_MSG(clean, "wrote behind %u elements", (unsigned)n);
        }
}

/* Long enough for threads, where the compiler has them. */
static void test_long_array(void) {
    size_t n = 300001, i;
    long bad = 0;
    float* src = (float*)malloc(n * sizeof *src);
    uint16_t* dst = (uint16_t*)malloc(n * sizeof *dst);
    if (!src || !dst) { TEST_SKIP("no memory"); free(src); free(dst); return; }
    for (i = 0; i < n; i++) src[i] = (float)some_value();
    CHECK(amp_convert(amp_ref_of(dst, AMP_F16), amp_f32(src), n) == AMP_OK);
    for (i = 0; i < n; i++) bad += dst[i] != amp_half_from_float(src[i]).bits;
    CHECK(amp_convert(amp_f32(src), amp_ref_of(dst, AMP_F16), n) == AMP_OK);
    for (i = 0; i < n; i++) bad += amp_half_from_float(src[i]).bits != dst[i];
    CHECK_MSG(bad == 0, "%ld wrong", bad);
    free(src);
    free(dst);
}

/* Larger than the caches, where stores go past them: the same bits as piece by piece, nothing before or behind. */
static void test_larger_than_cache(void) {
    enum { N = 6000001, PIECE = 4099, LEAD = 3 };
    static const amp_dtype pairs[][2] = { { AMP_F32, AMP_F16 }, { AMP_F16, AMP_F32 }, { AMP_F32, AMP_BF16 } };
    char* src = (char*)malloc((size_t)N * 4);
    char* dst = (char*)malloc((size_t)(N + 2 * LEAD) * 4);
    float want[PIECE + LEAD], piece[PIECE];
    size_t k, i, m;
    if (!src || !dst) { TEST_SKIP("no memory"); free(src); free(dst); return; }
    for (k = 0; k < sizeof pairs / sizeof *pairs; k++) {
        size_t src_size = amp_dtype_size(pairs[k][0]), dst_size = amp_dtype_size(pairs[k][1]);
        char* first = dst + LEAD * dst_size;
        long bad = 0;
        for (i = 0; i < PIECE; i++) put_value(piece, pairs[k][0], i, some_value());
        for (i = 0; i < N; i += m) {
            m = N - i < PIECE ? N - i : PIECE;
            memcpy(src + i * src_size, piece, m * src_size);
        }
        memset(dst, 0xa5, (size_t)(N + 2 * LEAD) * dst_size);
        memset(want, 0xa5, sizeof want);
        CHECK(amp_convert(amp_ref_of(first, pairs[k][1]), amp_ref_of(src, pairs[k][0]), N) == AMP_OK);
        bad += memcmp(dst, want, LEAD * dst_size) != 0;
        bad += memcmp(first + N * dst_size, want, LEAD * dst_size) != 0;
        CHECK(amp_convert(amp_ref_of(want, pairs[k][1]), amp_ref_of(piece, pairs[k][0]), PIECE) == AMP_OK);
        for (i = 0; i < N; i += m) {
            m = N - i < PIECE ? N - i : PIECE;
            bad += memcmp(first + i * dst_size, want, m * dst_size) != 0;
        }
        CHECK_MSG(bad == 0, "%s to %s: %ld pieces wrong", amp_dtype_name(pairs[k][0]), amp_dtype_name(pairs[k][1]), bad);
    }
    free(src);
    free(dst);
}

/* The rounding mode of the processor changes nothing. */
static void test_rounding_modes(void) {
    static const int round_modes[] = {
#ifdef FE_UPWARD
        FE_UPWARD,
#endif
#ifdef FE_DOWNWARD
        FE_DOWNWARD,
#endif
#ifdef FE_TOWARDZERO
        FE_TOWARDZERO,
#endif
        FE_TONEAREST };
    static uint32_t in[BATCH];
    static float f[BATCH], narrow[BATCH], want_narrow[BATCH], wide[BATCH], want_wide[BATCH];
    static double d[BATCH];
    static uint16_t out[BATCH], want[BATCH];
    size_t m;
    int i, k;
    for (i = 0; i < BATCH; i++) {
        in[i] = (96u + test_random() % 50u) << 23 | (test_random() & 0x7fffffu) | (uint32_t)(i & 1) << 31;
        d[i] = some_value() * (1 + 1e-10);
    }
    memcpy(f, in, sizeof f);
    amp_convert(amp_f32(want_narrow), amp_ref_of(d, AMP_F64), BATCH);
    for (m = 0; m < sizeof round_modes / sizeof *round_modes; m++) for (k = 0; k < 2; k++) {
        const format* t = k ? &bf16_format : &half_format;
        for (i = 0; i < BATCH; i++) want[i] = reference_float(t, in[i]);
        amp_convert(amp_f32(want_wide), amp_ref_of(want, t->dtype), BATCH);
        fesetround(round_modes[m]);
        amp_convert(amp_ref_of(out, t->dtype), amp_f32(f), BATCH);
        amp_convert(amp_f32(wide), amp_ref_of(want, t->dtype), BATCH);
        amp_convert(amp_f32(narrow), amp_ref_of(d, AMP_F64), BATCH);
        fesetround(FE_TONEAREST);
        CHECK(memcmp(out, want, sizeof out) == 0);
        CHECK(memcmp(wide, want_wide, sizeof wide) == 0);
        CHECK(memcmp(narrow, want_narrow, sizeof narrow) == 0);
    }
}

/* Control words under which float arithmetic flushes subnormals or rewrites NaNs; conversions do not care. */
#if defined(__aarch64__) && defined(__GNUC__)
static const uint64_t modes[] = { 1u << 24, 1u << 25, 1u << 26, 7u << 24 };    /* FZ, DN, AHP, all */
static uint64_t mode_set(uint64_t word) {
    uint64_t old;
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(word));
    return old;
}
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__TINYC__)
static const uint64_t modes[] = { 0x8000, 0x40, 0x8040, 0xe040 };  /* FTZ, DAZ, both, and towards 0 */
static uint64_t mode_set(uint64_t word) {
    uint32_t old, next = (uint32_t)word;
    __asm__ volatile("stmxcsr %0" : "=m"(old));
    next |= 0x1f80u;                                                            /* all exceptions masked */
    __asm__ volatile("ldmxcsr %0" : : "m"(next));
    return old;
}
#else
static const uint64_t modes[] = { 0 };
static uint64_t mode_set(uint64_t word) { return word; }
#endif

static void test_processor_modes(void) {
    static uint32_t in[BATCH];
    static float f[BATCH], narrow[BATCH];
    static double d[BATCH], want_wide[BATCH];
    static uint16_t out[BATCH], want[BATCH], again[BATCH];
    size_t m;
    int i, k;
    for (i = 0; i < BATCH; i++) {
        /* subnormal floats, subnormal halves, NaNs, 1 to 2 */
        static const uint32_t top[4] = { 0, 0x33800000u, 0x7f800000u, 0x3f800000u };
        int kind = i >> 6 & 3;                       /* in runs, because kernels work on 16 or 32 at a time */
        in[i] = (top[kind] + (kind == 1 ? test_random() % 12u << 23 : 0u)) | (test_random() & 0x7fffffu)
              | (test_random() & 1u) << 31;
    }
    memcpy(f, in, sizeof f);
    amp_convert(amp_ref_of(want_wide, AMP_F64), amp_f32(f), BATCH);
    for (m = 0; m < sizeof modes / sizeof *modes; m++) for (k = 0; k < 2; k++) {
        const format* t = k ? &bf16_format : &half_format;
        uint64_t old;
        for (i = 0; i < BATCH; i++) want[i] = reference_float(t, in[i]);
        old = mode_set(modes[m]);
        amp_convert(amp_ref_of(out, t->dtype), amp_f32(f), BATCH);
        amp_convert(amp_ref_of(d, AMP_F64), amp_f32(f), BATCH);
        amp_convert(amp_f32(narrow), amp_ref_of(want, t->dtype), BATCH);
        amp_convert(amp_ref_of(again, t->dtype), amp_f32(narrow), BATCH);
        amp_convert(amp_f32(narrow), amp_ref_of(d, AMP_F64), BATCH);
        mode_set(old);
        CHECK(memcmp(out, want, sizeof out) == 0);
        CHECK(memcmp(again, want, sizeof out) == 0);
        CHECK(memcmp(d, want_wide, sizeof d) == 0);
        amp_convert(amp_ref_of(out, t->dtype), amp_f32(narrow), BATCH);
        CHECK(memcmp(out, want, sizeof out) == 0);
    }
}

/* --- saturation ------------------------------------------------------------------------------- */

static void test_saturate(void) {
    /* With inf and NaN as bits. clamped: how many of them become 65504 in half. */
    static const uint32_t in[12] = {
        0x3f800000u, 0x477fe000u, 0x477fefffu, 0x477ff000u, 0xc77ff000u, 0x7f800000u,
        0xff800000u, 0x7fc00000u, 0xffa00000u, 0x7f7fffffu, 0x00000001u, 0xc7800000u };
    static const uint16_t want[12] = {
        0x3c00, 0x7bff, 0x7bff, 0x7bff, 0xfbff, 0x7bff, 0xfbff, 0x7e00, 0xff00, 0x7bff, 0x0000, 0xfbff };
    float f[12];
    uint16_t out[12];
    double wide[12];
    size_t count = 100;
    amp_convert_desc desc;
    int i;
    memset(&desc, 0, sizeof desc);
    desc.saturate = 1;
    desc.saturated = &count;
    memcpy(f, in, sizeof f);
    CHECK(amp_convert_with(amp_ref_of(out, AMP_F16), amp_f32(f), 12, &desc) == AMP_OK);
    for (i = 0; i < 12; i++) CHECK_MSG(out[i] == want[i], "%08x gave %04x", in[i], out[i]);
    CHECK_MSG(count == 106, "count %u", (unsigned)count);
    /* to bfloat16: FLT_MAX rounds to infinity there, so 3 are clamped */
    CHECK(amp_convert_with(amp_ref_of(out, AMP_BF16), amp_f32(f), 12, &desc) == AMP_OK);
    CHECK(out[5] == 0x7f7f && out[6] == 0xff7f && out[9] == 0x7f7f && out[7] == 0x7fc0 && count == 109);
    /* to double: the infinities become DBL_MAX */
    CHECK(amp_convert_with(amp_ref_of(wide, AMP_F64), amp_f32(f), 12, &desc) == AMP_OK);
    CHECK(bits64(wide[5]) == 0x7fefffffffffffffu && bits64(wide[6]) == 0xffefffffffffffffu && count == 111);
    CHECK((bits64(wide[7]) & 0x7fffffffffffffffu) == 0x7ff8000000000000u);
    /* same type, and in place */
    CHECK(amp_convert_with(amp_f32(f), amp_f32(f), 12, &desc) == AMP_OK);
    CHECK(to_bits(f[5]) == 0x7f7fffffu && to_bits(f[6]) == 0xff7fffffu && to_bits(f[9]) == 0x7f7fffffu);
    CHECK(count == 113);
    /* doubles, straight to half; without the counter */
    desc.saturated = NULL;
    wide[0] = 1e300; wide[1] = -65520; wide[2] = 65519.999;
    CHECK(amp_convert_with(amp_ref_of(out, AMP_F16), amp_ref_of(wide, AMP_F64), 3, &desc) == AMP_OK);
    CHECK(out[0] == 0x7bff && out[1] == 0xfbff && out[2] == 0x7bff && count == 113);
}

/* A host that traps overflow looks at the same flag: a saturating conversion must not raise it. */
static void test_saturate_raises_nothing(void) {
#ifdef FE_OVERFLOW
    float f[40];
    uint16_t out[40];
    amp_convert_desc desc;
    int i;
    memset(&desc, 0, sizeof desc);
    desc.saturate = 1;
    for (i = 0; i < 40; i++) f[i] = i & 1 ? 1e6f : -3e38f;
    feclearexcept(FE_ALL_EXCEPT);
    amp_convert_with(amp_ref_of(out, AMP_F16), amp_f32(f), 40, &desc);
    amp_convert_with(amp_ref_of(out, AMP_BF16), amp_f32(f), 40, &desc);
    CHECK(!fetestexcept(FE_OVERFLOW | FE_INVALID | FE_DIVBYZERO));
    CHECK(out[1] == 0x4974);
#endif
}

/* --- instruction sets ---------------------------------------------------------------------------- */

/* No processor has both NEON and AVX2; what is refused changes nothing. */
static void test_isa(void) {
    static const char* const names[] = { "auto", "scalar", "neon", "avx2", "avx512", "avx512_bf16", "?" };
    const amp_isa now = amp_cpu_isa();
    int i, refused = 0;
    for (i = 0; i < 7; i++) CHECK(strcmp(amp_isa_name((amp_isa)i), names[i]) == 0);
    CHECK(strcmp(amp_isa_name((amp_isa)-1), "?") == 0 && strcmp(amp_isa_name((amp_isa)0x7fffffff), "?") == 0);
    for (i = 1; i < 7; i++) {
        amp_result r;
        amp_cpu_force_isa(now);
        r = amp_cpu_force_isa((amp_isa)i);
        CHECK(r == AMP_OK ? amp_cpu_isa() == (amp_isa)i : r == AMP_ERR_UNSUPPORTED && amp_cpu_isa() == now);
        refused += r != AMP_OK;
    }
    CHECK(refused >= 2 && amp_cpu_force_isa(AMP_ISA_SCALAR) == AMP_OK);
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK && amp_cpu_isa() != AMP_ISA_AUTO);
#if !defined(__aarch64__)
    CHECK(amp_cpu_force_isa(AMP_ISA_NEON) == AMP_ERR_UNSUPPORTED && amp_cpu_isa() != AMP_ISA_NEON);
#endif
    amp_cpu_force_isa(now);
}

/* --- stochastic rounding ------------------------------------------------------------------------ */

/* The rule: away from zero if the random word is below the first 32 bits of the fraction cut off. */
static uint16_t reference_stochastic(const format* t, double x, uint32_t random) {
    uint64_t u = bits64(x), mag = u & 0x7fffffffffffffffu;
    int b, up = 0, sign = (int)(u >> 63);
    double cut;
    if (mag >= (uint64_t)0x7ff << 52) return reference_double(t, x);
    b = format_floor(t, float64(mag));
    /* A step is a power of two and x lies less than one above value[b]: all exact but ldexp of a tiny x. */
    if (b < t->inf) {
        cut = (float64(mag) - t->value[b]) / (t->value[b + 1] - t->value[b]);
        up = (double)random < floor(ldexp(cut, 32));
    }
    return (uint16_t)(sign << 15 | (b + up));
}

static void test_stochastic_rule(void) {
    static double in[BATCH];
    static float f[BATCH];
    static uint16_t out[BATCH], again[BATCH];
    amp_convert_desc desc;
    int k, i, source;
    memset(&desc, 0, sizeof desc);
    desc.rounding = AMP_ROUND_STOCHASTIC;
    desc.seed = 77;
    desc.offset = 0xffffffffffffff03u;          /* the stream position wraps inside the array */
    for (k = 0; k < 2; k++) for (source = 0; source < 2; source++) {
        const format* t = k ? &bf16_format : &half_format;
        long bad = 0;
        for (i = 0; i < BATCH; i++) {
            uint32_t e = k ? test_random() % 256 : 90 + test_random() % 60;
            uint32_t u = (uint32_t)(i & 1) << 31 | e << 23 | (test_random() & 0x7fffffu);
            uint32_t mag = u & 0x7fffffffu;
            double x = mag < 0x7f800000u ? value_of_float(mag) : (double)from_bits(mag);
            memcpy(&f[i], &u, 4);
            in[i] = i & 1 ? -x : x;
            if (source) in[i] *= 1 + 1e-12 * (double)(test_random() % 1000);
        }
        if (source) CHECK(amp_convert_with(amp_ref_of(out, t->dtype), amp_ref_of(in, AMP_F64),
            BATCH, &desc) == AMP_OK);
        else CHECK(amp_convert_with(amp_ref_of(out, t->dtype), amp_f32(f), BATCH, &desc) == AMP_OK);
        for (i = 0; i < BATCH; i++) {
            uint32_t random = amp_random_bits(desc.seed, desc.offset + (uint64_t)i), u = to_bits(f[i]);
            uint16_t want = reference_stochastic(t, in[i], random);
            if (!source && (u & 0x7fffffffu) > 0x7f800000u) want = reference_float(t, u);
            if (out[i] != want && bad++ == 0)
                CHECK_MSG(0, "%s of %a gave %04x, not %04x", amp_dtype_name(t->dtype), in[i], out[i], want);
        }
        CHECK_MSG(bad == 0, "%ld wrong", bad);
        /* the same again from a later element: a pure function of seed and position */
        desc.offset += 1001;
        if (source) amp_convert_with(amp_ref_of(again, t->dtype), amp_ref_of(in + 1001, AMP_F64),
            700, &desc);
        else amp_convert_with(amp_ref_of(again, t->dtype), amp_f32(f + 1001), 700, &desc);
        desc.offset -= 1001;
        CHECK(memcmp(again, out + 1001, 700 * sizeof *out) == 0);
        for (i = 0; i < 64; i++) {              /* a few elements, from each place in a block of random words */
            amp_convert_desc few = desc;
            few.offset += (uint64_t)i;
            if (source) amp_convert_with(amp_ref_of(again, t->dtype), amp_ref_of(in + i, AMP_F64),
                40, &few);
            else amp_convert_with(amp_ref_of(again, t->dtype), amp_f32(f + i), 40, &few);
            CHECK(memcmp(again, out + i, 40 * sizeof *out) == 0);
        }
        /* in place */
        if (source) amp_convert_with(amp_ref_of(in, t->dtype), amp_ref_of(in, AMP_F64), BATCH,
            &desc);
        else amp_convert_with(amp_ref_of(f, t->dtype), amp_f32(f), BATCH, &desc);
        CHECK(memcmp(source ? (const void*)in : (const void*)f, out, sizeof out) == 0);
    }
}

/* A cut fraction of exactly random / 2^32 stays down, one of (random + 1) / 2^32 goes up. */
static void test_stochastic_edge(void) {
    double in[64];
    uint16_t out[64];
    amp_convert_desc desc;
    int i;
    memset(&desc, 0, sizeof desc);
    desc.rounding = AMP_ROUND_STOCHASTIC;
    for (i = 0; i < 64; i++)
        in[i] = 1.0 + ldexp((double)amp_random_bits(0, (uint64_t)i) + (i & 1), -42);
    CHECK(amp_convert_with(amp_ref_of(out, AMP_F16), amp_ref_of(in, AMP_F64), 64, &desc) == AMP_OK);
    for (i = 0; i < 64; i++) CHECK_MSG(out[i] == 0x3c00 + (i & 1), "%04x", out[i]);
    for (i = 0; i < 64; i++)                         /* 5 units of the smallest subnormal and the fraction */
        in[i] = ldexp(5.0 + ldexp((double)amp_random_bits(0, (uint64_t)i) + (i & 1), -32), -24);
    CHECK(amp_convert_with(amp_ref_of(out, AMP_F16), amp_ref_of(in, AMP_F64), 64, &desc) == AMP_OK);
    for (i = 0; i < 64; i++) CHECK_MSG(out[i] == 5 + (i & 1), "%04x", out[i]);
}

/* n roundings of x, a fraction p of them up: the count is binomial, 5 sigma = 5*sqrt(n p (1-p)). */
static void check_share(amp_dtype dtype, float x, double p, uint16_t low, uint16_t high) {
    enum { n = 40000 };
    static float in[n];
    static uint16_t out[n];
    amp_convert_desc desc;
    int i, up = 0, other = 0;
    memset(&desc, 0, sizeof desc);
    desc.rounding = AMP_ROUND_STOCHASTIC;
    desc.seed = 5;
    for (i = 0; i < n; i++) in[i] = x;
    CHECK(amp_convert_with(amp_ref_of(out, dtype), amp_f32(in), n, &desc) == AMP_OK);
    for (i = 0; i < n; i++) {
        up += out[i] == high;
        other += out[i] != high && out[i] != low;
    }
    CHECK(other == 0);
    CHECK_MSG(fabs(up - n * p) <= 5 * sqrt(n * p * (1 - p)), "%a: %d up, expected %g", (double)x, up, n * p);
}
static void test_stochastic_share(void) {
    check_share(AMP_F16, 1.0f + 0.25f / 1024, 0.25, 0x3c00, 0x3c01);
    check_share(AMP_F16, -1.0f - 0.9f / 1024, 0.9, 0xbc00, 0xbc01);
    check_share(AMP_F16, 0.125f * AMP_HALF_TRUE_MIN, 0.125, 0, 1);               /* below every half */
    check_share(AMP_F16, 100.7f * AMP_HALF_TRUE_MIN, 0.7, 100, 101);             /* subnormal */
    check_share(AMP_F16, 65512.0f, 0.25, 0x7bff, 0x7c00);                  /* a quarter of the way to 65536 */
    check_share(AMP_F16, 70000.0f, 0, 0x7c00, 0x7c01);                     /* beyond the grid: infinity */
    check_share(AMP_BF16, 1.0f + 0.75f / 128, 0.75, 0x3f80, 0x3f81);
    check_share(AMP_BF16, -from_bits(0x00012000u), 0.125, 0x8001, 0x8002);         /* a subnormal float */
}

/* Values that the target has stay what they are, for any random word; saturation comes after rounding. */
static void test_stochastic_exact(void) {
    static uint16_t in[65536], out[65536];
    static float wide[65536];
    amp_convert_desc desc;
    size_t count = 0;
    int h, k;
    long bad = 0;
    for (k = 0; k < 2; k++) {
        const format* t = k ? &bf16_format : &half_format;
        memset(&desc, 0, sizeof desc);
        desc.rounding = AMP_ROUND_STOCHASTIC;
        for (h = 0; h < 65536; h++) in[h] = (uint16_t)h;
        amp_convert(amp_f32(wide), amp_ref_of(in, t->dtype), 65536);
        CHECK(amp_convert_with(amp_ref_of(out, t->dtype), amp_f32(wide), 65536, &desc) == AMP_OK);
        for (h = 0; h < 65536; h++)
            bad += out[h] != ((h & 0x7fff) > t->inf ? h | 1 << (t->fraction_bits - 1) : h);
        CHECK(amp_convert_with(amp_ref_of(out, t->dtype), amp_ref_of(in, t->dtype), 65536, &desc) == AMP_OK);
        bad += memcmp(out, in, sizeof in) != 0;
    }
    CHECK_MSG(bad == 0, "%ld wrong", bad);
    desc.saturate = 1;
    desc.saturated = &count;
    for (h = 0; h < 1000; h++) wide[h] = 65520.0f;                               /* half way to 65536 */
    amp_convert_with(amp_ref_of(out, AMP_F16), amp_f32(wide), 1000, &desc);
    for (h = 0; h < 1000; h++) bad += out[h] != 0x7bff;
    CHECK(bad == 0 && count > 400 && count < 600);                               /* 500, sigma 16 */
}

/* --- errors ----------------------------------------------------------------------------------- */

static void expect_refusal(amp_result got, amp_result want, const char* words) {
    CHECK_MSG(got == want && heard_code == want, "code %d, wanted %d", (int)got, (int)want);
    CHECK_MSG(strstr(heard, words) != NULL, "\"%s\" does not say \"%s\"", heard, words);
    CHECK(strstr(heard, "amp_convert") != NULL);
    heard_code = AMP_OK;
    heard[0] = 0;
}
static void test_errors(void) {
    float f[8];
    uint16_t h[8], untouched[8];
    int tag = 0;
    amp_logger logger;
    amp_convert_desc desc;
    logger.log = listen;
    logger.user_data = &tag;
    memset(f, 0, sizeof f);
    memset(h, 0x11, sizeof h);
    memcpy(untouched, h, sizeof h);
    memset(&desc, 0, sizeof desc);
    desc.logger = &logger;
    expect_refusal(amp_convert_with(AMP_NONE, amp_f32(f), 8, &desc), AMP_ERR_ARGUMENT, "dst is NULL");
    expect_refusal(amp_convert_with(amp_ref_of(h, AMP_F16), AMP_NONE, 8, &desc), AMP_ERR_ARGUMENT, "src is NULL");
    expect_refusal(amp_convert_with(amp_ref_of(h, (amp_dtype)17), amp_f32(f), 8, &desc), AMP_ERR_DTYPE, "17");
    expect_refusal(amp_convert_with(amp_ref_of(h, AMP_F16), amp_ref_of(f, (amp_dtype)9), 8, &desc), AMP_ERR_DTYPE, "src_dtype 9");
    expect_refusal(amp_convert_with(amp_ref_of(h, AMP_F16), amp_f32(f), SIZE_MAX / 4, &desc), AMP_ERR_ARGUMENT, "memory");
    expect_refusal(amp_convert_with(amp_f32(f + 1), amp_f32(f), 4, &desc), AMP_ERR_ARGUMENT, "overlap");
    expect_refusal(amp_convert_with(amp_ref_of(f, AMP_F16), amp_f32(f + 2), 5, &desc), AMP_ERR_ARGUMENT, "overlap");
    desc.rounding = (amp_rounding)2;
    expect_refusal(amp_convert_with(amp_ref_of(h, AMP_F16), amp_f32(f), 8, &desc), AMP_ERR_DESC, "rounding 2");
    desc.rounding = AMP_ROUND_STOCHASTIC;
    expect_refusal(amp_convert_with(amp_f32(f + 4), amp_ref_of(h, AMP_F16), 4, &desc), AMP_ERR_DESC, "f32");
    CHECK(heard_user_data == &tag);
    CHECK(memcmp(h, untouched, sizeof h) == 0);
    /* without a logger: silent; nothing to do: fine; 0 is AMP_F32 */
    CHECK(amp_convert(AMP_NONE, amp_f32(f), 8) == AMP_ERR_ARGUMENT && heard_code == AMP_OK);
    CHECK(amp_convert(amp_ref_of(h, (amp_dtype)-3), amp_f32(f), 8) == AMP_ERR_DTYPE);
    CHECK(amp_convert(AMP_NONE, AMP_NONE, 0) == AMP_OK);
    f[0] = 1.5f;
    CHECK(amp_convert(amp_ref_of(h, AMP_F16), amp_ref_of(f, AMP_DTYPE_DEFAULT), 1) == AMP_OK && h[0] == 0x3e00);
    CHECK(amp_convert(amp_ref_of(f + 1, AMP_DTYPE_DEFAULT), amp_f32(f), 1) == AMP_OK && f[1] == 1.5f);
}

/* The types that a batch alone may have: known by size and name, refused elsewhere. */
static void test_types_of_data(void) {
    static const struct { amp_dtype t; size_t size; const char* name; } kinds[4] = {
        { AMP_U8, 1, "u8" }, { AMP_I32, 4, "i32" }, { AMP_I64, 8, "i64" }, { (amp_dtype)8, 0, "?" } };
    static amp_stats stats;
    float x[4] = { 0 }, y[4] = { 0 };
    amp_tensor tensor;
    amp_scaler scaler;
    int i;
    CHECK(amp_scaler_init(&scaler, NULL) == AMP_OK && amp_scaler_scale_loss(&scaler, 1.0f) > 0.0f);
    for (i = 0; i < 4; i++) {
        const amp_dtype t = kinds[i].t;
        CHECK(amp_dtype_size(t) == kinds[i].size && strcmp(amp_dtype_name(t), kinds[i].name) == 0);
        CHECK(amp_convert(amp_f32(y), amp_ref_of(x, t), 1) == AMP_ERR_DTYPE && amp_convert(amp_ref_of(y, t),
            amp_f32(x), 1) == AMP_ERR_DTYPE);
        CHECK(amp_activation_forward(AMP_RELU, amp_ref_of(x, t), amp_f32(y), 1, NULL) == AMP_ERR_DTYPE);
        CHECK(amp_linear_forward(amp_f32(x), amp_ref_of(x + 1, t), AMP_NONE, amp_f32(y), 1, 1, 1,
            NULL) == AMP_ERR_DTYPE);
        CHECK(amp_stats_collect(&stats, x, t, 1, AMP_F16, 0) == AMP_ERR_DTYPE);
        CHECK(amp_stats_collect(&stats, x, AMP_F32, 1, t, 0) == AMP_ERR_DTYPE);
        tensor.data = x; tensor.dtype = t; tensor.count = 1; tensor.name = "x";
        CHECK(amp_scaler_check(&scaler, &tensor, 1, NULL) == AMP_ERR_DTYPE);
    }
}

/* A block of a matrix: its elements as in one run, what lies beside them untouched; in place too. */
static void test_rows(void) {
    enum { ROWS = 5, COLS = 7, DST_LD = 9, SRC_LD = 11 };
    static unsigned char dst[8 * ROWS * DST_LD], src[8 * ROWS * SRC_LD], dense[8 * ROWS * COLS], want[8 * ROWS * COLS];
    double values[ROWS * SRC_LD];
    amp_convert_desc d;
    size_t saturated, hits, from, to, i, k, a, b;
    for (i = 0; i < ROWS * SRC_LD; i++) values[i] = ldexp((double)test_uniform(), (int)(i % 40) - 20);
    for (k = 0; k < 2 * 16; k++) {
        const amp_dtype st = TYPES[k % 4], dt = TYPES[k / 4 % 4];
        from = amp_dtype_size(st); to = amp_dtype_size(dt);
        memset(&d, 0, sizeof d);
        d.rounding = k < 16 && to == 2 ? AMP_ROUND_STOCHASTIC : AMP_ROUND_NEAREST;
        d.saturate = k >= 16; d.seed = 3; d.offset = 1000; d.saturated = &saturated;
        amp_convert(amp_ref_of(src, st), amp_ref_of(values, AMP_F64), ROWS * SRC_LD);
        for (i = 0; i < ROWS; i++) memcpy(dense + i * COLS * from, src + i * SRC_LD * from, COLS * from);
        saturated = 0;
        CHECK(amp_convert_with(amp_ref_of(want, dt), amp_ref_of(dense, st), ROWS * COLS, &d) == AMP_OK);
        hits = saturated; saturated = 0;
        memset(dst, 0xa5, sizeof dst);
        CHECK(amp_convert_rows(amp_ref_of(dst, dt), DST_LD, amp_ref_of(src, st), SRC_LD, ROWS,
            COLS, &d) == AMP_OK && saturated == hits);
        for (i = b = 0; i < ROWS; i++) {
            CHECK_MSG(memcmp(dst + i * DST_LD * to, want + i * COLS * to, COLS * to) == 0, "%d, row %d", (int)k, (int)i);
            for (a = COLS * to; a < DST_LD * to; a++) b += dst[i * DST_LD * to + a] != 0xa5;
        }
        CHECK(b == 0);
        for (i = 0; i < ROWS; i++) memcpy(src + 88 * i, dense + i * COLS * from, COLS * from);   /* in place */
        CHECK(amp_convert_rows(amp_ref_of(src, dt), 88 / to, amp_ref_of(src, st), 88 / from, ROWS,
            COLS, &d) == AMP_OK);
        for (i = 0; i < ROWS; i++) CHECK(memcmp(src + 88 * i, want + i * COLS * to, COLS * to) == 0);
    }
    CHECK(amp_convert_rows(amp_ref_of(dst, AMP_F32), COLS - 1, amp_ref_of(src, AMP_F32), SRC_LD, 2, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst, AMP_F32), DST_LD, amp_ref_of(src, AMP_F32), COLS - 1, 2, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst, AMP_F32), COLS, amp_ref_of(src, AMP_F32), COLS, (size_t)-1 / 8, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst, AMP_F32), COLS, AMP_NONE, COLS, 1, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst, AMP_F32), DST_LD, amp_ref_of(dst + 4 * DST_LD, AMP_F16), DST_LD, 3, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst + 8 * DST_LD, AMP_F32), DST_LD, amp_ref_of(dst, AMP_F32), DST_LD, 3, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst, AMP_F32), DST_LD, amp_ref_of(dst, AMP_F16), DST_LD, 3, COLS, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_convert_rows(amp_ref_of(dst, (amp_dtype)99), DST_LD, amp_ref_of(src, AMP_F32), DST_LD, 3, COLS,
        NULL) == AMP_ERR_DTYPE);
    CHECK(amp_convert_rows(AMP_NONE, 0, AMP_NONE, 0, 0, 5, NULL) == AMP_OK);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    format_init(&half_format);
    format_init(&bf16_format);
    TEST(test_known_values);
    TEST(test_all_16_bit_values);
    on_every_isa(test_float_sweep);
    on_every_isa(test_float_edges);
    on_every_isa(test_widen_bulk);
    on_every_isa(test_doubles);
    on_every_isa(test_double_and_float);
    on_every_isa(test_lengths_and_guards);
    on_every_isa(test_in_place);
    on_every_isa(test_long_array);
    on_every_isa(test_larger_than_cache);
    on_every_isa(test_rounding_modes);
    on_every_isa(test_processor_modes);
    on_every_isa(test_saturate);
    on_every_isa(test_saturate_raises_nothing);
    on_every_isa(test_stochastic_rule);
    on_every_isa(test_stochastic_edge);
    on_every_isa(test_stochastic_share);
    on_every_isa(test_stochastic_exact);
    TEST(test_isa);
    TEST(test_errors);
    TEST(test_rows);
    TEST(test_types_of_data);
    TEST_END();
}
