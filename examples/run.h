/* run.h - what the examples tell of a run: its seconds, and a hash by which two of them are compared at a glance. */
#ifndef EXAMPLES_RUN_H
#define EXAMPLES_RUN_H

#include "../amp.h"
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Of a clock on the wall; on Windows of the processor. */
static inline double run_seconds(void) {
#if defined(_WIN32)
    return (double)clock() / CLOCKS_PER_SEC;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
#endif
}

/* FNV-1a over the bits of every weight; 0 without memory. */
static inline uint32_t run_hash(amp_model* m) {
    int count, i, byte;
    const amp_param* p = amp_model_params(m, &count);
    uint32_t hash = 2166136261u, bits;
    size_t k;
    for (i = 0; i < count; i++) {
        float* w = (float*)malloc(p[i].count * sizeof *w);
        if (!w || amp_model_read_param(m, &p[i], w) != AMP_OK) { free(w); return 0; }
        for (k = 0; k < p[i].count; k++) {
            memcpy(&bits, &w[k], sizeof bits);
            for (byte = 0; byte < 4; byte++) hash = (hash ^ ((bits >> 8 * byte) & 255u)) * 16777619u;
        }
        free(w);
    }
    return hash;
}

#endif
