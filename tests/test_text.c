/* test_text.c - the header's own printf beside the C library's in the C locale: numbers of every exponent, ties, carries
   and subnormals, with each precision; directives, widths, and texts that are cut; and sorting. It has a copy of the implementation. */
#define AMP_IMPLEMENTATION
#define AMP_STATIC
#if !defined(AMP_NO_SIMD)
  #define AMP_NO_SIMD
#endif
#include "../amp.h"
#include "test.h"

static void number(double x, int precision, char kind) {
    char ours[AMPI_DIGITS], theirs[AMPI_DIGITS];
    const size_t n = ampi_write_float(ours, x, precision, kind);
    ours[n] = 0;
    snprintf(theirs, sizeof theirs, kind == 'f' ? "%.*f" : "%.*g", precision, x);
    CHECK_MSG(strcmp(ours, theirs) == 0, "%%.%d%c: %s, not %s", precision, kind, ours, theirs);
}

/* x and its neighbours with each precision. */
static void numbers(double x) {
    for (int step = -1; step <= 1; step++) {
        const double y = ampi_double(ampi_bits64(x) + (uint64_t)step);
        if (y != y) continue;       /* the sign of a NaN is the library's affair */
        for (int precision = 0; precision <= 18; precision++) number(y, precision, 'g');
        for (int precision = 0; precision <= 9 && y < 1e30; precision += 3) number(y, precision, 'f');
        number(-y, 6, 'g');
    }
}

static uint64_t random_bits64(void) { return (uint64_t)test_random() << 42 ^ (uint64_t)test_random() << 21 ^ test_random(); }

static void test_numbers(void) {
    const double fixed[] = { 0.0, 1.0, 0.5, 1.5, 2.5, 0.25, 0.125, 9.5, 99.5, 999999.5, 9999995.0, 9.9999995e9, 9999999.5, 1e-4, 9.99995e-5,
        1e22, 1e23, 123456789012345678.0, 4.9406564584124654e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1, 0.3,
        65504.0, 5.9604644775390625e-8, 2.93874e-39, 1.401298464324817e-45, 3.4028234663852886e38, 1e5, 1e6, 1e17 };
    for (int i = 0; i < (int)AMPI_LENGTH(fixed); i++) numbers(fixed[i]);
    numbers(ampi_double(AMPI_INF64));
    number(-ampi_double(AMPI_INF64), 6, 'g');
    number(-0.0, 6, 'g');
    number(ampi_double(AMPI_INF64 + 1), 6, 'g');
    for (int i = 0; i < 300; i++) {
        const uint64_t bits = random_bits64();
        const float f = ampi_float((uint32_t)bits & 0x7fffffffu);
        if (!test_due()) continue;
        if (i % 8 == 0) numbers(ampi_double(bits & 0x7fffffffffffffffu));
        if (f == f) numbers((double)f);
        numbers((double)(bits % 100000000) / 1024.0);       /* ties */
        numbers((double)(bits % 2000001) * 0.5);
        number((double)(bits % 100000) / 100.0, 1, 'f');
    }
}

/* Into arrays of all sizes, up to one that holds the text. */
#define FORMAT(...) do { \
        char ours[120], theirs[120]; \
        const size_t whole = (size_t)snprintf(theirs, sizeof theirs, __VA_ARGS__); \
        for (size_t size = 1; size <= sizeof ours; size++) { \
            const size_t fits = ampi_min_size(whole, size - 1); \
            memset(ours, 'x', sizeof ours); \
            CHECK(ampi_say(ours, size, __VA_ARGS__) == fits && ours[fits] == 0); \
            CHECK_MSG(memcmp(ours, theirs, fits) == 0, "'%s', not '%s'", ours, theirs); \
            CHECK(size == sizeof ours || ours[size] == 'x'); \
        } } while (0)

static void test_directives(void) {
    FORMAT("%s", "");
    FORMAT("%s, %10s, %-10s, %.3s, %*s, %.*s|", "one", "two", "three", "four", 7, "five", 2, "six");
    FORMAT("%d %5d %-5d %lld %lld %u %llu %10llu", -12, 34, -56, INT64_MIN + 0LL, -7LL, 4000000000u, 18446744073709551615ULL, 8ULL);
    FORMAT("%x %.8x %.8llx %.2x %c%c %%", 0xabcu, 0x12345u, 0x16789abcdULL, 5u, 'p', '\n');
    FORMAT("%g %-10.4g| %10.3g %.9g %.17g %.1f %.2f %g %-8g|", 1.5, 2.0 / 3.0, 1e-7, 0.1, 0.1, 154.5, 99.995, -0.0, 1e100);
    FORMAT("%d%s%d", 0, "", INT32_MAX);
}

/* Any number of records in any order, with half as many, rounded up, for scratch; equal ones keep their order. */
static int by_first(const void* a, const void* b) { return *(const int*)a - *(const int*)b; }
static void test_sort(void) {
    for (int n = 0; n <= 70; n++)
        for (int range = 1; range <= 1000; range *= 10) {
            int (*x)[3] = (int (*)[3])malloc((size_t)n * sizeof *x + 1), wrong = 0;
            void* scratch = malloc((size_t)(n + 1) / 2 * sizeof *x + 1);
            if (!x || !scratch) { CHECK(x && scratch); return; }
            for (int i = 0; i < n; i++) {
                x[i][0] = range == 10 ? i : range == 100 ? -i : (int)(test_random() % (unsigned)range);
                x[i][1] = i;
                x[i][2] = 5 * x[i][0];
            }
            ampi_sort(x, (size_t)n, sizeof *x, by_first, scratch);
            for (int i = 0; i < n; i++) wrong += x[i][2] != 5 * x[i][0];
            for (int i = 1; i < n; i++)
                wrong += x[i][0] < x[i - 1][0] || (x[i][0] == x[i - 1][0] && x[i][1] < x[i - 1][1]);
            CHECK_MSG(wrong == 0, "%d records: %d", n, wrong);
            free(x);
            free(scratch);
        }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_numbers);
    TEST(test_directives);
    TEST(test_sort);
    TEST_END();
}
