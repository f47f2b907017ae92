/* test_fit.c - amp_fit and amp_evaluate_data: the order of the samples, the same as a loop by hand, resuming, early ends, errors. */
#include "small_model.h"
#include <math.h>

/* --- data: 8x8 pictures of three kinds, by the bright quarter ------------------------------------ */

enum { SIDE = TOY_SIDE, PIXELS = SIDE * SIDE, SAMPLES = 50, CLASSES = TOY_CLASSES, BATCH = 8, BATCHES = (SAMPLES + BATCH - 1) / BATCH };
static float pictures[SAMPLES * PIXELS];
static uint8_t bytes[SAMPLES * PIXELS];
static int32_t labels[SAMPLES];
static int64_t long_labels[SAMPLES];
static uint8_t short_labels[SAMPLES];
static void make_pictures(void) {
    int s, i;
    for (s = 0; s < SAMPLES; s++) {
        labels[s] = s * 7 % 11 % CLASSES;
        long_labels[s] = labels[s];
        short_labels[s] = (uint8_t)labels[s];
        for (i = 0; i < PIXELS; i++) {
            int quarter = (i % SIDE < SIDE / 2 ? 0 : 1) + (i / SIDE < SIDE / 2 ? 0 : 2);
            bytes[s * PIXELS + i] = (uint8_t)(test_random() % 120 + (quarter == labels[s] ? 100 : 0));
            pictures[s * PIXELS + i] = (float)bytes[s * PIXELS + i] / 255.0f;
        }
    }
}
static amp_data arrays(void) {
    amp_data d;
    memset(&d, 0, sizeof d);
    d.count = SAMPLES;
    d.inputs[0] = pictures;
    d.targets[0] = labels;
    return d;
}

/* A source of its own: notes which samples it was asked for, and fails at a call of the test's choice. */
typedef struct source {
    int64_t seen[4096];
    int count, calls, fails_at, says;   /* says: what it writes to n at its second call, if not 0 */
    float x[BATCH * PIXELS];
    int32_t y[BATCH];
} source;
static source src;
static amp_result read_source(amp_batch* b, const int64_t* indices, void* user_data) {
    source* s = (source*)user_data;
    int i;
    if (++s->calls == s->fails_at) return AMP_ERR_IO;
    CHECK(b->n >= 1 && b->n <= BATCH && !b->inputs[0] && !b->targets[0]);
    for (i = 0; i < b->n; i++) {
        s->seen[s->count++ % 4096] = indices[i];
        memcpy(s->x + i * PIXELS, pictures + indices[i] * PIXELS, PIXELS * sizeof(float));
        s->y[i] = labels[indices[i]];
    }
    b->inputs[0] = s->x;
    b->targets[0] = s->y;
    if (s->says && s->calls == 2) b->n = s->says > 0 ? s->says : 0;
    return AMP_OK;
}
static amp_data sourced(void) {
    amp_data d;
    memset(&d, 0, sizeof d);
    memset(&src, 0, sizeof src);
    d.count = SAMPLES;
    d.read = read_source;
    d.user_data = &src;
    return d;
}

/* --- models ---------------------------------------------------------------------------------------- */

static amp_model_desc desc_of(amp_level level) {
    amp_model_desc d = model_desc(BATCH, level, AMP_DTYPE_DEFAULT);
    d.optimizer.kind = AMP_ADAM;
    d.optimizer.lr = 0.01f;
    d.allocator.alloc = failing_alloc;
    d.allocator.free = failing_free;
    return d;
}
static amp_model* make(const amp_model_desc* d) { return make_toy(d, 1, 0.1f).m; }
static amp_model* make_level(amp_level level) {
    amp_model_desc d = desc_of(level);
    return make(&d);
}
static int same_state(amp_model* a, amp_model* b) {
    return same_weights(a, b) && amp_model_scaler(a)->state.scale == amp_model_scaler(b)->state.scale;
}
static amp_fit_desc fit_of(int epochs) {
    amp_fit_desc f;
    memset(&f, 0, sizeof f);
    f.epochs = epochs;
    return f;
}
static amp_result fit(amp_model* m, amp_data data, const amp_fit_desc* f, amp_fit_info* info) {
    heard[0] = 0;
    return amp_fit(m, &data, f, info);
}

/* --- the order ------------------------------------------------------------------------------------- */

/* The samples that a run with this seed (0 = the model's) is given. */
static void order_of(uint64_t seed, int epochs, int first, int64_t* out) {
    amp_model* m = make_level(AMP_O0);
    amp_fit_desc f = fit_of(epochs);
    f.seed = seed; f.first_epoch = first;
    CHECK(fit(m, sourced(), &f, NULL) == AMP_OK && src.count == (epochs - first) * SAMPLES);
    CHECK(src.calls == (epochs - first) * BATCHES);         /* the last batch is a smaller one */
    memcpy(out, src.seen, (size_t)src.count * sizeof *out);
    amp_model_destroy(m);
}
static void test_order(void) {
    static int64_t a[3 * SAMPLES], b[3 * SAMPLES];
    int k, i;
    order_of(77, 3, 0, a);
    for (k = 0; k < 3; k++) {
        int times[SAMPLES] = { 0 };
        for (i = 0; i < SAMPLES; i++) times[a[k * SAMPLES + i]]++;
        for (i = 0; i < SAMPLES; i++) CHECK(times[i] == 1);
    }
    CHECK(memcmp(a, a + SAMPLES, SAMPLES * sizeof *a) != 0 && memcmp(a + SAMPLES, a + 2 * SAMPLES, SAMPLES * sizeof *a) != 0);
    order_of(77, 3, 0, b);
    CHECK(memcmp(a, b, sizeof a) == 0);
    order_of(77, 3, 2, b);                                  /* an epoch's order does not depend on those before */
    CHECK(memcmp(a + 2 * SAMPLES, b, SAMPLES * sizeof *a) == 0);
    order_of(78, 1, 0, b);
    CHECK(memcmp(a, b, SAMPLES * sizeof *a) != 0);
    order_of(0, 1, 0, b);
    CHECK(memcmp(a, b, SAMPLES * sizeof *a) != 0);
}
/* Fisher-Yates by the header's random numbers, written apart. */
static void test_order_by_hand(void) {
    int64_t order[SAMPLES], seen[SAMPLES];
    int i;
    for (i = 0; i < SAMPLES; i++) order[i] = i;
    for (i = SAMPLES - 1; i > 0; i--) {
        uint64_t at = 2 * (uint64_t)(1 * SAMPLES + i), high = amp_random_bits(5, at), low = amp_random_bits(5, at + 1);
        int j = (int)((high << 32 | low) % (uint64_t)(i + 1));
        int64_t t = order[i];
        order[i] = order[j]; order[j] = t;
    }
    order_of(5, 1, 0, seen);
    CHECK(memcmp(order, seen, sizeof seen) == 0);
}

