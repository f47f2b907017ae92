/* test_conv.c - convolution, forward and backward, bit for bit and against double precision.
   The exact reference sums the products of each output element in the documented order with fmaf:
   y: (c, kernel row, kernel column) ascending; dw: (image, output row, output column); dx: (o, kernel row, kernel column)
   of the kernel positions that the stride lets meet the pixel. Margins are zeros. */
#include "pages.h"
#include "amx.h"
#include "helpers.h"
#include <fenv.h>
#include <limits.h>
#include <math.h>

/* A packed tensor as stored, with guard bytes on both sides, and its values as floats. */
typedef struct tensor { amp_dtype dtype; size_t count; unsigned char* bytes; float* value; } tensor;
enum { GUARD = 16, FILL = 0xff };      /* a NaN in every type: what is read by mistake shows */

static void* tensor_at(const tensor* t) { return t->bytes + GUARD; }
static void tensor_restore(tensor* t) { amp_convert(amp_ref_of(tensor_at(t), t->dtype),
    amp_f32(t->value), t->count); }
static tensor tensor_new(amp_dtype dtype, size_t count) {
    tensor t;
    size_t i;
    t.dtype = dtype; t.count = count;
    t.bytes = (unsigned char*)malloc(count * amp_dtype_size(dtype) + 2 * GUARD);
    t.value = (float*)malloc(count * sizeof(float));
    memset(t.bytes, FILL, count * amp_dtype_size(dtype) + 2 * GUARD);
    for (i = 0; i < count; i++) t.value[i] = test_uniform();
    tensor_restore(&t);
    amp_convert(amp_f32(t.value), amp_ref_of(tensor_at(&t), dtype), count);
    return t;
}
static void tensor_free(tensor* t) { free(t->bytes); free(t->value); }

/* The stored tensor must be `expected` rounded once to its type, and its guards untouched. */
static void tensor_check(const tensor* t, const float* expected, const char* what) {
    size_t size = amp_dtype_size(t->dtype), i, bad = 0, first = 0, intact = 0;
    unsigned char* want = (unsigned char*)malloc(t->count * size);
    amp_convert(amp_ref_of(want, t->dtype), amp_f32(expected), t->count);
    for (i = t->count; i-- > 0; )
        if (memcmp(want + i * size, t->bytes + GUARD + i * size, size) != 0) { bad++; first = i; }
    for (i = 0; i < GUARD; i++) {
        intact += (size_t)(t->bytes[i] == FILL);
        intact += (size_t)(t->bytes[GUARD + t->count * size + i] == FILL);
    }
    CHECK_MSG(bad == 0, "%s %s: %lu of %lu differ, the first at %lu", amp_isa_name(amp_cpu_isa()), what,
              (unsigned long)bad, (unsigned long)t->count, (unsigned long)first);
    CHECK_MSG(intact == 2 * GUARD, "%s: bytes beside the tensor were written", what);
    free(want);
}

typedef struct conv {
    amp_conv2d_shape s;
    int oh, ow, cg, og;
    tensor x, w, b, y, dy, dx, dw, db;
    float *ry, *rdx, *rdw, *rdb, *rdw_added, *rdb_added;       /* expected sums, not yet rounded */
} conv;

static int pad_end[2];      /* of the shapes below */
static amp_conv2d_shape shape_of(int n, int c, int h, int w, int o, int kh, int kw, int sh, int sw, int ph, int pw,
                                 int dh, int dw, int groups) {
    amp_conv2d_shape s;
    memset(&s, 0, sizeof s);
    s.n = n; s.channels = c; s.height = h; s.width = w; s.out_channels = o; s.kernel_h = kh; s.kernel_w = kw;
    s.stride_h = sh; s.stride_w = sw; s.pad_h = ph; s.pad_w = pw; s.dilation_h = dh; s.dilation_w = dw; s.groups = groups;
    s.pad_end_h = pad_end[0]; s.pad_end_w = pad_end[1];
    return s;
}

static size_t x_at(const conv* v, int n, int c, int i, int j) {
    return ((size_t)(n * v->s.channels + c) * (size_t)v->s.height + (size_t)i) * (size_t)v->s.width + (size_t)j;
}
static size_t w_at(const conv* v, int o, int c, int a, int b) {
    return ((size_t)(o * v->cg + c) * (size_t)v->s.kernel_h + (size_t)a) * (size_t)v->s.kernel_w + (size_t)b;
}
static size_t y_at(const conv* v, int n, int o, int i, int j) {
    return ((size_t)(n * v->s.out_channels + o) * (size_t)v->oh + (size_t)i) * (size_t)v->ow + (size_t)j;
}
static int inside(const conv* v, int i, int j) { return i >= 0 && j >= 0 && i < v->s.height && j < v->s.width; }
/* A row of x; of zeros where there is none. */
static const float* x_row(const conv* v, int n, int c, int i) {
    static const float zeros[1024];
    return i >= 0 && i < v->s.height ? v->x.value + x_at(v, n, c, i, 0) : zeros;
}

/* Sums of many elements grow side by side, each in the documented order: one factor of all, then the next one. */
static float sums[65536];
/* Those of the matrix unit beside them, while `matrix_unit`; it takes k >= 32. */
static amx_sum unit[65536];
static int matrix_unit, fast_sums;    /* fast_sums: calls are with AMP_SUMS_FAST */
static void sums_begin(size_t count) {
    if (count > sizeof sums / sizeof *sums) abort();
    memset(sums, 0, count * sizeof *sums);
    if (matrix_unit) memset(unit, 0, count * sizeof *unit);
}
static void sums_end(float* to, size_t count) {
    size_t i;
    for (i = 0; i < count; i++) {
        const float sum = matrix_unit && unit[i].count >= 32 ? amx_total(&unit[i]) : sums[i];
        to[i] = isnan(sum) ? NAN : sum;
    }
}
/* Adds a product to a sum, and to that of the matrix unit. */
TEST_REFERENCE static void add_product(float* sum, float a, float b) {
    *sum = fmaf(a, b, *sum);
    if (matrix_unit) amx_add(&unit[sum - sums], a, b);
}

/* One plane of y: adds a weight times the pixel that meets it, or times the zero of a margin. */
TEST_REFERENCE static void add_to_y(const conv* v, int n, int c, int a, int b, float weight) {
    int i, j;
    for (i = 0; i < v->oh; i++) {
        const float* row = x_row(v, n, c, i * v->s.stride_h - v->s.pad_h + a * v->s.dilation_h);
        const int step = v->s.stride_w, width = v->s.width;
        float* to = sums + i * v->ow;
        int x = b * v->s.dilation_w - v->s.pad_w;
        for (j = 0; j < v->ow; j++, x += step) add_product(&to[j], weight, x >= 0 && x < width ? row[x] : 0.0f);
    }
}
static void reference_y(conv* v) {
    int n, o, i, c, a, b;
    if (v->s.width > 1024) abort();
    for (n = 0; n < v->s.n; n++) for (o = 0; o < v->s.out_channels; o++) {
        float* to = v->ry + y_at(v, n, o, 0, 0);
        sums_begin((size_t)(v->oh * v->ow));
        for (c = 0; c < v->cg; c++) for (a = 0; a < v->s.kernel_h; a++) for (b = 0; b < v->s.kernel_w; b++)
            add_to_y(v, n, o / v->og * v->cg + c, a, b, v->w.value[w_at(v, o, c, a, b)]);
        sums_end(to, (size_t)(v->oh * v->ow));
        for (i = 0; i < v->oh * v->ow; i++) {
            volatile float sum = to[i];
            sum += v->b.value[o];
            to[i] = isnan(sum) ? NAN : sum;
        }
    }
}

/* The kernel's gradient of one output channel: adds dy's pixel times the pixel of x that meets it at each position. */
TEST_REFERENCE static void add_to_dw(const conv* v, int n, int o, int i, int j) {
    const float dy = v->dy.value[y_at(v, n, o, i, j)];
    const int step = v->s.dilation_w, width = v->s.width;
    float* to = sums;
    int c, a, b;
    for (c = 0; c < v->cg; c++) for (a = 0; a < v->s.kernel_h; a++) {
        const float* row = x_row(v, n, o / v->og * v->cg + c, i * v->s.stride_h - v->s.pad_h + a * v->s.dilation_h);
        int x = j * v->s.stride_w - v->s.pad_w;
        for (b = 0; b < v->s.kernel_w; b++, x += step, to++) add_product(to, dy, x >= 0 && x < width ? row[x] : 0.0f);
    }
}
static void reference_dw(conv* v) {
    const size_t kernel = w_at(v, 1, 0, 0, 0);
    size_t at;
    int n, o, i, j;
    for (o = 0; o < v->s.out_channels; o++) {
        sums_begin(kernel);
        for (n = 0; n < v->s.n; n++) for (i = 0; i < v->oh; i++) for (j = 0; j < v->ow; j++) add_to_dw(v, n, o, i, j);
        sums_end(v->rdw + w_at(v, o, 0, 0, 0), kernel);
    }
    for (at = 0; at < v->dw.count; at++) v->rdw_added[at] = v->rdw[at] + v->dw.value[at];
}

/* The output pixel in which a kernel's position meets the input, along one side: -1 if that is a margin, -2 if the stride
   leaves it out. */
static int met(int at, int stride, int count) {
    if (at % stride != 0) return -2;
    return at >= 0 && at / stride < count ? at / stride : -1;
}
/* One plane of dx: adds a weight times the pixel of dy that it met, or times zero in a margin. columns: met, per column. */
TEST_REFERENCE static void add_to_dx(const conv* v, int n, int o, int a, float weight, const int* columns) {
    int i, j;
    for (i = 0; i < v->s.height; i++) {
        const int met_row = met(i + v->s.pad_h - a * v->s.dilation_h, v->s.stride_h, v->oh), width = v->s.width;
        const float* row = v->dy.value + y_at(v, n, o, met_row < 0 ? 0 : met_row, 0);
        float* to = sums + i * width;
        for (j = 0; j < width && met_row != -2; j++) {
            if (columns[j] == -2) continue;
            add_product(&to[j], weight, met_row >= 0 && columns[j] >= 0 ? row[columns[j]] : 0.0f);
        }
    }
}
static void reference_dx(conv* v) {
    static int columns[16][1024];
    int n, o, c, j, a, b;
    if (v->s.kernel_w > 16) abort();
    for (b = 0; b < v->s.kernel_w; b++) for (j = 0; j < v->s.width; j++)
        columns[b][j] = met(j + v->s.pad_w - b * v->s.dilation_w, v->s.stride_w, v->ow);
    for (n = 0; n < v->s.n; n++) for (c = 0; c < v->s.channels; c++) {
        const int group = c / v->cg;
        sums_begin((size_t)(v->s.height * v->s.width));
        for (o = group * v->og; o < (group + 1) * v->og; o++)
            for (a = 0; a < v->s.kernel_h; a++) for (b = 0; b < v->s.kernel_w; b++)
                add_to_dx(v, n, o, a, v->w.value[w_at(v, o, c % v->cg, a, b)], columns[b]);
        sums_end(v->rdx + x_at(v, n, c, 0, 0), (size_t)(v->s.height * v->s.width));
    }
}

