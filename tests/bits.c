/* bits.c - training whose result must be the same bits everywhere: prints one hash over the losses, scaler states,
   weights and moments of ten steps at O0, O1 and O2, in FP16 and BF16, with SGD-momentum and AdamW, and of two steps
   of a network that is wide enough for OpenMP to use its threads. The network has a layer of every kind. Then ten steps of
   a small GPT, a block like examples/gpt.c's and one like Llama's, on a text that is made up, and letters that it writes.
   See test_bits.sh for where it is run. */
#include "../amp.h"
#include <stdio.h>
#include <string.h>
#ifdef _OPENMP
  #include <omp.h>
#endif

enum { SIDE = 20, BATCH = 12, STEPS = 10, WIDE_BATCH = 48, WIDE_STEPS = 2 };
enum { TEXTS = 4, T = 16, LETTERS = 27, WIDTH = 32, WRITTEN = 24 };

/* FNV-1a on bytes, in an order that does not depend on the machine's. */
static uint64_t hash_bits(uint64_t h, uint32_t bits) {
    int i;
    for (i = 0; i < 4; i++) h = (h ^ ((bits >> (8 * i)) & 0xffu)) * 1099511628211u;
    return h;
}
static uint64_t hash_floats(uint64_t h, const float* x, size_t n) {
    size_t i;
    for (i = 0; x && i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        h = hash_bits(h, u);
    }
    return h;
}

static amp_value linear(amp_model* m, amp_value x, int out) {
    amp_linear_desc d;
    memset(&d, 0, sizeof d);
    d.out_features = out;
    d.init = AMP_INIT_HE;
    return amp_linear_with(m, x, &d);
}

static void build(amp_model* m, int hidden) {
    amp_conv2d_desc c;
    amp_value x = amp_input(m, 1, SIDE, SIDE), y;
    memset(&c, 0, sizeof c);
    c.init = AMP_INIT_HE;
    c.out_channels = 6;
    c.kernel = 5;
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d_with(m, x, &c)), 2);                        /* 6 x 8 x 8 */
    c.out_channels = 8;
    c.kernel = 3;
    c.pad = 1;
    x = amp_batch_norm(m, amp_conv2d_with(m, x, &c));
    c.groups = 2;
    y = amp_gelu(m, amp_conv2d_with(m, x, &c));
    x = amp_add(m, x, y);
    x = amp_avg_pool2d(m, amp_concat(m, x, amp_sigmoid(m, y)), 2);                      /* 16 x 4 x 4 */
    x = amp_layer_norm(m, amp_tanh(m, linear(m, x, hidden)));
    x = amp_dropout(m, x, 0.1f);
    amp_mse(m, amp_softmax(m, linear(m, x, 10)));
    amp_softmax_cross_entropy(m, linear(m, x, 10));
}

static void build_text(amp_model* m, amp_value* logits) {
    amp_transformer_desc block;
    amp_value letters = amp_embedding(m, amp_tokens(m, T), LETTERS, WIDTH), x = amp_position_embedding(m, letters);
    memset(&block, 0, sizeof block);
    block.heads = 4;
    block.dropout = 0.1f;
    x = amp_transformer_block(m, x, &block);
    memset(&block, 0, sizeof block);
    block.kind = AMP_BLOCK_LLAMA;
    block.heads = 4;
    block.kv_heads = 2;
    block.hidden = 48;
    x = amp_transformer_block(m, x, &block);
    *logits = amp_tied_linear(m, amp_rms_norm(m, x), letters);
    amp_softmax_cross_entropy(m, *logits);
}

/* Masters and moments. */
static uint64_t hash_params(uint64_t h, amp_model* m) {
    int i, count;
    const amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) {
        h = hash_floats(h, p[i].master, p[i].count);
        h = hash_floats(h, p[i].m, p[i].count);
        h = hash_floats(h, p[i].v, p[i].count);
    }
    return h;
}

/* What both networks' models have. */
static void settings(amp_model_desc* d, int batch, amp_level level, amp_dtype low) {
    memset(d, 0, sizeof *d);
    d->batch = batch;
    d->seed = 7;
    d->precision.level = level;
    d->precision.low_dtype = low;
    d->logger.log = amp_log_stderr;
}

/* Each second step has texts that end early. */
static int run_text(uint64_t* h, amp_level level, amp_dtype low) {
    static const int32_t lengths[TEXTS] = { T, 5, 11, T };
    int32_t text[TEXTS * T + 1], written[WRITTEN];
    amp_model_desc d;
    amp_generate_desc how;
    amp_model* m;
    amp_value logits;
    amp_batch b;
    amp_step_info info;
    int i, k;
    settings(&d, TEXTS, level, low);
    memset(&how, 0, sizeof how);
    memset(&b, 0, sizeof b);
    d.optimizer.kind = AMP_ADAMW;
    d.optimizer.lr = 0.004f;
    d.optimizer.clip_norm = 1.0f;
    if (amp_model_create(&m, &d) != AMP_OK) return 0;
    build_text(m, &logits);
    if (amp_model_finalize(m) != AMP_OK) return 0;
    b.n = TEXTS;
    b.inputs[0] = text;
    b.targets[0] = text + 1;
    for (k = 0; k < STEPS; k++) {
        for (text[0] = k, i = 1; i <= TEXTS * T; i++)
            text[i] = (text[i - 1] * 5 + (int32_t)(amp_random_bits(13, (uint64_t)(k * TEXTS * T + i)) % 3u)) % LETTERS;
        b.lengths = k % 2 ? lengths : NULL;
        if (amp_train_step(m, &b, &info) != AMP_OK) return 0;
        *h = hash_floats(*h, &info.loss, 1);
        *h = hash_floats(*h, &info.scale_after, 1);
    }
    *h = hash_params(*h, m);
    how.seed = 5;
    if (amp_generate(m, logits, text, 3, written, WRITTEN, &how) != AMP_OK) return 0;
    for (i = 0; i < WRITTEN; i++) *h = hash_bits(*h, (uint32_t)written[i]);
    amp_model_destroy(m);
    return 1;
}