/* --- as by hand ------------------------------------------------------------------------------------- */

static void test_as_by_hand(void) {
    int level;
    for (level = 0; level <= 2; level++) {
        amp_model *a = make_level((amp_level)level), *b = make_level((amp_level)level);
        amp_data data = arrays();
        amp_fit_desc f = fit_of(2);
        amp_fit_epoch history[2];
        amp_fit_info info;
        amp_eval_info part, all;
        double loss = 0.0, sum = 0.0;
        int epoch, at, n;
        int64_t correct = 0;
        f.in_order = 1; f.evaluation = &data; f.history = history;
        CHECK_MSG(fit(a, data, &f, &info) == AMP_OK, "%s", heard);
        for (epoch = 0; epoch < 2; epoch++)
            for (at = 0, loss = 0.0; at < SAMPLES; at += n) {
                amp_step_info step;
                amp_batch batch;
                memset(&batch, 0, sizeof batch);
                batch.n = n = SAMPLES - at < BATCH ? SAMPLES - at : BATCH;
                batch.inputs[0] = pictures + at * PIXELS;
                batch.targets[0] = labels + at;
                CHECK(amp_train_step(b, &batch, &step) == AMP_OK && (epoch == 0 || step.outcome == AMP_STEP_APPLIED));
                loss += (double)step.loss * (double)n;
            }
        CHECK(same_state(a, b));
        for (at = 0; at < SAMPLES; at += n) {
            amp_batch batch;
            memset(&batch, 0, sizeof batch);
            batch.n = n = SAMPLES - at < BATCH ? SAMPLES - at : BATCH;
            batch.inputs[0] = pictures + at * PIXELS;
            batch.targets[0] = labels + at;
            CHECK(amp_evaluate(b, &batch, &part) == AMP_OK);
            sum += (double)part.loss * (double)n;
            correct += part.correct;
        }
        CHECK(info.epochs == 2 && info.end == AMP_FIT_EPOCHS && info.last.epoch == 2 && info.last.steps == BATCHES && info.last.skipped == 0);
        CHECK(info.last.loss == (float)(loss / SAMPLES) && info.last.eval_loss == (float)(sum / SAMPLES));
        CHECK(info.last.accuracy == (double)correct / SAMPLES && info.last.lr == 0.01f);
        CHECK(info.last.scale == amp_model_scaler(b)->state.scale && history[0].epoch == 1 && history[1].eval_loss == info.last.eval_loss);
        CHECK(amp_evaluate_data(b, &data, &all) == AMP_OK && all.loss == info.last.eval_loss && all.correct == correct);
        data = sourced();
        CHECK(amp_evaluate_data(b, &data, &all) == AMP_OK && all.loss == info.last.eval_loss && all.correct == correct);
        amp_model_destroy(a);
        amp_model_destroy(b);
    }
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
}

/* Arrays of bytes, labels of each type, and a source that brings the same all end in the same bits; it learns, too. */
static void test_sources(void) {
    amp_fit_desc f = fit_of(12);
    amp_fit_info info;
    amp_model* first = make_level(AMP_O2);
    int k;
    CHECK(fit(first, arrays(), &f, &info) == AMP_OK && info.last.loss < 0.7f * 1.386f);
    for (k = 0; k < 4; k++) {
        amp_model* m = make_level(AMP_O2);
        amp_data d = k == 3 ? sourced() : arrays();
        if (k < 3) { d.inputs[0] = bytes; d.input_dtype = AMP_U8; }
        if (k == 1) { d.targets[0] = long_labels; d.label_dtype = AMP_I64; }
        if (k == 2) { d.targets[0] = short_labels; d.label_dtype = AMP_U8; }
        CHECK_MSG(fit(m, d, &f, NULL) == AMP_OK && same_state(m, first), "source %d: %s", k, heard);
        amp_model_destroy(m);
    }
    amp_model_destroy(first);
}

/* --- resuming and the best ----------------------------------------------------------------------------- */

static void test_resume(void) {
    amp_scaler_desc s;
    amp_model_desc d = desc_of(AMP_O2);
    amp_model *whole, *part, *rest;
    amp_fit_desc f = fit_of(4), half = fit_of(2);
    memset(&s, 0, sizeof s);
    s.growth_interval = 5;
    d.scaler = &s;
    whole = make(&d); part = make(&d); rest = make(&d);
    CHECK(fit(whole, arrays(), &f, NULL) == AMP_OK && fit(part, arrays(), &half, NULL) == AMP_OK && !same_state(whole, part));
    CHECK(amp_checkpoint_save(part, "test_fit.safetensors") == AMP_OK);
    CHECK(amp_checkpoint_load(rest, "test_fit.safetensors") == AMP_OK);
    f.first_epoch = 2;
    CHECK(fit(rest, arrays(), &f, NULL) == AMP_OK && same_state(whole, rest));
    f.first_epoch = 4;                                      /* nothing left to do */
    CHECK(fit(rest, arrays(), &f, NULL) == AMP_OK && same_state(whole, rest));
    amp_model_destroy(whole); amp_model_destroy(part); amp_model_destroy(rest);
    remove("test_fit.safetensors");
}

