/* test_sequence.c - sequences in the graph: a value has positions. A model over n sequences of t positions is compared, bit
   for bit, with one over n * t rows, which knows no positions; what lies beyond lengths with a model that never saw it. */
#define AMP_BACKEND_API
#include "small_model.h"
#include <math.h>

enum { BATCH = 4, LONGEST = 5, WIDTH = 6, CLASSES = 7, PADDED = 9 };   /* sequences, positions, features, labels, logits */

/* The levels and types that a network runs in. */
static const struct { amp_level level; amp_dtype low; const char* name; } runs[] = {
    { AMP_O0, AMP_F16, "O0" }, { AMP_O1, AMP_F16, "O1 f16" }, { AMP_O2, AMP_F16, "O2 f16" }, { AMP_O2, AMP_BF16, "O2 bf16" } };

/* Data of a batch: inputs, and a target for each loss. */
typedef struct data {
    float x[BATCH * LONGEST * WIDTH], floats[BATCH * LONGEST * 3], bits[BATCH * LONGEST * 2];
    int32_t labels[BATCH * LONGEST];
} data;
static void fill(data* d) {
    int i;
    for (i = 0; i < COUNT(d->x); i++) d->x[i] = test_uniform();
    for (i = 0; i < COUNT(d->floats); i++) d->floats[i] = test_uniform();
    for (i = 0; i < COUNT(d->bits); i++) d->bits[i] = (float)(test_random() & 1u);
    for (i = 0; i < COUNT(d->labels); i++) d->labels[i] = (int32_t)(test_random() % CLASSES);
}
static amp_batch batch_of(const data* d, int n, int positions, const int32_t* lengths) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n;
    b.inputs[0] = d->x;
    b.targets[0] = d->labels; b.targets[1] = d->floats; b.targets[2] = d->bits;
    b.positions = positions;
    b.lengths = lengths;
    return b;
}

static amp_value input_of(amp_model* m, int positions, int width) {
    amp_input_desc d;
    memset(&d, 0, sizeof d);
    d.channels = width; d.height = d.width = 1; d.positions = positions;
    return amp_input_with(m, &d);
}

/* Each operator on rows, and each loss; positions 0: a model of rows. */
typedef struct network { amp_model* m; amp_value x, sum, logits; } network;
static network make_network(int batch, int positions, int run, float dropout) {
    amp_model_desc d = model_desc(batch, runs[run].level, runs[run].low);
    amp_loss_desc loss;
    network w;
    amp_value a, b, c;
    d.optimizer.kind = AMP_ADAM;
    w.m = new_model(&d);
    w.x = input_of(w.m, positions, WIDTH);
    a = amp_linear(w.m, w.x, 8);
    b = amp_gelu(w.m, amp_layer_norm(w.m, a));
    c = amp_linear(w.m, amp_dropout(w.m, b, dropout), 8);
    w.sum = amp_add(w.m, amp_rms_norm(w.m, c), a);
    c = amp_mul(w.m, amp_softmax(w.m, w.sum), b);
    w.logits = amp_linear(w.m, amp_concat(w.m, c, amp_flatten(w.m, w.sum)), CLASSES);
    memset(&loss, 0, sizeof loss);
    loss.smoothing = 0.1f;
    amp_softmax_cross_entropy_with(w.m, w.logits, &loss);
    amp_mse(w.m, amp_linear(w.m, amp_tanh(w.m, w.sum), 3));
    amp_bce_with_logits(w.m, amp_linear(w.m, w.sum, 2));
    amp_mean(w.m, amp_sigmoid(w.m, w.sum));
    CHECK_MSG(amp_model_finalize(w.m) == AMP_OK, "%s", amp_model_error(w.m));
    return w;
}

/* Sequences train with the bits of rows, at each level, short ones too, and with lengths that leave nothing out. */
static void test_rows(void) {
    static const int32_t whole[BATCH] = { LONGEST, LONGEST, LONGEST, LONGEST };
    int run, step;
    for (run = 0; run < COUNT(runs); run++) {
        network s = make_network(BATCH, LONGEST, run, 0.25f), r = make_network(BATCH * LONGEST, 0, run, 0.25f);
        CHECK(amp_model_layer(s.m, 1)->positions == LONGEST && amp_model_layer(r.m, 1)->positions == 1);
        CHECK(amp_model_layer(s.m, 1)->activation_bytes == amp_model_layer(r.m, 1)->activation_bytes);
        for (step = 0; step < 6; step++) {
            const int positions = step == 2 ? 3 : step == 3 ? 1 : LONGEST, n = step == 4 ? 2 : BATCH;
            const int32_t* lengths = step == 5 ? whole : NULL;
            float values[2][BATCH * LONGEST * CLASSES];
            amp_step_info a, b;
            amp_eval_info e, f;
            data d;
            amp_batch bs, br;
            memset(values, 0, sizeof values);
            fill(&d);
            bs = batch_of(&d, n, positions == LONGEST ? 0 : positions, lengths);
            br = batch_of(&d, n * positions, 0, NULL);
            CHECK_MSG(amp_train_step(s.m, &bs, &a) == AMP_OK, "%s", amp_model_error(s.m));
            CHECK(amp_train_step(r.m, &br, &b) == AMP_OK);
            CHECK_MSG(to_bits(a.loss) == to_bits(b.loss) && a.outcome == b.outcome, "%s step %d: %.9g %.9g", runs[run].name,
                      step, (double)a.loss, (double)b.loss);
            CHECK_MSG(same_weights(s.m, r.m), "%s step %d", runs[run].name, step);
            CHECK(amp_evaluate(s.m, &bs, &e) == AMP_OK && amp_evaluate(r.m, &br, &f) == AMP_OK);
            CHECK(to_bits(e.loss) == to_bits(f.loss) && e.correct == f.correct && e.predictions == f.predictions);
            CHECK(e.predictions == n * positions * 3);
            CHECK(amp_predict(s.m, &bs, s.logits, values[0]) == AMP_OK && amp_predict(r.m, &br, r.logits, values[1]) == AMP_OK);
            CHECK(memcmp(values[0], values[1], sizeof values[0]) == 0);
        }
        amp_model_destroy(s.m);
        amp_model_destroy(r.m);
    }
}

/* Largest difference of the models' weight gradients, relative to the largest gradient. */
static double gradient_difference(amp_model* a, amp_model* b) {
    double worst = 0.0, largest = 0.0;
    int i, count;
    amp_param *p = amp_model_params(a, &count), *q = amp_model_params(b, NULL);
    for (i = 0; i < count; i++) {
        size_t k;
        float *x = (float*)malloc(p[i].count * sizeof *x), *y = (float*)malloc(p[i].count * sizeof *y);
        CHECK(amp_model_read_param_gradient(a, &p[i], x) == AMP_OK && amp_model_read_param_gradient(b, &q[i], y) == AMP_OK);
        for (k = 0; k < p[i].count; k++) {
            worst = fmax(worst, fabs((double)x[k] - (double)y[k]));
            largest = fmax(largest, fabs((double)x[k]));
        }
        free(x); free(y);
    }
    return worst / largest;
}

/* The rows that count, behind one another, and rubbish in the targets of others. */
static int gather(data* of, data* rows, int n, int positions, const int32_t* lengths) {
    int i, k, count = 0;
    *rows = *of;
    for (i = 0; i < n * positions; i++) {
        const int counts = i % positions < lengths[i / positions];
        for (k = 0; k < WIDTH && counts; k++) rows->x[count * WIDTH + k] = of->x[i * WIDTH + k];
        for (k = 0; k < 3; k++)
            if (counts) rows->floats[count * 3 + k] = of->floats[i * 3 + k];
            else of->floats[i * 3 + k] = from_bits(0x7fc00000u);
        for (k = 0; k < 2; k++)
            if (counts) rows->bits[count * 2 + k] = of->bits[i * 2 + k];
            else of->bits[i * 2 + k] = from_bits(0x7fc00000u);
        if (counts) rows->labels[count] = of->labels[i];
        else of->labels[i] = 999;
        count += counts;
    }
    return count;
}

/* Positions beyond lengths have no loss, no gradient and no prediction, whatever their targets. */
static void test_lengths(void) {
    static const int32_t lengths[3][BATCH] = { { 5, 1, 3, 2 }, { 1, 1, 1, 1 }, { 3, 2, 3, 1 } };
    int run, k;
    for (run = 0; run < COUNT(runs); run++)
        for (k = 0; k < 3; k++) {
            const int positions = k == 2 ? 3 : LONGEST;
            const double near = run == 0 ? 1e-6 : runs[run].low == AMP_F16 ? 2e-3 : 2e-2;
            network s = make_network(BATCH, LONGEST, run, 0.0f), r = make_network(BATCH * LONGEST, 0, run, 0.0f);
            amp_eval_info e, f;
            amp_step_info a, b;
            data d, rows;
            amp_batch bs, br;
            float loss[2];
            int count;
            fill(&d);
            count = gather(&d, &rows, BATCH, positions, lengths[k]);
            bs = batch_of(&d, BATCH, k == 2 ? positions : 0, lengths[k]);
            br = batch_of(&rows, count, 0, NULL);
            CHECK_MSG(amp_evaluate(s.m, &bs, &e) == AMP_OK, "%s", amp_model_error(s.m));
            CHECK(amp_evaluate(r.m, &br, &f) == AMP_OK);
            CHECK_MSG(fabs((double)e.loss - (double)f.loss) < 1e-6, "%.9g %.9g", (double)e.loss, (double)f.loss);
            CHECK(e.correct == f.correct && e.predictions == f.predictions && e.predictions == 3 * count);
            CHECK(amp_forward(s.m, &bs, &loss[0]) == AMP_OK && amp_forward(r.m, &br, &loss[1]) == AMP_OK);
            CHECK(fabs((double)loss[0] - (double)loss[1]) < 1e-6);
            CHECK(amp_backward(s.m, NULL) == AMP_OK && amp_backward(r.m, NULL) == AMP_OK);
            CHECK_MSG(gradient_difference(s.m, r.m) < near, "%s, lengths %d: %g", runs[run].name, k, gradient_difference(s.m, r.m));
            CHECK(amp_update(s.m, &a) == AMP_OK && amp_update(r.m, &b) == AMP_OK && a.outcome == b.outcome);
            amp_model_destroy(s.m);
            amp_model_destroy(r.m);
        }
}

/* Labels that are ignored, and labels beyond lengths, in one loss; each class may have a weight. */
static void test_ignored(void) {
    const int32_t none = -1, lengths[2] = { 4, 2 };
    int with;
    for (with = 0; with < 2; with++) {
        float weights[CLASSES] = { 1, 2, 3, 1, 2, 3, 1 }, x[10 * 4], loss[2];
        int32_t labels[10], rows[6];
        amp_model_desc d = model_desc(with ? 2 : 6, AMP_O0, AMP_F16);
        amp_loss_desc l;
        amp_model* m[2];
        amp_batch b;
        int i, k, count = 0;
        memset(&l, 0, sizeof l);
        l.ignored = &none; l.class_weights = weights;
        for (i = 0; i < 40; i++) x[i] = test_uniform();
        for (i = 0; i < 10; i++) labels[i] = i % 3 == 0 ? -1 : i % CLASSES;
        for (k = 0; k < 2; k++) {
            d.batch = k ? 10 : 2;
            m[k] = new_model(&d);
            amp_softmax_cross_entropy_with(m[k], amp_linear(m[k], input_of(m[k], k ? 0 : 5, 4), CLASSES), &l);
            CHECK(amp_model_finalize(m[k]) == AMP_OK);
        }
        memset(&b, 0, sizeof b);
        b.n = 2; b.inputs[0] = x; b.targets[0] = labels; b.lengths = lengths;
        CHECK(amp_forward(m[0], &b, &loss[0]) == AMP_OK && amp_backward(m[0], NULL) == AMP_OK);
        for (i = 0; i < 10; i++) {
            if (i % 5 >= lengths[i / 5]) continue;
            memmove(x + 4 * count, x + 4 * i, 4 * sizeof *x);
            rows[count++] = labels[i];
        }
        b.n = count; b.targets[0] = rows; b.lengths = NULL;
        CHECK(amp_forward(m[1], &b, &loss[1]) == AMP_OK && amp_backward(m[1], NULL) == AMP_OK);
        CHECK_MSG(fabs((double)loss[0] - (double)loss[1]) < 1e-6, "%g %g", (double)loss[0], (double)loss[1]);
        CHECK(gradient_difference(m[0], m[1]) < 1e-6);
        amp_model_destroy(m[0]);
        amp_model_destroy(m[1]);
    }
}

