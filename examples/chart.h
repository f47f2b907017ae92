/* chart.h - line charts as one SVG file, for the demo. Header only; everything is static.

   A chart is a row of panels, a panel a list of series over steps 0, 1, 2, ... The file has a transparent
   background, and all its colours have about the same contrast against white and against black, so that it fits
   either. It is plain ASCII, needs no font, and is written to PATH.tmp first and then renamed: PATH is never half
   a picture. */
#ifndef EXAMPLES_CHART_H
#define EXAMPLES_CHART_H

#include "../amp.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define CHART_ERROR 400
#define CHART_NEUTRAL "#7b7f86"         /* text and axes: 4 to 1 on white, 5 to 1 on black */

typedef struct chart_series {
    const char* name;
    const char* color;                  /* "#rrggbb" */
    const char* dash;                   /* SVG's stroke-dasharray, e.g. "7 4"; NULL = a full line */
    double width;                       /* of the line; where lines may cover each other, draw the wide one first */
    double opacity;                     /* 0..1 */
    const float* y;                     /* [count]; what is not finite leaves a gap */
    const unsigned char* marks;         /* [count], 1 = a cross at this point; NULL = none */
    int count;
} chart_series;

typedef struct chart_panel {
    const char* title;
    const char* x_label;
    int log_y;                          /* 1 = logarithmic axis: values must be positive */
    int integer_y;                      /* 1 = ticks at whole numbers only */
    const char* y_prefix;               /* before each number of the y axis, e.g. "2^"; NULL = nothing */
    int steps;                          /* 1 = values hold until the next one: a staircase */
    const char* mark_name;              /* what a cross means, for the legend; NULL = no crosses */
    const char* mark_color;
    const chart_series* series;
    int series_count;
} chart_panel;

/* Pixels of the picture: each panel has room for its axis on the left and its legend on top. */
enum { CHART_PANEL = 470, CHART_HEIGHT = 380, CHART_LEFT = 56, CHART_RIGHT = 18, CHART_TOP = 84, CHART_BOTTOM = 50 };

/* Where the values of a panel lie, and where it stands in the picture. */
typedef struct chart_frame { double x, y, width, height, x_max, low, high; int log_y; } chart_frame;

static inline int chart_usable(const chart_panel* p, const float* y) {
    return amp_is_finite(y, AMP_F32) && (!p->log_y || *y > 0.0f);
}

static inline double chart_axis(const chart_frame* f, double y) { return f->log_y ? log10(y) : y; }
static inline double chart_px(const chart_frame* f, double step) { return f->x + f->width * step / f->x_max; }
static inline double chart_py(const chart_frame* f, double axis) {
    return f->y + f->height * (1.0 - (axis - f->low) / (f->high - f->low));
}

/* The range of all usable values, a little widened; 0..1 if there are none. */
static inline chart_frame chart_measure(const chart_panel* p, int index) {
    chart_frame f;
    int i, k, any = 0;
    f.x = CHART_PANEL * index + CHART_LEFT;
    f.y = CHART_TOP;
    f.width = CHART_PANEL - CHART_LEFT - CHART_RIGHT;
    f.height = CHART_HEIGHT - CHART_TOP - CHART_BOTTOM;
    f.x_max = 1.0;
    f.low = f.high = 0.0;
    f.log_y = p->log_y;
    for (i = 0; i < p->series_count; i++)
        for (k = 0; k < p->series[i].count; k++) {
            double value;
            if (!chart_usable(p, &p->series[i].y[k])) continue;
            value = chart_axis(&f, p->series[i].y[k]);
            f.low = !any || value < f.low ? value : f.low;
            f.high = !any || value > f.high ? value : f.high;
            f.x_max = k > f.x_max ? k : f.x_max;
            any = 1;
        }
    if (p->integer_y) { f.low -= 0.6; f.high += 0.6; }
    else if (f.high > f.low) { double pad = 0.04 * (f.high - f.low); f.low -= pad; f.high += pad; }
    else { f.low -= 0.5; f.high += 0.5; }
    return f;
}

