/* chart.h - charts as one SVG file, and a progress bar, for the examples. Header only; everything is static.

   A chart is a row of panels, a panel a list of series: lines, bars, points or ticks. The file has a transparent
   background and two sets of colours, of which the reader's setting (light or dark) takes one. Each panel is an svg
   element of its own, so that a page can stack them. The file is plain ASCII, needs no font, and is written to PATH.tmp
   first and then renamed: PATH is never half a picture. In texts 2^-20 becomes a superscript. */
#ifndef EXAMPLES_CHART_H
#define EXAMPLES_CHART_H

#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#if defined(_WIN32)
  #include <io.h>
  #define chart_is_terminal() (_isatty(_fileno(stderr)) != 0)
#else
  #include <unistd.h>
  #define chart_is_terminal() (isatty(STDERR_FILENO) != 0)
#endif

#define CHART_ERROR 400

/* One colour for one format in all pictures; FAULT is what goes wrong, OTHER what is no format. Any two of them differ
   for the colour-blind too: by more than 25 in CIELAB under deuteranopia and protanopia (test_data.c computes it). */
typedef enum chart_color {
    CHART_FP32 = 0, CHART_FP16, CHART_BF16, CHART_E4M3, CHART_E5M2, CHART_FAULT, CHART_OTHER, CHART_COLORS
} chart_color;
static const char* const chart_light[CHART_COLORS] = { "#2f343b", "#0a62f0", "#bd8a05", "#91328f", "#21a05f", "#a01008",
                                                       "#8f959f" };
static const char* const chart_dark[CHART_COLORS] = { "#e6ebf5", "#3578ff", "#fbc104", "#c468d6", "#52e898", "#d8281a",
                                                      "#7f858f" };
/* Text and axes, and the pages that they are read on: at least 4.5 to 1. */
#define CHART_INK_LIGHT "#4d535c"
#define CHART_INK_DARK "#a9b1bc"
#define CHART_PAGE_LIGHT "#ffffff"
#define CHART_PAGE_DARK "#0d1117"

/* BARS stand on 0, those of several series side by side. POINTS are squares. TICKS are upright strokes on row y. */
typedef enum chart_style { CHART_LINE = 0, CHART_BARS, CHART_POINTS, CHART_TICKS } chart_style;

typedef struct chart_series {
    const char* name;                   /* NULL = not in the legend */
    chart_color color;
    const char* dash;                   /* SVG's stroke-dasharray, e.g. "7 4"; NULL = a full line */
    double width;                       /* pixels of a line, a bar, a point or a tick; draw the wide ones first */
    double opacity;                     /* 0..1 */
    const float* y;                     /* [count]; what is not finite leaves a gap */
    const float* x;                     /* [count]; NULL = 0, 1, 2, ... */
    const unsigned char* marks;         /* [count], 1 = a cross at this point; NULL = none */
    int count;
    chart_style style;
    char letter;                        /* in each point, which then is an outline; 0 = none */
} chart_series;

/* A dashed upright line, and a shaded range of x, with their names; a text beside a point of the panel. */
typedef struct chart_wall { double x; const char* name; } chart_wall;
typedef struct chart_band { double from, to; const char* name; } chart_band;
typedef struct chart_note { double x, y; const char* text; const char* anchor; } chart_note;    /* NULL = "start" */

typedef struct chart_panel {
    const char* title;                  /* what the panel shows, as a claim; '\n' begins its second line */
    const char* x_label;
    const char* y_label;                /* NULL = none */
    int log_x, log_y;                   /* 1 = logarithmic axis: values must be positive; 2 = with powers of two */
    int integer_y;                      /* 1 = ticks at whole numbers only */
    const char* x_prefix;               /* before each number, then a whole one, e.g. "2^"; NULL = nothing */
    const char* y_prefix;
    const char* const* x_names;         /* of the values 0, 1, 2, ... to the largest in use; NULL = numbers */
    const char* const* y_names;         /* likewise, from the bottom */
    int steps;                          /* 1 = values hold until the next one: a staircase */
    const char* mark_name;              /* what a cross means, for the legend; NULL = no crosses */
    const chart_series* series;
    int series_count;
    const chart_wall* walls;            /* always inside the picture */
    int wall_count;
    const chart_band* bands;            /* cut off where the picture ends */
    int band_count;
    const chart_note* notes;
    int note_count;
} chart_panel;