/* Pixel p of a plane goes to sum p % 16, image after image; then a tree. */
static void reference_db(conv* v) {
    int o, n, p, pixels = v->oh * v->ow;
    for (o = 0; o < v->s.out_channels; o++) {
        volatile float sum[16] = { 0 };
        for (n = 0; n < v->s.n; n++)
            for (p = 0; p < pixels; p++) sum[p % 16] += v->dy.value[y_at(v, n, o, 0, 0) + (size_t)p];
        for (n = 8; n > 0; n /= 2) for (p = 0; p < n; p++) sum[p] += sum[p + n];
        v->rdb[o] = sum[0];
        v->rdb_added[o] = sum[0] + v->db.value[o];
    }
}

/* Some values of a tensor become a special one; most become so small that products of two vanish. */
static void tensor_spoil(tensor* t, float special, uint32_t one_in) {
    size_t i;
    for (i = 0; i < t->count; i++) t->value[i] = test_random() % one_in == 0 ? special : 1e-30f * t->value[i];
    tensor_restore(t);
    amp_convert(amp_f32(t->value), amp_ref_of(tensor_at(t), t->dtype), t->count);
}

/* 1: the expected sums are not wanted. */
static int without_reference;

/* Some activations and gradients are infinite; a few weights are; products of two are subnormal; all weights are zeros but
   the last, whose products are. */
static enum { USUAL, INFINITE_ACTIVATIONS, INFINITE_WEIGHTS, SMALL_PRODUCTS, SMALL_LAST_WEIGHT } numbers;
static void tensor_set(tensor* t, float special, uint32_t one_in) {
    size_t i;
    for (i = 0; i < t->count; i++) if (test_random() % one_in == 0) t->value[i] = special;
    tensor_restore(t);
    amp_convert(amp_f32(t->value), amp_ref_of(tensor_at(t), t->dtype), t->count);
}
static void tensor_scale(tensor* t, int power) {
    size_t i;
    for (i = 0; i < t->count; i++) t->value[i] = ldexpf(t->value[i], power);
    tensor_restore(t);
    amp_convert(amp_f32(t->value), amp_ref_of(tensor_at(t), t->dtype), t->count);
}
/* y, dx, dw and db are stored as `result`. special: NULL, or what some of w and dy become. */
static conv conv_new(amp_conv2d_shape s, amp_dtype act, amp_dtype weight, amp_dtype result, const float* special) {
    conv v;
    size_t x, w, y, i, o = (size_t)s.out_channels;
    CHECK(amp_conv2d_output(&s, &v.oh, &v.ow, NULL) == AMP_OK);
    v.s = s;
    v.cg = s.channels / s.groups; v.og = s.out_channels / s.groups;
    x = (size_t)(s.n * s.channels * s.height * s.width);
    w = (size_t)(s.out_channels * v.cg * s.kernel_h * s.kernel_w);
    y = (size_t)(s.n * s.out_channels * v.oh * v.ow);
    v.x = tensor_new(act, x);   v.w = tensor_new(weight, w);  v.b = tensor_new(weight, o);  v.dy = tensor_new(act, y);
    v.y = tensor_new(result, y); v.dx = tensor_new(result, x); v.dw = tensor_new(result, w); v.db = tensor_new(result, o);
    if (special) {
        tensor_spoil(&v.x, 0.0f, 97); tensor_spoil(&v.w, *special, 13); tensor_spoil(&v.dy, *special, 97);
        tensor_spoil(&v.dw, 0.0f, 97);
        for (i = 0; i < o; i++) v.b.value[i] = -0.0f;
        tensor_restore(&v.b);
    }
    if (numbers == INFINITE_ACTIVATIONS) {
        tensor_set(&v.x, INFINITY, 97); tensor_set(&v.dy, -INFINITY, 97);
    }
    if (numbers == INFINITE_WEIGHTS) tensor_set(&v.w, INFINITY, 2999);
    if (numbers == SMALL_PRODUCTS) {
        tensor_scale(&v.x, -67); tensor_scale(&v.dy, -67); tensor_scale(&v.w, -67); tensor_scale(&v.b, -134);
    }
    if (numbers == SMALL_LAST_WEIGHT) {
        tensor_scale(&v.x, -30); tensor_scale(&v.dy, -30);
        tensor_set(&v.w, 0.0f, 1); tensor_set(&v.b, 0.0f, 1);
        v.w.value[w - 1] = 1.0f;
        tensor_scale(&v.w, -100);
    }
    v.ry = (float*)malloc(y * sizeof(float));         v.rdx = (float*)malloc(x * sizeof(float));
    v.rdw = (float*)malloc(w * sizeof(float));        v.rdw_added = (float*)malloc(w * sizeof(float));
    v.rdb = (float*)malloc(o * sizeof(float));        v.rdb_added = (float*)malloc(o * sizeof(float));
    if (!without_reference) {
        const int unit_fits = fast_sums && amp_cpu_has_fast_sums() && act == AMP_BF16 && weight == AMP_BF16 && v.cg > 1;
        matrix_unit = unit_fits && v.og >= 16;
        reference_y(&v); reference_dw(&v);
        matrix_unit = unit_fits && v.cg >= 16;
        reference_dx(&v);
        matrix_unit = 0;
        reference_db(&v);
    }
    return v;
}
static void conv_free(conv* v) {
    tensor_free(&v->x); tensor_free(&v->w); tensor_free(&v->b); tensor_free(&v->y);
    tensor_free(&v->dy); tensor_free(&v->dx); tensor_free(&v->dw); tensor_free(&v->db);
    free(v->ry); free(v->rdx); free(v->rdw); free(v->rdb); free(v->rdw_added); free(v->rdb_added);
}

/* rdx + dx, as the call adds it. */
static void check_added_dx(const conv* v) {
    float* want = (float*)malloc(v->dx.count * sizeof *want);
    size_t i;
    for (i = 0; i < v->dx.count; i++) want[i] = v->rdx[i] + v->dx.value[i];
    tensor_check(&v->dx, want, "added dx");
    free(want);
}

/* Forward and backward; without `accumulate` the gradients come from two calls, each with a workspace full of NaN. */
static void conv_check(conv* v, int accumulate, size_t workspace) {
    const int input = (accumulate & AMP_ACCUMULATE_INPUT) != 0, params = (accumulate & AMP_ACCUMULATE_PARAMS) != 0;
    unsigned char* memory = (unsigned char*)malloc(workspace + GUARD);
    int part;
    amp_exec exec;
    size_t i, intact = 0;
    memset(&exec, 0, sizeof exec);
    exec.sums = fast_sums ? AMP_SUMS_FAST : AMP_SUMS_FIXED;
    memset(memory, FILL, workspace + GUARD);
    exec.workspace = memory; exec.workspace_size = workspace;
    tensor_restore(&v->dw); tensor_restore(&v->db);
    memset(tensor_at(&v->y), 0xff, v->y.count * amp_dtype_size(v->y.dtype));
    if (input) tensor_restore(&v->dx);
    else memset(tensor_at(&v->dx), 0xff, v->dx.count * amp_dtype_size(v->dx.dtype));
    CHECK(amp_conv2d_forward(&v->s, amp_ref_of(tensor_at(&v->x), v->x.dtype),
        amp_ref_of(tensor_at(&v->w), v->w.dtype), amp_ref_of(tensor_at(&v->b), v->b.dtype),
        amp_ref_of(tensor_at(&v->y), v->y.dtype), workspace || fast_sums ? &exec : NULL) == AMP_OK);
    for (part = 0; part < (accumulate ? 1 : 2); part++) {
        int dx = accumulate || part == 0, dw = accumulate || part == 1;
        memset(memory, FILL, workspace);
        CHECK(amp_conv2d_backward(&v->s, amp_ref_of(tensor_at(&v->dy), v->dy.dtype),
            amp_ref_of(tensor_at(&v->x), v->x.dtype), amp_ref_of(tensor_at(&v->w), v->w.dtype),
            amp_ref_of(dx ? tensor_at(&v->dx) : NULL, v->dx.dtype),
            amp_ref_of(dw ? tensor_at(&v->dw) : NULL, v->dw.dtype),
            amp_ref_of(dw ? tensor_at(&v->db) : NULL, v->db.dtype), accumulate,
            workspace || fast_sums ? &exec : NULL) == AMP_OK);
    }
    tensor_check(&v->y, v->ry, "y");
    if (input) check_added_dx(v);
    else tensor_check(&v->dx, v->rdx, "dx");
    tensor_check(&v->dw, params ? v->rdw_added : v->rdw, "dw");
    tensor_check(&v->db, params ? v->rdb_added : v->rdb, "db");
    for (i = 0; i < GUARD; i++) intact += memory[workspace + i] == FILL;
    CHECK_MSG(intact == GUARD, "bytes behind the workspace were written");
    free(memory);
}