/* A rate so high that the evaluation's loss gets worse again: the run ends, and the file has the best weights. */
static void test_patience(void) {
    amp_model_desc d = desc_of(AMP_O0);
    amp_data data = arrays();
    amp_fit_desc f = fit_of(60);
    amp_fit_epoch history[60];
    amp_fit_info info;
    amp_eval_info told;
    amp_model *m, *best;
    int i;
    d.optimizer.lr = 0.3f;
    m = make(&d);
    best = make(&d);
    f.evaluation = &data; f.patience = 3; f.history = history; f.best_path = "test_fit_best.safetensors";
    CHECK(fit(m, data, &f, &info) == AMP_OK && info.end == AMP_FIT_PATIENCE && info.epochs < 60);
    CHECK(info.best.best && !info.last.best && info.last.epoch == info.best.epoch + 3 && info.last.epoch == info.epochs);
    for (i = 0; i < info.epochs; i++) CHECK(history[i].eval_loss >= info.best.eval_loss && history[i].epoch == i + 1);
    CHECK(history[info.best.epoch - 1].best && history[info.best.epoch - 1].eval_loss == info.best.eval_loss);
    CHECK(amp_checkpoint_load(best, f.best_path) == AMP_OK && amp_evaluate_data(best, &data, &told) == AMP_OK);
    CHECK(told.loss == info.best.eval_loss && !same_state(m, best));
    amp_model_destroy(m); amp_model_destroy(best);
    remove("test_fit_best.safetensors");
}

/* A best file that cannot be written: known before the first step, or, if it comes later, told behind a whole epoch. */
static char best_path[80];
static amp_result lose_path(amp_batch* b, const int64_t* indices, void* user_data) {
    if (src.calls == 1) snprintf(best_path, sizeof best_path, "there/is/no/such/directory");
    return read_source(b, indices, user_data);
}
static void test_best_path(void) {
    amp_model* m = make_level(AMP_O0);
    amp_data data = sourced();
    amp_fit_desc f = fit_of(2);
    amp_fit_epoch history[2];
    amp_fit_info info;
    f.history = history; f.best_path = best_path;
    snprintf(best_path, sizeof best_path, "there/is/no/such/directory");
    CHECK(amp_fit(m, &data, &f, &info) == AMP_ERR_IO && src.calls == 0 && strstr(heard, "no/such"));
    CHECK(info.epochs == 0 && info.last.epoch == 0 && info.best.epoch == 0);
    snprintf(best_path, sizeof best_path, "test_fit_best.safetensors");
    data.read = lose_path;
    CHECK(amp_fit(m, &data, &f, &info) == AMP_ERR_IO && src.calls == BATCHES && strstr(heard, "no/such"));
    CHECK(info.epochs == 1 && info.last.epoch == 1 && info.best.epoch == 1 && history[0].epoch == 1);
    CHECK(info.last.best && info.last.loss == info.best.loss && info.best.loss == history[0].loss);
    CHECK(remove("test_fit_best.safetensors") != 0);        /* the trial leaves nothing */
    amp_model_destroy(m);
}

/* --- early ends ----------------------------------------------------------------------------------------- */

typedef struct ends { int steps, epochs, at_step, at_epoch; long printed, bars, cells; char text[2000]; } ends;
static int on_step(amp_model* m, const amp_step_info* step, void* user_data) {
    ends* e = (ends*)user_data;
    CHECK(m && step->attempts >= 1);
    return ++e->steps == e->at_step;
}
static int on_epoch(amp_model* m, const amp_fit_epoch* epoch, void* user_data) {
    ends* e = (ends*)user_data;
    CHECK(m && epoch->epoch == e->epochs + 1);
    return ++e->epochs == e->at_epoch;
}
static void print(const char* text, void* user_data) {
    ends* e = (ends*)user_data;
    const char *loss = strstr(text, "  loss "), *from = strchr(text, '['), *to = strchr(text, ']');
    e->bars += text[0] == '\r';
    e->printed++;
    e->cells += from && to && to - from == 31 && from[1] == '=';
    CHECK_MSG(loss && atof(loss + 7) > 0.0, "%s", text);
    if (strchr(text, '\n')) snprintf(e->text, sizeof e->text, "%s", text);
}
static void test_ends(void) {
    amp_model_desc d = desc_of(AMP_O0);
    amp_fit_desc f = fit_of(3);
    amp_fit_info info;
    ends e;
    amp_model* m = make(&d);
    memset(&e, 0, sizeof e);
    f.on_step = on_step; f.on_epoch = on_epoch; f.user_data = &e;
    e.at_step = BATCHES + 2;
    CHECK(fit(m, arrays(), &f, &info) == AMP_OK && info.end == AMP_FIT_CALLBACK && e.steps == BATCHES + 2 && e.epochs == 2);
    CHECK(info.epochs == 2 && info.last.steps == 2);
    memset(&e, 0, sizeof e);
    e.at_epoch = 1;
    CHECK(fit(m, arrays(), &f, &info) == AMP_OK && info.end == AMP_FIT_CALLBACK && e.steps == BATCHES && info.epochs == 1);
    memset(&e, 0, sizeof e);
    f.max_steps = amp_model_optimizer(m)->state.step + 3;
    CHECK(fit(m, arrays(), &f, &info) == AMP_OK && info.end == AMP_FIT_STEPS && e.steps == 3);
    CHECK(fit(m, arrays(), &f, &info) == AMP_OK && info.end == AMP_FIT_STEPS && e.steps == 3 && info.epochs == 0);
    amp_model_destroy(m);
    /* Within a step of micro-batches the end waits for that step. 50 samples are 6 full batches and one of 2: three steps of
       two, and the last batch fills none. */
    d.accumulate = 2;
    m = make(&d);
    memset(&e, 0, sizeof e);
    f = fit_of(1);
    f.on_step = on_step; f.user_data = &e;
    CHECK(fit(m, arrays(), &f, &info) == AMP_OK && e.steps == 6 && info.last.steps == 3);
    f.drop_last = 1;
    CHECK(fit(m, sourced(), &f, &info) == AMP_OK && e.steps == 12 && src.count == 6 * BATCH);
    f.drop_last = 0;
    e.steps = 0; e.at_step = 3;
    CHECK(fit(m, sourced(), &f, &info) == AMP_OK && e.steps == 4 && info.last.steps == 2 && src.count == 4 * BATCH);
    amp_model_destroy(m);
}