/* Logits that only fill up a vocabulary: the loss is that of a model without them, they get no gradient, no weight of
   theirs moves, and the largest logit among them is no prediction. */
static void test_padded_vocabulary(void) {
    int run;
    for (run = 0; run < COUNT(runs); run++) {
        amp_model* m[2];
        amp_batch b;
        float x[6 * 4], w[PADDED * 4], bias[PADDED], g[PADDED * 4], gb[PADDED], loss[2];
        int32_t labels[6];
        amp_eval_info e[2];
        int i, k;
        for (i = 0; i < 24; i++) x[i] = test_uniform();
        for (i = 0; i < 6; i++) labels[i] = i % CLASSES;
        for (i = 0; i < PADDED * 4; i++) w[i] = test_uniform();
        for (i = 0; i < PADDED; i++) bias[i] = i < CLASSES ? 0.0f : 9.0f;
        memset(&b, 0, sizeof b);
        b.n = 2; b.inputs[0] = x; b.targets[0] = labels;
        for (k = 0; k < 2; k++) {
            amp_model_desc d = model_desc(2, runs[run].level, runs[run].low);
            amp_loss_desc l;
            amp_value logits;
            memset(&l, 0, sizeof l);
            l.classes = k ? 0 : CLASSES;
            m[k] = new_model(&d);
            logits = amp_linear(m[k], input_of(m[k], 3, 4), k ? CLASSES : PADDED);
            amp_softmax_cross_entropy_with(m[k], logits, &l);
            CHECK_MSG(amp_model_finalize(m[k]) == AMP_OK, "%s", amp_model_error(m[k]));
            CHECK(amp_model_write_param(m[k], amp_model_find_param(m[k], "linear1.weight"), w) == AMP_OK);
            CHECK(amp_model_write_param(m[k], amp_model_find_param(m[k], "linear1.bias"), bias) == AMP_OK);
            CHECK(amp_evaluate(m[k], &b, &e[k]) == AMP_OK);
            CHECK(amp_forward(m[k], &b, &loss[k]) == AMP_OK && amp_backward(m[k], NULL) == AMP_OK);
        }
        CHECK(to_bits(loss[0]) == to_bits(loss[1]) && e[0].correct == e[1].correct && e[0].predictions == e[1].predictions);
        CHECK(amp_model_read_param_gradient(m[0], amp_model_find_param(m[0], "linear1.weight"), g) == AMP_OK);
        CHECK(amp_model_read_param_gradient(m[0], amp_model_find_param(m[0], "linear1.bias"), gb) == AMP_OK);
        CHECK(amp_model_read_param_gradient(m[1], amp_model_find_param(m[1], "linear1.weight"), w) == AMP_OK);
        CHECK(memcmp(g, w, CLASSES * 4 * sizeof *g) == 0);
        for (i = CLASSES; i < PADDED; i++)
            CHECK_MSG(to_bits(gb[i]) == 0 && to_bits(g[4 * i]) == 0 && to_bits(g[4 * i + 3]) == 0, "%s: %g", runs[run].name, (double)gb[i]);
        CHECK(amp_discard(m[0]) == AMP_OK);
        labels[4] = CLASSES;
        CHECK(amp_evaluate(m[0], &b, &e[0]) == AMP_ERR_ARGUMENT);
        CHECK_MSG(strcmp(heard, "layer 'softmax_cross_entropy1': label 7 of sample 1, position 1, is outside 0..6") == 0, "%s", heard);
        amp_model_destroy(m[0]);
        amp_model_destroy(m[1]);
    }
}

