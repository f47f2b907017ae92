/* test_generate.c - texts that a model continues: amp_generate beside amp_predict on the same tokens, draws beside the
   probabilities they come from, and refusals. */
#define AMP_BACKEND_API
#include "small_model.h"
#include <math.h>

enum { WORDS = 11, LONGEST = 6, DIM = 8, TEXT = 40 };

typedef struct speaker { amp_model* m; amp_value tokens, logits; } speaker;

/* Logits of the last token alone: row v of `table` behind token v. */
static speaker make_table(const float* table, int classes) {
    const amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
    speaker s;
    s.m = new_model(&d);
    s.tokens = amp_tokens(s.m, LONGEST);
    s.logits = amp_embedding(s.m, s.tokens, WORDS, WORDS);
    if (classes > 0) {
        amp_loss_desc loss;
        memset(&loss, 0, sizeof loss);
        loss.classes = classes;
        amp_softmax_cross_entropy_with(s.m, s.logits, &loss);
    }
    CHECK_MSG(amp_model_finalize(s.m) == AMP_OK, "%s", amp_model_error(s.m));
    CHECK(amp_model_write_param(s.m, amp_model_find_param(s.m, "embedding1.weight"), table) == AMP_OK);
    return s;
}

/* Rows that dense layers have computed. */
static size_t rows_computed;
static amp_result counting_linear(amp_ref x, amp_ref w, amp_ref b, amp_ref y, size_t n, size_t in, size_t out, const amp_exec* exec) {
    rows_computed += n;
    return amp_linear_forward(x, w, b, y, n, in, out, exec);
}
static amp_result same_forward(const amp_custom_call* c) {
    return amp_convert(c->y, c->x[0], (size_t)(c->n * c->positions) * DIM);
}
static const amp_custom_desc same = { .forward = same_forward };

/* A transformer. how: 0 GPT-2, 1 Llama, whose second of two blocks sees a window, 2 positions see later ones, 3 an operator
   of the user's might. */
enum { CAUSAL_HOWS = 2, HOWS = 4 };
static speaker make_transformer(int how, amp_level level, amp_dtype low) {
    static amp_backend counting;
    amp_model_desc d = model_desc(2, level, low);
    amp_transformer_desc block;
    amp_embedding_desc e;
    amp_value x;
    speaker s;
    counting = *amp_cpu_backend();
    counting.linear_forward = counting_linear;
    counting.linear_relu_forward = NULL;
    d.backend = &counting;
    d.allocator.alloc = failing_alloc;
    d.allocator.free = failing_free;
    memset(&block, 0, sizeof block);
    memset(&e, 0, sizeof e);
    block.kind = how == 1 ? AMP_BLOCK_LLAMA : AMP_BLOCK_GPT2;
    block.heads = 2; block.hidden = 16; block.sd = 0.5f; block.bidirectional = how == 2;
    block.kv_heads = how == 1;
    e.vocabulary = WORDS; e.features = DIM; e.init = AMP_INIT_NORMAL; e.sd = 1.0f;
    s.m = new_model(&d);
    s.tokens = amp_tokens(s.m, LONGEST);
    x = amp_embedding_with(s.m, s.tokens, &e);
    e.vocabulary = e.features = 0;
    if (how != 1) x = amp_position_embedding_with(s.m, x, &e);
    x = amp_transformer_block(s.m, x, &block);
    if (how == 1) block.window = 3;
    x = amp_transformer_block(s.m, x, &block);
    if (how == 3) x = amp_custom(s.m, &x, 1, &same);
    s.logits = amp_linear(s.m, amp_layer_norm(s.m, x), WORDS);
    CHECK_MSG(amp_model_finalize(s.m) == AMP_OK, "%s", amp_model_error(s.m));
    return s;
}

/* The text that amp_predict gives, whose largest logit is always next, of the last LONGEST tokens. */
static void continue_by_predictions(const speaker* s, const int32_t* prompt, int known, int32_t* out, int count, int words) {
    int32_t text[2 * TEXT];
    float* logits = malloc(LONGEST * WORDS * sizeof *logits);
    int i, k;
    memcpy(text, prompt, (size_t)known * sizeof *text);
    for (i = 0; i < count; i++, known++) {
        const int sees = known < LONGEST ? known : LONGEST;
        const float* row = logits + (sees - 1) * WORDS;
        amp_batch b;
        memset(&b, 0, sizeof b);
        b.n = 1;
        b.positions = sees;
        b.inputs[0] = text + known - sees;
        CHECK_MSG(amp_predict(s->m, &b, s->logits, logits) == AMP_OK, "%s", heard);
        text[known] = 0;
        for (k = 1; k < words; k++) if (row[k] > row[text[known]]) text[known] = k;
        out[i] = text[known];
    }
    free(logits);
}

