/* pictures.c - the pictures that are no lesson's: drawings for the book, and the one of README.   Run:  make lessons

   pictures FOLDER RESULTS: writes bits.svg, step.svg, network.svg, blocks.svg, tiles.svg and front.svg to the folder.
   What they show is computed here (formats, memory, shapes) or read from a file of results of `make bench` (times). */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"

enum { WIDE = 960 };                    /* pixels of a drawing */
static const char* folder;
static char error[CHART_ERROR];

/* ---- drawings: boxes, arrows, texts ------------------------------------------------------------------------------ */

static FILE* drawing(const char* name, const char* title, int height, char* path) {
    snprintf(path, 300, "%.250s/%s.svg", folder, name);
    FILE* out = chart_create(path, error);
    if (!out) return NULL;
    chart_open(out, WIDE, height, title);
    fprintf(out, "<svg class=\"ink wide\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\">\n",
            WIDE, height, WIDE, height);
    chart_text(out, 14, 22, "start", " font-size=\"16\" font-weight=\"600\"", title);
    return out;
}

static int finished(FILE* out, const char* path) {
    fputs("</svg>\n</svg>\n", out);
    return chart_finish(out, path, error);
}

static void filled(FILE* out, double x, double y, double width, double height, chart_color color,
                   double opacity) {
    chart_fill(out, color, opacity);
    chart_box(out, x, y, width, height);
    fputs("\"/>\n", out);
}

/* A frame with one or two lines in its middle. */
static void box(FILE* out, double x, double y, double width, double height, chart_color color,
                const char* first, const char* second) {
    filled(out, x, y, width, height, color, 0.12);
    fprintf(out, "<path class=\"s%d\" stroke-width=\"2\" d=\"", (int)color);
    chart_box(out, x, y, width, height);
    fputs("\"/>\n", out);
    chart_text(out, x + width / 2, y + height / 2 + (second ? -4 : 5), "middle",
               " font-weight=\"600\"", first);
    if (second)
        chart_text(out, x + width / 2, y + height / 2 + 15, "middle", " font-size=\"12\"", second);
}

/* From one point to another, level or upright, with a head. */
static void arrow(FILE* out, double x, double y, double to_x, double to_y) {
    double dx = to_x > x ? 1 : to_x < x ? -1 : 0, dy = to_y > y ? 1 : to_y < y ? -1 : 0;
    fprintf(out,
            "<path fill=\"none\" stroke-width=\"1.5\" d=\"M%.1f %.1fL%.1f %.1fm%.1f %.1fL%.1f "
            "%.1fL%.1f %.1f\"/>\n",
            x, y, to_x, to_y, -8 * dx - 4 * dy, -8 * dy - 4 * dx, to_x, to_y,
            to_x - 8 * dx + 4 * dy, to_y - 8 * dy + 4 * dx);
}

/* ---- the formats' bits ------------------------------------------------------------------------------------------- */

