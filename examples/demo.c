/* demo.c - one network, three precision levels, one picture. Needs nothing but this repository.

   Trains LeNet-5 at O0 (all FP32), O1 (matrix products in half) and O2 (all in half but norms and losses), each
   time from the same weights and with the same batches. Prints a table and draws the loss, the loss scale, and what
   each level costs in memory and time.

     make demo                     digits drawn by the program, some 15 seconds; picture in build/demo.svg
     make demo DATA=directory      MNIST files in that directory (train-images-idx3-ubyte[.gz] and the other three)
     build/demo [DATA_DIR] [--svg PATH] [--steps N]

   By hand:  cc -O2 -o demo examples/demo.c -lm && ./demo --svg demo.svg                                        */
#if !defined(_WIN32) && !defined(_POSIX_C_SOURCE)
  #define _POSIX_C_SOURCE 200809L       /* clock_gettime */
#endif
#define AMP_IMPLEMENTATION
#if defined(DEMO_CUDA)                  /* by train_cuda.cu */
  #include "../amp_cuda.cuh"
#else
  #include "../amp.h"
  #define demo_backend() amp_cpu_backend()
  #define demo_processor() amp_isa_name(amp_cpu_isa())
#endif
#include "chart.h"
#include "data.h"
#include "run.h"

enum { BATCH = 64, SIDE = 32, CLASSES = 10, STEPS = 400, MAX_STEPS = 100000, SEED = 1 };
enum { OWN_TRAIN = 12000, OWN_TEST = 4000, MAX_TEST = 5000 };

typedef struct options { const char* data; const char* svg; int steps; } options;

/* What one training run leaves behind. */
typedef struct run {
    int    updates;                     /* wanted: a skipped step is repeated with the same batch */
    int    tries, max_tries;            /* steps so far, skipped ones included */
    amp_level level;
    float* loss;                        /* [updates] smoothed, for the picture */
    float* scale;                       /* [max_tries] log2 of the loss scale that the step used */
    unsigned char* skipped_at;          /* [max_tries] 1 = the step was skipped */
    double accuracy, final_loss, seconds, final_scale;
    int    applied, skipped;
    size_t activation_bytes;
    uint32_t fingerprint;               /* checksum of the weights' bits */
} run;

/* ---------------------------------------------------------------------------------------- */
/* The network.                                                                              */
/* ---------------------------------------------------------------------------------------- */

static amp_value convolution(amp_model* m, amp_value x, int out_channels) {
    return amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, out_channels, 5, 1, 0)), 2);
}

static amp_value dense(amp_model* m, amp_value x, int out) {
    return amp_linear(m, x, out);
}

static amp_result build(amp_model** m, amp_level level, int steps) {
    /* A start too high and a short interval, so that 400 steps show what real trainings show in 40,000. */
    amp_scaler_desc dynamic = { .init_scale = 16777216.0f, .growth_interval = 50 };
    amp_model_desc desc = {
        .batch = BATCH,
        .precision = { .level = level },
        .scaler = level == AMP_O0 ? NULL : &dynamic,
        .optimizer = { .kind = AMP_SGD, .lr = 0.05f, .momentum = 0.9f,
                       .schedule = { .kind = AMP_SCHEDULE_LINEAR, .total_steps = steps } },
        .seed = SEED,
        .backend = demo_backend()
    };
    amp_value x;
    amp_result r = amp_model_create(m, &desc);
    if (r != AMP_OK) return r;
    x = amp_input(*m, 1, SIDE, SIDE);
    x = convolution(*m, x, 6);                                       /* [N, 6,14,14] */
    x = convolution(*m, x, 16);                                      /* [N,16, 5, 5] */
    x = amp_relu(*m, dense(*m, x, 120));
    x = amp_relu(*m, dense(*m, x, 84));
    x = dense(*m, x, CLASSES);
    amp_softmax_cross_entropy(*m, x);
    return amp_model_finalize(*m);
}

/* ---------------------------------------------------------------------------------------- */
/* One run.                                                                                  */
/* ---------------------------------------------------------------------------------------- */