/* Pixels of the picture: each panel has room for its axis on the left and for its titles on top. A letter is taken as
   LETTER wide. */
#define CHART_PANEL 480
#define CHART_HEIGHT 410
#define CHART_LEFT 62
#define CHART_RIGHT 20
#define CHART_BOTTOM 56
#define CHART_LETTER 8
#define CHART_LINE_HEIGHT 17
#define CHART_TITLE_HEIGHT 21
#define CHART_LEGEND_HEIGHT 20

/* Values along an axis, as logarithms if it is logarithmic. */
typedef struct chart_range { double low, high; int any; } chart_range;

static inline void chart_include(chart_range* r, double value) {
    r->low = r->any && r->low < value ? r->low : value;
    r->high = r->any && r->high > value ? r->high : value;
    r->any = 1;
}

/* Where a panel stands in the picture, and where its values lie. */
typedef struct chart_frame {
    double start, left, top, width, height;                 /* start: of titles, left: of the axis */
    chart_range x, y;
    double y_end;                                           /* no number above this: there are the names of walls */
    int x_names, y_names;                                   /* how many there are: one for each value in use */
    int counted;                                            /* 1 = x counts 0, 1, 2, ... */
} chart_frame;

static inline double chart_px(const chart_frame* f, double x) {
    return f->left + f->width * (x - f->x.low) / (f->x.high - f->x.low);
}
static inline double chart_py(const chart_frame* f, double y) {
    return f->top + f->height * (1.0 - (y - f->y.low) / (f->y.high - f->y.low));
}

static inline int chart_place(const float* value, int logarithmic, double* axis) {
    if (!amp_is_finite(amp_f32(value)) || (logarithmic && *value <= 0.0f)) return 0;
    *axis = logarithmic ? log10((double)*value) : (double)*value;
    return 1;
}

/* Point k on both axes; 0 if it cannot be shown. */
static inline int chart_point(const chart_panel* p, const chart_series* s, int k, double* x, double* y) {
    *x = k;
    return chart_place(&s->y[k], p->log_y, y) && (!s->x || chart_place(&s->x[k], p->log_x, x));
}

static inline void chart_pad(chart_range* r, double by) {
    if (!(r->high > r->low)) by = 0.5;
    r->low -= by;
    r->high += by;
}

static inline double chart_letters(const char* text) { return CHART_LETTER * (int)strlen(text); }

/* A value on an axis. */
static inline double chart_axis(int logarithmic, double value) { return logarithmic ? log10(value) : value; }

/* The range of all points and walls, a little widened; 0..1 if there are none. */
static inline void chart_measure_ranges(const chart_panel* p, chart_frame* f) {
    int i, k, bars = 0, lines = 0;
    double x, y, names = p->band_count ? CHART_LINE_HEIGHT + 3 : 0;
    for (i = 0; i < p->series_count; i++) {
        const chart_series* s = &p->series[i];
        for (k = 0; k < s->count; k++)
            if (chart_point(p, s, k, &x, &y)) {
                chart_include(&f->x, x);
                chart_include(&f->y, y);
            }
        lines += s->style == CHART_LINE;
        bars += s->style == CHART_BARS;
        f->counted |= !s->x && s->style == CHART_LINE && !p->x_names;
    }
    f->x_names = p->x_names ? (int)floor(f->x.high + 1.5) : 0;
    f->y_names = p->y_names ? (int)floor(f->y.high + 1.5) : 0;
    if (f->counted || !f->x.any) { chart_include(&f->x, 0.0); chart_include(&f->x, 1.0); }
    for (i = 0; i < p->wall_count; i++) chart_include(&f->x, chart_axis(p->log_x, p->walls[i].x));
    if (!p->log_y && (bars || !f->y.any)) chart_include(&f->y, 0.0);
    if (p->x_names || (bars && !p->log_x)) chart_pad(&f->x, 0.6);
    else if (lines < p->series_count || f->x.high <= f->x.low) chart_pad(&f->x, 0.04 * (f->x.high - f->x.low));
    chart_pad(&f->y, p->integer_y || p->y_names ? 0.6 : 0.04 * (f->y.high - f->y.low));
    if (bars && !p->log_y && f->y.low < 0.0 && f->y.low > -0.05 * f->y.high) f->y.low = 0.0;
    f->y_end = f->y.high;
    for (i = 0; i < p->wall_count; i++)                     /* names of walls and bands stand above the data */
        if (chart_letters(p->walls[i].name) + 8 > names) names = chart_letters(p->walls[i].name) + 8;
    f->y.high += (f->y.high - f->y.low) * names / (f->height - names);
}