/* A mean over the positions that count: a custom operator with one position, which sees positions and lengths. */
static int last_length;      /* that the operator saw of the last sample; -1 = no lengths */
static amp_result pool_forward(const amp_custom_call* c) {
    const float* x = (const float*)c->x[0].data;
    float* y = (float*)c->y.data;
    int i, p, k;
    last_length = c->lengths ? c->lengths[c->n - 1] : -1;
    for (i = 0; i < c->n; i++)
        for (k = 0; k < WIDTH; k++) {
            const int count = c->lengths ? c->lengths[i] : c->positions;
            y[i * WIDTH + k] = 0.0f;
            for (p = 0; p < count; p++) y[i * WIDTH + k] += x[(i * c->positions + p) * WIDTH + k] / (float)count;
        }
    return AMP_OK;
}
static amp_result pool_backward(const amp_custom_call* c) {
    const float* dy = (const float*)c->dy.data;
    float* dx = (float*)c->dx[0].data;
    int i, p, k;
    for (i = 0; i < c->n; i++)
        for (p = 0; p < c->positions; p++)
            for (k = 0; k < WIDTH; k++) {
                const int count = c->lengths ? c->lengths[i] : c->positions;
                dx[(i * c->positions + p) * WIDTH + k] = p < count ? dy[i * WIDTH + k] / (float)count : 0.0f;
            }
    return AMP_OK;
}
static void test_custom(void) {
    const int32_t lengths[BATCH] = { 2, 5, 1, 4 };
    amp_custom_desc op;
    amp_model_desc d = model_desc(BATCH, AMP_O0, AMP_F16);
    amp_model* m = new_model(&d);
    amp_value x, y;
    data v;
    float out[BATCH * WIDTH], g[WIDTH * WIDTH], w[WIDTH * WIDTH], loss, up, down;
    amp_batch b;
    amp_param* p;
    int i, k, n;
    memset(&op, 0, sizeof op);
    op.name = "pool"; op.forward = pool_forward; op.backward = pool_backward; op.positions = 1;
    x = amp_linear(m, input_of(m, LONGEST, WIDTH), WIDTH);
    y = amp_custom(m, &x, 1, &op);
    amp_softmax_cross_entropy(m, amp_linear(m, y, CLASSES));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(amp_model_layer(m, amp_model_layer_of(m, y))->positions == 1);
    fill(&v);
    for (n = 0; n < 3; n++) {                                /* whole, short, and with lengths */
        memset(&b, 0, sizeof b);
        b.n = BATCH; b.inputs[0] = v.x; b.targets[0] = v.labels;    /* a label a sample */
        b.positions = n == 1 ? 3 : 0;
        b.lengths = n == 2 ? lengths : NULL;
        CHECK(amp_predict(m, &b, y, out) == AMP_OK && last_length == (n == 2 ? lengths[BATCH - 1] : -1));
        p = amp_model_find_param(m, "linear1.weight");
        CHECK(amp_forward(m, &b, &loss) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
        CHECK(amp_model_read_param_gradient(m, p, g) == AMP_OK && amp_discard(m) == AMP_OK);
        CHECK(amp_model_read_param(m, p, w) == AMP_OK);
        for (i = 0; i < WIDTH * WIDTH; i++) {
            amp_eval_info e;
            const float was = w[i];
            for (k = 0; k < 2; k++) {
                w[i] = was + (k ? -0.02f : 0.02f);
                CHECK(amp_model_write_param(m, p, w) == AMP_OK && amp_evaluate(m, &b, &e) == AMP_OK);
                if (k) down = e.loss; else up = e.loss;
            }
            w[i] = was;
            CHECK_MSG(fabs((double)(up - down) / 0.04 - (double)g[i]) < 1e-4, "%d: %g %g", i, (double)(up - down) / 0.04, (double)g[i]);
        }
        CHECK(amp_model_write_param(m, p, w) == AMP_OK);
    }
    amp_model_destroy(m);
}

/* A data set of sequences: its batches carry positions, and lengths in the order of the samples. */
static void test_data(void) {
    enum { SAMPLES = 10 };
    static float x[SAMPLES * 4 * WIDTH], targets[SAMPLES * 4 * 3];
    int32_t lengths[SAMPLES];
    int with, i;
    for (i = 0; i < COUNT(x); i++) x[i] = test_uniform();
    for (i = 0; i < SAMPLES; i++) lengths[i] = 1 + i % 4;
    for (i = 0; i < COUNT(targets); i++) targets[i] = i / 3 % 4 < lengths[i / 12] ? test_uniform() : from_bits(0x7fc00000u);
    for (with = 0; with < 2; with++) {
        amp_model_desc d = model_desc(BATCH, AMP_O0, AMP_F16);
        amp_model* m[2];
        amp_fit_desc f;
        amp_fit_info info;
        amp_data set;
        amp_eval_info e;
        int k;
        memset(&set, 0, sizeof set);
        memset(&f, 0, sizeof f);
        set.count = SAMPLES; set.inputs[0] = x; set.targets[0] = targets; set.positions = 4;
        set.lengths = lengths;
        f.in_order = 1; f.epochs = 2;
        for (k = 0; k < 2; k++) {
            m[k] = new_model(&d);
            amp_mse(m[k], amp_linear(m[k], amp_tanh(m[k], amp_linear(m[k], input_of(m[k], LONGEST, WIDTH), 8)), 3));
            CHECK(amp_model_finalize(m[k]) == AMP_OK);
        }
        if (!with) f.in_order = 0;
        CHECK_MSG(amp_fit(m[0], &set, &f, &info) == AMP_OK && info.last.steps == 3, "%s", amp_model_error(m[0]));
        CHECK(amp_evaluate_data(m[0], &set, &e) == AMP_OK && e.loss == e.loss);
        for (k = 0; with && k < 6; k++) {
            const int at = k % 3 * BATCH;
            amp_batch b;
            amp_step_info step;
            memset(&b, 0, sizeof b);
            b.n = at + BATCH > SAMPLES ? SAMPLES - at : BATCH;
            b.inputs[0] = x + at * 4 * WIDTH; b.targets[0] = targets + at * 12; b.positions = 4; b.lengths = lengths + at;
            CHECK(amp_train_step(m[1], &b, &step) == AMP_OK);
        }
        CHECK(same_weights(m[0], m[1]) == with);
        set.positions = 6;
        CHECK(amp_evaluate_data(m[0], &set, &e) == AMP_ERR_ARGUMENT && strstr(heard, "positions is 6, 'input1' has 1 to 5"));
        amp_model_destroy(m[0]);
        amp_model_destroy(m[1]);
    }
}

/* --- tokens --- */
enum { WORDS = 11, DIM = 6 };
/* A language model without attention: tokens, positions, a block, and a head that is the embedding's weight or (untied) not. */
typedef struct language { amp_model* m; amp_value tokens, embedded, placed, logits; } language;
static language make_language(const amp_model_desc* d, int untied, int classes) {
    amp_embedding_desc e;
    amp_loss_desc l;
    language w;
    amp_value x;
    memset(&e, 0, sizeof e);
    memset(&l, 0, sizeof l);
    e.vocabulary = WORDS; e.features = DIM; e.init = AMP_INIT_NORMAL; e.sd = 0.5f;
    l.classes = classes;
    w.m = new_model(d);
    w.tokens = amp_tokens(w.m, LONGEST);
    w.embedded = amp_embedding_with(w.m, w.tokens, &e);
    e.vocabulary = e.features = 0;
    w.placed = amp_position_embedding_with(w.m, w.embedded, &e);
    x = amp_linear(w.m, amp_gelu_tanh(w.m, amp_linear(w.m, amp_layer_norm(w.m, w.placed), 16)), DIM);
    x = amp_layer_norm(w.m, amp_add(w.m, x, w.placed));
    w.logits = untied ? amp_linear(w.m, x, WORDS) : amp_tied_linear(w.m, x, w.embedded);
    amp_softmax_cross_entropy_with(w.m, w.logits, &l);
    CHECK_MSG(amp_model_finalize(w.m) == AMP_OK, "%s", amp_model_error(w.m));
    return w;
}
/* A text whose next word is known from the word and its place; labels are the next words. */
typedef struct text { int32_t words[BATCH * LONGEST], next[BATCH * LONGEST]; } text;
static amp_batch text_batch(text* t, int n, int positions, const int32_t* lengths) {
    amp_batch b;
    int i;
    for (i = 0; i < BATCH * LONGEST; i++) {
        t->words[i] = (int32_t)(test_random() % WORDS);
        t->next[i] = (int32_t)((t->words[i] * 3 + i % (positions ? positions : LONGEST)) % (WORDS - 2));
    }
    memset(&b, 0, sizeof b);
    b.n = n; b.inputs[0] = t->words; b.targets[0] = t->next; b.positions = positions; b.lengths = lengths;
    return b;
}

/* The gradients of both embeddings, tied or not, are differences of the loss: whole batches, short ones, and with lengths. */
static void test_embedding_gradients(void) {
    static const char* const names[] = { "embedding1.weight", "position_embedding1.weight", "linear1.weight" };
    const int32_t lengths[BATCH] = { 2, 5, 1, 4 };
    int untied, with, k, j;
    size_t i;
    for (untied = 0; untied < 2; untied++)
        for (with = 0; with < 4; with++) {
            const amp_model_desc d = model_desc(BATCH, AMP_O0, AMP_F16);
            language w = make_language(&d, untied, with == 3 ? WORDS - 2 : 0);
            text t;
            amp_batch b = text_batch(&t, BATCH, 0, NULL);
            float g[WORDS * DIM + 40], v[WORDS * DIM + 40], loss;
            CHECK(amp_forward(w.m, &b, NULL) == AMP_OK && amp_backward(w.m, NULL) == AMP_OK);    /* no memory is 0 afterwards */
            CHECK(amp_discard(w.m) == AMP_OK);
            b = text_batch(&t, with == 1 ? 3 : BATCH, with == 1 ? 3 : 0, with == 2 ? lengths : NULL);
            CHECK_MSG(amp_forward(w.m, &b, &loss) == AMP_OK && amp_backward(w.m, NULL) == AMP_OK, "%s", amp_model_error(w.m));
            for (k = 0; k < 3; k++) {
                amp_param* p = amp_model_find_param(w.m, names[k]);
                if (k) CHECK(amp_forward(w.m, &b, &loss) == AMP_OK && amp_backward(w.m, NULL) == AMP_OK);
                CHECK(p && amp_model_read_param_gradient(w.m, p, g) == AMP_OK && amp_model_read_param(w.m, p, v) == AMP_OK);
                CHECK(amp_discard(w.m) == AMP_OK);
                for (i = 0; i < p->count; i++) {
                    const float was = v[i];
                    double up[2];
                    for (j = 0; j < 2; j++) {
                        amp_eval_info e;
                        v[i] = was + (j ? -0.01f : 0.01f);
                        CHECK(amp_model_write_param(w.m, p, v) == AMP_OK && amp_evaluate(w.m, &b, &e) == AMP_OK);
                        up[j] = (double)e.loss;
                    }
                    v[i] = was;
                    CHECK_MSG(fabs((up[0] - up[1]) / 0.02 - (double)g[i]) < 4e-4, "%s %d, case %d: %g %g", names[k], (int)i, with,
                              (up[0] - up[1]) / 0.02, (double)g[i]);
                }
                CHECK(amp_model_write_param(w.m, p, v) == AMP_OK);
            }
            amp_model_destroy(w.m);
        }
}

/* A model of words learns at each level; its bits are those of a second run. */
static void test_language(void) {
    static const int32_t lengths[BATCH] = { 5, 1, 3, 2 };
    int level, low, untied, step;
    for (level = 0; level < 4; level++)
        for (low = AMP_F16; low <= AMP_BF16; low++)
            for (untied = 0; untied < 2; untied++) {
                amp_model_desc d = model_desc(BATCH, (amp_level)level, (amp_dtype)low);
                language a, b;
                double first = 0.0, last = 0.0;
                if (level == AMP_O0 && low == AMP_BF16) continue;
                d.optimizer.kind = AMP_ADAMW;
                d.optimizer.lr = level == AMP_O3 ? 1e-2f : 2e-2f;
                if (level == AMP_O3) d.optimizer.eps = 1e-4f;
                a = make_language(&d, untied, WORDS - 2);
                b = make_language(&d, untied, WORDS - 2);
                for (step = 0; step < 300; step++) {
                    text t;
                    const int positions = step % 3 == 1 ? 4 : 0;
                    amp_batch batch = text_batch(&t, BATCH, positions, step % 3 == 2 ? lengths : NULL);
                    amp_step_info ia, ib;
                    CHECK(amp_train_step(a.m, &batch, &ia) == AMP_OK && amp_train_step(b.m, &batch, &ib) == AMP_OK);
                    CHECK(to_bits(ia.loss) == to_bits(ib.loss));
                    if (step < 20) first += (double)ia.loss / 20;
                    if (step >= 280) last += (double)ia.loss / 20;
                }
                CHECK_MSG(same_weights(a.m, b.m), "O%d", level);
                CHECK_MSG(last < 0.75 * first, "O%d %s%s: %g to %g", level, amp_dtype_name((amp_dtype)low), untied ? " untied" : "", first, last);
                amp_model_destroy(a.m);
                amp_model_destroy(b.m);
            }
}

/* A tied weight is one parameter of two readers. At O1 the embedding reads it in FP32, the head its 16-bit copy; in a model
   for inference too. */
static void test_tied(void) {
    int level, split;
    for (level = 0; level < 4; level++)
        for (split = 0; split < 2; split++) {
            amp_model_desc d = model_desc(BATCH, (amp_level)level, AMP_BF16);
            language w, p;
            text t;
            amp_batch b;
            float rows[BATCH * LONGEST * DIM], weight[WORDS * DIM], logits[2][BATCH * LONGEST * WORDS];
            const amp_layer *e, *head;
            const amp_param* q;
            int i, count, read;
            d.split_masters = split;
            w = make_language(&d, 0, 0);
            d.inference = 1;
            p = make_language(&d, 0, 0);
            b = text_batch(&t, BATCH, 0, NULL);
            e = amp_model_layer(w.m, amp_model_layer_of(w.m, w.embedded));
            head = amp_model_layer(w.m, amp_model_layer_of(w.m, w.logits));
            amp_model_params(w.m, &count);
            q = amp_model_find_param(w.m, "embedding1.weight");
            CHECK(count == 2 + 4 + 4 && e->parameters == WORDS * DIM && head->parameters == 0 && head->op == AMP_OP_LINEAR);
            CHECK(e->param_dtype == (level < 2 ? AMP_F32 : AMP_BF16) && head->param_dtype == (level == 0 ? AMP_F32 : AMP_BF16));
            CHECK((q->low != NULL) == (level > 0) && (q->master != NULL) == (level < 2 || (level == 2 && !split)));
            CHECK((q->rest != NULL) == (level == 2 && split));
            for (i = 0; i < 30; i++) {
                amp_step_info info;
                CHECK(amp_train_step(w.m, &b, &info) == AMP_OK);
            }
            CHECK(amp_predict(w.m, &b, w.embedded, rows) == AMP_OK && amp_model_read_param(w.m, q, weight) == AMP_OK);
            for (i = 0; i < BATCH * LONGEST * DIM; i++) {
                const size_t at = (size_t)(t.words[i / DIM] * DIM + i % DIM);
                const float x = level < 2 ? weight[at] : (float)value_at(q->low, AMP_BF16, at);
                CHECK_MSG(to_bits(rows[i]) == to_bits(x), "O%d: %g %g", level, (double)rows[i], (double)x);
            }
            CHECK(amp_checkpoint_save(w.m, "build/sequence.tmp") == AMP_OK);
            CHECK_MSG(amp_checkpoint_load_weights(p.m, "build/sequence.tmp", &read) == AMP_OK && read == count, "%s", heard);
            CHECK(amp_predict(w.m, &b, w.logits, logits[0]) == AMP_OK && amp_predict(p.m, &b, p.logits, logits[1]) == AMP_OK);
            CHECK_MSG(split || memcmp(logits[0], logits[1], sizeof logits[0]) == 0, "O%d", level);
            amp_model_destroy(w.m);
            amp_model_destroy(p.m);
        }
    remove("build/sequence.tmp");
}

/* A run that stops and goes on has the bits of one that does not; another number of positions is another model. */
static void test_resume(void) {
    amp_model_desc d = model_desc(BATCH, AMP_O2, AMP_F16);
    language a = make_language(&d, 0, 0), b;
    amp_model* other;
    amp_value x;
    text t;
    amp_batch batch;
    amp_step_info info;
    int i;
    d.optimizer.kind = AMP_ADAM;
    for (i = 0; i < 3; i++) {
        batch = text_batch(&t, BATCH, 0, NULL);
        CHECK(amp_train_step(a.m, &batch, &info) == AMP_OK);
    }
    d.optimizer.kind = AMP_SGD;
    b = make_language(&d, 0, 0);
    CHECK(amp_checkpoint_save(a.m, "build/sequence.tmp") == AMP_OK);
    CHECK_MSG(amp_checkpoint_load(b.m, "build/sequence.tmp") == AMP_OK, "%s", heard);
    batch = text_batch(&t, BATCH, 0, NULL);
    CHECK(amp_train_step(a.m, &batch, &info) == AMP_OK && amp_train_step(b.m, &batch, &info) == AMP_OK);
    CHECK(same_weights(a.m, b.m));
    for (i = 0; i < 2; i++) {                         /* the same layers, and weights of the same sizes */
        other = new_model(&d);
        x = input_of(other, i ? 4 : 5, 6);
        amp_mse(other, amp_linear(other, x, 2));
        CHECK(amp_model_finalize(other) == AMP_OK);
        if (i == 0) CHECK(amp_checkpoint_save(other, "build/sequence.tmp") == AMP_OK);
        else CHECK(amp_checkpoint_load(other, "build/sequence.tmp") == AMP_ERR_FORMAT);
        amp_model_destroy(other);
    }
    remove("build/sequence.tmp");
    amp_model_destroy(a.m);
    amp_model_destroy(b.m);
}

/* One embedding for two inputs: its gradients add. */
static void test_embedding_again(void) {
    amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
    amp_model* m[2];
    int32_t words[2][6] = { { 1, 2, 3, 3, 2, 9 }, { 4, 2, 2, 0, 10, 1 } }, both[12];
    float target[36], g[2][WORDS * 3], loss;
    amp_batch b;
    int k, i;
    memset(&b, 0, sizeof b);
    for (i = 0; i < 36; i++) target[i] = test_uniform();
    for (k = 0; k < 2; k++) {
        amp_value x, y;
        m[k] = new_model(&d);
        x = amp_embedding(m[k], amp_tokens(m[k], k ? 6 : 3), WORDS, 3);
        if (!k) {
            y = amp_reuse(m[k], x, amp_tokens(m[k], 3));
            amp_mse(m[k], x);
            amp_mse(m[k], y);
        } else {
            amp_loss_desc l;
            memset(&l, 0, sizeof l);
            l.weight = 2.0f;
            amp_mse_with(m[k], x, &l);
        }
        CHECK_MSG(amp_model_finalize(m[k]) == AMP_OK, "%s", amp_model_error(m[k]));
    }
    for (i = 0; i < 12; i++) both[i] = words[i / 6][i % 6];
    b.n = 2; b.inputs[0] = words[0]; b.inputs[1] = words[1]; b.targets[0] = target; b.targets[1] = target + 18;
    CHECK(amp_forward(m[0], &b, &loss) == AMP_OK && amp_backward(m[0], NULL) == AMP_OK);
    b.inputs[0] = both;
    CHECK(amp_forward(m[1], &b, &loss) == AMP_OK && amp_backward(m[1], NULL) == AMP_OK);
    for (k = 0; k < 2; k++) CHECK(amp_model_read_param_gradient(m[k], amp_model_params(m[k], NULL), g[k]) == AMP_OK);
    for (i = 0; i < WORDS * 3; i++) CHECK_MSG(fabs((double)g[0][i] - (double)g[1][i]) < 1e-6, "%d: %g %g", i, (double)g[0][i], (double)g[1][i]);
    amp_model_destroy(m[0]);
    amp_model_destroy(m[1]);
}

/* A layer used again takes a sequence of other positions, whose batches may be short. */
static void test_reuse(void) {
    amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
    amp_model* m = new_model(&d);
    const amp_value x = amp_linear(m, input_of(m, 5, 4), 3), y = amp_reuse(m, x, input_of(m, 3, 4));
    float in[40], out[2][30];
    amp_batch b;
    int i;
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(amp_model_layer(m, amp_model_layer_of(m, y))->positions == 3);
    for (i = 0; i < 40; i++) in[i] = test_uniform();
    memset(&b, 0, sizeof b);
    b.n = 2; b.inputs[0] = b.inputs[1] = in; b.positions = 3;
    CHECK(amp_predict(m, &b, x, out[0]) == AMP_OK && amp_predict(m, &b, y, out[1]) == AMP_OK);
    CHECK(memcmp(out[0], out[1], 18 * sizeof **out) == 0);
    amp_model_destroy(m);
}

/* Weights start as said: mean and standard deviation. */
static void test_starts(void) {
    static const struct { amp_init init; float sd; double embedding, dense; } cases[] = {
        { AMP_INIT_TORCH, 0.0f, 1.0, 0.0 }, { AMP_INIT_NORMAL, 0.0f, 0.02, 0.02 }, { AMP_INIT_NORMAL, 0.3f, 0.3, 0.3 },
        { AMP_INIT_ZERO, 0.0f, 0.0, 0.0 }, { AMP_INIT_HE, 0.0f, 0.25, 0.25 } };
    int k, j;
    size_t i;
    for (k = 0; k < COUNT(cases); k++) {
        amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
        amp_model* m = new_model(&d);
        amp_embedding_desc e = { 200, 32, AMP_INIT_TORCH, 0.0f };
        amp_linear_desc l = { 100, 0, AMP_INIT_TORCH, 0.0f, 0 };
        amp_value x;
        e.init = l.init = cases[k].init; e.sd = l.sd = cases[k].sd;
        x = amp_embedding_with(m, amp_tokens(m, 64), &e);
        e.vocabulary = 64;                                   /* what it is may be said */
        x = amp_position_embedding_with(m, x, &e);
        amp_mse(m, amp_linear_with(m, x, &l));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        for (j = 0; j < 4; j++) {
            const amp_param* p = &amp_model_params(m, NULL)[j];
            const double want = j < 2 ? cases[k].embedding : cases[k].dense;
            double sum = 0.0, squares = 0.0, n = (double)p->count;
            if (k == 0 && j >= 2) continue;
            for (i = 0; i < p->count; i++) { sum += (double)p->master[i]; squares += (double)p->master[i] * (double)p->master[i]; }
            if (j == 3) CHECK(squares <= 0.0);
            else CHECK_MSG(fabs(sum / n) <= 0.1 * want && fabs(sqrt(squares / n) - want) <= 0.1 * want, "%s: %g, %g", p->name, sum / n, sqrt(squares / n));
        }
        amp_model_destroy(m);
    }
}

/* A gradient that overflows is skipped and named; a layer that overflows is blamed. */
static void test_overflows(void) {
    int model;
    for (model = 0; model < 2; model++) {
        amp_model_desc d = model_desc(BATCH, AMP_O2, AMP_F16);
        amp_scaler_desc s;
        language w;
        text t;
        amp_batch b;
        amp_step_info info;
        float weight[WORDS * DIM];
        int i;
        memset(&s, 0, sizeof s);
        s.init_scale = model ? 1024.0f : 16777216.0f;
        d.scaler = &s;
        w = make_language(&d, 0, 0);
        b = text_batch(&t, BATCH, 0, NULL);
        for (i = 0; i < WORDS * DIM; i++) weight[i] = i / DIM == t.words[7] ? 60000.0f : 0.1f;
        if (model) {
            CHECK(amp_model_write_param(w.m, amp_model_find_param(w.m, "embedding1.weight"), weight) == AMP_OK);
            for (i = 0; i < LONGEST * DIM; i++) weight[i] = 60000.0f;
            CHECK(amp_model_write_param(w.m, amp_model_find_param(w.m, "position_embedding1.weight"), weight) == AMP_OK);
        }
        CHECK(amp_train_step(w.m, &b, &info) == AMP_OK);
        CHECK_MSG(info.outcome == (model ? AMP_STEP_SKIPPED_MODEL : AMP_STEP_SKIPPED_OVERFLOW), "%d %s", (int)info.outcome, info.message);
        CHECK_MSG(model ? strcmp(info.culprit, "position_embedding1") == 0 : strstr(info.message, "gradient of 'embedding1.weight'") != NULL,
                  "%s: %s", info.culprit, info.message);
        CHECK(info.scale_after < info.scale_before || model);
        amp_model_destroy(w.m);
    }
}

/* Tokens of a data set, trained over. */
static void test_token_data(void) {
    static int32_t words[30 * LONGEST], next[30 * LONGEST];
    amp_model_desc d = model_desc(BATCH, AMP_O1, AMP_BF16);
    language w;
    amp_data set;
    amp_fit_desc f;
    amp_fit_info info;
    amp_fit_epoch history[12];
    int i;
    for (i = 0; i < 30 * LONGEST; i++) { words[i] = (int32_t)(test_random() % WORDS); next[i] = (words[i] + 1) % WORDS; }
    memset(&set, 0, sizeof set);
    memset(&f, 0, sizeof f);
    set.count = 30; set.inputs[0] = words; set.targets[0] = next;
    f.epochs = 12; f.evaluation = &set; f.history = history;
    d.optimizer.kind = AMP_ADAM;
    d.optimizer.lr = 0.02f;
    w = make_language(&d, 1, 0);
    CHECK_MSG(amp_fit(w.m, &set, &f, &info) == AMP_OK, "%s", heard);
    CHECK_MSG(history[11].eval_loss < 0.5f * history[0].eval_loss && history[11].accuracy > 0.9, "%g to %g, %g", (double)history[0].eval_loss,
              (double)history[11].eval_loss, history[11].accuracy);
    amp_model_destroy(w.m);
}

/* --- attention --- */
/* A small transformer. kind 0: GPT-2's blocks; 1: LLAMA's, two heads of q for one of k and v; 2: GPT-2's with a window and
   without biases. */
enum { HEADS = 2, FEATURES = 8 };
static amp_value small_transformer(amp_model* m, int kind, float dropout, amp_value* head) {
    amp_transformer_desc d;
    amp_embedding_desc e = { WORDS, FEATURES, AMP_INIT_NORMAL, 0.5f };
    amp_value x = amp_embedding_with(m, amp_tokens(m, LONGEST), &e), embedding = x;
    int i;
    e.vocabulary = e.features = 0;
    if (kind != 1) x = amp_position_embedding_with(m, x, &e);
    memset(&d, 0, sizeof d);
    d.kind = kind == 1 ? AMP_BLOCK_LLAMA : AMP_BLOCK_GPT2;
    d.heads = HEADS; d.sd = 0.4f; d.layers = 2;
    if (kind == 1) { d.kv_heads = 1; d.hidden = 12; }
    else d.dropout = dropout;
    if (kind == 2) { d.window = 2; d.no_bias = 1; }
    for (i = 0; i < 2; i++) {
        char name[8];
        snprintf(name, sizeof name, "h.%d", i);
        d.name = name;
        x = amp_transformer_block(m, x, &d);
    }
    x = kind == 1 ? amp_rms_norm(m, x) : amp_layer_norm(m, x);
    *head = kind == 1 ? amp_linear(m, x, WORDS) : amp_tied_linear(m, x, embedding);
    return amp_softmax_cross_entropy(m, *head);
}

/* The gradient of p, every `each`-th element of it, is a difference of losses. */
static void check_gradient(amp_model* m, const amp_batch* b, amp_param* p, size_t each) {
    float g[600], v[600];
    size_t i;
    int j;
    CHECK(p->count <= 600 && amp_forward(m, b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
    CHECK(amp_model_read_param_gradient(m, p, g) == AMP_OK && amp_model_read_param(m, p, v) == AMP_OK);
    CHECK(amp_discard(m) == AMP_OK);
    for (i = 0; i < p->count; i += each) {
        const float was = v[i];
        double up[2];
        for (j = 0; j < 2; j++) {
            amp_eval_info e;
            v[i] = was + (j ? -0.005f : 0.005f);
            CHECK(amp_model_write_param(m, p, v) == AMP_OK && amp_evaluate(m, b, &e) == AMP_OK);
            up[j] = (double)e.loss;
        }
        v[i] = was;
        CHECK_MSG(fabs((up[0] - up[1]) / 0.01 - (double)g[i]) < 1e-3, "%s %d: %g %g", p->name, (int)i, (up[0] - up[1]) / 0.01,
                  (double)g[i]);
    }
    CHECK(amp_model_write_param(m, p, v) == AMP_OK);
}

/* Gradients of all weights are differences of the loss: whole and short batches, and with lengths. */
static void test_transformer_gradients(void) {
    static const int32_t lengths[BATCH] = { 2, 5, 1, 4 };
    int kind, with, k;
    for (kind = 0; kind < 3; kind++)
        for (with = 0; with < 3; with++) {
            const amp_model_desc d = model_desc(BATCH, AMP_O0, AMP_F16);
            amp_model* m = new_model(&d);
            amp_value head;
            amp_param* p;
            int count;
            text t;
            amp_batch b;
            small_transformer(m, kind, 0.0f, &head);
            CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
            b = text_batch(&t, BATCH, with == 1 ? 3 : 0, with == 2 ? lengths : NULL);
            p = amp_model_params(m, &count);
            CHECK_MSG(count == (kind == 0 ? 2 + 24 + 2 : kind == 1 ? 1 + 18 + 3 : 2 + 16 + 2), "%d", count);
            for (k = 0; k < count; k++) check_gradient(m, &b, &p[k], 3);
            amp_model_destroy(m);
        }
}

/* A backend whose one call leaves an infinity: forward call number bad_forward of each pass, in what it computes, or
   backward call number bad_backward, in the gradient of its input. -1 = none. */
static int forward_calls, backward_calls, bad_forward, bad_backward;
static amp_result spoiled(amp_result r, amp_ref y, int* calls, int bad) {
    if (r == AMP_OK && (*calls)++ == bad && y.data) put_value(y.data, y.dtype, 0, (double)from_bits(0x7f800000u));
    return r;
}
#define FORWARD(name, params, args, y) \
    static amp_result bad_##name params { return spoiled(amp_##name args, y, &forward_calls, bad_forward); }
#define BACKWARD(name, params, args, dx) \
    static amp_result bad_##name params { return spoiled(amp_##name args, dx, &backward_calls, bad_backward); }
FORWARD(linear_forward, (amp_ref x, amp_ref w, amp_ref b, amp_ref y, size_t n, size_t in, size_t out, const amp_exec* e),
    (x, w, b, y, n, in, out, e), y)
FORWARD(layer_norm_forward, (amp_ref x, amp_ref g, amp_ref b, float eps, float* mean, float* invstd, amp_ref y, size_t rows, size_t d,
    const amp_exec* e), (x, g, b, eps, mean, invstd, y, rows, d, e), y)
FORWARD(rms_norm_forward, (amp_ref x, amp_ref g, float eps, float* invstd, amp_ref y, size_t rows, size_t d, const amp_exec* e),
    (x, g, eps, invstd, y, rows, d, e), y)
FORWARD(activation_forward, (amp_activation f, amp_ref x, amp_ref y, size_t n, const amp_exec* e), (f, x, y, n, e), y)
FORWARD(add_forward, (amp_ref a, amp_ref b, amp_ref y, size_t n, const amp_exec* e), (a, b, y, n, e), y)
FORWARD(mul_forward, (amp_ref a, amp_ref b, amp_ref y, size_t n, size_t repeat, const amp_exec* e), (a, b, y, n, repeat, e), y)
FORWARD(attention_forward, (const amp_attention_shape* s, amp_ref q, amp_ref k, amp_ref v, amp_ref y, float* lse, const amp_exec* e),
    (s, q, k, v, y, lse, e), y)
FORWARD(rope_forward, (const amp_rope_shape* s, amp_ref x, amp_ref y, const amp_exec* e), (s, x, y, e), y)
static amp_result bad_embedding_forward(const int32_t* tokens, amp_ref w, amp_ref y, size_t n, size_t rows, size_t d,
        const amp_exec* e) {
    forward_calls = 0;      /* the first of a pass */
    return spoiled(amp_embedding_forward(tokens, w, y, n, rows, d, e), y, &forward_calls, bad_forward);
}
BACKWARD(linear_backward, (amp_ref dy, amp_ref x, amp_ref w, amp_ref dx, amp_ref dw, amp_ref db, int add, size_t n, size_t in,
    size_t out, const amp_exec* e), (dy, x, w, dx, dw, db, add, n, in, out, e), dx)
BACKWARD(layer_norm_backward, (amp_ref dy, amp_ref x, amp_ref g, float eps, const float* mean, const float* invstd, amp_ref dx,
    amp_ref dg, amp_ref db, int add, size_t rows, size_t d, const amp_exec* e),
    (dy, x, g, eps, mean, invstd, dx, dg, db, add, rows, d, e), dx)
BACKWARD(rms_norm_backward, (amp_ref dy, amp_ref x, amp_ref g, float eps, const float* invstd, amp_ref dx, amp_ref dg, int add,
    size_t rows, size_t d, const amp_exec* e), (dy, x, g, eps, invstd, dx, dg, add, rows, d, e), dx)
BACKWARD(activation_backward, (amp_activation f, amp_ref dy, amp_ref saved, amp_ref dx, int add, size_t n, const amp_exec* e),
    (f, dy, saved, dx, add, n, e), dx)
BACKWARD(mul_backward, (amp_ref dy, amp_ref a, amp_ref b, amp_ref da, amp_ref db, int add, size_t n, size_t repeat,
    const amp_exec* e), (dy, a, b, da, db, add, n, repeat, e), da.data ? da : db)      /* a call for each */
BACKWARD(attention_backward, (const amp_attention_shape* s, amp_ref dy, amp_ref q, amp_ref k, amp_ref v, amp_ref y, const float* lse,
    amp_ref dq, amp_ref dk, amp_ref dv, int add, const amp_exec* e), (s, dy, q, k, v, y, lse, dq, dk, dv, add, e), dk)
BACKWARD(rope_backward, (const amp_rope_shape* s, amp_ref dy, amp_ref dx, int add, const amp_exec* e), (s, dy, dx, add, e), dx)

static amp_backend spoiled_backend(void) {
    amp_backend b = *amp_cpu_backend();
#define BAD(name) b.name = bad_##name
    BAD(linear_forward); BAD(layer_norm_forward); BAD(rms_norm_forward); BAD(activation_forward); BAD(add_forward);
    BAD(mul_forward); BAD(attention_forward); BAD(rope_forward); BAD(embedding_forward);
    BAD(linear_backward); BAD(layer_norm_backward); BAD(rms_norm_backward); BAD(activation_backward); BAD(mul_backward);
    BAD(attention_backward); BAD(rope_backward);
#undef BAD
    b.linear_relu_forward = NULL;
    return b;
}

/* All masters, 16-bit weights and moments one behind the other; their bytes. */
static size_t all_bytes(amp_model* m, unsigned char* to, size_t room) {
    int count, i;
    const amp_param* p = amp_model_params(m, &count);
    size_t n = 0;
    for (i = 0; i < count; i++) {
        const void* from[] = { p[i].master, p[i].low, p[i].m, p[i].v };
        int k;
        for (k = 0; k < 4; k++) {
            const size_t bytes = p[i].count * (k == 1 ? 2 : 4);
            if (!from[k] || n + bytes > room) continue;
            memcpy(to + n, from[k], bytes);
            n += bytes;
        }
    }
    return n;
}
/* Nothing of the model has moved. */
static void check_unmoved(amp_model* m, const unsigned char* before, size_t n, const char* where) {
    static unsigned char now[1u << 16];
    CHECK_MSG(all_bytes(m, now, sizeof now) == n && memcmp(now, before, n) == 0 && amp_model_optimizer(m)->state.step == 0, "%s", where);
}
/* The last parameter whose gradient is not finite: where infinities began. */
static const char* last_bad_gradient(amp_model* m) {
    const char* name = "";
    float g[600];
    int count, i;
    size_t k;
    const amp_param* p = amp_model_params(m, &count);
    for (i = 0; i < count; i++) {
        CHECK(p[i].count <= 600 && amp_model_read_param_gradient(m, &p[i], g) == AMP_OK);
        for (k = 0; k < p[i].count && amp_is_finite(amp_f32(&g[k])); k++) {}
        if (k < p[i].count) name = p[i].name;
    }
    return name;
}

/* An infinity made by any layer of GPT-2's blocks and of Llama's, in its output, its gradient or a parameter's: the step
   is skipped, nothing moves, and the step's information and (of outputs) the logger name the layer. */
static void test_overflow_in_each_layer(void) {
    static unsigned char before[1u << 16];
    static amp_backend backend;
    int kind, i, count, layers, outputs, gradients;
    backend = spoiled_backend();
    for (kind = 0; kind < 2; kind++) {
        amp_model_desc d = model_desc(1, AMP_O2, AMP_F16);
        amp_scaler_desc scaler;
        amp_model* m;
        amp_value head;
        amp_step_info info;
        amp_param* p;
        amp_batch b;
        size_t n;
        text t;
        memset(&scaler, 0, sizeof scaler);
        scaler.init_scale = 64.0f;
        scaler.max_unsound = 1000;
        d.scaler = &scaler;
        d.backend = &backend;
        d.optimizer.kind = AMP_ADAMW;
        m = new_model(&d);
        small_transformer(m, kind, 0.0f, &head);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        b = text_batch(&t, 1, 0, NULL);
        n = all_bytes(m, before, sizeof before);
        p = amp_model_params(m, &count);
        bad_forward = bad_backward = -1;

        layers = amp_model_layer_count(m);
        for (i = outputs = 0; i < layers; i++) {
            const amp_layer* l = amp_model_layer(m, i);
            if (l->op == AMP_OP_INPUT || l->op == AMP_OP_SOFTMAX_CROSS_ENTROPY) continue;
            bad_forward = outputs++;
            heard[0] = 0;
            CHECK(amp_train_step(m, &b, &info) == AMP_OK);
            CHECK_MSG(info.outcome == AMP_STEP_SKIPPED_MODEL && strcmp(info.culprit, l->name) == 0, "%s: %s, '%s'", l->name,
                      info.message, info.culprit);
            CHECK_MSG(strstr(info.message, l->name) && strstr(heard, l->name), "%s: %s; %s", l->name, info.message, heard);
            CHECK(to_bits(info.scale_after) == to_bits(64.0f));
            check_unmoved(m, before, n, l->name);
        }
        bad_forward = -1;
        CHECK_MSG(outputs == forward_calls && outputs == (kind ? 1 + 2 * 16 + 2 : 2 + 2 * 10 + 2), "%d outputs, %d calls", outputs,
                  forward_calls);

        for (i = gradients = 0; ; i++) {
            char culprit[136];
            bad_backward = i;
            backward_calls = 0;
            CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
            if (backward_calls <= i) break;
            snprintf(culprit, sizeof culprit, "%s", last_bad_gradient(m));
            if (!culprit[0]) { CHECK(amp_discard(m) == AMP_OK); continue; }      /* the input wants no gradient */
            gradients++;
            CHECK(amp_update(m, &info) == AMP_OK);
            CHECK_MSG(info.outcome == AMP_STEP_SKIPPED_OVERFLOW && strcmp(info.culprit, culprit) == 0 && strstr(info.message, culprit),
                      "gradient %d: %s, '%s', not '%s'", i, info.message, info.culprit, culprit);
            check_unmoved(m, before, n, culprit);
        }
        CHECK(amp_discard(m) == AMP_OK);
        bad_backward = -1;
        CHECK_MSG(gradients == (kind ? 2 * 15 + 2 : 2 * 8 + 2), "%d of %d", gradients, i);

        for (i = 0; i < count; i++) {
            float g[600];
            CHECK(amp_forward(m, &b, NULL) == AMP_OK && amp_backward(m, NULL) == AMP_OK);
            CHECK(p[i].count <= 600 && amp_model_read_param_gradient(m, &p[i], g) == AMP_OK);
            put_bits(&g[p[i].count / 2], i % 2 ? 0x7fc00000u : 0xff800000u);
            CHECK(amp_model_write_param_gradient(m, &p[i], g) == AMP_OK && amp_update(m, &info) == AMP_OK);
            CHECK_MSG(info.outcome == AMP_STEP_SKIPPED_OVERFLOW && strcmp(info.culprit, p[i].name) == 0
                && strstr(info.message, p[i].name) && info.overflow.first_index == p[i].count / 2
                && info.overflow.inf_count + info.overflow.nan_count == 1, "%s: %s, '%s'", p[i].name, info.message, info.culprit);
            check_unmoved(m, before, n, p[i].name);
        }

        CHECK(amp_model_scaler(m) && amp_scaler_set_scale(amp_model_scaler(m), 64.0f) == AMP_OK);
        CHECK(amp_train_step(m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);
        amp_model_destroy(m);
    }
}

/* Transformers learn at each level, twice with the same bits; what lies beyond a length, or is later, is not seen. */
static void test_transformers(void) {
    static const int32_t lengths[BATCH] = { 3, 1, 4, 2 };
    int kind, run, step, i, k;
    for (kind = 0; kind < 3; kind++)
        for (run = 0; run < COUNT(runs); run++) {
            amp_model_desc d = model_desc(BATCH, runs[run].level, runs[run].low);
            amp_model* m[2];
            amp_value head[2];
            double first = 0.0, last = 0.0;
            float out[2][BATCH * LONGEST * WORDS];
            text t;
            amp_batch b;
            d.optimizer.kind = AMP_ADAMW;
            d.optimizer.lr = 1e-2f;
            for (i = 0; i < 2; i++) {
                m[i] = new_model(&d);
                small_transformer(m[i], kind, 0.1f, &head[i]);
                CHECK_MSG(amp_model_finalize(m[i]) == AMP_OK, "%s", amp_model_error(m[i]));
            }
            for (step = 0; step < 150; step++) {
                amp_step_info a, c;
                b = text_batch(&t, BATCH, step % 3 == 1 ? 4 : 0, step % 3 == 2 ? lengths : NULL);
                for (i = 1; i < BATCH * LONGEST; i++) t.next[i] = i % 5 ? t.words[i - 1] % (WORDS - 2) : t.next[i];  /* the word before */
                CHECK_MSG(amp_train_step(m[0], &b, &a) == AMP_OK && amp_train_step(m[1], &b, &c) == AMP_OK, "%s", heard);
                CHECK(to_bits(a.loss) == to_bits(c.loss));
                if (step < 15) first += (double)a.loss / 15;
                if (step >= 135) last += (double)a.loss / 15;
            }
            CHECK(same_weights(m[0], m[1]));
            CHECK_MSG(last < 0.8 * first, "%d %s: %g to %g", kind, runs[run].name, first, last);

            b.positions = 0; b.lengths = lengths;             /* words beyond the length are others */
            CHECK(amp_predict(m[0], &b, head[0], out[0]) == AMP_OK);
            for (i = 0; i < BATCH * LONGEST; i++)
                if (i % LONGEST >= lengths[i / LONGEST]) t.words[i] = (t.words[i] + 1) % WORDS;
            CHECK(amp_predict(m[0], &b, head[0], out[1]) == AMP_OK);
            for (i = 0; i < BATCH * LONGEST; i++)
                for (k = 0; k < WORDS; k++)
                    CHECK(i % LONGEST >= lengths[i / LONGEST] || to_bits(out[0][i * WORDS + k]) == to_bits(out[1][i * WORDS + k]));
            amp_model_destroy(m[0]);
            amp_model_destroy(m[1]);
        }
}

/* Rows [q|k|v] are q, k and v; attention without a mask looks at all keys that count, of another sequence too. */
static void test_attention_forms(void) {
    static const int32_t lengths[BATCH] = { 2, 5, 1, 4 };
    amp_model_desc d = model_desc(BATCH, AMP_O0, AMP_F16);
    const amp_attention_desc a = { 2, 1, 1, 3, 0.3f }, cross = { 2, 0, 0, 0, 0.0f };
    const amp_rope_desc turn = { 3, 2, 100.0f, 1 }, of_q = { 2, 0, 100.0f, 1 }, of_k = { 1, 0, 100.0f, 1 };
    amp_model* m[2];
    amp_value y[2], x, q, k, v;
    float out[2][BATCH * LONGEST * 4], w[32], part[16];
    data set;
    amp_batch b;
    int i, j, p;
    fill(&set);
    memset(&b, 0, sizeof b);
    b.n = BATCH; b.inputs[0] = b.inputs[1] = set.x; b.lengths = lengths;
    for (i = 0; i < 2; i++) {
        m[i] = new_model(&d);
        x = input_of(m[i], LONGEST, 4);
        if (i == 0) y[0] = amp_attention(m[0], amp_rope(m[0], amp_linear(m[0], x, 8), &turn), &a);   /* heads of 2 elements */
        else {
            q = amp_rope(m[1], amp_linear(m[1], x, 4), &of_q);
            k = amp_rope(m[1], amp_linear(m[1], x, 2), &of_k);
            v = amp_linear(m[1], x, 2);
            y[1] = amp_attention_qkv(m[1], q, k, v, &a);
        }
        CHECK_MSG(amp_model_finalize(m[i]) == AMP_OK, "%s", amp_model_error(m[i]));
    }
    for (i = 0; i < 32; i++) w[i] = test_uniform();
    CHECK(amp_model_write_param(m[0], amp_model_find_param(m[0], "linear1.weight"), w) == AMP_OK);
    memset(part, 0, sizeof part);
    CHECK(amp_model_write_param(m[0], amp_model_find_param(m[0], "linear1.bias"), part) == AMP_OK);
    for (i = 0; i < 3; i++) {
        static const char* const names[3][2] = { { "linear1.weight", "linear1.bias" }, { "linear2.weight", "linear2.bias" }, { "linear3.weight", "linear3.bias" } };
        CHECK(amp_model_write_param(m[1], amp_model_find_param(m[1], names[i][0]), w + (i == 0 ? 0 : i == 1 ? 16 : 24)) == AMP_OK);
        CHECK(amp_model_write_param(m[1], amp_model_find_param(m[1], names[i][1]), part) == AMP_OK);
    }
    for (i = 0; i < 2; i++) CHECK(amp_predict(m[i], &b, y[i], out[i]) == AMP_OK);
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    for (i = 0; i < 2; i++) amp_model_destroy(m[i]);

    /* q of 3 positions of its own, k and v of the batch's */
    m[0] = new_model(&d);
    x = input_of(m[0], LONGEST, 4);
    q = input_of(m[0], LONGEST, 4);
    y[0] = amp_attention_qkv(m[0], q, x, x, &cross);
    CHECK_MSG(amp_model_finalize(m[0]) == AMP_OK, "%s", amp_model_error(m[0]));
    CHECK(amp_predict(m[0], &b, y[0], out[0]) == AMP_OK);
    for (i = 0; i < BATCH; i++)                               /* a head is a mean of the values, by e^score */
        for (p = 0; p < LONGEST; p++)
            for (j = 0; j < 4; j++) {
                const float* of = set.x + i * LONGEST * 4;
                double sum = 0.0, all = 0.0;
                int t;
                for (t = 0; t < lengths[i]; t++) {
                    const int h = j / 2 * 2;
                    const double e = exp(((double)of[p * 4 + h] * (double)of[t * 4 + h] + (double)of[p * 4 + h + 1] * (double)of[t * 4 + h + 1]) / sqrt(2.0));
                    all += e;
                    sum += e * (double)of[t * 4 + j];
                }
                CHECK_MSG(fabs((double)out[0][(i * LONGEST + p) * 4 + j] - sum / all) < 1e-6, "%d %d %d", i, p, j);
            }
    amp_model_destroy(m[0]);
}

/* Images as positions and back: the same bits at each level; a small vision transformer's gradients are differences. */
static void test_images(void) {
    int run, k, t;
    for (run = 0; run < COUNT(runs); run++) {
        amp_model_desc d = model_desc(2, runs[run].level, runs[run].low);
        amp_model* m = new_model(&d);
        amp_value x = amp_input(m, 3, 4, 5), p = amp_to_positions(m, x), y = amp_to_image(m, p, 4, 5);
        float in[2 * 60], out[2][2 * 60];
        amp_batch b;
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        CHECK(amp_model_layer(m, 1)->positions == 20 && amp_model_layer(m, 1)->channels == 3 && amp_model_layer(m, 2)->width == 5);
        for (k = 0; k < 120; k++) in[k] = test_uniform();
        memset(&b, 0, sizeof b);
        b.n = 2; b.inputs[0] = in;
        CHECK(amp_predict(m, &b, p, out[0]) == AMP_OK && amp_predict(m, &b, y, out[1]) == AMP_OK);
        CHECK(memcmp(in, out[1], sizeof in) == 0);
        for (k = 0; k < 120; k++) CHECK(to_bits(out[0][k]) == to_bits(in[k / 60 * 60 + k % 3 * 20 + k % 60 / 3]));
        amp_model_destroy(m);
    }
    for (t = 0; t < 2; t++) {
        amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
        amp_model* m = new_model(&d);
        amp_transformer_desc block;
        amp_param* p;
        amp_value x;
        int32_t labels[2] = { 1, 3 };
        float in[2 * 60];
        amp_batch b;
        int count;
        memset(&block, 0, sizeof block);
        block.heads = 2; block.sd = 0.4f; block.bidirectional = 1;
        if (t == 0) x = amp_position_embedding(m, amp_to_positions(m, amp_conv2d(m, amp_input(m, 3, 4, 5), 4, 2, 2, 0)));
        else x = amp_linear(m, input_of(m, 4, 15), 4);              /* a sequence of pixels */
        x = amp_to_image(m, amp_transformer_block(m, x, &block), 2, 2);
        amp_softmax_cross_entropy(m, amp_linear(m, amp_global_avg_pool2d(m, amp_conv2d(m, x, 5, 3, 1, 1)), 4));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        for (k = 0; k < 120; k++) in[k] = test_uniform();
        memset(&b, 0, sizeof b);
        b.n = 2; b.inputs[0] = in; b.targets[0] = labels;
        p = amp_model_params(m, &count);
        for (k = 0; k < count; k++) check_gradient(m, &b, &p[k], 2);
        if (t) {
            amp_step_info info;
            b.positions = 4;
            CHECK(amp_train_step(m, &b, &info) == AMP_OK);
            b.positions = 3;
            check_refused(amp_train_step(m, &b, &info), AMP_ERR_ARGUMENT, "train step: positions is 3, but 'to_image1' takes all 4");
        }
        amp_model_destroy(m);
    }
}

/* The names and starts of a block's layers. */
static void test_blocks(void) {
    static const char* const names[2][9] = {
        { "h.1.ln_1.weight", "h.1.ln_1.bias", "h.1.attn.c_attn.weight", "h.1.attn.c_attn.bias", "h.1.attn.c_proj.weight", "h.1.ln_2.weight",
          "h.1.mlp.c_fc.weight", "h.1.mlp.c_proj.weight", "h.1.mlp.c_proj.bias" },
        { "h.1.input_layernorm.weight", "h.1.self_attn.q_proj.weight", "h.1.self_attn.k_proj.weight", "h.1.self_attn.v_proj.weight",
          "h.1.self_attn.o_proj.weight", "h.1.post_attention_layernorm.weight", "h.1.mlp.gate_proj.weight", "h.1.mlp.up_proj.weight",
          "h.1.mlp.down_proj.weight" } };
    static const size_t counts[2][9] = { { 64, 64, 3 * 64 * 64, 3 * 64, 64 * 64, 64, 4 * 64 * 64, 4 * 64 * 64, 64 },
                                         { 64, 64 * 64, 64 * 32, 64 * 32, 64 * 64, 64, 64 * 256, 64 * 256, 64 * 256 } };
    int kind, i;
    for (kind = 0; kind < 2; kind++) {
        amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
        amp_model* m = new_model(&d);
        amp_transformer_desc t;
        memset(&t, 0, sizeof t);
        t.kind = (amp_block_kind)kind; t.heads = 4; t.layers = 8; t.name = "h.1";
        if (kind) t.kv_heads = 2;
        amp_mse(m, amp_transformer_block(m, input_of(m, 3, 64), &t));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        for (i = 0; i < 9; i++) {
            const amp_param* p = amp_model_find_param(m, names[kind][i]);
            const int adds = strstr(names[kind][i], "attn.c_proj.w") || strstr(names[kind][i], "mlp.c_proj.w") || strstr(names[kind][i], "o_proj")
                || strstr(names[kind][i], "down_proj");
            const double sd = adds ? 0.005 : 0.02;
            double squares = 0.0;
            size_t k;
            CHECK_MSG(p && p->count == counts[kind][i], "%s", names[kind][i]);
            if (!p || p->count < 1000) continue;
            for (k = 0; k < p->count; k++) squares += (double)p->master[k] * (double)p->master[k];
            CHECK_MSG(fabs(sqrt(squares / (double)p->count) / sd - 1.0) < 0.1, "%s: %g", p->name, sqrt(squares / (double)p->count));
        }
        amp_model_destroy(m);
    }
}

/* --- mistakes --- */
typedef void (*mistake)(amp_model* m, amp_value x);    /* x: 5 positions of 6 features */
static void e_conv(amp_model* m, amp_value x) { amp_conv2d(m, x, 3, 3, 1, 1); }
static void e_pool(amp_model* m, amp_value x) { amp_global_avg_pool2d(m, x); }
static void e_max_pool(amp_model* m, amp_value x) { amp_max_pool2d(m, x, 9); }
static void e_upsample(amp_model* m, amp_value x) { amp_upsample(m, x, 2); }
static void e_transposed(amp_model* m, amp_value x) { amp_conv_transpose2d(m, x, 3, 3, 1, 1); }
static void e_norm(amp_model* m, amp_value x) { amp_batch_norm(m, x); }
static void e_add(amp_model* m, amp_value x) { amp_add(m, x, input_of(m, 4, 6)); }
static void e_mul(amp_model* m, amp_value x) { amp_mul(m, x, input_of(m, 0, 6)); }
static void e_concat(amp_model* m, amp_value x) { amp_concat(m, input_of(m, 0, 6), x); }
static void e_reuse(amp_model* m, amp_value x) {
    const amp_value c = amp_conv2d(m, input_of(m, 0, 6), 3, 1, 1, 0);
    amp_reuse(m, c, x);
}
static void e_input(amp_model* m, amp_value x) { (void)x; input_of(m, -2, 6); }
static void e_input_large(amp_model* m, amp_value x) { (void)x; input_of(m, 2147483647, 6); }
static void e_linear_large(amp_model* m, amp_value x) { amp_linear(m, x, 500000000); }
static void e_classes(amp_model* m, amp_value x) {
    amp_loss_desc l;
    memset(&l, 0, sizeof l);
    l.classes = 8;
    amp_softmax_cross_entropy_with(m, amp_linear(m, x, 7), &l);
}
static void e_classes_negative(amp_model* m, amp_value x) {
    amp_loss_desc l;
    memset(&l, 0, sizeof l);
    l.classes = -1;
    amp_softmax_cross_entropy_with(m, amp_linear(m, x, 7), &l);
}
static void e_classes_of_maps(amp_model* m, amp_value x) {
    amp_loss_desc l;
    memset(&l, 0, sizeof l);
    (void)x;
    l.classes = 2;
    amp_softmax_cross_entropy_with(m, amp_input(m, 3, 2, 2), &l);
}
static void e_classes_of_mse(amp_model* m, amp_value x) {
    amp_loss_desc l;
    memset(&l, 0, sizeof l);
    l.classes = 2;
    amp_mse_with(m, x, &l);
}
static void e_custom(amp_model* m, amp_value x) {
    amp_custom_desc c;
    memset(&c, 0, sizeof c);
    c.forward = pool_forward; c.positions = -1;
    amp_custom(m, &x, 1, &c);
}
static void e_own_positions(amp_model* m, amp_value x) {
    amp_custom_desc c;
    memset(&c, 0, sizeof c);
    c.forward = pool_forward; c.positions = 3;
    amp_add(m, amp_custom(m, &x, 1, &c), input_of(m, 3, 6));
}
static amp_value embedding_of(amp_model* m, amp_value x, int vocabulary, int features, amp_init init, float sd) {
    amp_embedding_desc e;
    memset(&e, 0, sizeof e);
    e.vocabulary = vocabulary; e.features = features; e.init = init; e.sd = sd;
    return amp_embedding_with(m, x, &e);
}
static void e_embedding_of_floats(amp_model* m, amp_value x) { amp_embedding(m, x, 5, 6); }
static void e_embedding_again(amp_model* m, amp_value x) {
    const amp_value e = amp_embedding(m, amp_tokens(m, 5), 5, 6);
    (void)x;
    amp_reuse(m, e, input_of(m, 5, 1));
}
static void e_embedding_size(amp_model* m, amp_value x) { (void)x; amp_embedding(m, amp_tokens(m, 5), 0, 6); }
static void e_embedding_large(amp_model* m, amp_value x) { (void)x; amp_embedding(m, amp_tokens(m, 5), 70000, 70000); }
static void e_embedding_null(amp_model* m, amp_value x) { (void)x; amp_embedding_with(m, amp_tokens(m, 5), NULL); }
static void e_embedding_sd(amp_model* m, amp_value x) { (void)x; embedding_of(m, amp_tokens(m, 5), 5, 6, AMP_INIT_TORCH, 0.5f); }
static void e_embedding_negative(amp_model* m, amp_value x) { (void)x; embedding_of(m, amp_tokens(m, 5), 5, 6, AMP_INIT_NORMAL, -0.5f); }
static void e_embedding_init(amp_model* m, amp_value x) { (void)x; embedding_of(m, amp_tokens(m, 5), 5, 6, (amp_init)5, 0.0f); }
static void e_positions_size(amp_model* m, amp_value x) {
    const amp_embedding_desc e = { 6, 6, AMP_INIT_TORCH, 0.0f };
    amp_position_embedding_with(m, x, &e);
}
static void e_positions_again(amp_model* m, amp_value x) { amp_reuse(m, amp_position_embedding(m, x), input_of(m, 4, 6)); }
static void e_linear_of_tokens(amp_model* m, amp_value x) { (void)x; amp_linear(m, amp_tokens(m, 5), 6); }
static void e_flat_tokens(amp_model* m, amp_value x) { (void)x; amp_flatten(m, amp_tokens(m, 5)); }
static void e_no_tokens(amp_model* m, amp_value x) { (void)x; amp_tokens(m, 0); }
static void e_token_output(amp_model* m, amp_value x) { (void)x; amp_output(m, amp_tokens(m, 5)); }
static void e_token_gradient(amp_model* m, amp_value x) { (void)x; amp_retain_gradient(m, amp_tokens(m, 5)); }
static void e_tied_to_linear(amp_model* m, amp_value x) { amp_tied_linear(m, x, amp_linear(m, x, 6)); }
static void e_tied_features(amp_model* m, amp_value x) { amp_tied_linear(m, x, amp_embedding(m, amp_tokens(m, 5), 9, 7)); }
static void attention_of(amp_model* m, amp_value x, int heads, int kv_heads, int causal, int window, float scale) {
    const amp_attention_desc a = { heads, kv_heads, causal, window, scale };
    amp_attention(m, x, &a);
}
static void e_heads(amp_model* m, amp_value x) { attention_of(m, x, 0, 0, 0, 0, 0.0f); }
static void e_kv_heads(amp_model* m, amp_value x) { attention_of(m, amp_linear(m, x, 14), 3, 2, 0, 0, 0.0f); }
static void e_kv_negative(amp_model* m, amp_value x) { attention_of(m, x, 2, -1, 0, 0, 0.0f); }
static void e_head_size(amp_model* m, amp_value x) { attention_of(m, x, 4, 0, 0, 0, 0.0f); }
static void e_window(amp_model* m, amp_value x) { attention_of(m, x, 2, 0, 0, 3, 0.0f); }
static void e_scale(amp_model* m, amp_value x) { attention_of(m, x, 2, 0, 0, 0, from_bits(0x7f800000u)); }
static void e_attention_null(amp_model* m, amp_value x) { amp_attention(m, x, NULL); }
static void e_attention_keys(amp_model* m, amp_value x) {
    const amp_attention_desc a = { 2, 0, 0, 0, 0.0f };
    const amp_value k = input_of(m, 4, 6);
    amp_attention_qkv(m, x, k, input_of(m, 5, 6), &a);
}
static void e_attention_values(amp_model* m, amp_value x) {
    const amp_attention_desc a = { 2, 0, 0, 0, 0.0f };
    const amp_value k = input_of(m, 5, 4);
    amp_attention_qkv(m, x, k, input_of(m, 5, 8), &a);
}
static void rope_of(amp_model* m, amp_value x, int heads, int size, float theta) {
    const amp_rope_desc r = { heads, size, theta, 0 };
    amp_rope(m, x, &r);
}
static void e_rope_heads(amp_model* m, amp_value x) { rope_of(m, x, 0, 0, 0.0f); }
static void e_rope_odd(amp_model* m, amp_value x) { rope_of(m, x, 2, 0, 0.0f); }
static void e_rope_wide(amp_model* m, amp_value x) { rope_of(m, x, 2, 4, 0.0f); }
static void e_rope_theta(amp_model* m, amp_value x) { rope_of(m, x, 3, 0, 0.5f); }
static void e_rope_null(amp_model* m, amp_value x) { amp_rope(m, x, NULL); }
static void block_of(amp_model* m, amp_value x, int kind, int heads, int kv_heads, int layers, float dropout, float theta) {
    amp_transformer_desc t;
    memset(&t, 0, sizeof t);
    t.kind = (amp_block_kind)kind; t.heads = heads; t.kv_heads = kv_heads; t.layers = layers; t.dropout = dropout; t.theta = theta;
    amp_transformer_block(m, x, &t);
}
static void e_block_null(amp_model* m, amp_value x) { amp_transformer_block(m, x, NULL); }
static void e_block_kind(amp_model* m, amp_value x) { block_of(m, x, 2, 2, 0, 0, 0.0f, 0.0f); }
static void e_block_heads(amp_model* m, amp_value x) { block_of(m, x, 0, 4, 0, 0, 0.0f, 0.0f); }
static void e_block_layers(amp_model* m, amp_value x) { block_of(m, x, 0, 2, 0, -1, 0.0f, 0.0f); }
static void e_block_dropout(amp_model* m, amp_value x) { block_of(m, x, 1, 1, 0, 0, 0.1f, 0.0f); }
static void e_block_theta(amp_model* m, amp_value x) { block_of(m, x, 0, 2, 0, 0, 0.0f, 1e4f); }
static void e_block_odd(amp_model* m, amp_value x) { block_of(m, x, 1, 2, 0, 0, 0.0f, 0.0f); }
static void e_block_kv(amp_model* m, amp_value x) { block_of(m, x, 0, 3, 2, 0, 0.0f, 0.0f); }
static void e_block_many_kv(amp_model* m, amp_value x) { block_of(m, x, 1, 3, 0x40000001, 0, 0.0f, 0.0f); }
static void e_block_wide(amp_model* m, amp_value x) { (void)x; block_of(m, amp_input(m, 0x20000000, 1, 1), 0, 1, 0, 0, 0.0f, 0.0f); }
static void e_twice_positions(amp_model* m, amp_value x) { amp_to_positions(m, x); }
static void e_image_size(amp_model* m, amp_value x) { amp_to_image(m, x, 2, 3); }
static void e_image_negative(amp_model* m, amp_value x) { amp_to_image(m, x, -1, -5); }
static void e_image_added(amp_model* m, amp_value x) { amp_add(m, x, amp_to_positions(m, amp_input(m, 6, 1, 5))); }
static void e_tied_group(amp_model* m, amp_value x) { amp_group(m, amp_tied_linear(m, x, amp_embedding(m, amp_tokens(m, 5), 9, 6)), 0); }
static const struct { mistake make; amp_result code; const char* sentence; } mistakes[] = {
    { e_conv, AMP_ERR_SHAPE, "conv2d after 'words': it is for images, not for 5 positions" },
    { e_pool, AMP_ERR_SHAPE, "avg_pool2d after 'words': it is for images, not for 5 positions" },
    { e_max_pool, AMP_ERR_SHAPE, "max_pool2d after 'words': it is for images, not for 5 positions" },
    { e_upsample, AMP_ERR_SHAPE, "upsample after 'words': it is for images, not for 5 positions" },
    { e_transposed, AMP_ERR_SHAPE, "conv_transpose2d after 'words': it is for images, not for 5 positions" },
    { e_norm, AMP_ERR_SHAPE, "batch_norm after 'words': it is for images, not for 5 positions" },
    { e_add, AMP_ERR_SHAPE, "add after 'words': 5x6x1x1 does not fit 4x6x1x1 of 'input2'" },
    { e_mul, AMP_ERR_SHAPE, "mul after 'words': 5x6x1x1 does not fit 6x1x1 of 'input2'" },
    { e_concat, AMP_ERR_SHAPE, "concat after 'input2': 6x1x1 does not fit 5x6x1x1 of 'words'" },
    { e_reuse, AMP_ERR_SHAPE, "conv2d after 'words': 'conv2d1' takes 6x1x1, not 5x6x1x1" },
    { e_input, AMP_ERR_SHAPE, "input: 6 x 1 x 1 at -2 positions for a batch of 2 is not a size that can be had" },
    { e_input_large, AMP_ERR_SHAPE, "input: 6 x 1 x 1 at 2147483647 positions for a batch of 2 is not a size that can be had" },
    { e_linear_large, AMP_ERR_SHAPE, "linear after 'words': its output 5x500000000x1x1 is too large" },
    { e_classes, AMP_ERR_DESC, "softmax_cross_entropy on 'linear1': classes is 8, it must lie in 1..7" },
    { e_classes_negative, AMP_ERR_DESC, "softmax_cross_entropy on 'linear1': classes is -1, it must lie in 1..7" },
    { e_classes_of_maps, AMP_ERR_DESC, "softmax_cross_entropy on 'input2': classes is 2, but maps have all 3" },
    { e_classes_of_mse, AMP_ERR_DESC,
      "mse on 'words': ignored, class_weights and classes are for softmax_cross_entropy only" },
    { e_custom, AMP_ERR_DESC, "custom after 'words': positions is -1" },
    { e_embedding_of_floats, AMP_ERR_SHAPE, "embedding after 'words': 'words' has no tokens, as an embedding reads" },
    { e_embedding_again, AMP_ERR_SHAPE, "embedding after 'embedding1': 'input3' has no tokens, as an embedding reads" },
    { e_embedding_size, AMP_ERR_DESC, "embedding after 'input2': 0 rows of 6 features are not a size that can be had" },
    { e_embedding_large, AMP_ERR_DESC, "embedding after 'input2': 70000 rows of 70000 features are not a size that can be had" },
    { e_embedding_null, AMP_ERR_DESC, "embedding after 'input2': the desc is NULL" },
    { e_embedding_sd, AMP_ERR_DESC, "embedding after 'input2': sd 0.5 is for AMP_INIT_NORMAL only" },
    { e_embedding_negative, AMP_ERR_DESC, "embedding after 'input2': sd -0.5 must be finite and not negative" },
    { e_embedding_init, AMP_ERR_DESC, "embedding after 'input2': init 5 does not exist" },
    { e_positions_size, AMP_ERR_DESC, "position_embedding after 'words': its weight is 5x6, not 6x6" },
    { e_positions_again, AMP_ERR_SHAPE, "position_embedding after 'input2': 'position_embedding1' takes 5x6x1x1, not 4x6x1x1" },
    { e_linear_of_tokens, AMP_ERR_SHAPE, "linear after 'input2': 'input2' has tokens, which only an embedding reads" },
    { e_flat_tokens, AMP_ERR_SHAPE, "flatten after 'input2': 'input2' has tokens, which only an embedding reads" },
    { e_no_tokens, AMP_ERR_SHAPE, "input: tokens at 0 positions for a batch of 2 are not a size that can be had" },
    { e_token_output, AMP_ERR_ARGUMENT, "output: 'input2' has tokens" },
    { e_token_gradient, AMP_ERR_ARGUMENT, "retain_gradient: 'input2' has tokens" },
    { e_tied_to_linear, AMP_ERR_ARGUMENT, "linear after 'words': 'linear1' is no embedding" },
    { e_tied_features, AMP_ERR_SHAPE, "linear after 'words': 'embedding1' has 7 features, not 6" },
    { e_tied_group, AMP_ERR_ARGUMENT, "group of 'linear1': its weights are another layer's" },
    { e_heads, AMP_ERR_DESC, "attention after 'words': heads is 0, kv_heads 0, window 0" },
    { e_kv_heads, AMP_ERR_SHAPE, "attention after 'linear1': attention: 3 heads are not whole groups for 2 kv_heads" },
    { e_kv_negative, AMP_ERR_DESC, "attention after 'words': heads is 2, kv_heads -1, window 0" },
    { e_head_size, AMP_ERR_SHAPE, "attention after 'words': 6 features in all are not 4 heads of q and 4 of k and v each" },
    { e_window, AMP_ERR_SHAPE, "attention after 'words': attention: the window is 3, but only causal attention has one" },
    { e_scale, AMP_ERR_DESC, "attention after 'words': attention: the scale is not finite" },
    { e_attention_null, AMP_ERR_DESC, "attention after 'words': the desc is NULL" },
    { e_attention_keys, AMP_ERR_SHAPE, "attention after 'words': 'input2' and 'input3' have other positions" },
    { e_attention_values, AMP_ERR_SHAPE, "attention after 'words': 18 features in all are not 2 heads of q and 2 of k and v each" },
    { e_rope_heads, AMP_ERR_DESC, "rope after 'words': heads is 0, head_size 0" },
    { e_rope_odd, AMP_ERR_SHAPE, "rope after 'words': rope: head_size is 3; it must be even, from 2 to 1024" },
    { e_rope_wide, AMP_ERR_SHAPE, "rope after 'words': rope: the width is 6, but a row has 2 heads of 4 elements" },
    { e_rope_theta, AMP_ERR_DESC, "rope after 'words': rope: theta must be finite and at least 1" },
    { e_rope_null, AMP_ERR_DESC, "rope after 'words': the desc is NULL" },
    { e_block_null, AMP_ERR_DESC, "transformer_block: the desc is NULL" },
    { e_block_kind, AMP_ERR_DESC, "transformer_block: kind 2 does not exist" },
    { e_block_heads, AMP_ERR_DESC, "transformer_block after 'words': heads 4 must divide 6 features, kv_heads 0 lie in 0..heads, layers 0 not be negative" },
    { e_block_layers, AMP_ERR_DESC, "transformer_block after 'words': heads 2 must divide 6 features, kv_heads 0 lie in 0..heads, layers -1 not be negative" },
    { e_block_dropout, AMP_ERR_DESC, "transformer_block after 'words': no_bias, transposed and dropout are for AMP_BLOCK_GPT2" },
    { e_block_theta, AMP_ERR_DESC, "transformer_block after 'words': theta is for AMP_BLOCK_LLAMA" },
    { e_block_odd, AMP_ERR_SHAPE, "rope after 'linear1': rope: head_size is 3; it must be even, from 2 to 1024" },
    { e_block_kv, AMP_ERR_SHAPE, "attention after 'linear1': attention: 3 heads are not whole groups for 2 kv_heads" },
    { e_block_many_kv, AMP_ERR_DESC, "transformer_block after 'words': heads 3 must divide 6 features, kv_heads 1073741825 lie in 0..heads, layers 0 not be negative" },
    { e_block_wide, AMP_ERR_DESC, "transformer_block after 'input2': heads 1 must divide 536870912 features, kv_heads 0 lie in 0..heads, layers 0 not be negative" },
    { e_twice_positions, AMP_ERR_SHAPE, "to_positions after 'words': it has 5 positions already" },
    { e_image_size, AMP_ERR_SHAPE, "to_image after 'words': 5 positions are not 2x3 pixels" },
    { e_image_negative, AMP_ERR_SHAPE, "to_image after 'words': 5 positions are not -1x-5 pixels" },
    { e_image_added, AMP_ERR_SHAPE, "add after 'words': of this and 'to_positions1' only one has the positions of a batch" },
    { e_own_positions, AMP_ERR_SHAPE, "add after 'custom1': of this and 'input2' only one has the positions of a batch" },
};
static void test_mistakes(void) {
    int i;
    for (i = 0; i < COUNT(mistakes); i++) {
        amp_model_desc d = model_desc(2, AMP_O1, AMP_F16);
        amp_model* m = new_model(&d);
        amp_value x = input_of(m, 5, 6);
        amp_name(m, x, "words");
        mistakes[i].make(m, x);
        check_refused(amp_model_finalize(m), mistakes[i].code, mistakes[i].sentence);
        amp_model_destroy(m);
    }
}

/* Batches that do not fit, each with its sentence; the model trains afterwards. */
static void test_batches(void) {
    static const struct { int positions, first, length; const char* sentence; } cases[] = {
        { 6, 1, 0, "train step: positions is 6, 'input1' has 1 to 5" },
        { -1, 1, 0, "train step: positions is -1, 'input1' has 1 to 5" },
        { 0, 0, 1, "train step: the length 0 of sample 0 is outside 1..5" },
        { 4, 5, 1, "train step: the length 5 of sample 0 is outside 1..4" },
        { 0, -3, 1, "train step: the length -3 of sample 0 is outside 1..5" } };
    network s = make_network(BATCH, LONGEST, 0, 0.0f), r = make_network(BATCH * LONGEST, 0, 0, 0.0f);
    amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
    amp_model* two = new_model(&d);
    int32_t lengths[BATCH] = { 1, 1, 1, 1 };
    float out[BATCH * LONGEST * WORDS];
    amp_step_info info;
    amp_eval_info e;
    language w;
    text t;
    data v;
    amp_batch b;
    int i;
    fill(&v);
    for (i = 0; i < COUNT(cases); i++) {
        lengths[0] = cases[i].first;
        b = batch_of(&v, BATCH, cases[i].positions, cases[i].length ? lengths : NULL);
        check_refused(amp_train_step(s.m, &b, &info), AMP_ERR_ARGUMENT, cases[i].sentence);
    }
    b = batch_of(&v, BATCH, 3, NULL);
    check_refused(amp_train_step(r.m, &b, &info), AMP_ERR_ARGUMENT,
                  "train step: positions or lengths are given, but no input is a sequence");
    v.labels[7] = -2;
    b = batch_of(&v, BATCH, 0, NULL);
    check_refused(amp_train_step(s.m, &b, &info), AMP_ERR_ARGUMENT,
                  "layer 'softmax_cross_entropy1': label -2 of sample 1, position 2, is outside 0..6");
    v.labels[7] = 2;
    CHECK(amp_train_step(s.m, &b, &info) == AMP_OK && info.outcome == AMP_STEP_APPLIED);

    d.batch = BATCH;
    w = make_language(&d, 0, 0);
    b = text_batch(&t, BATCH, 0, NULL);
    t.words[12] = WORDS;
    check_refused(amp_train_step(w.m, &b, &info), AMP_ERR_ARGUMENT, "layer 'embedding1': token 11 of sample 2, position 2, is outside 0..10");
    t.words[12] = -1;
    check_refused(amp_evaluate(w.m, &b, &e), AMP_ERR_ARGUMENT, "layer 'embedding1': token -1 of sample 2, position 2, is outside 0..10");
    check_refused(amp_predict(w.m, &b, w.logits, out), AMP_ERR_ARGUMENT, "layer 'embedding1': token -1 of sample 2, position 2, is outside 0..10");
    b.positions = 2;                             /* then it is not read */
    CHECK(amp_predict(w.m, &b, w.logits, out) == AMP_OK);
    check_refused(amp_predict(w.m, &b, w.tokens, out), AMP_ERR_ARGUMENT, "predict: 'input1' has tokens");
    amp_model_destroy(w.m);

    amp_mse(two, amp_linear(two, input_of(two, 5, 4), 2));
    amp_mse(two, amp_linear(two, input_of(two, 3, 4), 2));
    CHECK(amp_model_finalize(two) == AMP_OK);
    memset(&b, 0, sizeof b);
    b.n = 2; b.inputs[0] = b.inputs[1] = v.x; b.targets[0] = b.targets[1] = v.floats;
    CHECK(amp_train_step(two, &b, &info) == AMP_OK);
    b.lengths = lengths;
    lengths[0] = 1;
    check_refused(amp_train_step(two, &b, &info), AMP_ERR_ARGUMENT,
                  "train step: lengths are for sequences of equal positions, but 'input2' has 3");
    b.positions = 3;
    CHECK(amp_train_step(two, &b, &info) == AMP_OK);
    b.positions = 4;
    check_refused(amp_train_step(two, &b, &info), AMP_ERR_ARGUMENT, "train step: positions is 4, 'input2' has 1 to 3");
    amp_model_destroy(s.m);
    amp_model_destroy(r.m);
    amp_model_destroy(two);
}

/* A person sees positions in front of the other sizes. */
static void test_print(void) {
    network s = make_network(BATCH, LONGEST, 1, 0.0f);
    char printed[8192] = "";
    FILE* f = tmpfile();
    size_t n;
    CHECK(f && amp_model_print(s.m, f) == AMP_OK);
    if (!f) return;
    rewind(f);
    n = fread(printed, 1, sizeof printed - 1, f);
    printed[n] = 0;
    fclose(f);
    CHECK_MSG(strstr(printed, " 5x8x1x1 ") && strstr(printed, " 5x7x1x1 ") && strstr(printed, " 1x1x1 "), "%s", printed);
    amp_model_destroy(s.m);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_rows);
    TEST(test_lengths);
    TEST(test_ignored);
    TEST(test_padded_vocabulary);
    TEST(test_custom);
    TEST(test_data);
    TEST(test_embedding_gradients);
    TEST(test_language);
    TEST(test_tied);
    TEST(test_resume);
    TEST(test_embedding_again);
    TEST(test_reuse);
    TEST(test_starts);
    TEST(test_overflows);
    TEST(test_token_data);
    TEST(test_transformer_gradients);
    TEST(test_overflow_in_each_layer);
    TEST(test_transformers);
    TEST(test_attention_forms);
    TEST(test_blocks);
    TEST(test_images);
    TEST(test_mistakes);
    TEST(test_batches);
    TEST(test_print);
    TEST_END();
}
