/* gpt.c - a GPT learns to write, letter by letter, in mixed precision: the network of "Let's build GPT" (A. Karpathy, 2023;
   4 blocks, 4 heads, 64 features, a context of 32 letters), 209,729 weights for a text of 65 different letters. It reads the
   file that you name, or makes up a tale. Losses are means over the last tenth, whole.
   Run:  make gpt [DATA=FILE], or build/gpt [O0 | O1 | O2 | O3] [f16 | bf16] [--steps N] [--seed N] [--svg PATH] [--keep PATH]
   [FILE]. With --keep it goes on where an earlier run stopped, with the same bits as without a stop. */
#if !defined(_WIN32)
  #define _POSIX_C_SOURCE 200809L       /* clock_gettime */
#endif
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "chart.h"
#include "run.h"
#include "text.h"

enum { BATCH = 16, T = 32, WIDTH = 64, HEADS = 4, BLOCKS = 4, EVERY = 100, MOST = 201, WRITTEN = 300 };
static amp_level level = AMP_O2;
static amp_dtype low = AMP_F16;
static int steps = 1000, seed = 1337;
static struct { float step[MOST], loss[MOST]; int count; } curve;       /* every EVERY steps */

/* x + attention(norm(x)), then x + mlp(norm(x)). The scale is the lesson's: of all features, not of a head's. */
static amp_value block(amp_model* m, amp_value x) {
    const amp_linear_desc qkv = { .out_features = 3 * WIDTH, .no_bias = 1 };
    const amp_attention_desc heads = { .heads = HEADS, .causal = 1, .scale = 0.125f };
    amp_value y = amp_attention(m, amp_linear_with(m, amp_layer_norm(m, x), &qkv), &heads);
    x = amp_add(m, x, amp_linear(m, y, WIDTH));
    y = amp_relu(m, amp_linear(m, amp_layer_norm(m, x), 4 * WIDTH));
    return amp_add(m, x, amp_linear(m, y, WIDTH));
}

static amp_result make_gpt(amp_model** m, int words, amp_value* logits) {
    const amp_model_desc desc = { .batch = BATCH, .precision = { .level = level, .low_dtype = low }, .seed = (uint64_t)seed,
        .optimizer = { .kind = AMP_ADAMW, .lr = 1e-3f, .weight_decay = 0.01f }, .logger = { .log = amp_log_stderr } };
    if (amp_model_create(m, &desc) != AMP_OK) return AMP_ERR_MEMORY;
    amp_value x = amp_position_embedding(*m, amp_embedding(*m, amp_tokens(*m, T), words, WIDTH));
    for (int i = 0; i < BLOCKS; i++) x = block(*m, x);
    *logits = amp_linear(*m, amp_layer_norm(*m, x), words);
    amp_softmax_cross_entropy(*m, *logits);
    return amp_model_finalize(*m);
}

/* The mean loss of the text's last tenth, pieces that lie one behind the other; NaN after an error. */
static float validate(amp_model* m, const text* t) {
    const int32_t* first = t->letters + t->split;
    const amp_data pieces = { .count = (t->length - 1 - t->split) / T, .inputs = { first }, .targets = { first + 1 } };
    amp_eval_info e;
    return amp_evaluate_data(m, &pieces, &e) == AMP_OK ? e.loss : NAN;
}