/* Lines of the title. */
static inline int chart_title_lines(const chart_panel* p) { return strchr(p->title, '\n') ? 2 : 1; }

static inline chart_frame chart_measure(const chart_panel* p, double top) {
    chart_frame f = { 0 };
    double left = CHART_LEFT, end = CHART_PANEL - CHART_RIGHT;
    int k;
    f.height = CHART_HEIGHT - top - CHART_BOTTOM;
    chart_measure_ranges(p, &f);
    for (k = 0; k < f.y_names; k++)
        if (22 + chart_letters(p->y_names[k]) > left) left = 22 + chart_letters(p->y_names[k]);
    if (p->y_label) left += (double)CHART_LINE_HEIGHT;
    f.start = 14;
    f.left = left;
    f.top = top;
    f.width = end - left;
    return f;
}

/* The smallest of 1, 2, 5, 10, 20, 50, ... that gives at most `most` intervals on the range; >= 1 if whole. */
static inline double chart_step(double range, int most, int whole) {
    double step = whole ? 1.0 : 1e-6;
    int i = 0;
    while (range / step > most) step *= i++ % 3 == 1 ? 2.5 : 2.0;
    return step;
}

/* What follows a ^: a sign, digits and letters, or what stands in brackets, raised. Returns where the text goes on. */
static inline const char* chart_raised(FILE* out, const char* text) {
    fputs("<tspan dy=\"-5\" font-size=\"11\">", out);
    if (*text == '-') { fputs("&#8722;", out); text++; }
    if (*text == '(') {
        for (text++; *text && *text != ')'; text++) fputc(*text, out);
        if (*text) text++;
    } else {
        while ((*text >= '0' && *text <= '9') || (*text >= 'a' && *text <= 'z')) fputc(*text++, out);
    }
    fputs("</tspan>", out);
    return text;
}

/* Text without anything that SVG would interpret, and in ASCII. What follows a superscript comes down again. */
static inline void chart_text(FILE* out, double x, double y, const char* anchor, const char* extra,
                              const char* text) {
    int down = 0;
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", x, y, anchor, extra);
    while (*text) {
        if (*text == '^') {
            text = chart_raised(out, text + 1);
            if (*text && !down) { fputs("<tspan dy=\"5\">", out); down = 1; }
            continue;
        }
        if (*text == '<') fputs("&lt;", out);
        else if (*text == '&') fputs("&amp;", out);
        else fputc(*text >= 32 && *text < 127 ? *text : '?', out);
        text++;
    }
    fputs(down ? "</tspan></text>\n" : "</text>\n", out);
}

/* Text from the bottom up. */
static inline void chart_upright(FILE* out, double x, double y, const char* anchor, const char* text) {
    char turn[64];
    snprintf(turn, sizeof turn, " transform=\"rotate(-90 %.1f %.1f)\"", x, y);
    chart_text(out, x, y, anchor, turn, text);
}

/* One grid line with its number or name. */
static inline void chart_tick_y(FILE* out, const chart_frame* f, double axis, const char* text) {
    double y = chart_py(f, axis);
    if (axis > f->y_end || y > f->top + f->height + 0.5) return;
    fprintf(out, "<path d=\"M%.1f %.1fh%.1f\" stroke-opacity=\".25\"/>\n", f->left, y, f->width);
    chart_text(out, f->left - 8, y + 5, "end", "", text);
}
static inline void chart_tick_x(FILE* out, const chart_frame* f, double axis, const char* text, double lower) {
    double x = chart_px(f, axis);
    if (x < f->left - 0.5 || x > f->left + f->width + 0.5) return;
    fprintf(out, "<path d=\"M%.1f %.1fv5\"/>\n", x, f->top + f->height);
    if (x + 4 + chart_letters(text) / 2 > CHART_PANEL) x = CHART_PANEL - 4 - chart_letters(text) / 2;
    chart_text(out, x, f->top + f->height + 20 + lower, "middle", "", text);
}