/* The smallest of 1, 2, 5, 10, 20, 50, ... that gives at most `most` intervals on the range; >= 1 if whole. */
static inline double chart_step(double range, int most, int whole) {
    double step = whole ? 1.0 : 1e-6;
    int i = 0;
    while (range / step > most) step *= i++ % 3 == 1 ? 2.5 : 2.0;
    return step;
}

/* Text without anything that SVG would interpret, and in ASCII. */
static inline void chart_text(FILE* out, double x, double y, const char* anchor, const char* extra,
                              const char* text) {
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", x, y, anchor, extra);
    for (; *text; text++) {
        if (*text == '<') fputs("&lt;", out);
        else if (*text == '&') fputs("&amp;", out);
        else fputc(*text >= 32 && *text < 127 ? *text : '?', out);
    }
    fputs("</text>\n", out);
}

/* One grid line with its number. */
static inline void chart_tick_y(FILE* out, const chart_panel* p, const chart_frame* f, double axis, double value) {
    char text[32];
    double y = chart_py(f, axis);
    if (y < f->y - 0.5 || y > f->y + f->height + 0.5) return;
    snprintf(text, sizeof text, "%.8s%g", p->y_prefix ? p->y_prefix : "", value);
    fprintf(out, "<path d=\"M%.1f %.1fh%.1f\" stroke-opacity=\".25\"/>\n", f->x, y, f->width);
    chart_text(out, f->x - 8, y + 4, "end", "", text);
}

static inline void chart_ticks(FILE* out, const chart_panel* p, const chart_frame* f) {
    static const double leading[3] = { 1.0, 2.0, 5.0 };
    char text[32];
    double step, at;
    int decade, i;
    if (f->log_y) {
        for (decade = (int)floor(f->low); decade <= (int)ceil(f->high); decade++)
            for (i = 0; i < 3; i++) {
                double value = leading[i] * pow(10.0, decade);
                chart_tick_y(out, p, f, log10(value), value);
            }
    } else {
        step = chart_step(f->high - f->low, 9, p->integer_y);
        for (at = ceil(f->low / step) * step; at <= f->high; at += step) chart_tick_y(out, p, f, at, at);
    }
    step = chart_step(f->x_max + 1.0, 8, 1);
    for (at = 0.0; at <= f->x_max + 1.0; at += step) {
        double x = chart_px(f, at > f->x_max ? f->x_max : at);
        snprintf(text, sizeof text, "%g", at);
        fprintf(out, "<path d=\"M%.1f %.1fv5\"/>\n", x, f->y + f->height);
        chart_text(out, x, f->y + f->height + 19, "middle", "", text);
    }
}

/* The attributes of a line. */
static inline void chart_stroke(FILE* out, const chart_series* s) {
    fprintf(out, " fill=\"none\" stroke=\"%s\" stroke-width=\"%.1f\" stroke-opacity=\"%.2f\"", s->color, s->width,
            s->opacity);
    fputs(" stroke-linejoin=\"round\"", out);
    if (s->dash) fprintf(out, " stroke-dasharray=\"%s\"", s->dash);
}

/* A line through the usable points: M starts a piece, L goes on; a staircase goes across, then up or down. */
static inline void chart_line(FILE* out, const chart_panel* p, const chart_frame* f, const chart_series* s) {
    int k, open = 0;
    double last = 0.0;
    fputs("<path", out);
    chart_stroke(out, s);
    fputs(" d=\"", out);
    for (k = 0; k < s->count; k++) {
        double x = chart_px(f, k), y;
        if (!chart_usable(p, &s->y[k])) { open = 0; continue; }
        y = chart_py(f, chart_axis(f, s->y[k]));
        if (!open) fprintf(out, "M%.1f %.1f", x, y);
        else if (!p->steps) fprintf(out, "L%.1f %.1f", x, y);
        else if (y != last || k + 1 == s->count) fprintf(out, "L%.1f %.1fL%.1f %.1f", x, last, x, y);
        open = 1;
        last = y;
    }
    fputs("\"/>\n", out);
}

