/* 05_scalers.c - lesson 5: who controls the scale?

   The best loss scale depends on the network, and changes while the network learns. So a scaler looks for it. After a
   step with an infinite gradient it skips the update of the weights and halves the scale. After many clean steps in a
   row it doubles the scale, to try whether more fits. Every framework does this, with other numbers and other corners.

   The scalers of amp.h follow the frameworks' rules exactly. Here each of them controls 24,000 steps with gradients of
   which the largest is 2^-9: in half they fit up to a scale of 2^24. At step 5,500 one gradient is infinite, as after
   a bad batch. Two more runs show what users have met: gradients that never overflow, and gradients that always do.

   Run:  make lesson N=5                                                                                            */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include <stdlib.h>

static const float LARGEST = 0.001953125f;       /* try 0.00001 to 1000 */
enum { STEPS = 24000, BAD_STEP = 5500, LONG = 300000, BROKEN = 2000, PRESETS = AMP_SCALER_PRESET_COUNT };

typedef struct run {
    float log2_scale[STEPS], skipped_at[STEPS];     /* the scale before each step; the numbers of the skipped steps */
    int skipped, skipped_first, steps, stopped;     /* first: before the first clean step. stopped: by an error */
    float end;                                      /* log2 of the scale at the end */
} run;

/* One step of a training: scale the loss, go backward, check, update the weights (not here), update the scale. */
static int train_step(amp_scaler* s, float largest, int bad, int* skipped) {
    amp_half stored[2];
    amp_tensor gradients = { stored, AMP_F16, 2, "gradients" };
    float scale = amp_scaler_scale_loss(s, 1.0f);
    stored[0] = amp_half_from_float(largest * scale);
    stored[1] = amp_half_from_float(bad ? INFINITY : 0.0f);
    amp_scaler_check(s, &gradients, 1, NULL);
    *skipped = !amp_scaler_may_step(s);
    return amp_scaler_update(s);
}

/* Follows one rule until the steps end or the rule gives up. */
static void follow(amp_scaler_preset preset, float largest, int bad_step, int steps, run* r) {
    amp_scaler_desc desc = { .preset = preset };
    amp_scaler s;
    if (amp_scaler_init(&s, &desc) != AMP_OK) {
        desc.init_scale = 65536.0f;                 /* some have no start of their own: those get PyTorch's */
        if (amp_scaler_init(&s, &desc) != AMP_OK) exit(1);
    }
    memset(r, 0, sizeof *r);
    for (; r->steps < steps && !r->stopped; r->steps++) {
        int at = r->steps, skipped;
        if (at < STEPS) r->log2_scale[at] = log2f(s.state.scale);
        r->stopped = train_step(&s, largest, at == bad_step, &skipped) != AMP_OK;
        if (!skipped) continue;
        if (r->skipped == at) r->skipped_first++;
        if (r->skipped < STEPS) r->skipped_at[r->skipped] = (float)at;
        r->skipped++;
    }
    r->end = log2f(s.state.scale);
}