/* What grows while it runs is not trained or evaluated with: the order has been made for the samples of the start. */
static amp_data growing[2];
static int grow(amp_model* m, const amp_fit_epoch* epoch, void* user_data) {
    (void)m; (void)epoch; (void)user_data;
    growing[0].count = growing[1].count = SAMPLES;
    return 0;
}
static void test_growing_data(void) {
    amp_model* m = make_level(AMP_O0);
    amp_fit_desc f = fit_of(3);
    amp_fit_info info;
    growing[0] = arrays();
    growing[1] = sourced();
    growing[0].count = growing[1].count = BATCH;
    f.evaluation = &growing[1]; f.on_epoch = grow;
    CHECK(amp_fit(m, &growing[0], &f, &info) == AMP_OK && info.epochs == 3 && info.last.steps == 1);
    CHECK_MSG(src.calls == 3 && src.count == 3 * BATCH && growing[0].count == SAMPLES, "%d calls", src.calls);
    amp_model_destroy(m);
}

/* Lines per epoch; on a terminal a bar besides. */
static void test_print(void) {
    amp_model* m = make_level(AMP_O0);
    amp_data data = arrays();
    amp_fit_desc f = fit_of(2);
    ends e;
    memset(&e, 0, sizeof e);
    f.print = print; f.user_data = &e; f.evaluation = &data;
    CHECK(fit(m, data, &f, NULL) == AMP_OK && e.printed == 2 && e.bars == 0);
    CHECK_MSG(strncmp(e.text, "epoch 2/2  loss ", 16) == 0 && strstr(e.text, "  applied 7  skipped 0  scale 1") && strstr(e.text, " %"),
              "%s", e.text);
    f.terminal = 1;
    CHECK(fit(m, data, &f, NULL) == AMP_OK && e.printed == 2 + 2 * (BATCHES + 1) && e.bars == 2 * (BATCHES + 1));
    CHECK_MSG(e.cells == 2 * BATCHES, "%ld", e.cells);
    amp_model_destroy(m);
}

/* A solved task with a loss that has no right answers: none are printed, and none told. */
static void test_print_without_answers(void) {
    static float targets[SAMPLES * CLASSES];
    int kind;
    for (kind = 0; kind < 3; kind++) {                      /* MSE; BCE, all right; a cross-entropy beside a BCE */
        amp_model_desc d = desc_of(AMP_O0);
        amp_data data = arrays();
        amp_fit_desc f = fit_of(60);
        amp_fit_info info;
        amp_eval_info told;
        amp_model* m = NULL;
        amp_value x;
        ends e;
        int i;
        for (i = 0; i < SAMPLES * CLASSES; i++) targets[i] = labels[i / CLASSES] == i % CLASSES ? 1.0f : 0.0f;
        memset(&e, 0, sizeof e);
        m = new_model(&d);
        x = amp_linear(m, amp_relu(m, amp_linear(m, amp_input(m, 1, SIDE, SIDE), 16)), CLASSES);
        if (kind == 2) amp_softmax_cross_entropy(m, x);
        if (kind > 0) amp_bce_with_logits(m, x);
        else amp_mse(m, x);
        CHECK(amp_model_finalize(m) == AMP_OK);
        data.targets[kind == 2] = targets;
        f.evaluation = &data; f.print = print; f.user_data = &e;
        CHECK_MSG(fit(m, data, &f, &info) == AMP_OK, "%s", heard);
        CHECK(amp_evaluate_data(m, &data, &told) == AMP_OK);
        CHECK(told.predictions == (kind == 0 ? 0 : (kind == 2 ? SAMPLES : 0) + SAMPLES * CLASSES));
        if (kind == 0) {
            CHECK(info.last.accuracy == -1.0 && told.correct == 0);
            CHECK_MSG(strstr(e.text, "  evaluation 0.") && !strchr(e.text, '%') && strstr(e.text, "  applied "), "%s", e.text);
        } else {
            CHECK_MSG(info.last.accuracy == 1.0 && told.correct == told.predictions, "%g", info.last.accuracy);
            CHECK_MSG(strstr(e.text, ", 100.00 %"), "%s", e.text);
        }
        f.evaluation = NULL;
        CHECK(fit(m, data, &f, &info) == AMP_OK && info.last.accuracy == -1.0);
        amp_model_destroy(m);
    }
}

