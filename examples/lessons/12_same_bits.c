/* 12_same_bits.c - lesson 12: the same bits everywhere?                               Run:  make lesson N=12

   In floating point a + (b + c) is not (a + b) + c, because each sum is rounded. A library that adds in another order
   on another processor, or with more threads, trains another network there. amp.h adds in one order: on each path the
   GPT of gpt.c has the same bits. Beside it stands a training with the texts of each batch in reversed order: the same
   sums, but for rounding. Threads need OpenMP, which make uses if it is there: cc -O2 -fopenmp 12_same_bits.c -lm */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include "../text.h"
#ifdef _OPENMP
  #include <omp.h>
  #define set_threads(n) (omp_set_num_threads(n), 1)
#else
  #define set_threads(n) ((n) == 1)           /* compiled without threads */
#endif
#define HASH 0x1ee364eeu                        /* of all losses below, on every computer */
enum { BATCH = 4, T = 32, WIDTH = 64, HEADS = 4, BLOCKS = 4, STEPS = 240, SLOW = 2 };
static const int last_step = 240;               /* try 100 to 240 */
static text tale;

/* Trains the GPT from the same start. loss[i]: of unseen letters after step i + 1. Returns 0 after a sentence. */
static int run(amp_level level, int reversed, int steps, float* loss) {
    const amp_linear_desc qkv = { .out_features = 3 * WIDTH, .no_bias = 1 };
    const amp_attention_desc heads = { .heads = HEADS, .causal = 1, .scale = 0.125f };
    static int32_t tokens[BATCH * T], next[BATCH * T];
    const int32_t* end = tale.letters + tale.split;                         /* what it does not learn from */
    const amp_batch batch = { .n = BATCH, .inputs = { tokens }, .targets = { next } };
    const amp_batch unseen = { .n = BATCH / 2, .inputs = { end }, .targets = { end + 1 } };
    const amp_model_desc desc = { .batch = BATCH, .seed = 1, .precision.level = level, .logger.log = amp_log_stderr,
                                  .optimizer = { .kind = AMP_ADAMW, .lr = 1e-3f, .weight_decay = 0.01f } };
    amp_model* m;
    amp_eval_info info;
    amp_model_create(&m, &desc);
    amp_value x = amp_position_embedding(m, amp_embedding(m, amp_tokens(m, T), tale.words, WIDTH));
    for (int i = 0; i < BLOCKS; i++) {        /* x + attention(norm(x)), then x + mlp(norm(x)) */
        const amp_value y = amp_attention(m, amp_linear_with(m, amp_layer_norm(m, x), &qkv), &heads);
        x = amp_add(m, x, amp_linear(m, y, WIDTH));
        x = amp_add(m, x, amp_linear(m, amp_relu(m, amp_linear(m, amp_layer_norm(m, x), 4 * WIDTH)), WIDTH));
    }
    amp_softmax_cross_entropy(m, amp_linear(m, amp_layer_norm(m, x), tale.words));
    int ok = amp_model_finalize(m) == AMP_OK;
    for (int step = 0; ok && step < steps; step++) {
        for (int i = 0; i < BATCH; i++) {
            const int at = T * (reversed ? BATCH - 1 - i : i);
            text_pieces(&tale, (uint64_t)(step * BATCH + i), 1, T, tokens + at, next + at);
        }
        ok = amp_train_step(m, &batch, NULL) == AMP_OK && amp_evaluate(m, &unseen, &info) == AMP_OK;
        loss[step] = info.loss;
    }
    amp_model_destroy(m);
    return ok;
}

/* The same training on all paths of this processor. Returns how many gave other bits, or -1 after a sentence.
   gap[i]: the largest difference of any path from the first run's loss after step i + 1. */