static inline void chart_number(FILE* out, const chart_panel* p, const chart_frame* f, int on_x, double axis,
                                double value) {
    const char* prefix = on_x ? p->x_prefix : p->y_prefix;
    char text[32];
    if ((on_x ? p->log_x : p->log_y) == 1 && (value < 9e-4 || value > 9e4)) snprintf(text, sizeof text, "10^%.0f", axis);
    else snprintf(text, sizeof text, "%.8s%g", prefix ? prefix : "", value);
    if (on_x) chart_tick_x(out, f, axis, text, 0);
    else chart_tick_y(out, f, axis, text);
}

/* 1, 2 and 5 times each power of ten; over more decades powers of ten alone, over many not all of those. */
static inline void chart_decades(FILE* out, const chart_panel* p, const chart_frame* f, int on_x) {
    static const double leading[3] = { 1.0, 2.0, 5.0 };
    chart_range r = on_x ? f->x : f->y;
    int step = (int)chart_step(r.high - r.low, 9, 1), decade, i;
    for (decade = (int)floor(r.low / step) * step; decade <= (int)ceil(r.high); decade += step)
        for (i = 0; i < (r.high - r.low < 2.5 ? 3 : 1); i++) {
            double value = leading[i] * pow(10.0, decade);
            chart_number(out, p, f, on_x, log10(value), value);
        }
}

/* Powers of two. */
static inline void chart_doublings(FILE* out, const chart_panel* p, const chart_frame* f, int on_x) {
    chart_range r = on_x ? f->x : f->y;
    double two = log10(2.0), step = chart_step((r.high - r.low) / two, 8, 1), k;
    for (k = ceil(r.low / two / step); k * step * two <= r.high; k++)
        chart_number(out, p, f, on_x, k * step * two, pow(2.0, k * step));
}

/* Even steps. A run of 400 steps ends at number 399, and its axis at 400; powers are no steps. */
static inline void chart_numbers(FILE* out, const chart_panel* p, const chart_frame* f, int on_x) {
    chart_range r = on_x ? f->x : f->y;
    int counted = on_x && f->counted, whole = counted || (on_x ? p->x_prefix != NULL : p->integer_y || p->y_prefix);
    double high = r.high + (counted && !p->x_prefix), step = chart_step(high - r.low, on_x ? 8 : 9, whole), k;
    for (k = ceil(r.low / step); k * step <= high; k++)
        chart_number(out, p, f, on_x, k * step > r.high ? r.high : k * step, k * step + 0.0);
}

/* Names that are too long for their places take turns on two lines. */
static inline void chart_names(FILE* out, const chart_panel* p, const chart_frame* f, int on_x) {
    double room = chart_px(f, 1.0) - chart_px(f, 0.0);
    int k, long_ones = 0;
    for (k = 0; on_x && k < f->x_names; k++) long_ones += chart_letters(p->x_names[k]) > room;
    for (k = 0; on_x && k < f->x_names; k++)
        chart_tick_x(out, f, k, p->x_names[k], long_ones ? 14 * (k % 2) - 3 : 0);
    for (k = 0; !on_x && k < f->y_names; k++) chart_tick_y(out, f, k, p->y_names[k]);
}

static inline void chart_ticks(FILE* out, const chart_panel* p, const chart_frame* f, int on_x) {
    if (on_x ? p->x_names != NULL : p->y_names != NULL) chart_names(out, p, f, on_x);
    else if ((on_x ? p->log_x : p->log_y) == 2) chart_doublings(out, p, f, on_x);
    else if (on_x ? p->log_x : p->log_y) chart_decades(out, p, f, on_x);
    else chart_numbers(out, p, f, on_x);
}

/* The attributes of a line. */
static inline void chart_stroke(FILE* out, const chart_series* s) {
    fprintf(out, " class=\"s%d\" stroke-width=\"%.1f\" stroke-opacity=\"%.2f\"", (int)s->color, s->width, s->opacity);
    fputs(" stroke-linejoin=\"round\"", out);
    if (s->dash) fprintf(out, " stroke-dasharray=\"%s\"", s->dash);
}