/* NaNs in evaluation data: the first of them is told, once for each time that the data is evaluated. */
static void test_evaluation_nan(void) {
    static float spoilt[SAMPLES * PIXELS];
    amp_model* m = make_level(AMP_O0);
    amp_data data = arrays(), bad = arrays();
    amp_fit_desc f = fit_of(9);
    amp_fit_info info;
    amp_eval_info told;
    int before;
    memcpy(spoilt, pictures, sizeof spoilt);
    put_bits(&spoilt[19 * PIXELS + 5], 0x7fc00000u);
    put_bits(&spoilt[40 * PIXELS + 6], 0x7fc00000u);
    bad.inputs[0] = spoilt;
    before = heard_count;
    CHECK(amp_evaluate_data(m, &bad, &told) == AMP_OK && heard_count == before + 1 && heard_code == AMP_OK);
    CHECK(amp_is_nan(amp_f32(&told.loss)) && told.predictions == SAMPLES && strcmp(told.culprit, "input1") == 0);
    CHECK_MSG(strstr(told.message, "nan: first in the output of 'input1', element 5 of sample 19"), "%s", told.message);
    CHECK(strncmp(heard, "evaluate data: ", 15) == 0 && strcmp(heard + 15, told.message) == 0);
    f.evaluation = &bad; f.patience = 2; f.best_path = "test_fit_best.safetensors";
    before = heard_count;
    CHECK(fit(m, data, &f, &info) == AMP_OK && info.end == AMP_FIT_PATIENCE && info.epochs == 2 && !info.best.best);
    CHECK(heard_count == before + 2 && strncmp(heard, "fit: evaluation: ", 17) == 0);
    CHECK_MSG(strcmp(heard + 17, told.message) == 0, "%s", heard);
    CHECK(remove("test_fit_best.safetensors") != 0);
    CHECK(amp_evaluate_data(m, &data, &told) == AMP_OK && !told.message[0] && !told.culprit[0]);
    amp_model_destroy(m);
}

/* NNabla's updater: an overflow goes on with the next batch. What counts are the steps that were applied. */
static void test_skips(void) {
    amp_model_desc d = desc_of(AMP_O2);
    amp_scaler_desc s;
    amp_fit_desc f = fit_of(40);
    amp_fit_info info;
    amp_model* m;
    memset(&s, 0, sizeof s);
    s.preset = AMP_SCALER_NNABLA;
    s.init_scale = 1099511627776.0f;
    d.scaler = &s;
    m = make(&d);
    f.max_steps = 10;
    CHECK(fit(m, sourced(), &f, &info) == AMP_OK && info.end == AMP_FIT_STEPS && amp_model_optimizer(m)->state.step == 10);
    CHECK(amp_model_scaler(m)->state.skipped > 10 && src.calls == 10 + amp_model_scaler(m)->state.skipped);
    CHECK(info.best.steps > 0 && info.last.steps + info.last.skipped <= BATCHES);
    amp_model_destroy(m);
    d.max_replays = 100;                        /* the same batch again instead */
    m = make(&d);
    CHECK(fit(m, sourced(), &f, &info) == AMP_OK && src.calls == 10 && amp_model_scaler(m)->state.skipped > 10);
    amp_model_destroy(m);
}

/* --- ranks ------------------------------------------------------------------------------------------------ */

static int sums;
static amp_result alone(void* data, amp_dtype t, size_t count, void* stream, void* user_data) {
    (void)data; (void)t; (void)count; (void)stream; (void)user_data;
    sums++;
    return AMP_OK;
}
/* 50 samples for 3 ranks with batches of 8: two steps of 24, and one of 2 that does not reach all ranks. */
static void test_ranks(void) {
    int times[SAMPLES] = { 0 }, rank, i, all = 0;
    for (rank = 0; rank < 3; rank++) {
        amp_model_desc d = desc_of(AMP_O0);
        amp_comm comm;
        amp_fit_desc f = fit_of(1);
        amp_model* m;
        memset(&comm, 0, sizeof comm);
        comm.all_reduce_sum = alone; comm.size = 3; comm.rank = rank;
        d.comm = &comm;
        m = make(&d);
        CHECK_MSG(fit(m, sourced(), &f, NULL) == AMP_OK && src.calls == 2, "%s", heard);
        for (i = 0; i < src.count; i++) times[src.seen[i]]++;
        if (rank == 1) {                        /* a source that fails leaves no other rank waiting; nor does patience */
            amp_data data = sourced();
            src.fails_at = 1;
            sums = 0;
            CHECK(fit(m, arrays(), &f, NULL) == AMP_OK && sums == 1 + 6 + 1);
            sums = 0;
            CHECK(amp_fit(m, &data, &f, NULL) == AMP_ERR_IO && sums == 2 && strstr(heard, "the data's read returned"));
            f.patience = 1;
            CHECK(fit(m, arrays(), &f, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "evaluation data"));
        }
        amp_model_destroy(m);
    }
    for (i = 0; i < SAMPLES; i++) { CHECK(times[i] <= 1); all += times[i]; }
    CHECK(all == 48);
}