static int draw_bits(void) {
    static const struct {
        const char* name;
        int exponent, fraction;
        chart_color color;
        const char* range;
    } formats[5] = { { "FP32", 8, 23, CHART_FP32, "" },
                     { "BF16", 8, 7, CHART_BF16, "the range of FP32, 2 to 3 digits" },
                     { "FP16", 5, 10, CHART_FP16, "2^-24 to 65504, 3 to 4 digits" },
                     { "E5M2", 5, 2, CHART_E5M2, "2^-16 to 57344, 1 digit" },
                     { "E4M3", 4, 3, CHART_E4M3, "2^-9 to 448, 1 to 2 digits" } };
    char path[300], text[48];
    FILE* out = drawing(
        "bits", "Sign, exponent, fraction: exponent bits buy range, fraction bits buy digits", 308,
        path);
    if (!out) return 0;
    for (int i = 0; i < 5; i++) {
        const int bits = 1 + formats[i].exponent + formats[i].fraction;
        const double y = 44 + 48 * i, cell = 26;
        chart_text(out, 60, y + 22, "end", " font-weight=\"600\"", formats[i].name);
        for (int b = 0; b < bits; b++) {
            const double opacity = b == 0 ? 1.0 : b <= formats[i].exponent ? 0.6 : 0.2;
            filled(out, 74 + cell * b, y, cell - 2, 32, formats[i].color, opacity);
        }
        snprintf(text, sizeof text, "1 + %d + %d bits", formats[i].exponent, formats[i].fraction);
        if (bits == 32) continue;
        chart_text(out, 84 + cell * bits, y + 14, "start", " font-weight=\"600\"", text);
        chart_text(out, 84 + cell * bits, y + 31, "start", "", formats[i].range);
    }
    chart_text(
        out, 74, 300, "start", "",
        "full: the sign; medium: the exponent; light: the fraction. FP32 has 1 + 8 + 23 bits.");
    return finished(out, path);
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static int draw_step(void) {
    char path[300];
    FILE* out = drawing(
        "step", "A step in mixed precision: FP32 weights move, 16-bit copies compute", 300, path);
    if (!out) return 0;
    const double w = 156, h = 62, x[5] = { 14, 206, 398, 590, 782 }, top = 50, low = 176;
    box(out, x[0], top, w, h, CHART_FP32, "master weights", "FP32");
    box(out, x[1], top, w, h, CHART_FP16, "low weights", "rounded to 16 bits");
    box(out, x[2], top, w, h, CHART_FP16, "forward pass", "sums in FP32");
    box(out, x[3], top, w, h, CHART_FP32, "loss * scale", "FP32");
    box(out, x[4], top, w, h, CHART_FP16, "backward pass", "gradients * scale");
    for (int i = 0; i < 4; i++) arrow(out, x[i] + w, top + h / 2, x[i + 1], top + h / 2);
    arrow(out, x[4] + w / 2, top + h, x[4] + w / 2, low);
    box(out, x[4], low, w, h, CHART_FP32, "inf or NaN?", "in any gradient");
    box(out, x[2], low, w, h, CHART_FP32, "gradients / scale", "FP32; norms, clipping");
    box(out, x[0], low, w, h, CHART_FP32, "update", "SGD, Adam, ...: FP32");
    arrow(out, x[4], low + h / 2, x[2] + w, low + h / 2);
    chart_text(out, (x[4] + x[2] + w) / 2, low + h / 2 - 8, "middle", "", "no");
    arrow(out, x[2], low + h / 2, x[0] + w, low + h / 2);
    arrow(out, x[0] + w / 2, low, x[0] + w / 2, top + h);
    fprintf(out,
            "<path class=\"s%d\" stroke-width=\"2\" stroke-dasharray=\"5 4\" d=\"M%.1f "
            "%.1fv24h-160\"/>\n",
            CHART_FAULT, x[4] + w / 2, low + h);
    chart_text(out, x[4] + w / 2 - 168, low + h + 29, "end", "",
               "yes: the step is skipped, the scale is halved");
    return finished(out, path);
}

/* ---- the network of lesson 3, with its shapes, as a model says them --------------------------------------------- */

static amp_model* lenet(amp_level level) {
    amp_model* m;
    amp_model_desc desc = { .batch = 64,
                            .precision = { .level = level },
                            .optimizer = { .kind = AMP_ADAM } };
    if (amp_model_create(&m, &desc) != AMP_OK) return NULL;
    amp_value x = amp_input(m, 1, 28, 28);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 6, 5, 1, 0)), 2);
    x = amp_max_pool2d(m, amp_relu(m, amp_conv2d(m, x, 16, 5, 1, 0)), 2);
    amp_softmax_cross_entropy(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 100)), 10));
    return amp_model_finalize(m) == AMP_OK ? m : NULL;
}

static int draw_network(void) {
    char path[300], shape[40], weights[40];
    amp_model* m = lenet(AMP_O0);
    FILE* out =
        m ? drawing("network",
                    "The network of lesson 3: convolutions put out most numbers, "
                    "a linear layer has most weights",
                    228, path)
          : NULL;
    if (!out) return 0;
    double x = 14;
    for (int i = 0; i < amp_model_layer_count(m); i++) {
        const amp_layer* l = amp_model_layer(m, i);
        if (l->op == AMP_OP_RELU) continue;
        const double side = 26 + 3 * l->height; /* of a picture; a row of numbers is a bar */
        const int last = i + 1 == amp_model_layer_count(m);
        if (x > 14) arrow(out, x - 22, 104, x - 4, 104);
        box(out, x, 104 - side / 2, 88, side, l->parameters ? CHART_FP16 : CHART_OTHER,
            last                         ? "loss"
            : l->op == AMP_OP_MAX_POOL2D ? "max pool"
                                         : amp_op_name(l->op),
            NULL);
        snprintf(shape, sizeof shape, l->height > 1 ? "%d x %d x %d" : "%d", l->channels, l->height,
                 l->width);
        chart_text(out, x + 44, 178, "middle", "", last ? "1 number" : shape);
        snprintf(weights, sizeof weights, "%lu weights", (unsigned long)l->parameters);
        if (l->parameters) chart_text(out, x + 44, 198, "middle", " font-size=\"12\"", weights);
        x += 117;
    }
    amp_model_destroy(m);
    chart_text(out, 14, 220, "start", " font-size=\"12\"",
               "Below each layer: channels x height x width of its output");
    return finished(out, path);
}

/* ---- one scale, or one for each block --------------------------------------------------------------------------- */

