/* helpers.h - what several tests of amp.h share: types, instruction sets, bits of numbers, elements of arrays, a logger
   that listens, an allocator that fails. */
#ifndef AMP_TEST_HELPERS_H
#define AMP_TEST_HELPERS_H

#include "../amp.h"
#include "test.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

static const amp_dtype TYPES[4] = { AMP_F32, AMP_F16, AMP_BF16, AMP_F64 };    /* the first three are the operators' */
static const amp_isa ISAS[5] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512, AMP_ISA_AVX512_BF16 };

static inline float from_bits(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }
static inline uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }
static inline void put_bits(float* p, uint32_t u) { memcpy(p, &u, sizeof u); }
static inline int is_infinite(const double* p) { uint64_t u; memcpy(&u, p, sizeof u); return u == 0x7ff0000000000000u; }

/* Does backward of an activation read x, or y? */
static inline int activation_reads_input(int f) {
    enum { OUTPUT, INPUT };
#define X(NAME, name, reads, ...) reads,
    static const int reads_input[] = { AMP_ACTIVATION_LIST(X) };
#undef X
    return reads_input[f];
}

/* Leaves large floats in the stack's memory below, whose products and conversions to half would overflow. */
static inline void soil_stack(void) {
    volatile float below[24000];
    size_t i;
    for (i = 0; i < sizeof below / sizeof *below; i++) below[i] = 1e38f;
}

/* Element i of an array as a double, and a double to it, rounded to nearest. The array may lie anywhere. */
static inline double value_at(const void* p, amp_dtype t, size_t i) {
    const char* at = (const char*)p + i * amp_dtype_size(t);
    amp_half h;
    amp_bfloat16 b;
    float f;
    double d;
    if (t == AMP_F16) { memcpy(&h, at, sizeof h); return amp_half_to_double(h); }
    if (t == AMP_BF16) { memcpy(&b, at, sizeof b); return amp_bfloat16_to_double(b); }
    if (t == AMP_F32) { memcpy(&f, at, sizeof f); return (double)f; }
    memcpy(&d, at, sizeof d);
    return d;
}
static inline void put_value(void* p, amp_dtype t, size_t i, double d) {
    char* at = (char*)p + i * amp_dtype_size(t);
    if (t == AMP_F16) { const amp_half h = amp_half_from_double(d); memcpy(at, &h, sizeof h); }
    else if (t == AMP_BF16) { const amp_bfloat16 b = amp_bfloat16_from_double(d); memcpy(at, &b, sizeof b); }
    else if (t == AMP_F32) { const float f = (float)d; memcpy(at, &f, sizeof f); }
    else memcpy(at, &d, sizeof d);
}

/* The last sentence, the one before, the last code and user_data; how many sentences there were, how many of them were
   remarks beside calls that went well, and how many were refusals in one line of ten letters or more. */
static char heard[600], heard_before[600];
static amp_result heard_code;
static void* heard_user_data;
static int heard_count, remarks, refusals;
static inline void listen(amp_result code, const char* sentence, void* user_data) {
    heard_code = code;
    heard_user_data = user_data;
    heard_count++;
    remarks += code == AMP_OK;
    refusals += code != AMP_OK && strlen(sentence) >= 10 && !strchr(sentence, '\n');
    memcpy(heard_before, heard, sizeof heard);
    snprintf(heard, sizeof heard, "%s", sentence);
}
static const amp_logger LISTENER = { listen, NULL };

/* The call must have been refused with this code and this sentence. */
static inline void check_refused(amp_result got, amp_result code, const char* sentence) {
    CHECK_MSG(got == code, "%d instead of %d", (int)got, (int)code);
    CHECK_MSG(strcmp(heard, sentence) == 0, "\"%s\"", heard);
    heard[0] = 0;
}

/* An allocator that keeps books. Its alloc_fail_at-th call fails, and with alloc_fails_on each later one; 0 = none. */
static long alloc_fail_at, alloc_calls, alloc_live, alloc_wrong_frees;
static int alloc_fails_on;
static size_t alloc_bytes;
static void* alloc_blocks[4096];
/* Calls and bytes are counted from here. */
static inline void fail_at_call(long k) { alloc_fail_at = k; alloc_calls = 0; alloc_bytes = 0; }
static inline void* failing_alloc(size_t n, void* user_data) {
    int i;
    (void)user_data;
    alloc_calls++;
    if (alloc_calls == alloc_fail_at) return NULL;
    if (alloc_fails_on && alloc_fail_at > 0 && alloc_calls > alloc_fail_at) return NULL;
    for (i = 0; i < COUNT(alloc_blocks) && alloc_blocks[i]; i++) {}
    if (i == COUNT(alloc_blocks)) return NULL;
    alloc_bytes += n;
    alloc_blocks[i] = malloc(n);
    if (alloc_blocks[i]) { alloc_live++; memset(alloc_blocks[i], 0xa5, n); }     /* memory must not be zero by luck */
    return alloc_blocks[i];
}
static inline void failing_free(void* p, void* user_data) {
    int i;
    (void)user_data;
    for (i = 0; i < COUNT(alloc_blocks) && !(p && alloc_blocks[i] == p); i++) {}
    if (i == COUNT(alloc_blocks)) { alloc_wrong_frees++; return; }
    alloc_blocks[i] = NULL;
    alloc_live--;
    free(p);
}

#endif