/* Another rank, as it shows in the sums of flags: it failed before the told_at-th sum. What this rank told in its last. */
static int told_at;
static float told_last;
static amp_result with_another(void* data, amp_dtype t, size_t count, void* stream, void* user_data) {
    float* flag = (float*)data;
    (void)t; (void)stream; (void)user_data;
    told_last = flag[0];
    if (++sums == told_at && count == 1) flag[0] += 1.0f;
    return AMP_OK;
}
/* What one rank alone finds, before the first step or behind an epoch, ends the fit of all after as many sums. */
static void test_failing_rank(void) {
    static int32_t wrong[SAMPLES];
    amp_model_desc d = desc_of(AMP_O0);
    amp_comm comm;
    amp_data data = arrays(), bad = arrays(), none = arrays();
    amp_fit_desc f = fit_of(3), broken;
    amp_fit_info info;
    amp_model* m;
    int k;
    memset(&comm, 0, sizeof comm);
    comm.all_reduce_sum = with_another; comm.size = 2;
    d.comm = &comm;
    m = make(&d);
    memcpy(wrong, labels, sizeof wrong);
    wrong[SAMPLES - 1] = CLASSES;
    bad.targets[0] = wrong;
    none.count = 0;
    f.evaluation = &data; f.drop_last = 1;
    for (k = 0; k < 3; k++) {               /* a file, the data, an argument: before the first step */
        broken = f;
        if (k == 0) broken.best_path = "there/is/no/such/directory";
        if (k == 2) broken.evaluation = &none;
        told_at = sums = 0;
        CHECK(fit(m, k == 1 ? none : data, &broken, &info) == (k ? AMP_ERR_ARGUMENT : AMP_ERR_IO));
        CHECK_MSG(sums == 1 && told_last == 1.0f && info.epochs == 0, "%d: %d sums", k, sums);
    }
    told_at = 1; sums = 0;
    CHECK(fit(m, data, &f, &info) == AMP_ERR_ARGUMENT && sums == 1 && strstr(heard, "fit: another rank"));
    CHECK(info.epochs == 0 && amp_model_optimizer(m)->state.step == 0);
    f.evaluation = &bad;                    /* a label: behind the first epoch of three steps */
    told_at = sums = 0;
    CHECK_MSG(fit(m, data, &f, &info) == AMP_ERR_ARGUMENT && strstr(heard, "label 3"), "%d sums, %s", sums, heard);
    CHECK_MSG(told_last == 1.0f && sums == 1 + 9 + 1, "%d sums", sums);
    f.evaluation = &data;
    told_at = sums;
    sums = 0;
    CHECK(fit(m, data, &f, &info) == AMP_ERR_ARGUMENT && sums == told_at && strstr(heard, "fit: another rank"));
    f.patience = 2;                         /* another's patience has ended behind the second epoch */
    told_at = 1 + 2 * (9 + 2);
    sums = 0;
    CHECK(fit(m, data, &f, &info) == AMP_OK && info.end == AMP_FIT_PATIENCE && info.epochs == 2 && sums == told_at);
    CHECK(info.last.best && told_last == 0.0f);
    amp_model_destroy(m);
}

/* --- errors ------------------------------------------------------------------------------------------------- */

#define REFUSED(call, code, words) \
    do { amp_result r_; heard[0] = 0; r_ = (call); CHECK_MSG(r_ == (code) && strstr(heard, words), "%d: %s", (int)r_, heard); } while (0)