/* A prompt of each length, shorter and longer than the model's positions: the largest logits' text is that of predictions. */
static void check_greedy(const speaker* s, int words) {
    static const int32_t prompt[LONGEST + 2] = { 1, 4, 2, 8, 5, 7, 1, 3 };
    amp_generate_desc d;
    int known;
    memset(&d, 0, sizeof d);
    d.temperature = AMP_ZERO;
    d.classes = words < WORDS ? words : 0;
    for (known = 1; known <= LONGEST + 2; known++) {
        int32_t text[TEXT], expected[TEXT];
        continue_by_predictions(s, prompt, known, expected, TEXT, words);
        CHECK_MSG(amp_generate(s->m, s->logits, prompt, known, text, TEXT, &d) == AMP_OK, "%s", heard);
        CHECK_MSG(memcmp(text, expected, sizeof text) == 0, "a prompt of %d tokens, %d words", known, words);
    }
}

static void test_greedy(void) {
    float table[WORDS * WORDS];
    int32_t text[TEXT], token = 3, i;
    amp_generate_desc d;
    speaker s;
    for (i = 0; i < COUNT(table); i++) table[i] = test_uniform();
    for (i = 0; i < WORDS; i++) table[i * WORDS + (i * 3 + 1) % WORDS] = 5.0f;
    s = make_table(table, 0);
    memset(&d, 0, sizeof d);
    d.temperature = AMP_ZERO;
    CHECK(amp_generate(s.m, s.logits, &token, 1, text, TEXT, &d) == AMP_OK);
    for (i = 0; i < TEXT; i++) { token = (token * 3 + 1) % WORDS; CHECK(text[i] == token); }
    check_greedy(&s, WORDS);
    check_greedy(&s, WORDS - 4);
    amp_model_destroy(s.m);
}

/* Transformers at each level, with a key-value cache where that is possible, write what they write without one. */
static void test_transformers(void) {
    static const struct { amp_level level; amp_dtype low; } runs[] = { { AMP_O0, AMP_F16 }, { AMP_O1, AMP_BF16 },
        { AMP_O2, AMP_F16 }, { AMP_O2, AMP_BF16 }, { AMP_O3, AMP_F16 } };
    const int32_t prompt[3] = { 3, 1, 4 };
    int how, run, i;
    for (how = 0; how < HOWS; how++)
        for (run = 0; run < COUNT(runs); run++) {
            speaker s = make_transformer(how, runs[run].level, runs[run].low);
            amp_generate_desc d;
            int32_t text[TEXT];
            size_t each, expected = 0;
            check_greedy(&s, WORDS);
            /* Rows: all at first and where the oldest token leaves, else the new one. */
            memset(&d, 0, sizeof d);
            rows_computed = 0;
            CHECK(amp_generate(s.m, s.logits, prompt, 1, text, 1, &d) == AMP_OK);
            each = rows_computed;
            for (i = 0; i < 7; i++) expected += i == 0 || i > 3 || how >= CAUSAL_HOWS ? (size_t)(i > 3 ? LONGEST : 3 + i) : 1;
            rows_computed = 0;
            CHECK(amp_generate(s.m, s.logits, prompt, 3, text, 7, &d) == AMP_OK);
            CHECK_MSG(rows_computed == each * expected, "how %d: %lu rows, %lu a position", how, (unsigned long)rows_computed,
                      (unsigned long)each);
            amp_model_destroy(s.m);
        }
}

/* Without memory there is no text; without that for each cache the text is written with none. */
static void test_memory(void) {
    const int32_t prompt[3] = { 3, 1, 4 };
    int32_t expected[TEXT], text[TEXT];
    speaker s = make_transformer(0, AMP_O2, AMP_BF16);
    const long before = alloc_live;
    long at;
    CHECK(amp_generate(s.m, s.logits, prompt, 3, expected, TEXT, NULL) == AMP_OK && alloc_live == before);
    for (at = 1; at <= 5; at++) {
        amp_result r;
        memset(text, 0, sizeof text);
        fail_at_call(at);
        r = amp_generate(s.m, s.logits, prompt, 3, text, TEXT, NULL);
        CHECK(r == (at <= 2 ? AMP_ERR_MEMORY : AMP_OK) && alloc_live == before);
        CHECK(at <= 2 ? text[0] == 0 && strcmp(heard, "generate: out of memory") == 0 : memcmp(text, expected, sizeof text) == 0);
        CHECK(at <= 4 ? alloc_calls >= at : alloc_calls == 4);       /* two arrays and two caches are all */
    }
    fail_at_call(0);
    amp_model_destroy(s.m);
    CHECK(alloc_live == 0);
}