static int run(uint64_t* h, amp_level level, amp_dtype low, amp_optimizer_kind kind, int wide) {
    static float x[WIDE_BATCH * SIDE * SIDE], one_hot[WIDE_BATCH * 10];
    static int32_t labels[WIDE_BATCH];
    const int batch = wide ? WIDE_BATCH : BATCH, steps = wide ? WIDE_STEPS : STEPS;
    amp_model_desc d;
    amp_scaler_desc sd;
    amp_model* m;
    amp_batch b;
    amp_step_info info;
    int i, k;
    settings(&d, batch, level, low);
    memset(&sd, 0, sizeof sd);
    memset(&b, 0, sizeof b);
    d.optimizer.kind = kind;
    d.optimizer.lr = kind == AMP_SGD ? 0.05f : 0.002f;
    d.optimizer.momentum = kind == AMP_SGD ? 0.9f : 0.0f;
    d.optimizer.weight_decay = kind == AMP_SGD ? 0.0f : 0.01f;
    d.optimizer.clip_norm = 5.0f;
    sd.init_scale = 16777216.0f;                      /* high enough that some steps overflow in FP16 */
    sd.growth_interval = 3;
    if (level != AMP_O0) d.scaler = &sd;
    if (amp_model_create(&m, &d) != AMP_OK) return 0;
    build(m, wide ? 160 : 40);
    if (amp_model_finalize(m) != AMP_OK) return 0;
    b.n = batch;
    b.inputs[0] = x;
    b.targets[0] = one_hot;
    b.targets[1] = labels;
    for (k = 0; k < steps; k++) {
        for (i = 0; i < batch * SIDE * SIDE; i++) x[i] = amp_random_normal(11, (uint64_t)(k * batch * SIDE * SIDE + i));
        memset(one_hot, 0, sizeof one_hot);
        for (i = 0; i < batch; i++) {
            labels[i] = (int32_t)(amp_random_bits(12, (uint64_t)(k * batch + i)) % 10u);
            one_hot[i * 10 + labels[i]] = 1.0f;
        }
        if (amp_train_step(m, &b, &info) != AMP_OK) return 0;
        *h = hash_floats(*h, &info.loss, 1);
        *h = hash_floats(*h, &info.scale_after, 1);
        *h = hash_bits(*h, (uint32_t)info.step);
    }
    *h = hash_params(*h, m);
    amp_model_destroy(m);
    return 1;
}

/* One line for people, and its hash into that of the whole. */
enum { SMALL, WIDE, TEXT };
static int line(uint64_t* all, const char* name, amp_level level, amp_dtype low, amp_optimizer_kind kind, int what) {
    uint64_t h = 1469598103934665603u;
    if (!(what == TEXT ? run_text(&h, level, low) : run(&h, level, low, kind, what == WIDE))) return 0;
    printf("%-4s %s %-4s %-5s %08lx%08lx\n", name, amp_level_name(level), level == AMP_O0 ? "f32" : amp_dtype_name(low),
           kind == AMP_SGD ? "sgd" : "adamw", (unsigned long)(h >> 32), (unsigned long)(h & 0xffffffffu));
    *all = hash_bits(hash_bits(*all, (uint32_t)(h >> 32)), (uint32_t)h);
    return 1;
}

int main(void) {
    static const amp_level levels[] = { AMP_O0, AMP_O1, AMP_O2, AMP_O1, AMP_O2 };
    static const amp_dtype types[] = { AMP_F16, AMP_F16, AMP_F16, AMP_BF16, AMP_BF16 };
    uint64_t all = 1469598103934665603u;
    int i, k, threads = 1;
    for (i = 0; i < 5; i++)
        for (k = 0; k < 2; k++)
            if (!line(&all, "", levels[i], types[i], k ? AMP_ADAMW : AMP_SGD, SMALL)) return 1;
    if (!line(&all, "wide", AMP_O1, AMP_F16, AMP_ADAMW, WIDE)) return 1;
    for (i = 0; i < 5; i += 2)      /* O0, and O2 in both types */
        if (!line(&all, "text", levels[i], types[i], AMP_ADAMW, TEXT)) return 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    printf("path %s, %d thread%s\n", amp_isa_name(amp_cpu_isa()), threads, threads > 1 ? "s" : "");
    printf("hash %08lx%08lx\n", (unsigned long)(all >> 32), (unsigned long)(all & 0xffffffffu));
    return 0;
}