static void test_errors(void) {
    amp_model* m = make_level(AMP_O0);
    amp_model_desc d = desc_of(AMP_O0);
    amp_data data = arrays(), none = data;
    amp_fit_desc f = fit_of(2);
    amp_fit_info info;
    amp_eval_info told;
    amp_model* raw = NULL;
    long k, before;
    CHECK(amp_fit(NULL, &data, &f, NULL) == AMP_ERR_ARGUMENT && amp_evaluate_data(NULL, &data, &told) == AMP_ERR_ARGUMENT);
    CHECK(amp_evaluate_data(NULL, &data, NULL) == AMP_ERR_ARGUMENT);
    REFUSED(amp_fit(m, NULL, &f, NULL), AMP_ERR_ARGUMENT, "data is NULL");
    REFUSED(amp_evaluate_data(m, &data, NULL), AMP_ERR_ARGUMENT, "info is NULL");
    none.count = 0;
    REFUSED(amp_fit(m, &none, &f, NULL), AMP_ERR_ARGUMENT, "count");
    none = data; none.inputs[0] = NULL;
    REFUSED(amp_fit(m, &none, &f, NULL), AMP_ERR_ARGUMENT, "data.inputs[0] is NULL");
    none = data; none.targets[0] = NULL;
    REFUSED(amp_fit(m, &none, &f, NULL), AMP_ERR_ARGUMENT, "data.targets[0] is NULL");
    none = data; none.input_dtype = (amp_dtype)99;
    REFUSED(amp_fit(m, &none, &f, NULL), AMP_ERR_DTYPE, "input_dtype");
    none = data; none.label_dtype = (amp_dtype)99;
    REFUSED(amp_fit(m, &none, &f, NULL), AMP_ERR_DTYPE, "label_dtype");
    f.epochs = -1;
    REFUSED(amp_fit(m, &data, &f, NULL), AMP_ERR_ARGUMENT, "epochs -1");
    f = fit_of(2); f.first_epoch = 3;
    REFUSED(amp_fit(m, &data, &f, NULL), AMP_ERR_ARGUMENT, "first_epoch 3");
    f = fit_of(2); f.patience = -1;
    REFUSED(amp_fit(m, &data, &f, NULL), AMP_ERR_ARGUMENT, "patience -1");
    CHECK(amp_model_optimizer(m)->state.step == 0);
    /* A source that fails in the second epoch: what was finished is told. */
    f = fit_of(5);
    data = sourced(); src.fails_at = BATCHES + 3;
    REFUSED(amp_fit(m, &data, &f, &info), AMP_ERR_IO, "the data's read returned");
    CHECK(info.epochs == 1 && info.last.epoch == 1 && amp_model_optimizer(m)->state.step == BATCHES + 2);
    data = sourced(); src.fails_at = 2; none = arrays(); f.evaluation = &data;
    REFUSED(amp_fit(m, &none, &f, &info), AMP_ERR_IO, "fit: evaluation: the data's read returned");
    /* A batch of another size than was asked for; 0 is a batch written anew. */
    f = fit_of(1);
    for (k = -1; k <= 1; k++) {
        static const int says[] = { -1, BATCH - 1, BATCH + 1 };
        data = sourced(); src.says = says[k + 1];
        if (k < 0) { CHECK(amp_fit(m, &data, &f, &info) == AMP_OK); continue; }
        REFUSED(amp_fit(m, &data, &f, &info), AMP_ERR_ARGUMENT, k ? "made a batch of 9 samples, not of the 8"
                                                                  : "made a batch of 7 samples, not of the 8");
        CHECK(info.epochs == 0 && src.calls == 2);
        src.calls = 0;
        REFUSED(amp_evaluate_data(m, &data, &told), AMP_ERR_ARGUMENT, "evaluate data: the data's read made");
    }
    /* Memory that runs out, at each of the allocations; none is made in a step. */
    f = fit_of(1);
    data = arrays();
    alloc_fails_on = 1;
    for (k = 1; k <= 3; k++) {
        before = alloc_live;
        fail_at_call(k);
        REFUSED(amp_fit(m, &data, &f, NULL), AMP_ERR_MEMORY, "out of memory");
        fail_at_call(0);
        CHECK(alloc_live == before);
    }
    alloc_fails_on = 0;
    CHECK(amp_fit(m, &data, NULL, NULL) == AMP_OK && alloc_calls == 3);
    amp_model_destroy(m);
    raw = new_model(&d);
    REFUSED(amp_fit(raw, &data, &f, NULL), AMP_ERR_STATE, "not finalized");
    amp_model_destroy(raw);
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
}
static void test_micro_errors(void) {
    amp_model_desc d = desc_of(AMP_O0);
    amp_data data = arrays();
    amp_batch b;
    amp_model* m;
    d.accumulate = 8;                       /* 7 batches do not fill a step */
    m = make(&d);
    REFUSED(amp_fit(m, &data, NULL, NULL), AMP_ERR_ARGUMENT, "50 samples do not fill a step of 8 micro-batches of up to 8 on 1 ranks");
    amp_model_destroy(m);
    d.accumulate = 2;
    m = make(&d);
    memset(&b, 0, sizeof b);
    b.n = BATCH; b.inputs[0] = pictures; b.targets[0] = labels;
    CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
    REFUSED(amp_fit(m, &data, NULL, NULL), AMP_ERR_STATE, "micro-batches");
    amp_model_destroy(m);
}
/* Bytes of a file, at most `size`; 0 if there is none. */
static size_t read_file(const char* path, char* out, size_t size) {
    FILE* in = fopen(path, "rb");
    size_t n = in ? fread(out, 1, size, in) : 0;
    if (in) fclose(in);
    return n;
}
/* The checkpoints of both models are the same: weights, moments, running statistics, scaler, counters, random numbers. */
static int same_checkpoints(amp_model* a, amp_model* b) {
    static char x[65536], y[65536];
    size_t n;
    CHECK_MSG(amp_checkpoint_save(a, "test_fit_a.safetensors") == AMP_OK, "%s", heard);
    CHECK_MSG(amp_checkpoint_save(b, "test_fit_b.safetensors") == AMP_OK, "%s", heard);
    n = read_file("test_fit_a.safetensors", x, sizeof x);
    CHECK(n > 0 && n < sizeof x);
    n = read_file("test_fit_b.safetensors", y, sizeof y) == n ? n : 0;
    remove("test_fit_a.safetensors");
    remove("test_fit_b.safetensors");
    return n > 0 && memcmp(x, y, n) == 0;
}
/* One step of two micro-batches, then data that fails in the second of the next: that step is as if it had not begun. */
static void test_failed_step(void) {
    static int32_t wrong[SAMPLES];
    amp_model_desc d = desc_of(AMP_O2);
    int k;
    d.accumulate = 2;
    for (k = 0; k < 2; k++) {
        amp_model *a = make(&d), *b = make(&d);
        amp_fit_desc f = fit_of(1);
        amp_fit_info info;
        amp_data data = k ? arrays() : sourced();
        src.fails_at = 4;
        memcpy(wrong, labels, sizeof wrong);
        wrong[3 * BATCH] = CLASSES;
        if (k) data.targets[0] = wrong;
        f.in_order = 1;
        CHECK(amp_fit(a, &data, &f, &info) == (k ? AMP_ERR_ARGUMENT : AMP_ERR_IO) && info.epochs == 0);
        f.max_steps = 1;
        CHECK(fit(b, arrays(), &f, NULL) == AMP_OK && amp_model_optimizer(b)->state.step == 1);
        CHECK(same_checkpoints(a, b));
        f.max_steps = 0;
        CHECK_MSG(fit(a, arrays(), &f, NULL) == AMP_OK && fit(b, arrays(), &f, NULL) == AMP_OK, "%s", heard);
        CHECK(amp_model_optimizer(a)->state.step == 4 && same_checkpoints(a, b));
        amp_model_destroy(a); amp_model_destroy(b);
    }
}
/* A dead model ends the run, with the step's sentence. */
static void test_dead(void) {
    amp_model* m = make_level(AMP_O2);
    amp_param* p = amp_model_find_param(m, "linear2.weight");
    amp_data data = arrays();
    amp_fit_desc f = fit_of(9);
    amp_fit_info info;
    int i;
    for (i = 0; i < (int)p->count; i++) p->master[i] = 60000.0f;
    CHECK(amp_model_sync_params(m) == AMP_OK);
    REFUSED(amp_fit(m, &data, &f, &info), AMP_ERR_OVERFLOW, "max_unsound is 20");
    CHECK(info.epochs == 2 && info.last.steps == 0 && info.last.skipped == BATCHES && !info.best.best);
    CHECK(!amp_is_finite(amp_f32(&info.last.loss)));
    amp_model_destroy(m);
}

/* A network that gives each pixel a class, with weights and pixels that do not count: its loss is the formula's
   over the predicted logits, labels of each type give the same bits, and a fit learns the task. */
