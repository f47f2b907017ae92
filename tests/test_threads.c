/* test_threads.c - what the header promises about threads: the first calls may race on the cpuid cache, and objects
   are independent of each other, so two models trained in two threads end with the bits of one trained alone.
   Run by check.sh under ThreadSanitizer; needs POSIX threads, so it is no part of `make test`. */
#include "../amp.h"
#include "test.h"
#include <pthread.h>

enum { MODELS = 2, BATCH = 8, SIDE = 12, STEPS = 6 };

typedef struct job {
    uint64_t seed;
    amp_isa  isa;       /* what the first call answered */
    uint64_t hash;      /* of all weights and moments after training; 0 = a call failed */
} job;

static uint64_t hash_floats(uint64_t h, const float* x, size_t n) {
    for (size_t i = 0; x && i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        h = (h ^ u) * 1099511628211u;
    }
    return h;
}

static int build(amp_model** m, uint64_t seed) {
    amp_model_desc d;
    amp_conv2d_desc c;
    amp_value x;
    memset(&d, 0, sizeof d);
    memset(&c, 0, sizeof c);
    d.batch = BATCH;
    d.seed = seed;
    d.precision.level = AMP_O1;
    d.optimizer.kind = AMP_ADAMW;
    d.optimizer.lr = 0.002f;
    c.out_channels = 4;
    c.kernel = 5;
    if (amp_model_create(m, &d) != AMP_OK) return 0;
    x = amp_max_pool2d(*m, amp_relu(*m, amp_conv2d_with(*m, amp_input(*m, 1, SIDE, SIDE), &c)), 2);
    x = amp_dropout(*m, amp_gelu(*m, amp_linear(*m, x, 16)), 0.1f);
    amp_softmax_cross_entropy(*m, amp_linear(*m, x, 10));
    return amp_model_finalize(*m) == AMP_OK;
}

static void train(job* j) {
    float x[BATCH * SIDE * SIDE];
    int32_t labels[BATCH];
    amp_model* m = NULL;
    amp_batch b;
    amp_param* p;
    int i, k, count, ok = build(&m, j->seed);
    memset(&b, 0, sizeof b);
    b.n = BATCH;
    b.inputs[0] = x;
    b.targets[0] = labels;
    for (k = 0; ok && k < STEPS; k++) {
        for (i = 0; i < BATCH * SIDE * SIDE; i++) x[i] = amp_random_normal(j->seed, (uint64_t)(k * BATCH * SIDE * SIDE + i));
        for (i = 0; i < BATCH; i++) labels[i] = (int32_t)(amp_random_bits(j->seed, (uint64_t)(k * BATCH + i)) % 10u);
        ok = amp_train_step(m, &b, NULL) == AMP_OK;
    }
    j->hash = ok ? 1469598103934665603u : 0;
    p = ok ? amp_model_params(m, &count) : NULL;
    for (i = 0; p && i < count; i++) {
        j->hash = hash_floats(j->hash, p[i].master, p[i].count);
        j->hash = hash_floats(j->hash, p[i].m, p[i].count);
        j->hash = hash_floats(j->hash, p[i].v, p[i].count);
    }
    amp_model_destroy(m);
}

static void* thread(void* p) {
    job* j = (job*)p;
    j->isa = amp_cpu_isa();
    train(j);
    return NULL;
}

static void test_two_models_in_two_threads(void) {
    job together[MODELS], alone[MODELS];
    pthread_t threads[MODELS];
    int i;
    for (i = 0; i < MODELS; i++) {
        together[i].seed = alone[i].seed = (uint64_t)(i + 1);
        CHECK(pthread_create(&threads[i], NULL, thread, &together[i]) == 0);   /* the first calls of the process */
    }
    for (i = 0; i < MODELS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    for (i = 0; i < MODELS; i++) {
        thread(&alone[i]);
        CHECK(alone[i].isa == together[i].isa && alone[i].isa != AMP_ISA_AUTO);
        CHECK(alone[i].hash != 0);
        CHECK_MSG(alone[i].hash == together[i].hash, "model %d", i);
    }
    CHECK(alone[0].hash != alone[1].hash);      /* the hash sees the weights: other seeds, other bits */
}

int main(void) {
    TEST(test_two_models_in_two_threads);
    TEST_END();
}
