/* test.h - a small test harness. A test program calls TEST(fn) for each test and ends with TEST_END(). After
   TEST_BEGIN(argc, argv) an argument chooses: only tests whose name contains it run. Each CHECK counts as passed or
   failed; a failed one prints its place and, with CHECK_MSG, the values. TEST_TIMES in the environment prints how long
   each test took. */
#ifndef AMP_TEST_H
#define AMP_TEST_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static long test_passed, test_failed, test_skipped, test_count;
static const char* test_wanted = "";         /* a part of the names of the tests that run */

#define TEST_BEGIN(argc, argv) do { if ((argc) > 1) test_wanted = (argv)[1]; } while (0)

/* At most this many failures are printed in full; all are counted. */
#define TEST_MAX_PRINTED 20

#define CHECK(condition) CHECK_MSG(condition, "%s", "")
#define CHECK_MSG(condition, ...)                                                         \
    do {                                                                                  \
        if (condition) test_passed++;                                                     \
        else if (++test_failed <= TEST_MAX_PRINTED) {                                     \
            printf("%s:%d: failed: %s  ", __FILE__, __LINE__, #condition);                \
            printf(__VA_ARGS__);                                                          \
            printf("\n");                                                                 \
        }                                                                                 \
    } while (0)

/* 1 = the first test that fails ends the program. */
#ifndef TEST_STOP
  #define TEST_STOP 0
#endif


#define TEST(fn) test_run(#fn, fn)
static inline void test_run(const char* name, void (*test)(void)) {
    const long before = test_failed;
    const clock_t start = clock();
    if (!strstr(name, test_wanted)) return;
    test_count++;
    test();
    if (getenv("TEST_TIMES")) printf("%8.2f s  %s\n", (double)(clock() - start) / CLOCKS_PER_SEC, name);
    if (test_failed != before) printf("FAILED: %s\n", name);
    if (TEST_STOP && test_failed != before) exit(1);
}

/* Before a function that is a reference in plain loops over fma: built for a processor that has the instruction (TEST_FMA,
   from the Makefile) it is not a call into libm, and the tests take half the time. */
#if defined(TEST_FMA) && defined(__x86_64__) && defined(__GNUC__) && !defined(__TINYC__)
  #define TEST_REFERENCE __attribute__((target("fma")))
#else
  #define TEST_REFERENCE
#endif

#define TEST_SKIP(why) do { test_skipped++; printf("skipped: %s\n", why); } while (0)

/* The closing line: checks, then tests. The exit status is 1 if anything failed, or if nothing ran. */
#define TEST_END() return test_end()
static inline int test_end(void) {
    printf("%ld passed, %ld failed, %ld skipped (checks of %ld tests)\n", test_passed, test_failed, test_skipped,
           test_count);
    if (test_count == 0 && *test_wanted) printf("no test has '%s' in its name\n", test_wanted);
    return test_failed || (test_passed == 0 && test_skipped == 0) ? 1 : 0;
}

/* Of long lists of cases every n-th one is due: for emulators, sanitizers, and builds without optimisation. TEST_EVERY in
   the environment says n. */
static inline long test_every(void) {
    static long every;
    if (every == 0) {
        const char* wanted = getenv("TEST_EVERY");
        every = wanted && atol(wanted) > 0 ? atol(wanted) : 1;
    }
    return every;
}
static inline int test_due(void) {
    static long calls;
    return calls++ % test_every() == 0;
}

/* The shape of a matrix product, and that of many; after <amp.h>. */
#define PRODUCT(ta, tb, m, n, k, lda, ldb, ldc) PRODUCTS(ta, tb, m, n, k, lda, ldb, ldc, 0, 0, 0, 0)
#define PRODUCTS(ta, tb, m, n, k, lda, ldb, ldc, count, a_step, b_step, c_step) \
    (&(amp_gemm_shape){ (amp_transpose)(ta), (amp_transpose)(tb), m, n, k, lda, ldb, ldc, count, a_step, b_step, c_step })

/* A repeatable stream of numbers for test data. */
static unsigned long long test_seed = 1;
static inline unsigned test_random(void) {
    test_seed = test_seed * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(test_seed >> 33);
}
/* Uniform in [-1, 1). */
static inline float test_uniform(void) { return (float)((int)(test_random() & 0xffffffu) - 0x800000) / 8388608.0f; }

#endif