static int try_paths(amp_level level, const char* name, const float* first, float* gap) {
    static float loss[STEPS];
    int others = 0, other;
    for (int isa = AMP_ISA_SCALAR; isa <= AMP_ISA_AVX512_BF16; isa++)
        for (int threads = 1; threads <= 2; threads++) {
            const int steps = isa == AMP_ISA_SCALAR ? SLOW : last_step;       /* plain C computes each fma in pieces */
            chart_progress(name, 2 * isa + threads, 12);
            if (amp_cpu_force_isa((amp_isa)isa) != AMP_OK || !set_threads(threads)) continue;
            if (!run(level, 0, steps, loss)) return -1;
            others += other = memcmp(first, loss, (size_t)steps * sizeof *loss) != 0;
            for (int s = 0; s < steps; s++) gap[s] = fmaxf(gap[s], fabsf(loss[s] - first[s]));
            printf("%s  %-11s  threads %d  steps %3d  %s\n", name, amp_isa_name((amp_isa)isa), threads, steps,
                   other ? "OTHER BITS" : "the same bits");
        }
    return amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK && set_threads(1) ? others : -1;
}
int main(int argc, char** argv) {
    static const char* const names[2] = { "FP32", "half" };
    static const float logs_at[3] = { 200, 2000, 5000 }, logs[3] = { 0.0002f, 0.0058f, 0.0005f };
    static const float zero_at[2] = { 1, 5000 }, zero[2] = { 1e-8f, 1e-8f };       /* 0 has no logarithm */
    static float loss[2][STEPS], other[STEPS], apart[2][STEPS], size[2][STEPS], most[2][STEPS], gap[STEPS], at[STEPS];
    uint32_t hash = 2166136261u;              /* FNV-1a over the bits of all losses */
    int others = 0;
    if (!text_open(&tale, NULL, 1, 1)) return 1;
    for (int l = 0; l < 2; l++) {
        const amp_level level = l ? AMP_O2 : AMP_O0;
        int equal = 0, wrong = run(level, 0, last_step, loss[l]) ? try_paths(level, names[l], loss[l], gap) : -1;
        if (wrong < 0 || !run(level, 1, last_step, other)) return 1;
        others += wrong;
        for (int s = 0; s < last_step; s++) {
            uint32_t bits;
            memcpy(&bits, &loss[l][s], sizeof bits);
            hash = (hash ^ bits) * 16777619u, at[s] = (float)(s + 1);
            size[l][s] = fabsf(apart[l][s] = other[s] - loss[l][s]);
            most[l][s] = fmaxf(s ? most[l][s - 1] : 0.0f, size[l][s]);
            equal += most[l][s] == 0.0f;
        }
        printf("%s batch reversed: other bits from step %d on, by 100 %.0e, by %d %.0e\n\n", names[l],
               equal + 1, (double)most[l][99], last_step,
               (double)most[l][last_step - 1]);
    }
    puts("PyTorch's logs  step  100  2.6670  2.6670  2.6670\n                step  200  2.5058  2.5058  2.5060\n"
         "                step 2000  1.9954  1.9996  1.9938\n                step 5000  1.8226  1.8226  1.8221");
    chart_series gaps[3] = { chart_curve("FP16, batch reversed", CHART_FP16, at, apart[1], last_step),
        chart_curve("FP32, batch reversed", CHART_OTHER, at, apart[0], last_step),
        chart_curve("amp.h on each path", CHART_FP32, at, gap, last_step) };
    chart_series sizes[4] = { chart_curve("FP16, batch reversed", CHART_FP16, at, size[1], last_step),
        chart_curve("FP32, batch reversed", CHART_OTHER, at, size[0], last_step),
        chart_curve("amp.h: 0", CHART_FP32, zero_at, zero, 2),
        chart_curve("PyTorch's logs of three computers", CHART_FAULT, logs_at, logs, 3) };
    gaps[0].width = gaps[1].width = sizes[0].width = sizes[1].width = 1.5;
    sizes[3].style = CHART_POINTS, sizes[3].width = 9.0;
    const chart_panel panels[2] = {
        { "The same texts in another order train\nanother GPT; amp.h keeps the order", "step",
          "difference of loss", .series = gaps, .series_count = 3 },
        { "PyTorch's GPTs part after step 100,\namp.h's never", "step", "size of the difference", 1, 1,
          .series = sizes, .series_count = 4 } };
    if (!chart_save(argc, argv, "12_same_bits", "The same bits everywhere?", panels, 2)) return 1;
    printf("\ncheck: paths with other bits: %d (amp.h: 0)\n", others);
    printf("       hash of all losses: %08lx (%severywhere: %08lx)\n", (unsigned long)hash,
           last_step == STEPS ? "" : "of 240 steps ", (unsigned long)HASH);
    if (others == 0 && hash == HASH && most[0][last_step - 1] > 1e-4f) return 0;
    return fprintf(stderr, "12_same_bits: these are not amp.h's bits, or the order of a sum does not matter\n"), 1;
}