/* Trains, and prints the loss where others have published it. The seconds of a step; -1 after an error. */
static double train(amp_model* m, const text* t, const char* keep) {
    const amp_scaler* s = amp_model_scaler(m);
    const int first = (int)(s->state.applied + s->state.skipped);     /* of a checkpoint */
    double seconds = 0.0;
    if (first > steps) return fprintf(stderr, "gpt: %s has made %d steps already\n", keep, first), -1.0;
    for (int step = first; step <= steps; step++) {
        if (step % EVERY == 0 || step == steps) {
            if (curve.count == MOST) curve.count--;     /* the last loss is kept, however many there are */
            curve.step[curve.count] = (float)step;
            curve.loss[curve.count++] = validate(m, t);
            if (step % 1000 == 0 || step == 100 || step == 500 || step == steps)
                printf("step %5d  validation loss %.4f\n", step, (double)curve.loss[curve.count - 1]);
            if (keep && step > first && amp_checkpoint_save(m, keep) != AMP_OK) return -1.0;
        }
        static int32_t tokens[BATCH * T], targets[BATCH * T];
        const amp_batch b = { .n = BATCH, .inputs = { tokens }, .targets = { targets } };
        const double start = run_seconds();
        text_pieces(t, (uint64_t)step * BATCH, BATCH, T, tokens, targets);
        if (step < steps && amp_train_step(m, &b, NULL) != AMP_OK) return -1.0;
        seconds += run_seconds() - start;
        chart_progress("learning to write", step, steps);
    }
    return seconds / (steps > first ? steps - first : 1);
}

/* The losses as a picture; 0 after a sentence. */
static int draw(const char* path) {
    const chart_color color = level == AMP_O0 ? CHART_FP32 : low == AMP_BF16 ? CHART_BF16 : CHART_FP16;
    const chart_series s = chart_curve("the last tenth", color, curve.step, curve.loss, curve.count);
    const chart_panel p = { .title = "A GPT learns to write", .x_label = "step", .y_label = "loss a letter", .series = &s,
        .series_count = 1 };
    char error[CHART_ERROR];
    return chart_write(path, p.title, &p, 1, error) || (fprintf(stderr, "gpt: %s\n", error), 0);
}

static int write_letter(int32_t token, void* t) { return putchar(((text*)t)->byte_of[token]) == EOF; }

int main(int argc, char** argv) {
    const char *file = NULL, *svg = NULL, *keep = NULL;
    static int32_t written[WRITTEN];
    amp_model* m = NULL;
    amp_memory memory;
    amp_value logits;
    text t;
    for (int i = 1; i < argc; i++) {
        if (strstr("O0 O1 O2 O3", argv[i]) && argv[i][0] == 'O' && argv[i][1]) level = (amp_level)(argv[i][1] - '0');
        else if (!strcmp(argv[i], "f16") || !strcmp(argv[i], "bf16")) low = argv[i][0] == 'f' ? AMP_F16 : AMP_BF16;
        else if (!strcmp(argv[i], "--steps") && i + 1 < argc) steps = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--seed") && i + 1 < argc) seed = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--svg") && i + 1 < argc) svg = argv[++i];
        else if (!strcmp(argv[i], "--keep") && i + 1 < argc) keep = argv[++i];
        else if (argv[i][0] != '-' && !file) file = argv[i];
        else return fprintf(stderr, "gpt: '%s' is not understood; see the head of examples/gpt.c\n", argv[i]), 2;
    }
    if (steps < 1) return fprintf(stderr, "gpt: --steps needs a number from 1 on\n"), 2;
    if (!text_open(&t, file, 20 * T, (uint64_t)seed)) return 1;
    amp_result r = make_gpt(&m, t.words, &logits);
    FILE* there = keep ? fopen(keep, "rb") : NULL;
    if (there && !fclose(there) && r == AMP_OK) r = amp_checkpoint_load(m, keep);
    const double seconds = r == AMP_OK ? train(m, &t, keep) : -1.0;
    const amp_generate_desc aloud = { .seed = (uint64_t)seed, .on_token = write_letter, .user_data = &t };
    const int ok = seconds >= 0.0 && amp_model_memory(m, &memory) == AMP_OK && (!svg || draw(svg)) &&
                   amp_generate(m, logits, t.letters + t.split, 1, written, WRITTEN, &aloud) == AMP_OK;
    if (ok) printf("\n\n%.1f MB\nGPT %s %s: val %.4f after %d steps, %.0f tokens/s, weights %08lx\n",
        1e-6 * (double)memory.total_bytes, amp_level_name(level), amp_dtype_name(level ? low : AMP_F32),
        (double)curve.loss[curve.count - 1], steps, BATCH * T / seconds, (unsigned long)run_hash(m));
    amp_model_destroy(m);
    free(t.letters);
    return !ok;
}