/* A line through the usable points: M starts a piece, L goes on; a staircase goes across, then up or down. What is less
   than half a pixel away is left out. */
static inline void chart_line(FILE* out, const chart_panel* p, const chart_frame* f, const chart_series* s) {
    int k, open = 0;
    double last_x = 0.0, last = 0.0, next;
    fputs("<path", out);
    chart_stroke(out, s);
    fputs(" d=\"", out);
    for (k = 0; k < s->count; k++) {
        int ends = k + 1 == s->count || !chart_point(p, s, k + 1, &next, &next);
        double x, y;
        if (!chart_point(p, s, k, &x, &y)) { open = 0; continue; }
        x = chart_px(f, x);
        y = chart_py(f, y);
        if (open && !ends && fabs(x - last_x) < 0.5 && fabs(y - last) < 0.5) continue;
        if (!open) fprintf(out, "M%.1f %.1f", x, y);
        else if (!p->steps) fprintf(out, "L%.1f %.1f", x, y);
        else if (y != last || ends) fprintf(out, "L%.1f %.1fL%.1f %.1f", x, last, x, y);
        open = 1;
        last_x = x;
        last = y;
    }
    fputs("\"/>\n", out);
}

/* The start of a filled path, and a rectangle of it. */
static inline void chart_fill(FILE* out, chart_color color, double opacity) {
    fprintf(out, "<path class=\"f%d\" fill-opacity=\"%.2f\" d=\"", (int)color, opacity);
}
static inline void chart_box(FILE* out, double x, double y, double width, double height) {
    fprintf(out, "M%.1f %.1fh%.1fv%.1fh%.1fz", x, y, width, height, -width);
}

/* Bars, points and ticks. `shift` moves bars beside those of other series; a tick on the last one is not drawn. */
static inline void chart_boxes(FILE* out, const chart_panel* p, const chart_frame* f, const chart_series* s,
                               double shift) {
    double x, y, w = s->width, last = -1.0, base = chart_py(f, p->log_y || f->y.low > 0.0 ? f->y.low : 0.0);
    int k;
    if (s->letter) fprintf(out, "<path class=\"s%d\" stroke-width=\"2\" d=\"", (int)s->color);
    else chart_fill(out, s->color, s->opacity);
    for (k = 0; k < s->count; k++) {
        if (!chart_point(p, s, k, &x, &y)) continue;
        x = chart_px(f, x);
        y = chart_py(f, y);
        if (s->style == CHART_BARS) chart_box(out, x - w / 2 + shift, y, w, base - y);
        else if (s->style == CHART_POINTS) chart_box(out, x - w / 2, y - w / 2, w, w);
        else if (fabs(x - last) >= 0.9 * w) { chart_box(out, x - w / 2, y - 8, w, 16); last = x; }
    }
    fputs("\"/>\n", out);
}

/* The letter of a series in each of its points. */
static inline void chart_lettered(FILE* out, const chart_panel* p, const chart_frame* f, const chart_series* s) {
    char text[2] = { s->letter, 0 };
    double x, y;
    int k;
    for (k = 0; s->letter && k < s->count; k++)
        if (chart_point(p, s, k, &x, &y))
            chart_text(out, chart_px(f, x), chart_py(f, y) + 4, "middle", " font-size=\"12\"", text);
}

static inline void chart_draw_series(FILE* out, const chart_panel* p, const chart_frame* f) {
    double across = 0.0, shift;
    int i;
    for (i = 0; i < p->series_count; i++)
        if (p->series[i].style == CHART_BARS) across += p->series[i].width;
    for (i = 0, shift = -across / 2; i < p->series_count; i++) {
        const chart_series* s = &p->series[i];
        if (s->style == CHART_LINE) chart_line(out, p, f, s);
        else chart_boxes(out, p, f, s, shift + s->width / 2);
        chart_lettered(out, p, f, s);
        if (s->style == CHART_BARS) shift += s->width;
    }
}