/* n c h w, o kh kw, stride, pad, dilation, groups */
static const int SHAPES[][14] = {
    { 2, 3, 7, 9, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1 },      /* the usual one */
    { 2, 1, 12, 12, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1 },
    { 3, 6, 8, 8, 16, 5, 5, 1, 1, 0, 0, 1, 1, 1 },
    { 1, 4, 9, 11, 6, 3, 2, 2, 3, 1, 0, 1, 1, 2 },     /* strides, groups, unequal sides */
    { 2, 2, 10, 7, 3, 3, 3, 1, 2, 2, 3, 2, 1, 1 },     /* dilation */
    { 1, 2, 13, 13, 2, 3, 3, 3, 2, 4, 4, 3, 4, 1 },    /* stride and dilation with a common divisor and without */
    { 2, 5, 6, 6, 5, 3, 3, 1, 1, 1, 1, 1, 1, 5 },      /* depthwise */
    { 1, 3, 9, 9, 6, 3, 3, 2, 2, 1, 1, 1, 1, 3 },      /* depthwise with a multiplier and a stride */
    { 3, 7, 5, 4, 9, 1, 1, 1, 1, 0, 0, 1, 1, 1 },      /* 1 x 1 */
    { 3, 10, 8, 9, 6, 1, 1, 1, 1, 0, 0, 1, 1, 2 },     /* 1 x 1, image by image */
    { 2, 3, 8, 8, 4, 1, 1, 2, 2, 0, 0, 1, 1, 1 },      /* 1 x 1 with a stride: pixels that meet no output */
    { 2, 3, 7, 8, 4, 2, 1, 2, 2, 0, 0, 1, 1, 1 },      /* a phase of dx with more rows than dy */
    { 3, 5, 1, 1, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1 },      /* one pixel, with a stride */
    { 2, 3, 5, 6, 4, 5, 6, 1, 1, 0, 0, 1, 1, 1 },      /* kernel = input */
    { 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1 },
    { 2, 3, 1, 1, 4, 3, 3, 2, 2, 1, 1, 1, 1, 1 },      /* planes of one pixel, and of one row, with a stride */
    { 2, 18, 1, 5, 3, 3, 3, 3, 2, 1, 1, 1, 1, 1 },
    { 1, 2, 3, 3, 2, 5, 5, 1, 1, 4, 4, 1, 1, 1 },      /* padding larger than the input: kernel rows that see nothing */
    { 1, 1, 3, 40, 2, 2, 2, 1, 25, 0, 30, 1, 1, 1 },   /* stride larger than a kernel */
    { 1, 2, 4, 300, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    /* rows longer than a panel */
    { 1, 2, 3, 700, 3, 1, 3, 1, 2, 0, 1, 1, 1, 1 },
    { 2, 21, 7, 9, 21, 5, 4, 2, 1, 3, 2, 1, 2, 21 },   /* depthwise, channels that fill a vector and more */
    { 3, 16, 6, 5, 16, 3, 3, 1, 2, 0, 1, 1, 1, 16 },
    { 3, 17, 5, 5, 17, 3, 3, 1, 1, 1, 1, 1, 1, 17 },   /* pairs of pixels across rows and images, the last one alone */
    { 2, 8, 24, 41, 8, 3, 3, 1, 1, 1, 1, 1, 1, 8 },    /* more than the stack has room for at once */
    { 2, 40, 5, 5, 20, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    /* k larger than a block */
    { 1, 2, 72, 70, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1 },      /* more than one band of rows */
    { 3, 1, 5, 7, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1 },        /* an odd number of pixels and of terms */
    { 13, 9, 5, 6, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1 },     /* channels and terms odd in a large batch */
    { 13, 8, 6, 5, 9, 3, 3, 1, 1, 1, 1, 1, 1, 1 },     /* batches that fill a vector, and more than two */
    { 37, 7, 5, 4, 8, 4, 3, 2, 1, 1, 2, 1, 1, 1 },
    { 25, 12, 5, 6, 10, 5, 5, 3, 2, 2, 3, 1, 1, 2 },
    { 29, 7, 6, 11, 5, 3, 4, 1, 2, 1, 0, 1, 1, 1 },    /* one with a stride along rows, and none of their pixels at a margin */
    { 12, 8, 18, 17, 5, 3, 3, 1, 1, 1, 1, 1, 2, 1 },
    { 3, 130, 5, 5, 61, 3, 3, 2, 2, 0, 1, 1, 1, 1 },   /* dw in more than one tile, of channels and of outputs */
    { 1, 8, 5, 5, 910, 3, 3, 2, 2, 0, 0, 1, 1, 1 },
    { 1, 2, 13, 9, 9, 4, 3, 4, 3, 0, 2, 1, 1, 1 },     /* strides: some pixels' lines are others than dy's, but as many */
    { 1, 160, 5, 4, 192, 3, 3, 2, 2, 1, 1, 1, 1, 1 },  /* strides, and weights that do not fit a cache */
    { 2, 5, 7, 31, 67, 1, 1, 2, 2, 0, 0, 1, 1, 1 },    /* many outputs: 1 x 1 with a stride, and without one */
    { 1, 2, 4, 63, 66, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 17, 5, 7, 23, 3, 3, 2, 2, 1, 1, 1, 1, 1 },    /* dx as products of words, part by part */
    { 1, 130, 3, 4, 226, 3, 3, 1, 1, 1, 1, 1, 1, 1 },  /* too many weights for a direct form */
    { 1, 5, 60, 60, 2, 3, 3, 2, 2, 1, 1, 1, 1, 1 }     /* dw by parts of the rows, with a stride */
};

static void conv_check_all(const int* z, amp_dtype act, amp_dtype weight, amp_dtype result, const float* special) {
    const amp_isa best = amp_cpu_isa();
    const int both = AMP_ACCUMULATE_PARAMS | AMP_ACCUMULATE_INPUT;
    static unsigned turn;
    conv v;
    unsigned i, q, own;
    if (!test_due()) return;
    v = conv_new(shape_of(z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8], z[9], z[10], z[11], z[12], z[13]),
                 act, weight, result, special);
    turn++;
    own = (turn + turn / 4) % 4;        /* lists have four types in a row: each of them meets each kind of call */
    for (i = 0; i < 5; i++) {
        /* One kind of call in turn where portable C is slow, and where pairs of bfloat16 have nothing to do. */
        const int one = best != AMP_ISA_SCALAR
                        && (ISAS[i] == AMP_ISA_SCALAR
                            || (ISAS[i] == AMP_ISA_AVX512_BF16 && (act != AMP_BF16 || weight != AMP_BF16)));
        size_t full;
        if ((fast_sums && ISAS[i] != best) || amp_cpu_force_isa(ISAS[i]) != AMP_OK) continue;
        full = amp_conv2d_workspace(&v.s);
        CHECK(full > 0);
        for (q = 0; q < 4; q++) {
            const int accumulate = q == 0 ? 0 : q == 1 ? (turn % 3 ? 1 : both) : q == 2 ? (turn % 2 ? 1 : both)
                                 : turn % 3 ? 0 : AMP_ACCUMULATE_INPUT;
            if (!one || q == own) conv_check(&v, accumulate, q == 1 ? full / 2 + 1 : q == 3 ? 0 : full);
        }
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
    conv_free(&v);
}

static void test_shapes(void) {
    size_t i, t;
    for (i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        for (t = 0; t < 4; t++)
            conv_check_all(SHAPES[i], TYPES[t % 3], TYPES[t == 3 ? 1 : t], TYPES[(t + i) % 3], NULL);
}

static void test_type_mixes(void) {
    size_t t;
    for (t = 0; t < 27; t++) conv_check_all(SHAPES[t % 4], TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3], NULL);
}

static void test_random_convolutions(void) {
    int i;
    for (i = 0; i < 60; i++) {
        int z[14], groups = 1 + (int)(test_random() % 3), side, t = (int)(test_random() % 3);
        z[0] = 1 + (int)(test_random() % 3);
        z[1] = groups * (1 + (int)(test_random() % 4));
        z[4] = groups * (1 + (int)(test_random() % 5));
        for (side = 0; side < 2; side++) {
            z[5 + side] = 1 + (int)(test_random() % 4);
            z[7 + side] = 1 + (int)(test_random() % 4);
            z[9 + side] = (int)(test_random() % 4);
            z[11 + side] = 1 + (int)(test_random() % 3);
            z[2 + side] = z[11 + side] * (z[5 + side] - 1) + 1 + (int)(test_random() % 14);
        }
        z[13] = groups;
        conv_check_all(z, TYPES[t], TYPES[t], TYPES[test_random() % 3], NULL);
    }
}

/* Padding below and to the right of its own: as TensorFlow's SAME, none, more than the kernel. */
static void test_pad_end(void) {
    static const int Z[7][14] = { { 2, 3, 8, 8, 5, 3, 3, 2, 2, 0, 0, 1, 1, 1 },
        { 1, 4, 9, 7, 6, 3, 3, 1, 1, 1, 1, 1, 1, 1 }, { 2, 6, 5, 40, 6, 1, 1, 1, 1, 0, 0, 1, 1, 1 },
        { 1, 8, 12, 20, 8, 3, 3, 1, 1, 1, 1, 1, 1, 8 }, { 1, 32, 8, 17, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
        { 2, 4, 7, 11, 4, 2, 5, 3, 2, 1, 2, 2, 1, 2 }, { 1, 2, 6, 6, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1 } };
    static const int ends[][2] = { { 1, 1 }, { AMP_ZERO, AMP_ZERO }, { 2, AMP_ZERO }, { AMP_ZERO, 5 }, { 0, 3 } };
    int i, k, oh, ow;
    for (k = 0; k < 5; k++)
        for (i = 0; i < 7; i++) {
            const int* z = Z[i];
            amp_conv2d_shape s;
            pad_end[0] = ends[k][0]; pad_end[1] = ends[k][1];
            s = shape_of(z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8], z[9], z[10], z[11], z[12], z[13]);
            CHECK(amp_conv2d_output(&s, &oh, &ow, NULL) == AMP_OK);
            CHECK(oh == (z[2] + z[9] + (ends[k][0] ? ends[k][0] > 0 ? ends[k][0] : 0 : z[9]) - z[11] * (z[5] - 1) - 1) / z[7] + 1);
            CHECK(ow == (z[3] + z[10] + (ends[k][1] > 0 ? ends[k][1] : 0) - z[12] * (z[6] - 1) - 1) / z[8] + 1);
            conv_check_all(z, TYPES[(i + k) % 3], TYPES[(i + k) % 3], TYPES[i % 3], NULL);
        }
    pad_end[0] = pad_end[1] = 0;
}

/* AMP_SUMS_FAST changes no convolution: strides, groups, planes, one image, a pixel count that is no multiple of anything,
   a depth of several blocks. */
static void test_fast_sums(void) {
    static const int Z[9][14] = { { 2, 32, 6, 7, 33, 3, 3, 1, 1, 1, 1, 1, 1, 1 }, { 1, 128, 5, 5, 130, 3, 2, 1, 1, 1, 0, 1, 1, 1 },
        { 2, 64, 7, 5, 96, 1, 1, 1, 1, 0, 0, 1, 1, 1 },   { 2, 64, 6, 6, 64, 3, 3, 1, 1, 2, 2, 2, 2, 2 },
        { 3, 5, 9, 8, 48, 3, 3, 1, 1, 0, 0, 1, 1, 1 },    { 1, 40, 9, 9, 40, 3, 3, 2, 2, 1, 1, 1, 1, 1 },
        { 1, 256, 4, 4, 128, 1, 1, 1, 1, 0, 0, 1, 1, 1 }, { 4, 3, 20, 21, 32, 5, 5, 1, 1, 2, 2, 1, 1, 1 },
        { 2, 130, 17, 1, 36, 7, 1, 1, 1, 3, 0, 1, 1, 1 } };
    int i, t;
    fast_sums = 1;
    for (i = 0; i < 9; i++)
        for (t = 1; t < 3; t++) conv_check_all(Z[i], TYPES[t], TYPES[t], TYPES[(i + t) % 3], NULL);
    fast_sums = 0;
}

/* Products so small that sums are -0, whose sign a term 0 * w decides, and weights with which that term is a NaN. */
static void test_zeros_and_nans(void) {
    static const float specials[] = { 0.0f, -INFINITY, NAN };
    size_t i, k;
    for (i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        for (k = 0; k < 3; k++) {
            conv_check_all(SHAPES[i], AMP_BF16, AMP_BF16, AMP_F32, &specials[k]);
            if (k == i % 3) conv_check_all(SHAPES[i], AMP_F32, AMP_F32, AMP_BF16, &specials[k]);
        }
}

/* Infinite activations and gradients beside usual weights: a zero that stands in for a term must not meet them. */
static void test_infinities(void) {
    size_t i;
    numbers = INFINITE_ACTIVATIONS;
    for (i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        conv_check_all(SHAPES[i], i % 4 ? AMP_BF16 : AMP_F16, i % 4 ? AMP_BF16 : AMP_F16, AMP_F32, NULL);
    numbers = USUAL;
}

/* BF16 with enough rows for products of words: tails, odd channels and pixels, several tiles and blocks, strides,
   dilation, groups. Scaled, so that nothing is subnormal, or an operand is, or a product. */
static void test_words(void) {
    static const int Z[][14] = {
        { 2, 7, 9, 8, 33, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 3, 25, 7, 7, 26, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
        { 2, 19, 9, 12, 35, 3, 3, 2, 2, 1, 1, 1, 1, 1 }, { 2, 17, 11, 10, 32, 2, 4, 3, 3, 2, 1, 1, 2, 1 },
        { 1, 33, 9, 9, 40, 1, 1, 2, 2, 0, 0, 1, 1, 1 },  { 3, 48, 5, 5, 48, 1, 1, 1, 1, 0, 0, 1, 1, 1 },
        { 2, 34, 8, 9, 64, 3, 3, 1, 1, 2, 2, 2, 2, 2 },  { 1, 18, 4, 90, 24, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
        { 1, 16, 5, 70, 33, 3, 2, 2, 2, 1, 1, 3, 1, 1 }, { 1, 110, 6, 6, 30, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
        { 1, 16, 30, 30, 33, 2, 2, 1, 1, 1, 1, 1, 1, 1 }, { 2, 24, 9, 8, 40, 5, 5, 1, 2, 2, 2, 1, 1, 1 },
        { 2, 17, 9, 10, 23, 3, 3, 2, 2, 1, 1, 1, 1, 1 }, { 1, 16, 11, 13, 24, 3, 4, 3, 2, 2, 1, 1, 1, 1 },
        { 2, 36, 8, 9, 48, 2, 3, 2, 2, 1, 0, 1, 1, 2 },  { 1, 20, 13, 12, 26, 3, 3, 2, 3, 2, 2, 2, 1, 1 },
        { 1, 32, 9, 14, 31, 5, 5, 2, 2, 2, 2, 1, 1, 1 }, { 1, 24, 9, 70, 25, 3, 3, 4, 1, 1, 1, 1, 1, 1 },
        { 3, 16, 41, 27, 22, 3, 3, 2, 2, 1, 1, 1, 1, 1 }, { 1, 16, 5, 6, 220, 3, 3, 2, 2, 1, 1, 1, 1, 1 },
        { 1, 18, 7, 69, 24, 3, 3, 1, 4, 0, 2, 1, 1, 1 }, { 2, 17, 37, 4, 25, 3, 3, 2, 3, 1, 1, 1, 2, 1 },
        { 1, 18, 2, 69, 24, 3, 3, 2, 2, 1, 1, 1, 1, 1 }, { 1, 18, 5, 120, 70, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
        { 1, 16, 3, 460, 70, 3, 3, 1, 1, 1, 1, 1, 1, 1 }, /* and with so few that lanes are outputs: */
        { 3, 7, 6, 8, 13, 3, 3, 2, 1, 1, 1, 1, 1, 1 },   { 2, 3, 9, 10, 16, 5, 5, 1, 1, 2, 0, 1, 1, 1 },
        { 2, 8, 5, 6, 20, 3, 3, 1, 1, 1, 1, 1, 1, 2 },   { 2, 1, 7, 10, 6, 5, 5, 3, 1, 1, 2, 1, 1, 1 },
        { 3, 2, 2, 2, 9, 3, 3, 1, 1, 3, 4, 1, 1, 1 },    { 1, 33, 7, 9, 8, 3, 3, 1, 1, 0, 2, 1, 1, 1 } };
    static const int scale[4][2] = { { 0, 0 }, { -130, 60 }, { 60, -130 }, { -67, -67 } };
    const size_t shapes = sizeof Z / sizeof Z[0];
    const amp_isa best = amp_cpu_isa();
    size_t i, j, q;
    for (i = 0; i < shapes; i++)
        for (j = 0; j < (i < 3 ? 4u : 2u); j++) {
            const int* z = Z[i];
            const int* power = scale[i < 3 ? j : j == 0 ? 0 : 1 + i % 3];
            conv v;
            if (!test_due()) continue;
            without_reference = 1;           /* not of what is scaled below */
            v = conv_new(shape_of(z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8], z[9], z[10], z[11], z[12], z[13]),
                         AMP_BF16, AMP_BF16, TYPES[i % 3], NULL);
            without_reference = 0;
            tensor_scale(&v.x, power[0]); tensor_scale(&v.dy, power[1]); tensor_scale(&v.w, power[1]);
            tensor_scale(&v.b, power[0] + power[1]);
            reference_y(&v); reference_dw(&v); reference_dx(&v); reference_db(&v);
            for (q = 0; q < 5; q++) {
                const int one = ISAS[q] == AMP_ISA_SCALAR && best != AMP_ISA_SCALAR;       /* of two kinds of call, in turn */
                if (amp_cpu_force_isa(ISAS[q]) != AMP_OK) continue;
                if (!one || (i + j) % 2) conv_check(&v, j == 1 ? AMP_ACCUMULATE_INPUT : 0, amp_conv2d_workspace(&v.s));
                if (!one || (i + j) % 2 == 0) conv_check(&v, 0, 0);
            }
            amp_cpu_force_isa(AMP_ISA_AUTO);
            conv_free(&v);
        }
    for (i = 0; i < shapes; i++) conv_check_all(Z[i], AMP_BF16, TYPES[i % 2], TYPES[i % 3], NULL);    /* no words in A */
}

/* Short rows of pixels: images that share a panel, rows of each length beside the width of a panel, with and without a
   stride, channels of one block or more, kernels that see nothing but padding. */
static const int SHORT_ROWS[][14] = {
    { 2, 32, 7, 7, 48, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    { 2, 33, 4, 4, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 2, 47, 9, 5, 33, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    { 2, 32, 5, 6, 64, 5, 3, 1, 1, 2, 1, 1, 1, 1 },
    { 2, 32, 8, 8, 63, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    { 2, 12, 9, 9, 80, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 65, 7, 15, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 1, 16, 11, 17, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 32, 5, 21, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 1, 12, 5, 25, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 12, 4, 28, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 2, 12, 14, 14, 32, 3, 3, 2, 2, 1, 1, 1, 1, 1 },
    { 1, 12, 28, 27, 96, 3, 3, 2, 2, 1, 1, 1, 1, 1 },  { 2, 12, 20, 31, 32, 3, 3, 2, 3, 1, 1, 1, 1, 1 },
    { 1, 12, 20, 40, 32, 5, 5, 2, 4, 2, 2, 1, 1, 1 },  { 1, 32, 12, 14, 32, 1, 7, 1, 1, 0, 3, 1, 1, 1 },
    { 2, 12, 12, 12, 32, 3, 3, 1, 1, 2, 2, 2, 2, 1 },  { 1, 12, 4, 4, 32, 3, 3, 1, 1, 4, 4, 1, 1, 1 },
    { 2, 12, 19, 20, 31, 3, 4, 1, 2, 1, 2, 2, 3, 1 },  { 2, 200, 7, 7, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 12, 13, 29, 32, 3, 3, 2, 2, 1, 1, 1, 1, 1 },  { 1, 80, 5, 26, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 80, 7, 17, 80, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 1, 65, 5, 22, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 2, 64, 7, 7, 112, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 2, 48, 13, 13, 80, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 3, 47, 4, 4, 48, 3, 3, 1, 1, 1, 1, 1, 1, 1 },   { 3, 48, 5, 5, 64, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 3, 63, 6, 6, 48, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    { 2, 48, 8, 8, 62, 3, 3, 1, 1, 0, 0, 1, 1, 1 },
    { 1, 33, 12, 24, 48, 3, 3, 1, 1, 1, 1, 1, 1, 1 },  { 2, 24, 25, 28, 48, 3, 3, 2, 2, 1, 1, 1, 1, 1 },
    { 2, 48, 13, 11, 48, 5, 5, 1, 1, 2, 2, 1, 1, 1 },  { 2, 48, 12, 12, 48, 3, 3, 1, 1, 2, 2, 2, 2, 1 },
    { 2, 50, 10, 14, 48, 3, 3, 1, 1, 2, 2, 1, 1, 1 },  { 2, 48, 14, 14, 48, 3, 1, 1, 1, 1, 0, 1, 1, 1 },
    { 2, 24, 26, 28, 48, 3, 3, 2, 2, 1, 2, 1, 1, 1 },  { 2, 48, 14, 14, 48, 1, 9, 1, 1, 0, 1, 1, 1, 1 },
    { 3, 48, 14, 14, 48, 1, 7, 1, 1, 0, 0, 1, 1, 1 },
};

/* Weights of FP32 and short lines, where lanes are channels: panels that are not full, half and whole; lines in one part
   and two; strides, dilation, few kernel positions; more than one block of channels, and of images. */
static void test_short_rows(void) {
    static const int Z[][14] = {
        { 3, 11, 12, 10, 47, 3, 3, 1, 1, 1, 1, 1, 1, 1 }, { 2, 47, 12, 17, 13, 3, 3, 1, 1, 1, 2, 1, 1, 1 },
        { 3, 17, 25, 8, 62, 3, 2, 2, 1, 2, 1, 3, 2, 1 },  { 3, 48, 9, 9, 32, 1, 3, 1, 1, 0, 1, 1, 1, 1 },
        { 2, 70, 9, 23, 80, 3, 3, 1, 1, 1, 1, 1, 1, 1 },  { 3, 32, 10, 6, 32, 2, 2, 1, 1, 2, 0, 1, 1, 1 },
        { 3, 11, 24, 24, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1 } };
    static const float specials[] = { 0.0f, -INFINITY, NAN };
    size_t i;
    for (i = 0; i < sizeof Z / sizeof Z[0]; i++) {
        conv_check_all(Z[i], AMP_F32, AMP_F32, i % 2 ? AMP_F32 : AMP_F16, NULL);
        if (i == 6) continue;
        conv_check_all(Z[i], i % 2 ? AMP_F16 : AMP_BF16, AMP_F32, AMP_BF16, NULL);
        conv_check_all(Z[i], AMP_F32, AMP_F32, AMP_F32, &specials[i % 3]);
    }
    for (i = 0; i < sizeof SHORT_ROWS / sizeof SHORT_ROWS[0]; i++) {
        conv_check_all(SHORT_ROWS[i], TYPES[i % 3], TYPES[i % 3 == 2 ? 0 : (i + i / 3) % 3], TYPES[i / 2 % 3], NULL);
        if (i % 2) continue;
        numbers = i % 4 ? USUAL : i % 8 ? INFINITE_WEIGHTS : SMALL_PRODUCTS;
        conv_check_all(SHORT_ROWS[i], AMP_BF16, AMP_BF16, TYPES[i / 2 % 3], NULL);
        numbers = USUAL;
    }
}

/* Sums that one weight makes subnormal are not taken as zeros, wherever it lies. */
static void test_small_last_weight(void) {
    static const int Z[14] = { 1, 40, 6, 6, 40, 3, 3, 1, 1, 1, 1, 1, 1, 1 };
    numbers = SMALL_LAST_WEIGHT;
    conv_check_all(Z, AMP_BF16, AMP_BF16, AMP_F32, NULL);
    numbers = USUAL;
}

#if defined(__linux__)
/* Of n, channels, side, outputs, kernel, groups: nothing is read behind x, w, dy and the workspace, however small it is. */
static void check_reads(const int* z, amp_dtype t, amp_isa isa, amp_sums order) {
    const amp_conv2d_shape s = shape_of(z[0], z[1], z[2], z[2], z[3], z[4], z[4], 1, 1, z[4] / 2, z[4] / 2, 1, 1, z[5]);
    const size_t pixels = (size_t)(z[0] * z[2] * z[2]), x_count = pixels * (size_t)z[1], y_count = pixels * (size_t)z[3];
    const size_t count[4] = { x_count, (size_t)(z[1] / z[5] * z[3] * z[4] * z[4]), y_count, x_count };
    void *memory[5], *base[5];
    size_t length[5], full, part, i;
    amp_exec exec;
    if (amp_cpu_force_isa(isa) != AMP_OK) return;
    full = amp_conv2d_workspace(&s);
    memset(&exec, 0, sizeof exec);
    exec.sums = order;
    for (i = 0; i < 4; i++) memory[i] = at_page_end(count[i] * amp_dtype_size(t), &base[i], &length[i]);
    for (part = 0; part <= 8; part++) {
        exec.workspace_size = full * part / 8;
        exec.workspace = memory[4] = at_page_end(exec.workspace_size, &base[4], &length[4]);
        CHECK(amp_conv2d_forward(&s, amp_ref_of(memory[0], t), amp_ref_of(memory[1], t), AMP_NONE,
            amp_ref_of(memory[2], t), &exec) == AMP_OK);
        CHECK(amp_conv2d_backward(&s, amp_ref_of(memory[2], t), amp_ref_of(memory[0], t), amp_ref_of(memory[1], t),
            amp_ref_of(memory[3], t), AMP_NONE, AMP_NONE, 0, &exec) == AMP_OK);
        CHECK(amp_conv2d_backward(&s, amp_ref_of(memory[2], t), amp_ref_of(memory[0], t), AMP_NONE, AMP_NONE,
            amp_ref_of(memory[1], t), AMP_NONE, 0, &exec) == AMP_OK);
        munmap(base[4], length[4]);
    }
    for (i = 0; i < 4; i++) munmap(base[i], length[i]);
    amp_cpu_force_isa(AMP_ISA_AUTO);
}
static void test_reads_nothing_else(void) {
    static const int Z[6][6] = { { 1, 64, 8, 33, 3, 1 }, { 2, 33, 9, 17, 3, 1 }, { 1, 256, 4, 33, 3, 1 }, { 1, 33, 4, 260, 3, 1 },
        { 2, 40, 7, 17, 1, 1 }, { 1, 80, 5, 66, 3, 2 } };
    int i, t;
    for (i = 0; i < 6; i++)
        for (t = 0; t < 3; t++) {
            check_reads(Z[i], TYPES[t], AMP_ISA_AUTO, AMP_SUMS_FIXED);
            if (t == 2) check_reads(Z[i], AMP_BF16, AMP_ISA_AUTO, AMP_SUMS_FAST);
            if (t == 2) check_reads(Z[i], AMP_BF16, AMP_ISA_AVX512_BF16, AMP_SUMS_FIXED);
        }
}
#else
static void test_reads_nothing_else(void) { TEST_SKIP("no guard pages here"); }
#endif

/* Zeroed strides, dilations and groups mean 1. */
static void test_defaults(void) {
    amp_conv2d_shape s = shape_of(2, 3, 6, 5, 4, 3, 2, 0, 0, 0, 0, 0, 0, 0), full = s;
    float x[180], w[72], y[2 * 4 * 4 * 4], z[2 * 4 * 4 * 4];
    int i, oh = 0, ow = 0;
    full.stride_h = full.stride_w = full.dilation_h = full.dilation_w = full.groups = 1;
    for (i = 0; i < 180; i++) x[i] = test_uniform();
    for (i = 0; i < 72; i++) w[i] = test_uniform();
    CHECK(amp_conv2d_output(&s, &oh, &ow, NULL) == AMP_OK && oh == 4 && ow == 4);
    CHECK(amp_conv2d_forward(&s, amp_ref_of(x, AMP_DTYPE_DEFAULT),
        amp_ref_of(w, AMP_DTYPE_DEFAULT), AMP_NONE, amp_ref_of(y, AMP_DTYPE_DEFAULT), NULL) == AMP_OK);
    CHECK(amp_conv2d_forward(&full, amp_f32(x), amp_f32(w), AMP_NONE, amp_f32(z), NULL) == AMP_OK);
    CHECK(memcmp(y, z, sizeof y) == 0);
}

/* The direct forms leave out terms that are zeros. That must not show where zeros matter: an infinite weight (one of
   all, or every seventh) makes them NaN, and a sum that underflows to -0 loses its sign to a zero added last. The
   scalar path's product, which leaves out nothing then, is the reference. */
static void direct_run(const conv* v, const amp_exec* exec, float* out[3]) {
    const amp_dtype t = v->w.dtype;
    CHECK(amp_conv2d_forward(&v->s, amp_ref_of(tensor_at(&v->x), t),
        amp_ref_of(tensor_at(&v->w), t), AMP_NONE, amp_f32(out[0]), exec) == AMP_OK);
    CHECK(amp_conv2d_backward(&v->s, amp_ref_of(tensor_at(&v->dy), t),
        amp_ref_of(tensor_at(&v->x), t), amp_ref_of(tensor_at(&v->w), t), amp_f32(out[1]),
        amp_f32(out[2]), AMP_NONE, 0, exec) == AMP_OK);
}
static void direct_check(const int* z, amp_dtype t, int odd) {
    conv v;
    float tiny = t == AMP_F16 ? ldexpf(1, -24) : ldexpf(1, -80), *w, *out[2][3];
    size_t i, counts[3];
    amp_exec exec;
    int j, q, isa, stack;
    if (!test_due()) return;
    v = conv_new(shape_of(z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8], z[9], z[10], z[11], z[12], z[13]),
                 t, t, AMP_F32, NULL);
    w = (float*)malloc(v.w.count * sizeof *w);
    counts[0] = v.y.count; counts[1] = v.dx.count; counts[2] = v.dw.count;
    for (i = 0; i < v.w.count; i++) w[i] = odd == 1 && i % 7 == 3 ? (i % 2 ? INFINITY : NAN) : -tiny * (float)(i % 3);
    if (odd == 3) w[v.w.count / 2] = INFINITY;
    CHECK(amp_convert(amp_ref_of(tensor_at(&v.w), t), amp_f32(w), v.w.count) == AMP_OK);
    for (q = 0; odd == 2 && q < 2; q++) {                         /* all products underflow, most to -0 */
        tensor* p = q ? &v.dy : &v.x;
        for (i = 0; i < p->count; i++) p->value[i] = tiny;
        CHECK(amp_convert(amp_ref_of(tensor_at(p), t), amp_f32(p->value), p->count) == AMP_OK);
    }
    for (q = 0; q < 2; q++) for (j = 0; j < 3; j++) out[q][j] = (float*)malloc(counts[j] * sizeof(float));
    memset(&exec, 0, sizeof exec);
    CHECK(amp_cpu_force_isa(AMP_ISA_SCALAR) == AMP_OK);
    direct_run(&v, NULL, out[0]);
    for (isa = 1; isa < 5; isa++) {               /* the scalar path has no direct forms */
        if (amp_cpu_force_isa(ISAS[isa]) != AMP_OK) continue;
        exec.workspace_size = amp_conv2d_workspace(&v.s);
        exec.workspace = malloc(exec.workspace_size);
        for (stack = 0; stack < 2; stack++) {
            direct_run(&v, stack ? NULL : &exec, out[1]);
            for (j = 0; j < 3; j++) CHECK(memcmp(out[0][j], out[1][j], counts[j] * sizeof(float)) == 0);
        }
        free(exec.workspace);
    }
    for (q = 0; q < 2; q++) for (j = 0; j < 3; j++) free(out[q][j]);
    free(w);
    conv_free(&v);
}
static void test_direct_zeros(void) {
    size_t i, t;
    int odd;
    without_reference = 1;
    for (i = 0; i < sizeof SHAPES / sizeof SHAPES[0]; i++)
        for (t = 0; t < 3; t++)
            for (odd = 0; odd < 4; odd++) direct_check(SHAPES[i], TYPES[t], odd);
    for (i = 0; i < sizeof SHORT_ROWS / sizeof SHORT_ROWS[0]; i++)
        for (odd = 0; odd < 4; odd++) direct_check(SHORT_ROWS[i], TYPES[i % 2], odd);
    without_reference = 0;
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Only the wanted gradients are computed, and only what they need has to be there. */
static void test_single_gradients(void) {
    conv v = conv_new(shape_of(2, 3, 7, 9, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1), AMP_F32, AMP_F32, AMP_F32, NULL);
    CHECK(amp_conv2d_backward(&v.s, amp_f32(tensor_at(&v.dy)), AMP_NONE, amp_f32(tensor_at(&v.w)),
        amp_f32(tensor_at(&v.dx)), AMP_NONE, AMP_NONE, 0, NULL) == AMP_OK);
    CHECK(amp_conv2d_backward(&v.s, amp_f32(tensor_at(&v.dy)), amp_f32(tensor_at(&v.x)), AMP_NONE,
        AMP_NONE, amp_f32(tensor_at(&v.dw)), AMP_NONE, 0, NULL) == AMP_OK);
    CHECK(amp_conv2d_backward(&v.s, amp_f32(tensor_at(&v.dy)), AMP_NONE, AMP_NONE, AMP_NONE,
        AMP_NONE, amp_f32(tensor_at(&v.db)), 0, NULL) == AMP_OK);
    tensor_check(&v.dx, v.rdx, "dx");
    tensor_check(&v.dw, v.rdw, "dw");
    tensor_check(&v.db, v.rdb, "db");
    conv_free(&v);
}

/* Against double precision, dx by scattering instead of gathering: |error| <= k*u/(1 - k*u) * sum|a*b|, u = 2^-24, and the
   last rounding to F32. */
static void test_error_bound(void) {
    conv v = conv_new(shape_of(2, 6, 9, 8, 10, 3, 3, 2, 1, 1, 2, 1, 2, 2), AMP_F16, AMP_F16, AMP_F32, NULL);
    double* sum = (double*)calloc(v.x.count, sizeof(double));
    double* size = (double*)calloc(v.x.count, sizeof(double));
    float* dx = (float*)malloc(v.x.count * sizeof(float));
    double ku = v.og * 9 * ldexp(1, -24);
    int n, o, i, j, c, a, b;
    size_t q;
    CHECK(amp_conv2d_backward(&v.s, amp_f16(tensor_at(&v.dy)), AMP_NONE, amp_f16(tensor_at(&v.w)),
        amp_f32(dx), AMP_NONE, AMP_NONE, 0, NULL) == AMP_OK);
    for (n = 0; n < v.s.n; n++) for (o = 0; o < v.s.out_channels; o++) for (i = 0; i < v.oh; i++) for (j = 0; j < v.ow; j++)
        for (c = 0; c < v.cg; c++) for (a = 0; a < 3; a++) for (b = 0; b < 3; b++) {
            int y = i * v.s.stride_h - v.s.pad_h + a * v.s.dilation_h, x = j * v.s.stride_w - v.s.pad_w + b * v.s.dilation_w;
            double p = (double)v.w.value[w_at(&v, o, c, a, b)] * (double)v.dy.value[y_at(&v, n, o, i, j)];
            if (!inside(&v, y, x)) continue;
            q = x_at(&v, n, o / v.og * v.cg + c, y, x);
            sum[q] += p; size[q] += fabs(p);
        }
    for (q = 0; q < v.x.count; q++) {
        double limit = ku / (1 - ku) * size[q];
        CHECK_MSG(fabs((double)dx[q] - sum[q]) <= limit + (fabs(sum[q]) + limit) * ldexp(1, -24), "%g %g", (double)dx[q], sum[q]);
    }
    free(sum); free(size); free(dx);
    conv_free(&v);
}

/* --- transposed convolution: against double precision, by scattering as its definition says --- */

/* Sums in double, and of magnitudes. */
typedef struct exact { double *sum, *size; size_t count; } exact;
static exact exact_new(size_t count) {
    const exact e = { (double*)calloc(count, sizeof(double)), (double*)calloc(count, sizeof(double)), count };
    return e;
}
static void exact_add(exact* e, size_t i, double v) { e->sum[i] += v; e->size[i] += fabs(v); }
/* The stored tensor is within k roundings of the sums, and one of its type; its guards are untouched. */
static void exact_check(exact* e, const tensor* t, double k, const char* what) {
    const double ku = (k + 2) * ldexp(1, -24), unit_of_type = t->dtype == AMP_F32 ? ldexp(1, -24) : t->dtype == AMP_F16
        ? ldexp(1, -11) : ldexp(1, -8);
    float* got = (float*)malloc(t->count * sizeof *got);
    size_t i, bad = 0, first = 0, intact = 0;
    amp_convert(amp_f32(got), amp_ref_of(tensor_at(t), t->dtype), t->count);
    for (i = e->count; i-- > 0; ) {
        const double limit = ku * e->size[i];
        if (fabs((double)got[i] - e->sum[i]) <= limit + (fabs(e->sum[i]) + limit) * unit_of_type + 3e-8) continue;
        bad++; first = i;
    }
    for (i = 0; i < GUARD; i++)
        intact += (size_t)(t->bytes[i] == FILL && t->bytes[GUARD + t->count * amp_dtype_size(t->dtype) + i] == FILL);
    CHECK_MSG(e->count == t->count && bad == 0 && intact == GUARD, "%s of %s: %lu of %lu, at %lu %g is not %g", what,
              amp_dtype_name(t->dtype), (unsigned long)bad, (unsigned long)t->count, (unsigned long)first, (double)got[first],
              e->sum[first]);
    free(got); free(e->sum); free(e->size);
}
/* y and the gradients of s, alone or added to what is there, with this workspace. */
static void transposed_check(const amp_conv2d_shape* s, int oh, int ow, const amp_dtype* types, amp_exec* exec, int add) {
    const int groups = s->groups ? s->groups : 1, cg = s->channels / groups, og = s->out_channels / groups;
    const int sh = s->stride_h ? s->stride_h : 1, sw = s->stride_w ? s->stride_w : 1;
    const int dh = s->dilation_h ? s->dilation_h : 1, dw = s->dilation_w ? s->dilation_w : 1;
    const size_t pixels = (size_t)(s->height * s->width), out = (size_t)(oh * ow), area = (size_t)(s->kernel_h * s->kernel_w);
    tensor x = tensor_new(types[0], (size_t)(s->n * s->channels) * pixels), w = tensor_new(types[0], (size_t)(s->channels * og) * area);
    tensor b = tensor_new(types[1], (size_t)s->out_channels), y = tensor_new(types[2], (size_t)(s->n * s->out_channels) * out);
    tensor dy = tensor_new(types[0], y.count), dx = tensor_new(types[2], x.count), gw = tensor_new(types[1], w.count);
    tensor db = tensor_new(types[1], b.count);
    exact ey = exact_new(y.count), ex = exact_new(x.count), ew = exact_new(w.count), eb = exact_new(b.count);
    const amp_ref none = AMP_NONE, bias = add ? none : amp_ref_of(tensor_at(&b), b.dtype);
    size_t i, o;
    int c, k, a, e;
    for (i = 0; !add && i < y.count; i++) exact_add(&ey, i, (double)b.value[i / out % b.count]);
    for (i = 0; add && i < dx.count; i++) exact_add(&ex, i, (double)dx.value[i]);
    for (i = 0; add && i < gw.count; i++) exact_add(&ew, i, (double)gw.value[i]);
    for (i = 0; add && i < db.count; i++) exact_add(&eb, i, (double)db.value[i]);
    for (i = 0; i < y.count; i++) exact_add(&eb, i / out % b.count, (double)dy.value[i]);
    for (i = 0; i < x.count; i++) {
        const int ci = (int)(i / pixels) % s->channels, ih = (int)(i % pixels) / s->width, iw = (int)(i % pixels) % s->width;
        for (k = 0; k < og; k++) for (a = 0; a < s->kernel_h; a++) for (e = 0; e < s->kernel_w; e++) {
            const int i0 = ih * sh - s->pad_h + a * dh, j0 = iw * sw - s->pad_w + e * dw;
            const size_t at = ((size_t)(ci * og + k) * (size_t)s->kernel_h + (size_t)a) * (size_t)s->kernel_w + (size_t)e;
            if (i0 < 0 || j0 < 0 || i0 >= oh || j0 >= ow) continue;
            c = ci / cg * og + k;
            o = (i / pixels / (size_t)s->channels * b.count + (size_t)c) * out + (size_t)(i0 * ow + j0);
            exact_add(&ey, o, (double)x.value[i] * (double)w.value[at]);
            exact_add(&ex, i, (double)dy.value[o] * (double)w.value[at]);
            exact_add(&ew, at, (double)dy.value[o] * (double)x.value[i]);
        }
    }
    CHECK(amp_conv_transpose2d_forward(s, amp_ref_of(tensor_at(&x), x.dtype), amp_ref_of(tensor_at(&w), w.dtype), bias,
        amp_ref_of(tensor_at(&y), y.dtype), exec) == AMP_OK);
    CHECK(amp_conv_transpose2d_backward(s, amp_ref_of(tensor_at(&dy), dy.dtype), amp_ref_of(tensor_at(&x), x.dtype),
        amp_ref_of(tensor_at(&w), w.dtype), amp_ref_of(tensor_at(&dx), dx.dtype), amp_ref_of(tensor_at(&gw), gw.dtype),
        amp_ref_of(tensor_at(&db), db.dtype), add ? AMP_ACCUMULATE_PARAMS | AMP_ACCUMULATE_INPUT : 0, exec) == AMP_OK);
    exact_check(&ey, &y, (double)cg * (double)area, "transposed y");
    exact_check(&ex, &dx, (double)og * (double)area, "transposed dx");
    exact_check(&ew, &gw, (double)((size_t)s->n * pixels), "transposed dw");
    exact_check(&eb, &db, (double)((size_t)s->n * out), "transposed db");
    tensor_free(&x); tensor_free(&w); tensor_free(&b); tensor_free(&y); tensor_free(&dy); tensor_free(&dx);
    tensor_free(&gw); tensor_free(&db);
}
/* Of each kind, then random ones: kernels smaller than the stride, whose gaps hold the bias alone; groups, depthwise,
   dilation, pad_end and output_pad; types of operands, of b, dw and db, and of y and dx. */
static void test_transposed(void) {
    static const int Z[][16] = { /* n c h w o kernel stride pad dilation groups output_pad */
        { 2, 3, 4, 5, 6, 4, 4, 2, 2, 1, 1, 1, 1, 1, 0, 0 }, { 1, 32, 7, 7, 16, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1 },
        { 2, 4, 3, 3, 4, 1, 1, 2, 3, 0, 0, 1, 1, 1, 0, 0 }, { 1, 4, 5, 3, 6, 2, 1, 3, 2, 0, 0, 1, 1, 2, 2, 1 },
        { 2, 24, 6, 9, 24, 3, 3, 2, 2, 1, 1, 1, 1, 24, 1, 1 }, { 1, 20, 5, 5, 20, 1, 1, 2, 2, 0, 0, 1, 1, 20, 1, 1 },
        { 1, 6, 4, 4, 3, 3, 2, 1, 1, 0, 0, 2, 3, 3, 0, 0 }, { 1, 1, 1, 1, 5, 4, 4, 1, 1, 0, 0, 1, 1, 1, 0, 0 },
        { 3, 40, 8, 8, 33, 3, 3, 1, 1, 1, 1, 1, 1, 1, 0, 0 } };
    static char memory[1 << 22];
    amp_exec exec;
    int i, t, oh, ow;
    memset(&exec, 0, sizeof exec);
    exec.workspace = memory;
    for (i = 0; i < 120; i++) {
        int z[16];
        amp_conv2d_shape s;
        if (i < (int)(sizeof Z / sizeof *Z)) memcpy(z, Z[i], sizeof z);
        else for (t = 0; t < 16; t++) z[t] = t < 2 || t == 4 ? 1 + (int)(test_random() % 5) : t < 4 ? 1 + (int)(test_random() % 7)
            : t < 9 ? 1 + (int)(test_random() % 3) : t < 11 ? (int)(test_random() % 2) : t < 13 ? 1 + (int)(test_random() % 2)
            : t == 13 ? 1 : (int)(test_random() % (unsigned)z[t - 7]);
        s = shape_of(z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7], z[8], z[9], z[10], z[11], z[12], z[13]);
        s.output_pad_h = z[14]; s.output_pad_w = z[15];
        if (i % 5 == 4 && i > 8) { s.pad_end_h = AMP_ZERO; s.pad_end_w = 1; }
        if (amp_conv_transpose2d_output(&s, &oh, &ow, NULL) != AMP_OK) continue;
        CHECK(oh == (z[2] - 1) * z[7] - z[9] - (s.pad_end_h ? 0 : z[9]) + z[11] * (z[5] - 1) + 1 + z[14]);
        CHECK(ow == (z[3] - 1) * z[8] - z[10] - (s.pad_end_w ? 1 : z[10]) + z[12] * (z[6] - 1) + 1 + z[15]);
        exec.workspace_size = amp_conv_transpose2d_workspace(&s);
        CHECK(exec.workspace_size > 0 && exec.workspace_size <= sizeof memory);
        for (t = 0; t < 3; t++) {
            const amp_dtype types[3] = { TYPES[t], TYPES[(t + i) % 3], TYPES[(t + i / 3) % 3] };
            transposed_check(&s, oh, ow, types, t == i % 3 ? NULL : &exec, i / 2 % 2);
        }
    }
}

/* --- refusals ---------------------------------------------------------------------------- */

static void refuse_shape(amp_conv2d_shape s, amp_result code, const char* sentence) {
    amp_exec e;
    int oh = 77, ow = 77;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    check_refused(amp_conv2d_output(&s, &oh, &ow, &e), code, sentence);
    CHECK(oh == 77 && ow == 77);
    CHECK(amp_conv2d_workspace(&s) == 0);
}

static void test_refused_shapes(void) {
    refuse_shape(shape_of(1, 1, 5, 5, 1, 7, 7, 1, 1, 0, 0, 1, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: kernel 7x7 with dilation 1x1 is larger than its 5x5 input padded by 0x0");
    refuse_shape(shape_of(1, 1, 5, 5, 1, 3, 3, 1, 1, 0, 0, INT_MAX, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: kernel 3x3 with dilation 2147483647x1 is larger than its 5x5 input padded by 0x0");
    refuse_shape(shape_of(0, 1, 5, 5, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1), AMP_ERR_DESC, "conv2d: n is 0, it must be at least 1");
    refuse_shape(shape_of(1, 1, 5, 5, 1, 3, 0, 1, 1, 0, 0, 1, 1, 1), AMP_ERR_DESC, "conv2d: kernel_w is 0, it must be at least 1");
    refuse_shape(shape_of(1, 1, 5, 5, 1, 3, 3, 1, 1, -1, 0, 1, 1, 1), AMP_ERR_DESC, "conv2d: pad_h is -1, it must be at least 0");
    refuse_shape(shape_of(1, 1, 5, 5, 1, 3, 3, 1, -2, 0, 0, 1, 1, 1), AMP_ERR_DESC, "conv2d: stride_w is -2, it must be at least 0");
    refuse_shape(shape_of(1, 4, 5, 5, 6, 3, 3, 1, 1, 0, 0, 1, 1, 3), AMP_ERR_SHAPE,
                 "conv2d: 3 groups do not divide 4 channels and 6 out_channels");
    refuse_shape(shape_of(1, 6, 5, 5, 4, 3, 3, 1, 1, 0, 0, 1, 1, 3), AMP_ERR_SHAPE,
                 "conv2d: 3 groups do not divide 6 channels and 4 out_channels");
    refuse_shape(shape_of(INT_MAX, INT_MAX, INT_MAX, 5, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: x has more elements than memory can hold");
    refuse_shape(shape_of(1, 1, 5, 5, 1, 1, 1, 1, 1, INT_MAX, INT_MAX, 1, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: a 5x5 input padded by 2147483647x2147483647 has sides over 2^31 - 1");
    refuse_shape(shape_of(1, 1, 5, 5, 1, 3, 1, 1, 1, INT_MAX - 2, 0, INT_MAX - 1, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: a 5x5 input padded by 2147483645x0 has sides over 2^31 - 1");
    refuse_shape(shape_of(1 << 20, 1, 1, 1, 1 << 26, 1, 1, 1, 1, 1000, 1000, 1, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: y has more elements than memory can hold");
    refuse_shape(shape_of(1, 1 << 20, 1, 1, 1 << 20, 1 << 26, 1, 1, 1, 1 << 25, 0, 1, 1, 1), AMP_ERR_SHAPE,
                 "conv2d: w has more elements than memory can hold");
}

static void refuse_transposed(amp_conv2d_shape s, int output_pad, amp_result code, const char* sentence) {
    amp_exec e;
    int oh = 77, ow = 77;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    s.output_pad_w = output_pad;
    check_refused(amp_conv_transpose2d_output(&s, &oh, &ow, &e), code, sentence);
    CHECK(oh == 77 && ow == 77);
    CHECK(amp_conv_transpose2d_workspace(&s) == 0);
}
static void test_refused_transposed(void) {
    amp_conv2d_shape s = shape_of(1, 2, 4, 4, 2, 3, 3, 2, 2, 0, 0, 1, 1, 1);
    float x[32] = { 0 }, y[200];
    amp_exec e;
    int i;
    refuse_transposed(s, 2, AMP_ERR_DESC, "conv_transpose2d: output_pad 0x2 must be less than the stride, 2x2");
    refuse_transposed(s, -1, AMP_ERR_DESC, "conv2d: output_pad_w is -1, it must be at least 0");
    s.pad_h = 5;
    refuse_transposed(s, 0, AMP_ERR_SHAPE, "conv_transpose2d: the sides of a 4x4 input's output are not within 1..2^31-1");
    s.pad_h = s.pad_w = INT_MAX;
    refuse_transposed(s, 0, AMP_ERR_SHAPE, "conv_transpose2d: the sides of a 4x4 input's output are not within 1..2^31-1");
    s = shape_of(1, 2, INT_MAX, INT_MAX, 2, INT_MAX, INT_MAX, INT_MAX, INT_MAX, 0, 0, INT_MAX, INT_MAX, 1);
    refuse_transposed(s, INT_MAX - 1, AMP_ERR_SHAPE,
        "conv_transpose2d: the sides of a 2147483647x2147483647 input's output are not within 1..2^31-1");
    s = shape_of(1, 2, 4, 4, 2, 3, 3, 2, 2, 0, 0, 1, 1, 1);
    s.output_pad_h = 1;
    refuse_shape(s, AMP_ERR_DESC, "conv2d: output_pad 1x0 is for transposed convolutions");
    s.output_pad_h = 0;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    for (i = 0; i < 200; i++) y[i] = 7;
    check_refused(amp_conv_transpose2d_forward(&s, AMP_NONE, amp_f32(x), AMP_NONE, amp_f32(y), &e), AMP_ERR_ARGUMENT,
                  "conv_transpose2d: x is NULL, but it has 1 x 32 elements");
    check_refused(amp_conv_transpose2d_forward(&s, amp_f32(x), AMP_NONE, AMP_NONE, amp_f32(y), &e), AMP_ERR_ARGUMENT,
                  "conv_transpose2d: w is NULL, but it has 1 x 36 elements");
    check_refused(amp_conv_transpose2d_backward(&s, amp_f32(x), amp_f32(x), amp_f32(y), AMP_NONE, AMP_NONE, amp_ref_of(y, AMP_F64),
        0, &e), AMP_ERR_DTYPE, "conv_transpose2d backward: db has type f64 (4); it must be f32, f16 or bf16");
    CHECK(amp_conv_transpose2d_forward(NULL, amp_f32(x), amp_f32(x), AMP_NONE, amp_f32(y), NULL) == AMP_ERR_ARGUMENT);
    for (i = 0; i < 200; i++) CHECK(y[i] == 7);
}

/* Each phase of so large a stride meets a kernel position or none: none may take the time to look at all of them. */
static void test_large_strides(void) {
    const int large = 1 << 29;
    amp_conv2d_shape s = shape_of(1, 1, 1, large, 1, 1, large - 3, 1, large - 1, 0, 1, 1, 1, 1);
    CHECK(amp_conv2d_workspace(&s) > 0);
    s.kernel_w = 5; s.stride_w = large; s.dilation_w = 1 << 26;
    CHECK(amp_conv2d_workspace(&s) > 0);
}

static void test_refused_calls(void) {
    amp_conv2d_shape s = shape_of(1, 1, 4, 4, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1);
    float x[16] = { 0 }, y[16];
    amp_exec e;
    int i;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    for (i = 0; i < 16; i++) y[i] = 7;
    check_refused(amp_conv2d_forward(NULL, amp_f32(x), amp_f32(x), AMP_NONE, amp_f32(y), &e), AMP_ERR_ARGUMENT,
                  "conv2d: the shape is NULL");
    check_refused(amp_conv2d_forward(&s, amp_f32(x), AMP_NONE, AMP_NONE, amp_f32(y), &e), AMP_ERR_ARGUMENT,
                  "conv2d: w is NULL, but it has 1 x 9 elements");
    check_refused(amp_conv2d_forward(&s, amp_ref_of(x, AMP_F64), amp_f32(x), AMP_NONE, amp_f32(y),
        &e), AMP_ERR_DTYPE,
                  "conv2d: x has type f64 (4); it must be f32, f16 or bf16");
    check_refused(amp_conv2d_backward(&s, amp_f32(x), AMP_NONE, amp_f32(x), amp_f32(y),
        amp_f32(y), AMP_NONE, 0, &e),
                  AMP_ERR_ARGUMENT, "conv2d backward: x is NULL, but it has 1 x 16 elements");
    CHECK(amp_conv2d_forward(&s, amp_f32(x), AMP_NONE, AMP_NONE, amp_f32(y), NULL) == AMP_ERR_ARGUMENT);
    for (i = 0; i < 16; i++) CHECK(y[i] == 7);
}

/* What the stack or a workspace held before is not computed with: zeros raise no exception of IEEE 754. */
static void test_exceptions(void) {
    static const amp_half zeros[2 * 15 * 81], *const z = zeros;
    static const int sides[] = { 5, 6, 9 };
    static amp_half y[2 * 15 * 81], dx[2 * 3 * 81], dw[15 * 3 * 9];
    static float workspace[1 << 18];
    int i, isa, last;
    size_t k;
    for (isa = 0; isa < COUNT(ISAS); isa++)
        for (i = 0; i < 36 && amp_cpu_force_isa(ISAS[isa]) == AMP_OK; i++)
            for (last = 0; last < 3; last++) {   /* y, dx or dw */
                const int side = sides[i % 3], outputs = i / 3 % 2 == 0 ? 3 : 15, stride = 1 + i / 6 % 2, groups = i / 12 == 1 ? 3 : 1;
                const amp_conv2d_shape s = shape_of(2, 3, side, side, outputs, 3, 3, stride, stride, i % 2, i % 2, 1, 1, groups);
                amp_exec e;
                amp_result r;
                memset(&e, 0, sizeof e);
                for (k = 0; k < sizeof workspace / sizeof *workspace; k++) workspace[k] = 1e38f;
                if (i >= 12) { e.workspace = workspace; e.workspace_size = sizeof workspace; }
                feclearexcept(FE_ALL_EXCEPT);
                soil_stack();
                if (last == 0) r = amp_conv2d_forward(&s, amp_f16(z), amp_f16(z), AMP_NONE,
                    amp_f16(y), &e);
                else r = amp_conv2d_backward(&s, amp_f16(z), amp_f16(z), amp_f16(z),
                    amp_f16(last == 1 ? dx : NULL), amp_f16(last == 2 ? dw : NULL), AMP_NONE, 0,
                    &e);
                CHECK_MSG(r == AMP_OK && !fetestexcept(FE_OVERFLOW | FE_INVALID), "%s, case %d, result %d",
                          amp_isa_name(ISAS[isa]), i, last);
            }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Convolutions of FP32 arrays that the exec has rounded to 16 bits have the bits of 16-bit arrays. */
static void check_rounded(const amp_conv2d_shape* s, amp_dtype type, const amp_exec* plain) {
    int oh = 0, ow = 0, i;
    amp_exec exec = *plain;
    CHECK(amp_conv2d_output(s, &oh, &ow, NULL) == AMP_OK);
    const size_t xs = (size_t)s->n * (size_t)s->channels * (size_t)s->height * (size_t)s->width;
    const size_t ws = (size_t)s->out_channels * (size_t)(s->channels / s->groups) * (size_t)s->kernel_h * (size_t)s->kernel_w;
    const size_t ys = (size_t)s->n * (size_t)s->out_channels * (size_t)oh * (size_t)ow, all = xs + ws + ys;
    float *x = (float*)malloc(3 * all * sizeof(float)), *w = x + xs, *dy = w + ws, *got[2];
    uint16_t* low = (uint16_t*)malloc(all * sizeof *low);
    got[0] = x + all; got[1] = got[0] + all;
    for (size_t j = 0; j < all; j++) x[j] = test_uniform();
    amp_convert(amp_ref_of(low, type), amp_f32(x), all);
    memset(got[0], 0, 2 * all * sizeof(float));
    exec.operands = type;
    for (i = 0; i < 2; i++) {
        const amp_ref rx = i ? amp_f32(x) : amp_ref_of(low, type), rw = i ? amp_f32(w) : amp_ref_of(low + xs, type),
            rdy = i ? amp_f32(dy) : amp_ref_of(low + xs + ws, type);
        const amp_exec* e = i ? &exec : plain;
        CHECK(amp_conv2d_forward(s, rx, rw, AMP_NONE, amp_f32(got[i] + xs + ws), e) == AMP_OK);
        CHECK(amp_conv2d_backward(s, rdy, rx, rw, amp_f32(got[i]), amp_f32(got[i] + xs), AMP_NONE, 0, e) == AMP_OK);
    }
    CHECK_MSG(memcmp(got[0], got[1], all * sizeof(float)) == 0, "%s %s %d -> %d, kernel %d, stride %d, groups %d, room %d",
              amp_isa_name(amp_cpu_isa()), amp_dtype_name(type), s->channels, s->out_channels, s->kernel_h, s->stride_h,
              s->groups, plain->workspace != NULL);
    free(x); free(low);
}
static void test_rounded_operands(void) {
    const amp_conv2d_shape shapes[9] = {
        shape_of(2, 3, 9, 10, 5, 3, 3, 1, 1, 1, 1, 1, 1, 1), shape_of(2, 4, 9, 10, 6, 3, 3, 2, 2, 1, 0, 1, 1, 2),
        shape_of(1, 2, 12, 11, 3, 3, 2, 1, 1, 2, 2, 2, 2, 1), shape_of(3, 20, 7, 7, 33, 1, 1, 1, 1, 0, 0, 1, 1, 1),
        shape_of(2, 20, 9, 8, 20, 3, 3, 1, 1, 1, 1, 1, 1, 20), shape_of(2, 20, 9, 8, 20, 3, 3, 2, 1, 1, 1, 1, 1, 20),
        shape_of(1, 3, 30, 31, 4, 5, 5, 5, 6, 0, 0, 1, 1, 1), shape_of(4, 40, 12, 12, 24, 3, 3, 1, 1, 1, 1, 1, 1, 1),
        shape_of(2, 6, 5, 5, 3, 2, 3, 1, 2, 0, 1, 1, 1, 3) };
    static float workspace[1 << 20];
    int isa, i, room;
    for (isa = 0; isa < COUNT(ISAS); isa++)
        for (i = 0; i < 9 && amp_cpu_force_isa(ISAS[isa]) == AMP_OK; i++)
            for (room = 0; room < 2 && test_due(); room++) {
                amp_exec exec;
                memset(&exec, 0, sizeof exec);
                if (room) { exec.workspace = workspace; exec.workspace_size = sizeof workspace; }
                check_rounded(&shapes[i], AMP_F16, &exec);
                check_rounded(&shapes[i], AMP_BF16, &exec);
            }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_rounded_operands);
    TEST(test_shapes);
    TEST(test_type_mixes);
    TEST(test_random_convolutions);
    TEST(test_pad_end);
    TEST(test_fast_sums);
    TEST(test_small_last_weight);
    TEST(test_reads_nothing_else);
    TEST(test_zeros_and_nans);
    TEST(test_infinities);
    TEST(test_words);
    TEST(test_short_rows);
    TEST(test_defaults);
    TEST(test_direct_zeros);
    TEST(test_single_gradients);
    TEST(test_error_bound);
    TEST(test_transposed);
    TEST(test_refused_shapes);
    TEST(test_refused_transposed);
    TEST(test_large_strides);
    TEST(test_refused_calls);
    TEST(test_exceptions);
    TEST_END();
}