/* 64 numbers of a long tail in E2M1, whose numbers above 0 span a factor of 12: smaller than a 24th is 0. */
static int draw_blocks(void) {
    enum { N = 64, BLOCK = 16 };
    static float x[N], y[4][N], at[2][N];
    static const chart_wall borders[] = { { 15.5, "" }, { 31.5, "" }, { 47.5, "" } };
    char path[300], titles[2][100];
    chart_series bars[4];
    chart_panel panels[2];
    for (int i = 0; i < N; i++)
        x[i] = fabsf(amp_random_normal(5, (uint64_t)i))
               * expf(1.5f * amp_random_normal(6, (uint64_t)i));
    for (int way = 0; way < 2; way++) {
        int zeros = 0;
        for (int i = 0; i < N; i++) {
            const int from = way ? i / BLOCK * BLOCK : 0, to = way ? from + BLOCK : N;
            float most = 0.0f;
            for (int k = from; k < to; k++) most = fmaxf(most, x[k]);
            const int zero = x[i] <= most / 24.0f;
            zeros += zero;
            at[0][i] = (float)i + 0.45f; /* bars of two series stand side by side: these do not */
            at[1][i] = (float)i - 0.45f;
            y[2 * way][i] = zero ? NAN : x[i];
            y[2 * way + 1][i] = zero ? x[i] : NAN;
        }
        snprintf(titles[way], sizeof titles[way],
                 way ? "A scale for each block of 16:\n%d of 64 become 0"
                     : "One scale for 64 numbers in 4 bits:\n%d become 0",
                 zeros);
        for (int k = 0; k < 2; k++)
            bars[2 * way + k] = (chart_series){ k ? "becomes 0" : "is kept",
                                                k ? CHART_FAULT : CHART_OTHER,
                                                NULL,
                                                5,
                                                1,
                                                .x = at[k],
                                                .y = y[2 * way + k],
                                                .count = N,
                                                .style = CHART_BARS };
        panels[way] = (chart_panel){ titles[way],
                                     way ? "number (dashed: where a block ends)" : "number",
                                     "size",
                                     .log_y = 1,
                                     .series = bars + 2 * way,
                                     .series_count = 2,
                                     .walls = borders,
                                     .wall_count = way ? 3 : 0 };
    }
    snprintf(path, sizeof path, "%.250s/blocks.svg", folder);
    return chart_write(path, "One scale per block", panels, 2, error);
}

/* ---- attention's tiles ------------------------------------------------------------------------------------------- */

static int draw_tiles(void) {
    char path[300];
    FILE* out = drawing(
        "tiles", "Attention in tiles: one tile of T x T exists at a time, a row keeps two numbers",
        330, path);
    if (!out) return 0;
    const double x = 130, y = 96, cell = 36;
    for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++)
            filled(out, x + cell * j, y + cell * i, cell - 3, cell - 3,
                   i == 2 && j == 3 ? CHART_FP32 : CHART_OTHER,
                   i == 2 && j == 3  ? 0.9
                   : i == 2 && j < 3 ? 0.5
                                     : 0.15);
    for (int i = 0; i < 6; i++) {
        filled(out, x - 40, y + cell * i, 24, cell - 3, CHART_FP32, i == 2 ? 0.9 : 0.2);
        filled(out, x + cell * i, y - 34, cell - 3, 22, CHART_FP32, i == 3 ? 0.9 : 0.2);
        filled(out, x + cell * 6 + 12, y + cell * i, 10, cell - 3, CHART_FP32, i == 2 ? 0.9 : 0.2);
        filled(out, x + cell * 6 + 26, y + cell * i, 10, cell - 3, CHART_FP32, i == 2 ? 0.9 : 0.2);
    }
    chart_text(out, x + cell * 6 + 17, y - 6, "middle", "", "m");
    chart_text(out, x + cell * 6 + 31, y - 6, "middle", "", "l");
    chart_text(out, x - 46, y + 120, "end", "", "Q, T rows");
    chart_text(out, x, y - 40, "start", "", "K and V, T rows");
    static const char* const lines[7] = {
        "Dark: the tile now. Medium: tiles of this row, already forgotten.",
        "1. scores = Q tile * K tile, 128 x 128 numbers",
        "2. m = the row's largest score so far; old sums shrink by e^(old m - new m)",
        "3. l = the row's sum of e^(score - m)",
        "4. output += e^(score - m) * V tile; in the end / l",
        "Right of the tiles: m and l, two numbers for each row.",
        "Backward: m + log l is kept, each tile is computed again."
    };
    for (int i = 0; i < 7; i++) chart_text(out, 420, y + 12 + 27 * i, "start", "", lines[i]);
    return finished(out, path);
}

/* ---- README's picture: memory by kind, and times of steps -------------------------------------------------------- */

enum { KINDS = 4, NETWORKS = 5, TYPES = 3 };

