/* gpt.c - a small GPT learns to write, letter by letter, in mixed precision: the network of gpt.h, a loss scaler and
   AdamW on FP32 masters, all of them raw-pointer calls.

   It reads the text file that you name, or a tale that it makes up: sentences of one form with words drawn by chance.
   Who knows the form and the words, but not which come, has a loss of 0.28 a letter.

   Run:  make examples && build/gpt [f32 | f16 | bf16] [FILE [CHECKPOINT]]        f16 if nothing is said
   With a checkpoint it goes on where the last run stopped, and writes what one run without a stop would write. */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include "chart.h"
#include "gpt.h"
#include <time.h>

enum { B = 16, T = 64, C = 64, HEADS = 4, BLOCKS = 2, STEPS = 600, REPORT = 50, WRITTEN = 400, SEED = 7 };
enum { TALE = 200000, MAX_TEXT = 100000000 };

/* Each byte that occurs has a number, 0 to vocabulary - 1. */
typedef struct text {
    unsigned char *bytes, byte_of[256];
    int32_t number_of[256];
    size_t length, vocabulary;
} text;

static uint32_t draws;
static uint32_t chance(uint32_t n) { return amp_random_bits(SEED, draws++) % n; }

static void tell(text* t) {
    static const char* const words[6][8] = {
        { "Once", "One night", "At noon", "In spring", "Long ago", "Far away", "At last", "Again" },
        { "old", "young", "brave", "quiet", "hungry", "clever", "small", "lonely" },
        { "fox", "king", "miller", "raven", "sailor", "giant", "queen", "wolf" },
        { "met", "fed", "heard", "feared", "followed", "saved", "forgot", "found" },
        { "grey", "gentle", "wild", "merry", "proud", "sleepy", "tall", "wise" },
        { "owl", "bear", "witch", "baker", "horse", "child", "mouse", "knight" } };
    while (t->length + 100 < TALE) {
        const char* w[6];
        for (int i = 0; i < 6; i++) w[i] = words[i][chance(8)];
        t->length += (size_t)sprintf((char*)t->bytes + t->length, "%s the %s %s %s a %s %s.\n",
                                     w[0], w[1], w[2], w[3], w[4], w[5]);
    }
}

static int read_file(text* t, const char* path) {
    FILE* f = fopen(path, "rb");
    if (!f) return 0;
    t->length = fread(t->bytes, 1, MAX_TEXT, f);
    int ok = !ferror(f);
    fclose(f);
    return ok;
}

/* Returns 0 after a sentence. */
static int text_get(text* t, const char* path) {
    t->bytes = (unsigned char*)malloc(path ? MAX_TEXT : TALE);
    if (!t->bytes) return fprintf(stderr, "gpt: there is not enough memory\n"), 0;
    if (!path) tell(t);
    else if (!read_file(t, path)) return fprintf(stderr, "gpt: %s cannot be read\n", path), 0;
    if (t->length < T + 1) return fprintf(stderr, "gpt: %s has less than %d letters\n", path, T + 1), 0;
    for (size_t i = 0; i < t->length; i++) t->number_of[t->bytes[i]] = 1;
    for (int i = 0; i < 256; i++)
        if (t->number_of[i]) {
            t->byte_of[t->vocabulary] = (unsigned char)i;
            t->number_of[i] = (int32_t)t->vocabulary++;
        }
    return 1;
}

/* B pieces of the text, and as targets the same ones a letter later. */
static void text_batch(const text* t, int32_t* tokens, int32_t* targets) {
    for (int b = 0; b < B; b++) {
        const unsigned char* piece = t->bytes + chance((uint32_t)(t->length - T));
        for (int i = 0; i < T; i++) {
            tokens[b * T + i] = t->number_of[piece[i]];
            targets[b * T + i] = t->number_of[piece[i + 1]];
        }
    }
}

static double seconds(void) {
#ifdef _OPENMP
    return omp_get_wtime();             /* clock() adds up the threads */
#else
    return (double)clock() / CLOCKS_PER_SEC;
#endif
}

/* A checkpoint has all that training needs to go on: parameters, moments and loss scale; and here the steps made, the
   numbers drawn, and what must be the same then: the type, and which bytes are letters. */
typedef struct place { double steps, draws, type, is_letter[256]; } place;

static const amp_logger to_stderr = { amp_log_stderr, NULL };
static const amp_file_desc file_desc = { .logger = &to_stderr };

static place place_now(const gpt* g, const text* t, int steps) {
    place p = { steps, draws, g->s.low, { 0 } };
    for (size_t i = 0; i < t->vocabulary; i++) p.is_letter[t->byte_of[i]] = 1.0;
    return p;
}
static amp_file_tensor place_tensor(place* p) {
    enum { NUMBERS = sizeof *p / sizeof p->steps };
    return (amp_file_tensor){ { p, AMP_F64, NUMBERS, "place" }, 1, { NUMBERS } };
}

static int save(const gpt* g, const text* t, amp_optimizer* o, amp_scaler* s, const char* path, int steps) {
    place now = place_now(g, t, steps);
    const amp_file_tensor more = place_tensor(&now);
    return amp_optimizer_save(o, s, path, &more, 1, &file_desc) == AMP_OK;
}
/* Returns 0 after a sentence. Looks at the place alone first: other letters may be as many. */
static int load(const gpt* g, const text* t, amp_optimizer* o, amp_scaler* s, const char* path, int* steps) {
    const place now = place_now(g, t, 0);
    place then;
    const amp_file_tensor more = place_tensor(&then);
    if (amp_file_load(path, &more, 1, &file_desc) != AMP_OK) return 0;
    if (then.type != now.type)
        return fprintf(stderr, "gpt: %s was not trained in %s\n", path, amp_dtype_name(g->s.low)), 0;
    if (memcmp(then.is_letter, now.is_letter, sizeof now.is_letter))
        return fprintf(stderr, "gpt: %s was trained on a text with other letters\n", path), 0;
    if (amp_optimizer_load(o, s, path, &more, 1, &file_desc) != AMP_OK) return 0;
    *steps = (int)then.steps;
    draws = (uint32_t)then.draws;
    return 1;
}