static inline void chart_cross(FILE* out, double x, double y, const char* color) {
    fprintf(out, "<path d=\"M%.1f %.1fl8 8m0 -8l-8 8\" stroke=\"%s\" stroke-width=\"2\"/>\n", x - 4, y - 4, color);
}

static inline void chart_marks(FILE* out, const chart_panel* p, const chart_frame* f, const chart_series* s) {
    int k;
    for (k = 0; s->marks && k < s->count; k++)
        if (s->marks[k] && chart_usable(p, &s->y[k]))
            chart_cross(out, chart_px(f, k), chart_py(f, chart_axis(f, s->y[k])), p->mark_color);
}

/* One line of samples and names under the title. A letter is taken as 7 pixels wide. */
static inline void chart_legend(FILE* out, const chart_panel* p, const chart_frame* f) {
    double x = f->x, y = f->y - 20;
    int i;
    for (i = 0; i < p->series_count; i++) {
        const chart_series* s = &p->series[i];
        fprintf(out, "<path d=\"M%.1f %.1fh26\"", x, y - 4);
        chart_stroke(out, s);
        fputs("/>\n", out);
        chart_text(out, x + 32, y, "start", "", s->name);
        x += 32 + 7.0 * (double)strlen(s->name) + 18;
    }
    if (!p->mark_name) return;
    chart_cross(out, x + 4, y - 4, p->mark_color);
    chart_text(out, x + 16, y, "start", "", p->mark_name);
}

static inline void chart_draw_panel(FILE* out, const chart_panel* p, int index) {
    chart_frame f = chart_measure(p, index);
    int i;
    chart_text(out, f.x, f.y - 48, "start", " font-size=\"15\" font-weight=\"600\"", p->title);
    chart_legend(out, p, &f);
    chart_ticks(out, p, &f);
    fprintf(out, "<path d=\"M%.1f %.1fv%.1fh%.1f\" fill=\"none\"/>\n", f.x, f.y, f.height, f.width);
    chart_text(out, f.x + f.width / 2, f.y + f.height + 40, "middle", "", p->x_label);
    for (i = 0; i < p->series_count; i++) chart_line(out, p, &f, &p->series[i]);
    for (i = 0; i < p->series_count; i++) chart_marks(out, p, &f, &p->series[i]);
}

static inline void chart_draw(FILE* out, const char* title, const chart_panel* panels, int count) {
    int width = CHART_PANEL * count, i;
    fprintf(out, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\"\n"
                 "     font-family=\"system-ui, Helvetica, Arial, sans-serif\" font-size=\"12.5\">\n",
            width, CHART_HEIGHT, width, CHART_HEIGHT);
    fprintf(out, "<title>%s</title>\n<style>text{stroke:none}</style>\n", title);
    fprintf(out, "<g fill=\"%s\" stroke=\"%s\">\n", CHART_NEUTRAL, CHART_NEUTRAL);
    for (i = 0; i < count; i++) chart_draw_panel(out, &panels[i], i);
    fputs("</g>\n</svg>\n", out);
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

/* Writes the picture. Returns 1, or 0 with a sentence in `error`; then no file was changed. */
static inline int chart_write(const char* path, const char* title, const chart_panel* panels, int count,
                              char* error) {
    char temporary[1024];
    FILE* out;
    int ok;
    if (!chart_try(path, error)) return 0;
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    out = fopen(temporary, "wb");
    if (out) chart_draw(out, title, panels, count);
    ok = out && !ferror(out);
    if (out && fclose(out) != 0) ok = 0;
#if defined(_WIN32)
    if (ok) remove(path);                         /* rename does not replace a file there */
#endif
    if (ok && rename(temporary, path) == 0) return 1;
    remove(temporary);
    snprintf(error, CHART_ERROR, "%.300s: writing it failed, is the disk full?", path);
    return 0;
}

#endif /* EXAMPLES_CHART_H */