static inline void chart_cross(FILE* out, double x, double y) {
    fprintf(out, "<path d=\"M%.1f %.1fl8 8m0 -8l-8 8\" class=\"s%d\" stroke-width=\"2\"/>\n", x - 4, y - 4, CHART_FAULT);
}

static inline void chart_marks(FILE* out, const chart_panel* p, const chart_frame* f, const chart_series* s) {
    double x, y;
    int k;
    for (k = 0; s->marks && k < s->count; k++)
        if (s->marks[k] && chart_point(p, s, k, &x, &y))
            chart_cross(out, chart_px(f, x), chart_py(f, y));
}

/* Names stand at the top: along a band if it is wide enough, else upright, as those of walls; those of bands that
   overlap one below the other. */
static inline void chart_bands(FILE* out, const chart_panel* p, const chart_frame* f) {
    double right = f->left + f->width, end = f->left, row = 0.0;
    int i;
    for (i = 0; i < p->band_count; i++) {
        const chart_band* b = &p->bands[i];
        double from = chart_px(f, chart_axis(p->log_x, b->from)), to = chart_px(f, chart_axis(p->log_x, b->to)), middle;
        from = from > f->left ? from : f->left;
        to = to < right ? to : right;
        if (!(from < to)) continue;
        middle = (from + to) / 2;
        chart_fill(out, CHART_OTHER, 0.2);
        chart_box(out, from, f->top, to - from, f->height);
        fputs("\"/>\n", out);
        row = from < end - 0.5 ? row + (double)CHART_LINE_HEIGHT : 0.0;
        end = to;
        if (chart_letters(b->name) < to - from) chart_text(out, middle, f->top + 14 + row, "middle", "", b->name);
        else chart_upright(out, middle + 4, f->top + 4 + row, "end", b->name);
    }
}

static inline void chart_walls(FILE* out, const chart_panel* p, const chart_frame* f) {
    int i;
    for (i = 0; i < p->wall_count; i++) {
        const chart_wall* w = &p->walls[i];
        double x = chart_px(f, chart_axis(p->log_x, w->x));
        fprintf(out, "<path d=\"M%.1f %.1fv%.1f\" stroke-width=\"1.5\" stroke-dasharray=\"4 3\"/>\n", x, f->top, f->height);
        chart_upright(out, x < f->left + (double)CHART_LINE_HEIGHT ? x + 13 : x - 5, f->top + 4, "end", w->name);
    }
}

static inline void chart_notes(FILE* out, const chart_panel* p, const chart_frame* f) {
    int i;
    for (i = 0; i < p->note_count; i++) {
        const chart_note* n = &p->notes[i];
        chart_text(out, chart_px(f, chart_axis(p->log_x, n->x)), chart_py(f, chart_axis(p->log_y, n->y)) + 5,
                   n->anchor ? n->anchor : "start", " font-weight=\"600\"", n->text);
    }
}

/* The sample of one series, at x and y of its name. */
static inline void chart_sample(FILE* out, const chart_series* s, double x, double y) {
    if (s->style == CHART_LINE) {
        fprintf(out, "<path d=\"M%.1f %.1fh26\"", x, y - 5);
        chart_stroke(out, s);
        fputs("/>\n", out);
    } else {
        if (s->letter) fprintf(out, "<path class=\"s%d\" stroke-width=\"2\" d=\"", (int)s->color);
        else chart_fill(out, s->color, s->opacity);
        chart_box(out, x + 12, y - 11, 13, 13);
        fputs("\"/>\n", out);
    }
    chart_text(out, x + 32, y, "start", "", s->name);
}

/* Samples and names from y on, on as many lines as they need, which it returns. out: NULL = only counts them. */
static inline int chart_legend(FILE* out, const chart_panel* p, double y) {
    double x = 14, right = CHART_PANEL - CHART_RIGHT;
    int i, rows = 0;
    for (i = 0; i <= p->series_count; i++) {
        const chart_series* s = i < p->series_count ? &p->series[i] : NULL;
        const char* name = s ? s->name : p->mark_name;
        double wide = name ? (s ? 32 : 16) + chart_letters(name) : 0;
        if (!name) continue;
        if (!rows || x + wide > right) { x = 14; rows++; }
        if (out && s) chart_sample(out, s, x, y + CHART_LEGEND_HEIGHT * (rows - 1));
        if (out && !s) {
            chart_cross(out, x + 4, y + CHART_LEGEND_HEIGHT * (rows - 1) - 5);
            chart_text(out, x + 16, y + CHART_LEGEND_HEIGHT * (rows - 1), "start", "", name);
        }
        x += wide + 14;
    }
    return rows;
}