/* A bar on a terminal, and a line in the end; elsewhere a line now and then. */
static void progress(const run* r) {
    char label[64], scale[24] = "";
    if (r->level != AMP_O0) snprintf(scale, sizeof scale, "  scale 2^%g", log2(r->final_scale));
    snprintf(label, sizeof label, "%s %d/%d  loss %.3f%s", amp_level_name(r->level), r->applied, r->updates,
             r->final_loss, scale);
    chart_progress(label, r->applied, r->updates);
    if (r->applied < r->updates && (chart_is_terminal() || r->applied % 100 != 0)) return;
    printf("  %s\n", label);
    fflush(stdout);
}

static void record(run* r, const amp_step_info* info) {
    int at = r->tries++, i = r->applied;
    r->scale[at] = (float)log2((double)info->scale_before);
    r->skipped_at[at] = info->outcome != AMP_STEP_APPLIED;
    if (info->outcome == AMP_STEP_APPLIED) {
        /* Mean over about 20 updates, exponentially weighted; the first ones are plain means. */
        float weight = i < 20 ? 1.0f / (float)(i + 1) : 0.05f, before = i > 0 ? r->loss[i - 1] : 0.0f;
        r->loss[i] = before + weight * (info->loss - before);
        r->final_loss = (double)r->loss[i];
    }
    r->applied = (int)info->step;
    r->skipped = (int)info->skipped;
    r->final_scale = (double)info->scale_after;
}

/* Every level makes the same number of updates with the same batches in the same order. */
static amp_result train(amp_model* m, run* r, const data_set* d, const int* order, float* x, int32_t* labels) {
    double start = run_seconds();
    while (r->applied < r->updates && r->tries < r->max_tries) {
        amp_batch batch = { .n = BATCH, .inputs = { x }, .targets = { labels } };
        amp_step_info info;
        amp_result result;
        data_batch(d, order, (int)((int64_t)r->applied * BATCH % d->count), BATCH, SIDE, x, labels);
        result = amp_train_step(m, &batch, &info);
        if (result != AMP_OK) return result;
        record(r, &info);
        if (info.outcome == AMP_STEP_APPLIED) progress(r);
    }
    r->seconds = run_seconds() - start;
    return AMP_OK;
}

static amp_result evaluate(amp_model* m, run* r, const data_set* d, float* x, int32_t* labels) {
    int total = d->count < MAX_TEST ? d->count : MAX_TEST, first;
    int64_t correct = 0;
    for (first = 0; first < total; first += BATCH) {
        int n = total - first < BATCH ? total - first : BATCH;
        amp_batch batch = { .n = n, .inputs = { x }, .targets = { labels } };
        amp_eval_info info;
        amp_result result;
        data_batch(d, NULL, first, n, SIDE, x, labels);
        result = amp_evaluate(m, &batch, &info);
        if (result != AMP_OK) return result;
        correct += info.correct;
    }
    r->accuracy = 100.0 * (double)correct / total;
    return AMP_OK;
}

static int run_level(run* r, const data_set* training, const data_set* test, const int* order, float* x,
                     int32_t* labels) {
    amp_model* m = NULL;
    amp_memory memory;
    amp_result result = build(&m, r->level, r->updates);
    if (result == AMP_OK) result = amp_model_memory(m, &memory);
    if (result == AMP_OK) result = train(m, r, training, order, x, labels);
    if (result == AMP_OK) result = evaluate(m, r, test, x, labels);
    if (result == AMP_OK) {
        r->activation_bytes = memory.activation_bytes;
        r->fingerprint = run_hash(m);
    } else {
        const char* sentence = m ? amp_model_error(m) : "";
        if (!*sentence) sentence = amp_result_string(result);
        fprintf(stderr, "demo: %s: %s\n", amp_level_name(r->level), sentence);
    }
    amp_model_destroy(m);
    return result == AMP_OK;
}

/* ---------------------------------------------------------------------------------------- */
/* The result: a table, a picture, a sentence.                                               */
/* ---------------------------------------------------------------------------------------- */

static void print_table(const run* runs, int count) {
    int i;
    printf("\n  level | accuracy | final loss | applied / skipped | final scale | activations |   time | weights\n"
           "  ------+----------+------------+-------------------+-------------+-------------+--------+---------\n");
    for (i = 0; i < count; i++) {
        const run* r = &runs[i];
        char scale[24] = "none";                        /* FP32 needs no loss scale */
        if (r->level != AMP_O0) snprintf(scale, sizeof scale, "%.0f", r->final_scale);
        printf("  %-5s | %6.2f %% | %10.4f | %7d / %-7d | %11s | %7.0f KiB | %4.1f s | %08lx\n",
               amp_level_name(r->level), r->accuracy, r->final_loss, r->applied, r->skipped, scale,
               (double)r->activation_bytes / 1024.0, r->seconds, (unsigned long)r->fingerprint);
    }
    printf("\n");
}