/* Returns 0 after a sentence. */
static int train(gpt* g, const text* t, amp_optimizer* optimizer, amp_scaler* scaler, const char* checkpoint) {
    int32_t tokens[B * T], targets[B * T];
    double start = seconds();
    int step = 0;
    FILE* there = checkpoint ? fopen(checkpoint, "rb") : NULL;
    if (there) {
        fclose(there);
        if (!load(g, t, optimizer, scaler, checkpoint, &step)) return 0;
    }
    printf("%d letters, %d different ones; %d steps with %d letters each; %s, %.1f MB\n", (int)t->length, (int)t->vocabulary,
           STEPS - step, B * T, amp_dtype_name(g->s.low), 1e-6 * (double)g->used);
    fflush(stdout);
    while (step++ < STEPS) {
        text_batch(t, tokens, targets);
        gpt_forward(g, tokens, B);
        float loss = gpt_loss(g, targets);
        float loss_scale = amp_scaler_scale_loss(scaler, 1.0f);
        gpt_backward(g, tokens, targets, &loss_scale);
        if (amp_optimizer_step(optimizer, scaler, NULL) != AMP_OK || amp_scaler_update(scaler) != AMP_OK) return 0;
        chart_progress("learning to write", step % REPORT ? step : STEPS, STEPS);     /* gone where a line is printed */
        if (step % REPORT) continue;
        printf("step %3d  loss %.3f  scale %-6g  %.0f letters/s\n", step, (double)loss, (double)scaler->state.scale,
               REPORT * B * T / (seconds() - start));
        if (checkpoint && !save(g, t, optimizer, scaler, checkpoint, step)) return 0;
        start = seconds();
    }
    printf("%d steps skipped\n\n", (int)scaler->state.skipped);
    return 1;
}

static int32_t draw(const float* probabilities, size_t n) {
    float u = amp_random_uniform(SEED, draws++);
    size_t i = 0;
    while (i + 1 < n && u >= probabilities[i]) u -= probabilities[i++];
    return (int32_t)i;
}

/* Letter by letter; the network sees the last T at most. Behind them stand zeros, which no letter sees. */
static void write_on(gpt* g, const text* t, char first) {
    int32_t tokens[T] = { t->number_of[(unsigned char)first] };
    float probabilities[256];
    for (int i = 1, seen = 1; i <= WRITTEN; i++) {
        gpt_forward(g, tokens, 1);
        amp_softmax_forward(amp_f32(g->logits + (size_t)(seen - 1) * t->vocabulary),
            amp_f32(probabilities), 1, t->vocabulary, NULL);
        int32_t next = draw(probabilities, t->vocabulary);
        putchar(t->byte_of[next]);
        if (seen < T) tokens[seen++] = next;
        else {
            memmove(tokens, tokens + 1, (T - 1) * sizeof *tokens);
            tokens[T - 1] = next;
        }
    }
    putchar('\n');
}

static int run(const text* t, amp_dtype low, const char* checkpoint) {
    gpt g;
    const gpt_shape shape = { B, T, C, HEADS, BLOCKS, t->vocabulary, low };
    const amp_optimizer_desc adamw = { .kind = AMP_ADAMW, .lr = 0.006f, .beta2 = 0.99f, .weight_decay = 0.1f,
        .clip_norm = 1.0f, .groups = gpt_groups, .group_count = 2, .logger = &g.logger,
        .schedule = { .kind = AMP_SCHEDULE_COSINE, .warmup_steps = 20, .total_steps = STEPS, .floor = 0.1f } };
    const amp_scaler_desc unscaled = { .preset = AMP_SCALER_STATIC, .init_scale = 1.0f, .logger = &g.logger };
    const amp_scaler_desc dynamic = { .growth_interval = 100, .logger = &g.logger };
    amp_optimizer optimizer;
    amp_scaler scaler;
    if (!gpt_create(&g, &shape)) return fprintf(stderr, "gpt: there is not enough memory\n"), 1;
    int ok = amp_optimizer_init(&optimizer, &adamw, g.params, g.count) == AMP_OK &&
             amp_scaler_init(&scaler, low == AMP_F16 ? &dynamic : &unscaled) == AMP_OK;  /* only half needs a scale */
    ok = ok && train(&g, t, &optimizer, &scaler, checkpoint);
    if (ok) write_on(&g, t, '\n');
    gpt_free(&g);
    return !ok;
}

static const char usage[] = "usage: gpt [f32 | f16 | bf16] [FILE [CHECKPOINT]]";

int main(int argc, char** argv) {
    static text t;
    const char *path = NULL, *checkpoint = NULL;
    amp_dtype low = AMP_F16;
    for (int i = 1; i < argc; i++) {
        amp_dtype type = AMP_F32;
        while (type <= AMP_BF16 && strcmp(argv[i], amp_dtype_name(type))) type = (amp_dtype)(type + 1);
        if (strcmp(argv[i], "--help") == 0) return puts(usage), 0;
        if (type <= AMP_BF16) low = type;
        else if (argv[i][0] != '-' && !path) path = argv[i];
        else if (argv[i][0] != '-' && !checkpoint) checkpoint = argv[i];
        else return fprintf(stderr, "gpt: '%s' is not understood; %s\n", argv[i], usage), 2;
    }
    int status = text_get(&t, path) ? run(&t, low, checkpoint) : 1;
    free(t.bytes);
    return status;
}
