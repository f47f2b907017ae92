/* upper.h - do functions leave the upper halves of the vector registers in use? Then code that mixes SSE with AVX is
   many times slower. XGETBV with ECX = 1 tells which parts of the state differ from their initial values (Intel SDM,
   XINUSE): bit 2 the upper halves of YMM, bit 6 those of ZMM; registers 16 to 31 (bit 7) hold nothing up. */
#ifndef AMP_TEST_UPPER_H
#define AMP_TEST_UPPER_H

/* With AVX for the whole program no SSE is left to be slow, and the tests themselves leave something there. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__TINYC__) && !defined(__AVX__)
#include <cpuid.h>
static inline unsigned upper_xgetbv(unsigned which) {
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(which));
    return low;
}
/* Is there AVX (OSXSAVE, AVX, XCR0 bits 1, 2) and XINUSE, and does it tell? Emulators say that all is always in use. */
static inline int upper_is_told(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & 0x18000000u) != 0x18000000u || (upper_xgetbv(0) & 6u) != 6u) return 0;
    if (!__get_cpuid_count(13, 1, &a, &b, &c, &d) || !(a & 4u)) return 0;
    __asm__ volatile("vzeroupper");
    return (upper_xgetbv(1) & 0x44u) == 0;
}
/* 1, 0, or -1: nobody tells. The first call clears them. */
static inline int upper_in_use(void) {
    static int told = -1;
    if (told < 0) told = upper_is_told();
    return told ? (upper_xgetbv(1) & 0x44u) != 0 : -1;
}
#else
static inline int upper_in_use(void) { return -1; }
#endif

#endif