enum { SEG = 40, SEG_PIXELS = 6 * 5, SEG_CLASSES = 3 };
static double segmentation_loss(const float* logits, const int64_t* truth, int64_t ignored, const float* weights,
                                int64_t* right, int64_t* counted) {
    double sum = 0, used = 0;
    int i, k;
    *right = *counted = 0;
    for (i = 0; i < SEG * SEG_PIXELS; i++) {
        const float* x = logits + i / SEG_PIXELS * SEG_CLASSES * SEG_PIXELS + i % SEG_PIXELS;
        double total = 0, terms = 0;
        int best = 0;
        if (truth[i] == ignored) continue;
        for (k = 0; k < SEG_CLASSES; k++) total += exp((double)x[k * SEG_PIXELS]);
        for (k = 0; k < SEG_CLASSES; k++) {
            const double target = 0.1 / SEG_CLASSES + (truth[i] == k ? 0.9 : 0);
            terms += (double)weights[k] * target * (log(total) - (double)x[k * SEG_PIXELS]);
            if (x[k * SEG_PIXELS] > x[best * SEG_PIXELS]) best = k;
        }
        sum += terms;
        used += (double)weights[truth[i]];
        *right += best == truth[i];
        ++*counted;
    }
    return sum / used;
}
static void test_segmentation(void) {
    static const amp_dtype types[3] = { AMP_I32, AMP_I64, AMP_U8 };
    static float images[SEG * 2 * SEG_PIXELS], logits[SEG * SEG_CLASSES * SEG_PIXELS];
    static int64_t wide[SEG * SEG_PIXELS];
    static int32_t narrow[SEG * SEG_PIXELS];
    static uint8_t octets[SEG * SEG_PIXELS];
    const void* arrays_of[3] = { narrow, wide, octets };
    float weights[SEG_CLASSES] = { 1.0f, 0.5f, 2.0f }, first_loss[2] = { 0, 0 };
    const float kept[SEG_CLASSES] = { 1.0f, 0.5f, 2.0f };
    int kind, i, k;
    for (kind = 0; kind < 4; kind++) {              /* each type ignores 255; int64 also -100 */
        const int32_t marker = kind == 3 ? -100 : 255;
        int32_t ignored = marker;
        amp_model_desc d = desc_of(AMP_O0);
        amp_loss_desc l;
        amp_data data;
        amp_batch b;
        amp_fit_desc f = fit_of(60);
        amp_eval_info told;
        amp_model* m = NULL;
        amp_value x;
        int64_t right, counted;
        double want;
        memset(&l, 0, sizeof l); memset(&data, 0, sizeof data); memset(&b, 0, sizeof b);
        test_seed = 4;
        for (i = 0; i < SEG * SEG_PIXELS; i++) {
            float* p = images + i / SEG_PIXELS * 2 * SEG_PIXELS + i % SEG_PIXELS;
            p[0] = test_uniform(); p[SEG_PIXELS] = test_uniform();
            wide[i] = i % 7 == 3 ? marker : p[0] > 0.2f ? 2 : p[SEG_PIXELS] > 0.0f;
            narrow[i] = (int32_t)wide[i]; octets[i] = (uint8_t)wide[i];
        }
        d.batch = SEG; d.optimizer.kind = AMP_ADAM; d.optimizer.lr = 0.03f;
        m = new_model(&d);
        l.smoothing = 0.1f; l.ignored = &ignored; l.class_weights = weights;
        x = amp_relu(m, amp_conv2d(m, amp_input(m, 2, 6, 5), 12, 3, 1, 1));
        x = amp_conv2d(m, x, SEG_CLASSES, 1, 1, 0);
        amp_softmax_cross_entropy_with(m, x, &l);
        ignored = 1; weights[0] = 9.0f;             /* what the desc pointed at was copied */
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", heard);
        weights[0] = 1.0f;
        data.count = b.n = SEG; data.inputs[0] = b.inputs[0] = images;
        data.targets[0] = b.targets[0] = arrays_of[kind % 3 + (kind == 3)];
        data.label_dtype = b.label_dtype = types[kind % 3 + (kind == 3)];
        for (k = 0; k < 2; k++) {                   /* before and after a fit */
            CHECK(amp_predict(m, &b, x, logits) == AMP_OK);
            want = segmentation_loss(logits, wide, marker, kept, &right, &counted);
            CHECK_MSG(amp_evaluate(m, &b, &told) == AMP_OK, "%s", heard);
            CHECK_MSG(fabs((double)told.loss - want) < 2e-6 * want, "%g, not %g", (double)told.loss, want);
            CHECK(told.correct == right && told.predictions == counted && counted < SEG * SEG_PIXELS);
            if (kind == 0) first_loss[k] = told.loss;
            CHECK(told.loss == first_loss[k]);      /* each type of labels: the same bits */
            if (k == 0) CHECK_MSG(fit(m, data, &f, NULL) == AMP_OK, "%s", heard);
        }
        CHECK_MSG((double)told.correct > 0.9 * (double)told.predictions, "%d of %d", (int)told.correct, (int)told.predictions);
        wide[SEG_PIXELS + 4] = narrow[SEG_PIXELS + 4] = octets[SEG_PIXELS + 4] = 3;
        REFUSED(amp_evaluate(m, &b, &told), AMP_ERR_ARGUMENT, "label 3 of sample 1 is outside 0..2");
        amp_model_destroy(m);
    }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    test_seed = 9;
    make_pictures();
    TEST(test_order);
    TEST(test_order_by_hand);
    TEST(test_as_by_hand);
    TEST(test_sources);
    TEST(test_resume);
    TEST(test_patience);
    TEST(test_best_path);
    TEST(test_ends);
    TEST(test_growing_data);
    TEST(test_print);
    TEST(test_print_without_answers);
    TEST(test_segmentation);
    TEST(test_evaluation_nan);
    TEST(test_skips);
    TEST(test_ranks);
    TEST(test_failing_rank);
    TEST(test_errors);
    TEST(test_micro_errors);
    TEST(test_failed_step);
    TEST(test_dead);
    TEST_END();
}