/* Counts of draws are what the probabilities say, within five standard deviations; one seed gives one text. */
static void test_draws(void) {
    enum { DRAWS = 20000 };
    static const float temperatures[] = { 0.0f, 0.5f, 3.0f };
    static int32_t text[DRAWS], again[DRAWS];
    float table[WORDS * WORDS];
    int t, k, i, top;
    speaker s;
    const int32_t token = 0;
    for (i = 0; i < COUNT(table); i++) table[i] = (float)(i % WORDS * 7 % WORDS) * 0.3f;    /* each row the same */
    s = make_table(table, 0);
    for (t = 0; t < COUNT(temperatures); t++)
        for (top = 0; top < WORDS; top += 3) {
            const double temperature = t ? (double)temperatures[t] : 1.0;
            double p[WORDS], sum = 0.0;
            int counts[WORDS] = { 0 };
            amp_generate_desc d;
            memset(&d, 0, sizeof d);
            d.temperature = temperatures[t];
            d.top_k = top;
            d.seed = (uint64_t)(5 + t);
            CHECK(amp_generate(s.m, s.logits, &token, 1, text, DRAWS, &d) == AMP_OK);
            CHECK(amp_generate(s.m, s.logits, &token, 1, again, DRAWS, &d) == AMP_OK && memcmp(text, again, sizeof text) == 0);
            for (i = 0; i < DRAWS; i++) counts[text[i]]++;
            for (k = 0; k < WORDS; k++) {
                const int larger = WORDS - 1 - k * 7 % WORDS;       /* logits above this one */
                p[k] = top == 0 || larger < top ? exp((double)table[k] / temperature) : 0.0;
                sum += p[k];
            }
            for (k = 0; k < WORDS; k++) {
                const double mean = DRAWS * p[k] / sum;
                CHECK_MSG(fabs(counts[k] - mean) <= 5 * sqrt(mean * (1 - p[k] / sum)), "temperature %g, top %d, token %d: %d of %g",
                          temperature, top, k, counts[k], mean);
            }
            d.seed++;
            CHECK(amp_generate(s.m, s.logits, &token, 1, again, DRAWS, &d) == AMP_OK && memcmp(text, again, sizeof text) != 0);
        }
    amp_model_destroy(s.m);
}

/* Of equal logits the first ones are drawn from; -inf and a padded vocabulary never are. */
static void test_ties(void) {
    float table[WORDS * WORDS];
    int32_t text[500], token = 0;
    int i, seen = 0;
    amp_generate_desc d;
    speaker s;
    for (i = 0; i < COUNT(table); i++)
        table[i] = i % WORDS == 2 ? -INFINITY : i % WORDS >= WORDS - 2 ? NAN : i % WORDS == 1 ? -1.0f : 2.0f;
    s = make_table(table, 0);
    memset(&d, 0, sizeof d);
    d.top_k = 3;
    d.classes = WORDS - 2;
    CHECK_MSG(amp_generate(s.m, s.logits, &token, 1, text, COUNT(text), &d) == AMP_OK, "%s", heard);
    for (i = 0; i < COUNT(text); i++) { CHECK(text[i] == 0 || text[i] == 3 || text[i] == 4); seen |= 1 << text[i]; }
    CHECK(seen == (1 | 1 << 3 | 1 << 4));
    d.top_k = 0;
    CHECK(amp_generate(s.m, s.logits, &token, 1, text, COUNT(text), &d) == AMP_OK);
    for (i = 0; i < COUNT(text); i++) CHECK(text[i] != 2 && text[i] < WORDS - 2);
    d.classes = 0;
    CHECK(amp_generate(s.m, s.logits, &token, 1, text, 3, &d) == AMP_ERR_OVERFLOW);
    CHECK_MSG(strcmp(heard, "generate: logits of token 0 are not finite") == 0, "%s", heard);

    /* a vocabulary that only fills up, as the loss says */
    amp_model_destroy(s.m);
    s = make_table(table, WORDS - 2);
    CHECK_MSG(amp_generate(s.m, s.logits, &token, 1, text, COUNT(text), &d) == AMP_OK, "%s", heard);
    for (i = 0; i < COUNT(text); i++) CHECK(text[i] != 2 && text[i] < WORDS - 2);
    for (i = 0; i < COUNT(table); i++) table[i] = -INFINITY;
    CHECK(amp_model_write_param(s.m, amp_model_find_param(s.m, "embedding1.weight"), table) == AMP_OK);
    CHECK(amp_generate(s.m, s.logits, &token, 1, text, 3, &d) == AMP_ERR_OVERFLOW);
    amp_model_destroy(s.m);
}

static int heard_tokens;
static int until_four(int32_t token, void* user_data) {
    CHECK(token == ((int32_t*)user_data)[heard_tokens]);
    return ++heard_tokens == 4;
}