/* kilobytes of each kind at a level. */
static int memory_of(amp_level level, float* kb) {
    amp_memory b;
    amp_model* m = lenet(level);
    if (!m || amp_model_memory(m, &b) != AMP_OK) return 0;
    kb[0] = (float)b.activation_bytes / 1024.0f;
    kb[1] = (float)(b.parameter_bytes + b.low_parameter_bytes) / 1024.0f;
    kb[2] = (float)b.gradient_bytes / 1024.0f;
    kb[3] = (float)b.optimizer_bytes / 1024.0f;
    amp_model_destroy(m);
    return 1;
}

/* times[t][n]: how many times as fast as PyTorch, the faster of its layouts, network n is in type t; NaN if unknown. */
static int read_times(const char* results, float times[TYPES][NETWORKS]) {
    static const char* const networks[NETWORKS] = { "train lenet5", "residual:", "bottleneck:",
                                                    "separable:", "train gpt2" };
    static const char* const types[TYPES] = { "| f32 | 1 |", "| f16 | 1 |", "| bf16 | 1 |" };
    char line[1000];
    FILE* in = fopen(results, "r");
    if (!in) return snprintf(error, sizeof error, "%.300s cannot be read", results), 0;
    for (int i = 0; i < TYPES * NETWORKS; i++) times[i / NETWORKS][i % NETWORKS] = NAN;
    while (fgets(line, sizeof line, in))
        for (int i = 0; i < TYPES * NETWORKS; i++) {
            float *best = &times[i / NETWORKS][i % NETWORKS], ratio;
            const char* last = strrchr(line, '|');
            if (!last || !strstr(line, types[i / NETWORKS])
                || !strstr(line, networks[i % NETWORKS]))
                continue;
            do last--; while (last > line && *last != '|');
            if (sscanf(last, "| %f", &ratio) == 1 && !(*best <= ratio)) *best = ratio;
        }
    fclose(in);
    return 1;
}

static int draw_front(const char* results) {
    static const char *const kinds[KINDS + 1] = { "activations", "weights", "gradients", "moments",
                                                  NULL },
                                           *const networks[] = { "LeNet-5",    "residual",
                                                                 "bottleneck", "separable",
                                                                 "GPT-2",      NULL },
                                           *const types[TYPES] = { "FP32", "FP16", "BF16" };
    static const chart_color colors[TYPES] = { CHART_FP32, CHART_FP16, CHART_BF16 };
    static float kb[2][KINDS], times[TYPES][NETWORKS], x[TYPES][NETWORKS],
        equal_x[2] = { -0.5f, NETWORKS - 0.55f }, equal[2] = { 1.0f, 1.0f };
    char path[300];
    chart_series bars[2], squares[TYPES + 1];
    if (!memory_of(AMP_O0, kb[0]) || !memory_of(AMP_O2, kb[1]) || !read_times(results, times))
        return 0;
    for (int i = 0; i < 2; i++)
        bars[i] = (chart_series){ i ? "O2: FP16 with FP32 masters" : "O0: FP32",
                                  colors[i],
                                  NULL,
                                  34,
                                  1,
                                  kb[i],
                                  .count = KINDS,
                                  .style = CHART_BARS };
    for (int t = 0; t < TYPES; t++) {
        for (int n = 0; n < NETWORKS; n++) x[t][n] = (float)n + 0.22f * (float)(t - 1);
        squares[t] = (chart_series){ types[t],
                                     colors[t],
                                     NULL,
                                     13,
                                     1,
                                     times[t],
                                     x[t],
                                     .count = NETWORKS,
                                     .style = CHART_POINTS };
    }
    squares[TYPES] = chart_curve("as fast", CHART_OTHER, equal_x, equal, 2);
    squares[TYPES].dash = "6 5";
    const chart_panel panels[2] = { { "Half the memory for activations,\na little more for weights",
                                      "LeNet-5, batch 64, Adam", "KiB", .x_names = kinds,
                                      .series = bars, .series_count = 2 },
                                    { "A step, times as fast as PyTorch's in the same\ntype: one "
                                      "thread of an Intel Xeon, no GPU",
                                      "network", "times", .log_y = 1, .x_names = networks,
                                      .series = squares, .series_count = TYPES + 1 } };
    snprintf(path, sizeof path, "%.250s/front.svg", folder);
    return chart_write(path, "Memory and speed of mixed precision", panels, 2, error);
}

int main(int argc, char** argv) {
    if (argc != 3) return fprintf(stderr, "usage: pictures FOLDER RESULTS\n"), 2;
    folder = argv[1];
    if (draw_bits() && draw_step() && draw_network() && draw_blocks() && draw_tiles()
        && draw_front(argv[2]))
        return 0;
    return fprintf(stderr, "pictures: %s\n", error[0] ? error : "a model cannot be built"), 1;
}
