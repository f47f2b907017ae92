/* impl_amx.c - the implementation with a matrix unit in plain C: what AMP_SUMS_FAST does with AMX is tested on a
   processor that has AVX-512 but no such unit. The eight tiles are arrays, and each instruction does what Intel's SDM
   says (TILELOADD, TILESTORED, TILEZERO, TDPBF16PS), but for flushing subnormals. gcc or clang, x86-64, -mfma. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { ROWS = 16, BYTES = 64 };
static __thread unsigned char tile[8][ROWS][BYTES];

static void tile_load(int t, const void* from, size_t stride) {
    int i;
    for (i = 0; i < ROWS; i++) memcpy(tile[t][i], (const char*)from + (size_t)i * stride, BYTES);
}
static void tile_store(int t, void* to, size_t stride) {
    int i;
    for (i = 0; i < ROWS; i++) memcpy((char*)to + (size_t)i * stride, tile[t][i], BYTES);
}

static uint32_t word_at(int t, int row, int column) {
    uint32_t w;
    memcpy(&w, tile[t][row] + 4 * column, sizeof w);
    return w;
}
static float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* c += a * b: the first numbers of 16 words and the second ones each in a chain of fma from 0, then both together. */
static void tile_multiply(int c, int a, int b) {
    int row, column, k;
    for (row = 0; row < ROWS; row++)
        for (column = 0; column < ROWS; column++) {
            float first = 0.0f, second = 0.0f, sum = number(word_at(c, row, column));
            for (k = 0; k < ROWS; k++) {
                uint32_t x = word_at(a, row, k), y = word_at(b, k, column);
                first = fmaf(number(x << 16), number(y << 16), first);
                second = fmaf(number(x & 0xffff0000u), number(y & 0xffff0000u), second);
            }
            sum += first + second;
            memcpy(tile[c][row] + 4 * column, &sum, sizeof sum);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero(t) memset(tile[t], 0, sizeof tile[t])
#define _tile_loadd(t, from, stride) tile_load(t, from, (size_t)(stride))
#define _tile_stream_loadd(t, from, stride) tile_load(t, from, (size_t)(stride))
#define _tile_stored(t, to, stride) tile_store(t, to, (size_t)(stride))
#define _tile_dpbf16ps(c, a, b) tile_multiply(c, a, b)

#define AMP_IMPLEMENTATION
#include "../amp.h"

/* As if cpuid had found the unit and the system had granted it. */
__attribute__((constructor)) static void have_a_unit(void) { ampi_amx_cache = 3; }
