/* 12_same_bits.c - lesson 12: the same bits everywhere?                               Run:  make lesson N=12

   In floating point a + (b + c) is not (a + b) + c, because each sum is rounded. A library that adds in another order
   on another processor, or with more threads, therefore trains another network there, though nobody changed anything.
   amp.h adds in one order everywhere: with each instruction set of this processor, and with one thread or two, training
   has the same bits. Beside it stands the same training with the images of each batch in reversed order. In exact
   arithmetic the gradient, a sum over the batch, is the same; in FP32 its last bits are not, and that grows.
   Threads need OpenMP, which make uses where the compiler has it: cc -O2 -fopenmp 12_same_bits.c -lm */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include "../data.h"
#ifdef _OPENMP
  #include <omp.h>
  #define set_threads(n) (omp_set_num_threads(n), 1)
#else
  #define set_threads(n) ((n) == 1)           /* compiled without threads */
#endif
#define HASH 0x3d2ba2d17b91a5f3u               /* of all losses below, on every computer */
enum { BATCH = 32, UNSEEN = 128, STEPS = 300, SLOW = 50, PIXELS = DATA_SIDE * DATA_SIDE };
static data_set train, unseen;

/* Trains a network from the same start. loss[i]: of unseen images after step i + 1. Returns 0 after a sentence. */
static int run(amp_level level, int reversed, int steps, float* loss) {
    static uint8_t pixels[BATCH * PIXELS], labels[BATCH];
    const amp_batch batch = { .n = BATCH, .inputs = { pixels }, .targets = { labels },
                              .input_dtype = AMP_U8, .label_dtype = AMP_U8 };
    const amp_batch test = { .n = UNSEEN, .inputs = { unseen.pixels }, .targets = { unseen.labels },
                             .input_dtype = AMP_U8, .label_dtype = AMP_U8 };
    const amp_model_desc desc = { .batch = UNSEEN, .seed = 1, .precision.level = level, .logger.log = amp_log_stderr,
                                  .optimizer = { .kind = AMP_SGD, .lr = 0.12f, .momentum = 0.9f } };
    amp_model* m;
    amp_eval_info info;
    int ok = amp_model_create(&m, &desc) == AMP_OK;
    amp_value x = amp_relu(m, amp_linear(m, amp_input(m, 1, DATA_SIDE, DATA_SIDE), 48));
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 48)), 10));
    ok = ok && amp_model_finalize(m) == AMP_OK;
    for (int step = 0; ok && step < steps; step++) {
        for (int i = 0; i < BATCH; i++) {
            const int at = step * BATCH + (reversed ? BATCH - 1 - i : i);
            memcpy(pixels + i * PIXELS, train.pixels + at * PIXELS, PIXELS);
            labels[i] = train.labels[at];
        }
        ok = amp_train_step(m, &batch, NULL) == AMP_OK && amp_evaluate(m, &test, &info) == AMP_OK;
        loss[step] = info.loss;
    }
    amp_model_destroy(m);
    return ok;
}

static int same(const float* a, const float* b, int count) { return memcmp(a, b, (size_t)count * sizeof *a) == 0; }

/* The same training on all paths of this processor. Returns how many gave other bits, or -1 after a sentence.
   gap[i]: the largest difference of any path from the first run's loss after step i + 1. */
static int try_paths(amp_level level, const char* name, const float* first, float* gap) {
    static float loss[STEPS];
    int others = 0;
    for (int isa = AMP_ISA_SCALAR; isa <= AMP_ISA_AVX512_BF16; isa++)
        for (int threads = 1; threads <= 2; threads++) {
            const int steps = isa == AMP_ISA_SCALAR ? SLOW : STEPS;           /* plain C computes each fma in pieces */
            chart_progress(name, 2 * isa + threads, 12);
            if (amp_cpu_force_isa((amp_isa)isa) != AMP_OK || !set_threads(threads)) continue;
            if (!run(level, 0, steps, loss)) return -1;
            others += !same(first, loss, steps);
            for (int s = 0; s < steps; s++) gap[s] = fmaxf(gap[s], fabsf(loss[s] - first[s]));
            printf("%s  %-11s  %d thread%s  %3d steps  %s\n", name, amp_isa_name((amp_isa)isa), threads,
                   threads > 1 ? "s" : " ", steps, same(first, loss, steps) ? "the same bits" : "OTHER BITS");
        }
    return amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK && set_threads(1) ? others : -1;
}