/* Where the axes begin: below titles and legends. */
static inline double chart_top(const chart_panel* p) {
    return 18.0 + CHART_TITLE_HEIGHT * chart_title_lines(p) + CHART_LEGEND_HEIGHT * chart_legend(NULL, p, 0);
}

static inline void chart_draw_title(FILE* out, const chart_panel* p) {
    static const char bold[] = " font-size=\"16\" font-weight=\"600\"";
    const char* second = strchr(p->title, '\n');
    char first[128];
    snprintf(first, sizeof first, "%.*s", second ? (int)(second - p->title) : 127, p->title);
    chart_text(out, 14, 22, "start", bold, first);
    if (second) chart_text(out, 14, 22 + CHART_TITLE_HEIGHT, "start", bold, second + 1);
}

/* The marks of a panel: an svg element, which page.sh takes line by line. */
static inline void chart_draw_panel(FILE* out, const chart_panel* p, int index, double top) {
    chart_frame f = chart_measure(p, top);
    int i;
    fprintf(out, "<svg class=\"ink\" x=\"%d\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\">\n", CHART_PANEL * index,
            CHART_PANEL, CHART_HEIGHT, CHART_PANEL, CHART_HEIGHT);
    chart_draw_title(out, p);
    chart_legend(out, p, 24.0 + CHART_TITLE_HEIGHT * chart_title_lines(p));
    chart_bands(out, p, &f);
    chart_ticks(out, p, &f, 0);
    chart_ticks(out, p, &f, 1);
    fprintf(out, "<path d=\"M%.1f %.1fv%.1fh%.1f\" fill=\"none\"/>\n", f.left, f.top, f.height, f.width);
    chart_text(out, f.left + f.width / 2, CHART_HEIGHT - 8, "middle", "", p->x_label);
    if (p->y_label) chart_upright(out, 15, f.top + f.height / 2, "middle", p->y_label);
    chart_draw_series(out, p, &f);
    chart_walls(out, p, &f);
    for (i = 0; i < p->series_count; i++) chart_marks(out, p, &f, &p->series[i]);
    chart_notes(out, p, &f);
    fputs("</svg>\n", out);
}

/* The classes of all colours: s0, s1, ... of lines, f0, f1, ... of areas, and ink. */
static inline void chart_classes(FILE* out, const char* const* colors, const char* ink) {
    int i;
    fprintf(out, ".ink{fill:%s;stroke:%s}", ink, ink);
    for (i = 0; i < CHART_COLORS; i++) fprintf(out, ".s%d{stroke:%s}.f%d{fill:%s}", i, colors[i], i, colors[i]);
}

/* The start of a picture, with both sets of colours. */
static inline void chart_open(FILE* out, int width, int height, const char* title) {
    int i;
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\"\n"
                 "     font-family=\"system-ui, Helvetica, Arial, sans-serif\" font-size=\"14\">\n",
            width, height, width, height);
    fprintf(out, "<title>%s</title>\n<style>", title);
    chart_classes(out, chart_light, CHART_INK_LIGHT);
    fputs("\n@media(prefers-color-scheme:dark){", out);
    chart_classes(out, chart_dark, CHART_INK_DARK);
    fputs("}\n.ink text{stroke:none}", out);
    for (i = 0; i < CHART_COLORS; i++) fprintf(out, ".s%d{fill:none}.f%d{stroke:none}", i, i);
    fputs("</style>\n", out);
}

static inline void chart_draw(FILE* out, const char* title, const chart_panel* panels, int count) {
    double top = 0.0;
    int i;
    for (i = 0; i < count; i++) top = chart_top(&panels[i]) > top ? chart_top(&panels[i]) : top;
    chart_open(out, CHART_PANEL * count, CHART_HEIGHT, title);
    for (i = 0; i < count; i++) chart_draw_panel(out, &panels[i], i, top);
    fputs("</svg>\n", out);
}