/* Less memory for activations at O2 than in FP32, in percent. */
static double saved_percent(const run* runs) {
    return 100.0 - 100.0 * (double)runs[2].activation_bytes / (double)runs[0].activation_bytes;
}

static int draw(const run* runs, const char* path, char* error) {
    static const char* const levels[3] = { "O0", "O1", "O2" };
    static char cost[80], seconds[3][16];
    float memory[3];
    chart_note notes[3];
    chart_series loss[3] = {
        { .name = "FP32 (O0)", .color = CHART_OTHER, .width = 6.0, .opacity = 1.0 },
        { .name = "O1", .color = CHART_FP32, .width = 3.4, .opacity = 0.9 },
        { .name = "O2", .color = CHART_FP16, .dash = "6 5", .width = 2.0, .opacity = 1.0 }
    };
    chart_series scale[2], bars = { .color = CHART_FP16, .width = 44, .opacity = 1.0, .y = memory, .count = 3,
                                    .style = CHART_BARS };
    chart_panel panels[3] = {
        { .title = "Half (O2) learns as FP32 does;\nO1 is the same run here", .x_label = "updates",
          .y_label = "loss, mean of about 20 batches", .log_y = 1, .series = loss, .series_count = 3 },
        { .title = "The loss scale finds its place;\na step that overflows is skipped",
          .x_label = "steps, skipped ones included", .y_label = "loss scale", .integer_y = 1, .y_prefix = "2^", .steps = 1,
          .mark_name = "step skipped: overflow", .series = scale, .series_count = 2 },
        { .title = cost, .x_label = "level", .y_label = "KiB of activations", .x_names = levels, .series = &bars,
          .series_count = 1, .notes = notes, .note_count = 3 }
    };
    int i;
    snprintf(cost, sizeof cost, "Activations take %.0f %% less memory at O2\n(above each bar: seconds of training)",
             saved_percent(runs));
    for (i = 0; i < 3; i++) {
        loss[i].y = runs[i].loss;
        loss[i].count = runs[i].applied;
        memory[i] = (float)runs[i].activation_bytes / 1024.0f;
        snprintf(seconds[i], sizeof seconds[i], "%.1f s", runs[i].seconds);
        notes[i].x = i;
        notes[i].y = (double)memory[i] + 0.03 * (double)runs[0].activation_bytes / 1024.0;
        notes[i].text = seconds[i];
        notes[i].anchor = "middle";
    }
    for (i = 0; i < 2; i++) {
        scale[i] = loss[i + 1];
        scale[i].y = runs[i + 1].scale;
        scale[i].count = runs[i + 1].tries;
        scale[i].marks = runs[i + 1].skipped_at;
    }
    return chart_write(path, "LeNet-5 at three precision levels", panels, 3, error);
}

static void print_verdict(const run* runs) {
    const run *fp32 = &runs[0], *worst = runs[1].accuracy < runs[2].accuracy ? &runs[1] : &runs[2];
    double lost = fp32->accuracy - worst->accuracy;
    if (runs[1].fingerprint == runs[2].fingerprint)
        printf("O1 and O2 have the same weights, bit for bit: they differ in norms, and this network has none.\n");
    if (runs[1].applied < runs[1].updates || runs[2].applied < runs[2].updates)
        printf("Verdict: training did not get through, too many steps were skipped.\n");
    else if (fp32->accuracy < 50.0)
        printf("Verdict: none, FP32 itself has learnt too little for one (%.2f %%).\n", fp32->accuracy);
    else if (lost > 0.3)
        printf("Verdict: accuracy was lost: %s is %.2f points below FP32 (%.2f %% against %.2f %%).\n",
               amp_level_name(worst->level), lost, worst->accuracy, fp32->accuracy);
    else
        printf("Verdict: as good as FP32 to within 0.3 points (%.2f %% at %s, %.2f %% at O0), with %.0f %% less memory "
               "for activations.\n", worst->accuracy, amp_level_name(worst->level), fp32->accuracy, saved_percent(runs));
}