int main(int argc, char** argv) {
    static const char* const names[2] = { "FP32", "half" };
    static const float logs_at[3] = { 200, 2000, 5000 }, logs[3] = { 0.0002f, 0.0058f, 0.0005f };
    static const float zero_at[2] = { 1, 5000 }, zero[2] = { 1e-8f, 1e-8f };       /* 0 has no logarithm */
    static float loss[2][STEPS], other[STEPS], apart[2][STEPS], size[2][STEPS], most[2][STEPS], gap[STEPS], at[STEPS];
    char error[DATA_ERROR];
    int others = 0;
    uint64_t hash = 1469598103934665603u;     /* FNV-1a over the bits of all losses */
    if (!data_digits(&train, STEPS * BATCH, 1, error) || !data_digits(&unseen, UNSEEN, 2, error))
        return fprintf(stderr, "12_same_bits: %s\n", error), 1;
    for (int l = 0; l < 2; l++) {
        const amp_level level = l ? AMP_O2 : AMP_O0;
        int equal = 0;
        const int wrong = run(level, 0, STEPS, loss[l]) ? try_paths(level, names[l], loss[l], gap) : -1;
        if (wrong < 0 || !run(level, 1, STEPS, other)) return 1;
        others += wrong;
        for (int s = 0; s < STEPS; s++) {
            uint32_t bits;
            memcpy(&bits, &loss[l][s], sizeof bits);
            hash = (hash ^ bits) * 1099511628211u;
            at[s] = (float)(s + 1);
            size[l][s] = fabsf(apart[l][s] = other[s] - loss[l][s]);
            most[l][s] = fmaxf(s ? most[l][s - 1] : 0.0f, size[l][s]);
            equal += most[l][s] == 0.0f;
        }
        printf("%s batch reversed: other bits from step %d on, by step 100 %.0e, by %d %.2f\n\n", names[l],
               equal + 1, (double)most[l][99], STEPS, (double)most[l][STEPS - 1]);
    }
    chart_series gaps[3] = { chart_curve("FP16, batch reversed", CHART_FP16, at, apart[1], STEPS),
        chart_curve("FP32, batch reversed", CHART_OTHER, at, apart[0], STEPS),
        chart_curve("amp.h on each path", CHART_FP32, at, gap, STEPS) };
    chart_series sizes[4] = { chart_curve("FP16, batch reversed", CHART_FP16, at, size[1], STEPS),
        chart_curve("FP32, batch reversed", CHART_OTHER, at, size[0], STEPS),
        chart_curve("amp.h: 0", CHART_FP32, zero_at, zero, 2),
        chart_curve("PyTorch's logs of three computers", CHART_FAULT, logs_at, logs, 3) };
    gaps[0].width = gaps[1].width = sizes[0].width = sizes[1].width = 1.5;
    sizes[3].style = CHART_POINTS, sizes[3].width = 9.0;
    const chart_panel panels[2] = {
        { "The same digits in another order train\nanother network; amp.h keeps the order", "step",
          "difference of loss", .series = gaps, .series_count = 3 },
        { "From the last digit to the first\nin a hundred steps", "step", "size of the difference", 1, 1,
          .series = sizes, .series_count = 4 } };
    if (!chart_save(argc, argv, "12_same_bits", "The same bits everywhere?", panels, 2)) return 1;
    printf("check: paths with other bits: %d (amp.h: 0)\n", others);
    printf("       hash of all losses: %08lx%08lx (everywhere: %08lx%08lx)\n", (unsigned long)(hash >> 32),
           (unsigned long)(hash & 0xffffffffu), (unsigned long)(HASH >> 32), (unsigned long)(HASH & 0xffffffffu));
    if (others == 0 && hash == HASH && most[0][STEPS - 1] > 0.01f) return 0;
    return fprintf(stderr, "12_same_bits: these are not amp.h's bits, or the order of a sum does not matter\n"), 1;
}