static int draw(const char* path, const run* runs, char* error) {
    enum { LINES = 3, ROWS = 7 };
    static const struct { amp_scaler_preset preset; chart_color color; const char* dash; } shown[ROWS] = {
        { AMP_SCALER_PYTORCH, CHART_FP32, NULL }, { AMP_SCALER_DEEPSPEED, CHART_OTHER, NULL },
        { AMP_SCALER_NNABLA, CHART_FP32, "7 5" }, { AMP_SCALER_PADDLE, CHART_FP32, NULL },
        { AMP_SCALER_KERAS, CHART_FP32, NULL }, { AMP_SCALER_MINDSPORE_MANAGER, CHART_FP32, NULL },
        { AMP_SCALER_MEGATRON, CHART_FP32, NULL } };
    static const chart_wall walls[1] = { { BAD_STEP, "an infinity" } };
    static float row[ROWS][STEPS];
    const char* names[ROWS];
    chart_series scale[LINES], ticks[ROWS];
    chart_panel panels[2] = {
        { "All climb towards the largest that fits; how\nfast, and what one infinity costs, differs", "step",
          "loss scale", .y_prefix = "2^", .integer_y = 1, .steps = 1, .series = scale, .series_count = LINES,
          .walls = walls, .wall_count = 1 },
        { "Who tries a larger scale more often\nskips more steps (strokes)", "step", .y_names = names, .series = ticks,
          .series_count = ROWS, .walls = walls, .wall_count = 1 } };
    for (int i = 0; i < ROWS; i++) {
        const run* r = &runs[shown[i].preset];
        chart_series line = { .name = amp_scaler_preset_name(shown[i].preset), .color = shown[i].color, .width = 2.6,
                              .dash = shown[i].dash, .opacity = 1, .y = r->log2_scale, .count = r->steps };
        chart_series tick = { .color = CHART_FAULT, .width = 1.5, .opacity = 1, .x = r->skipped_at, .y = row[i],
                              .count = r->skipped, .style = CHART_TICKS };
        for (int k = 0; k < STEPS; k++) row[i][k] = (float)(ROWS - 1 - i);
        if (i < LINES) scale[i] = line;
        ticks[i] = tick;
        names[ROWS - 1 - i] = line.name;
    }
    return chart_write(path, "Who controls the scale?", panels, 2, error);
}

int main(int argc, char** argv) {
    static run runs[PRESETS], never[PRESETS], always[PRESETS];
    char error[CHART_ERROR] = "one argument at most, the path of the picture";
    const char* path = argc > 1 ? argv[1] : "05_scalers.svg";
    if (argc > 2 || !chart_try(path, error)) return fprintf(stderr, "05_scalers: %s\n", error), 1;
    printf("                     | skipped  | log2 of the scale at step| at the end, if\n"
           "rule                 |first all |   0  %d  %d %d | none or all overflow\n", BAD_STEP,
           BAD_STEP + 1, STEPS);
    for (int i = 0; i < PRESETS; i++) {
        amp_scaler_preset p = (amp_scaler_preset)i;
        follow(p, LARGEST, BAD_STEP, STEPS, &runs[i]);
        follow(p, 0.0f, -1, LONG, &never[i]);
        follow(p, INFINITY, -1, BROKEN, &always[i]);
        chart_progress("each rule in three runs", i + 1, PRESETS);
        printf("%-21s| %3d %4d | %3g %5g %5g %5g | %4g %5g", amp_scaler_preset_name(p),
               runs[i].skipped_first, runs[i].skipped, (double)runs[i].log2_scale[0],
               (double)runs[i].log2_scale[BAD_STEP], (double)runs[i].log2_scale[BAD_STEP + 1], (double)runs[i].end,
               (double)never[i].end, (double)always[i].end);
        if (always[i].stopped) printf(" error %d", always[i].steps);
        printf("\n");
    }
    const run *torch = always + AMP_SCALER_PYTORCH, *manager = always + AMP_SCALER_MINDSPORE_MANAGER;
    printf("\ncheck: 144 overflows take PyTorch's scale from 2^16 to 2^-128, 1 over it is no\n"
           "       float (run): %d; MindSpore's manager gives up at overflow 1001: %d\n",
           torch->steps, manager->steps);
    if (!draw(path, runs, error)) return fprintf(stderr, "05_scalers: %s\n", error), 1;
    const float *torch_scale = runs[AMP_SCALER_PYTORCH].log2_scale, *deep = runs[AMP_SCALER_DEEPSPEED].log2_scale;
    if (torch->steps == 144 && manager->steps == 1001 && torch_scale[BAD_STEP + 1] == torch_scale[BAD_STEP] - 1.0f
        && deep[BAD_STEP + 1] == deep[BAD_STEP] && never[AMP_SCALER_APEX].end == 24.0f) return 0;
    return fprintf(stderr, "05_scalers: a rule moves otherwise than in the unchanged lesson\n"), 1;
}