/* A device, a pipe or a directory: what a picture must not take the place of. */
static inline int chart_is_no_file(const char* path) {
#if defined(_WIN32)
    struct _stat there;
    return _stat(path, &there) == 0 && (there.st_mode & _S_IFMT) != _S_IFREG;
#else
    struct stat there;
    return stat(path, &there) == 0 && !S_ISREG(there.st_mode);
#endif
}

/* 1 if PATH can be replaced and PATH.tmp created: asked before a long run, not after it. Otherwise 0 and a sentence. */
static inline int chart_try(const char* path, char* error) {
    char temporary[1024];
    FILE* out;
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= (int)sizeof temporary) {
        snprintf(error, CHART_ERROR, "the path of the picture is too long");
        return 0;
    }
    if (chart_is_no_file(path)) {
        snprintf(error, CHART_ERROR, "%.300s: is not a regular file, so no picture takes its place", path);
        return 0;
    }
    out = fopen(temporary, "wb");
    if (!out) {
        snprintf(error, CHART_ERROR, "%.300s: cannot be written here, does its directory exist?", path);
        return 0;
    }
    fclose(out);
    remove(temporary);
    return 1;
}

/* A file that shall become the picture PATH; NULL with a sentence in `error`. */
static inline FILE* chart_create(const char* path, char* error) {
    char temporary[1024];
    FILE* out;
    if (!chart_try(path, error)) return NULL;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    out = fopen(temporary, "wb");
    if (!out) snprintf(error, CHART_ERROR, "%.300s: cannot be written", path);
    return out;
}

/* Closes it, and puts it in the place of PATH. Returns 1, or 0 with a sentence in `error`; then no file was changed. */
static inline int chart_finish(FILE* out, const char* path, char* error) {
    char temporary[1024];
    int ok = !ferror(out);
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    if (fclose(out) != 0) ok = 0;
#if defined(_WIN32)
    if (ok) remove(path);                         /* rename does not replace a file there */
#endif
    if (ok && rename(temporary, path) == 0) return 1;
    remove(temporary);
    snprintf(error, CHART_ERROR, "%.300s: writing it failed, is the disk full?", path);
    return 0;
}

/* Writes the picture. Returns 1, or 0 with a sentence in `error`; then no file was changed. */
static inline int chart_write(const char* path, const char* title, const chart_panel* panels, int count,
                              char* error) {
    FILE* out = chart_create(path, error);
    if (!out) return 0;
    chart_draw(out, title, panels, count);
    return chart_finish(out, path, error);
}

/* A full line of the usual width. */
static inline chart_series chart_curve(const char* name, chart_color color, const float* x, const float* y, int count) {
    chart_series s;
    memset(&s, 0, sizeof s);
    s.name = name;
    s.color = color;
    s.width = 3.0;
    s.opacity = 1.0;
    s.x = x;
    s.y = y;
    s.count = count;
    return s;
}

/* The picture of a lesson, to the path that its user gave or to NAME.svg. Returns 1, or 0 after a sentence on stderr. */
static inline int chart_save(int argc, char** argv, const char* name, const char* title, const chart_panel* panels,
                             int count) {
    char error[CHART_ERROR] = "the only argument is the path of the picture", path[64];
    snprintf(path, sizeof path, "%s.svg", name);
    if (argc <= 2 && chart_write(argc > 1 ? argv[1] : path, title, panels, count, error)) return 1;
    fprintf(stderr, "%s: %s\n", name, error);
    return 0;
}

/* A bar on the terminal, drawn over itself, with what is being done; gone when done == total. Nothing elsewhere. */
static inline void chart_progress(const char* label, int done, int total) {
    static const char bar[] = "##############################";
    enum { WIDTH = sizeof bar - 1 };
    static int shown = -1;
    int percent = total > 0 ? (int)(100.0 * done / total) : 100, full = WIDTH * percent / 100;
    if (!chart_is_terminal() || (percent == shown && done < total)) return;
    shown = percent;
    if (done < total) fprintf(stderr, "\r  [%.*s%*s] %3d %%  %.40s\033[K", full, bar, WIDTH - full, "", percent, label);
    else fputs("\r\033[K", stderr);
    fflush(stderr);
}

#endif /* EXAMPLES_CHART_H */