/* ---------------------------------------------------------------------------------------- */
/* Options, memory, order of events.                                                         */
/* ---------------------------------------------------------------------------------------- */

static const char usage[] = "usage: demo [DATA_DIR] [--svg PATH] [--steps N]";

/* 1, or 0 after a sentence. */
static int read_options(options* o, int argc, char** argv) {
    int i;
    for (i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--svg") == 0 && i + 1 < argc && argv[i + 1][0]) o->svg = argv[++i];
        else if (strcmp(argv[i], "--steps") == 0 && i + 1 < argc) {
            char* end;
            long n = strtol(argv[++i], &end, 10);
            if (*end || n < 1 || n > MAX_STEPS) {
                fprintf(stderr, "demo: --steps %s: a number from 1 to %d expected\n", argv[i], MAX_STEPS);
                return 0;
            }
            o->steps = (int)n;
        } else if (argv[i][0] != '-' && argv[i][0] && !o->data) o->data = argv[i];
        else {
            fprintf(stderr, "demo: '%s' is not understood; %s\n", argv[i], usage);
            return 0;
        }
    }
    return 1;
}

static int get_data(const char* directory, data_set* training, data_set* test, char* error) {
    if (directory) return data_load_both(training, test, directory, error);
    return data_digits(training, OWN_TRAIN, 1, error) && data_digits(test, OWN_TEST, 2, error);
}

/* All levels, then the results. Returns 1 on success. */
static int compare(run* runs, const options* o, const data_set* training, const data_set* test, int* order,
                   float* x, int32_t* labels) {
    char error[CHART_ERROR];
    int i;
    data_shuffle(order, training->count, SEED);
    printf("The same network three times, from the same weights: all in FP32 (O0), products in half (O1), all but norms "
           "and losses in half (O2).\nLeNet-5, %d updates with %d digits each (%s; %d to train, %d to test), on %s\n",
           o->steps, BATCH, o->data ? o->data : "drawn by this program", training->count,
           test->count < MAX_TEST ? test->count : MAX_TEST, demo_processor());
    for (i = 0; i < 3; i++)
        if (!run_level(&runs[i], training, test, order, x, labels)) return 0;
    print_table(runs, 3);
    if (!draw(runs, o->svg, error)) {
        fprintf(stderr, "demo: %s\n", error);
        return 0;
    }
    printf("Picture: %s\n", o->svg);
    print_verdict(runs);
    return 1;
}

int main(int argc, char** argv) {
    static const amp_level levels[3] = { AMP_O0, AMP_O1, AMP_O2 };
    options o = { NULL, "build/demo.svg", STEPS };
    data_set training = {0}, test = {0};
    char error[DATA_ERROR];
    run runs[3] = {{0}};
    float *curves, *x;
    int32_t* labels;
    unsigned char* marks;
    int *order, tries, i, ok = 0;
    if (!read_options(&o, argc, argv)) return 2;
    if (!chart_try(o.svg, error) || !get_data(o.data, &training, &test, error)) {
        fprintf(stderr, "demo: %s\n", error);
        data_free(&training);
        return 1;
    }
    tries = o.steps + o.steps / 2 + 50;                 /* room for more skipped steps than there should be */
    curves = (float*)malloc(6 * sizeof(float) * (size_t)tries);
    marks = (unsigned char*)malloc(3 * (size_t)tries);
    x = (float*)malloc(sizeof(float) * BATCH * SIDE * SIDE);
    labels = (int32_t*)malloc(sizeof(int32_t) * BATCH);
    order = (int*)malloc(sizeof(int) * (size_t)training.count);
    if (curves && marks && x && labels && order) {
        for (i = 0; i < 3; i++) {
            runs[i].level = levels[i];
            runs[i].updates = o.steps;
            runs[i].max_tries = tries;
            runs[i].loss = curves + 2 * i * tries;
            runs[i].scale = curves + (2 * i + 1) * tries;
            runs[i].skipped_at = marks + i * tries;
        }
        ok = compare(runs, &o, &training, &test, order, x, labels);
    } else fprintf(stderr, "demo: there is not enough memory\n");
    free(curves); free(marks); free(x); free(labels); free(order);
    data_free(&training);
    data_free(&test);
    return ok ? 0 : 1;
}