/* The callback hears each token, and ends the text. */
static void test_callback(void) {
    float table[WORDS * WORDS];
    int32_t text[10], expected[10], token = 6;
    int i;
    amp_generate_desc d;
    speaker s;
    for (i = 0; i < COUNT(table); i++) table[i] = test_uniform();
    s = make_table(table, 0);
    memset(&d, 0, sizeof d);
    CHECK(amp_generate(s.m, s.logits, &token, 1, expected, 10, &d) == AMP_OK);
    d.on_token = until_four;
    d.user_data = expected;
    heard_tokens = 0;
    CHECK(amp_generate(s.m, s.logits, &token, 1, text, 10, &d) == AMP_OK && heard_tokens == 4);
    for (i = 0; i < 10; i++) CHECK(text[i] == (i < 4 ? expected[i] : -1));
    amp_model_destroy(s.m);
}

static void check_silent(const speaker* s, amp_value v, const int32_t* prompt, int known, int count, const amp_generate_desc* d,
                          amp_result code, const char* sentence) {
    int32_t out[2] = { 77, 78 };
    CHECK(amp_generate(s->m, v, prompt, known, count == 3 ? NULL : out, count, d) == code);
    CHECK_MSG(strcmp(heard, sentence) == 0, "\"%s\"", heard);
    CHECK(out[0] == 77 && out[1] == 78);
}
static void test_refusals(void) {
    static const float table[WORDS * WORDS] = { 0 };
    const int32_t prompt[2] = { 1, 2 }, wrong[2] = { 1, WORDS };
    const amp_value none = { 0, 0 };
    amp_model_desc md = model_desc(1, AMP_O0, AMP_F16);
    amp_generate_desc d;
    speaker s = make_table(table, 0), rows;
    check_silent(&s, s.logits, NULL, 2, 2, NULL, AMP_ERR_ARGUMENT, "generate: prompt is NULL");
    check_silent(&s, s.logits, prompt, 0, 2, NULL, AMP_ERR_ARGUMENT, "generate: prompt_count is 0, at least 1 is needed");
    check_silent(&s, s.logits, prompt, 2, -1, NULL, AMP_ERR_ARGUMENT,
                  "generate: count is -1, and out must have room for as many tokens");
    check_silent(&s, s.logits, prompt, 2, 3, NULL, AMP_ERR_ARGUMENT,
                  "generate: count is 3, and out must have room for as many tokens");
    check_silent(&s, none, prompt, 2, 2, NULL, AMP_ERR_ARGUMENT, "generate: value 0 is not of this model");
    check_silent(&s, s.tokens, prompt, 2, 2, NULL, AMP_ERR_ARGUMENT, "generate: 'input1' has no logits at each position");
    check_silent(&s, s.logits, wrong, 2, 2, NULL, AMP_ERR_ARGUMENT,
                 "layer 'embedding1': token 11 of sample 0, position 1, is outside 0..10");
    memset(&d, 0, sizeof d);
    d.classes = WORDS + 1;
    check_silent(&s, s.logits, prompt, 2, 2, &d, AMP_ERR_DESC, "generate: classes 12 must lie in 0..11, top_k 0 not be negative");
    d.classes = 0; d.top_k = -1;
    check_silent(&s, s.logits, prompt, 2, 2, &d, AMP_ERR_DESC, "generate: classes 0 must lie in 0..11, top_k -1 not be negative");
    d.top_k = 0; d.temperature = -2.0f;
    check_silent(&s, s.logits, prompt, 2, 2, &d, AMP_ERR_DESC, "generate: temperature is -2, it must be positive, or AMP_ZERO");
    d.temperature = INFINITY;
    CHECK(amp_generate(s.m, s.logits, prompt, 2, (int32_t[2]){ 0 }, 2, &d) == AMP_ERR_DESC);
    CHECK(amp_generate(NULL, s.logits, prompt, 2, (int32_t[2]){ 0 }, 2, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_generate(s.m, s.logits, prompt, 2, NULL, 0, NULL) == AMP_OK);
    amp_model_destroy(s.m);

    rows.m = new_model(&md);
    rows.tokens = amp_input(rows.m, 4, 1, 1);
    rows.logits = amp_linear(rows.m, rows.tokens, WORDS);
    check_silent(&rows, rows.logits, prompt, 2, 2, NULL, AMP_ERR_STATE, "generate: the model is not finalized");
    CHECK(amp_model_finalize(rows.m) == AMP_OK);
    check_silent(&rows, rows.logits, prompt, 2, 2, NULL, AMP_ERR_ARGUMENT, "generate: the model's one input must be amp_tokens");
    amp_model_destroy(rows.m);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_greedy);
    TEST(test_transformers);
    TEST(test_memory);
    TEST(test_draws);
    TEST(test_ties);
    TEST(test_callback);
    TEST(test_refusals);
    TEST_END();
}
