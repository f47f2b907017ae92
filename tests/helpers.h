/* helpers.h - what several tests of amp.h share: types, instruction sets, bits of numbers, a logger that listens. */
#ifndef AMP_TEST_HELPERS_H
#define AMP_TEST_HELPERS_H

#include "../amp.h"
#include "test.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static const amp_dtype TYPES[3] = { AMP_F32, AMP_F16, AMP_BF16 };
static const amp_isa ISAS[5] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512, AMP_ISA_AVX512_BF16 };

static inline float from_bits(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }
static inline uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }
static inline void put_bits(float* p, uint32_t u) { memcpy(p, &u, sizeof u); }
static inline int is_infinite(const double* p) { uint64_t u; memcpy(&u, p, sizeof u); return u == 0x7ff0000000000000u; }

/* The last sentence and its code, how many there were, and how many of them were remarks beside calls that went well. */
static char heard[512];
static amp_result heard_code;
static int heard_count, remarks;
static inline void listen(amp_result code, const char* sentence, void* user_data) {
    (void)user_data;
    heard_code = code;
    heard_count++;
    remarks += code == AMP_OK;
    snprintf(heard, sizeof heard, "%s", sentence);
}
static const amp_logger LISTENER = { listen, NULL };

/* The call must have been refused with this code and this sentence. */
static inline void check_refused(amp_result got, amp_result code, const char* sentence) {
    CHECK_MSG(got == code, "%d instead of %d", (int)got, (int)code);
    CHECK_MSG(strcmp(heard, sentence) == 0, "\"%s\"", heard);
    heard[0] = 0;
}

#endif
