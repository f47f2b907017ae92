/* test_nan.c - every NaN that an operator stores is the quiet NaN 0x7fc00000 rounded to its type, on each instruction
   set, whatever NaNs, infinities and zeros went in; and what goes in as a NaN comes out as one. All of it holds under
   -Ofast too, except that the other bits are the same on each instruction set. */
#include "helpers.h"

static const char* isa_name = "";
static uint64_t first[8192];              /* hashes of the results on the first instruction set */
static size_t cases, first_cases;
static uint64_t numbers;                  /* where the stream of random numbers is */

typedef struct array { void* p; amp_dtype t; size_t n; } array;
static array make(amp_dtype t, size_t n) {
    array a;
    a.p = calloc(n ? n : 1, amp_dtype_size(t));
    a.t = t; a.n = n;
    return a;
}
static unsigned bits_of(const array* a, size_t i) {
    uint32_t u;
    if (a->t != AMP_F32) return ((const uint16_t*)a->p)[i];
    memcpy(&u, (const char*)a->p + 4 * i, sizeof u);
    return u;
}
static unsigned infinity_of(amp_dtype t) { return t == AMP_F32 ? 0x7f800000u : t == AMP_F16 ? 0x7c00u : 0x7f80u; }
static unsigned sign_of(amp_dtype t) { return t == AMP_F32 ? 0x80000000u : 0x8000u; }
static unsigned canonical(amp_dtype t) { return t == AMP_F32 ? 0x7fc00000u : t == AMP_F16 ? 0x7e00u : 0x7fc0u; }
static int is_nan_at(const array* a, size_t i) { return (bits_of(a, i) & ~sign_of(a->t)) > infinity_of(a->t); }
static void set_bits(array* a, size_t i, unsigned u) {
    const uint32_t wide = u;
    const uint16_t half = (uint16_t)u;
    if (a->t == AMP_F32) memcpy((char*)a->p + 4 * i, &wide, 4);
    else memcpy((char*)a->p + 2 * i, &half, 2);
}
/* A NaN of either sign with a payload, every second one signalling. */
static void set_nan(array* a, size_t i, size_t k) {
    const unsigned quiet = canonical(a->t) ^ infinity_of(a->t);
    set_bits(a, i, infinity_of(a->t) | (k & 1 ? sign_of(a->t) : 0) | (k & 2 ? quiet : 0) | (unsigned)(k / 4 % 13 + 1));
}
/* Number i of a repeating stream of normal numbers. */
static float normal(uint64_t i) {
    static float table[100003];
    static int made;
    size_t k;
    for (k = 0; !made && k < sizeof table / sizeof table[0]; k++) table[k] = amp_random_normal(9, k);
    made = 1;
    return table[i % (sizeof table / sizeof table[0])];
}
/* Normal numbers; of kind 1 with NaNs every `each` elements, of kind 2 with infinities and zeros, of 3 with all. */
static array random_array(amp_dtype t, size_t n, int kind, size_t each) {
    array a = make(t, n);
    size_t i;
    for (i = 0; i < n; i++) {
        const float v = normal(numbers++);
        amp_convert(amp_ref_of((char*)a.p + i * amp_dtype_size(t), t), amp_f32(&v), 1);
    }
    for (i = each / 2; kind & 1 && i < n; i += each) set_nan(&a, i, i / each);
    for (i = each / 3; kind & 2 && i < n; i += each)
        set_bits(&a, i, i / each % 3 == 2 ? 0 : infinity_of(t) | (i / each % 3 ? sign_of(t) : 0));
    return a;
}

/* Ends a result: its NaNs are canonical, and its bits those of the first instruction set. Returns the NaNs. */
static size_t finish(const char* what, array* a) {
    const unsigned char* byte = (const unsigned char*)a->p;
    uint64_t h = 1469598103934665603u;
    size_t i, nans = 0, wrong = 0, at = 0;
    for (i = 0; i < a->n; i++)
        if (is_nan_at(a, i)) {
            nans++;
            if (bits_of(a, i) != canonical(a->t) && wrong++ == 0) at = i;
        }
    CHECK_MSG(wrong == 0, "%s, %s, %s: %lu NaNs of %lu are others, element %lu is %x", isa_name, what,
              amp_dtype_name(a->t), (unsigned long)wrong, (unsigned long)nans, (unsigned long)at, bits_of(a, at));
#if !defined(__FAST_MATH__)
    for (i = 0; i < a->n * amp_dtype_size(a->t); i++) h = (h ^ byte[i]) * 1099511628211u;
#else
    (void)byte;
#endif
    if (cases < sizeof first / sizeof first[0]) {
        if (first_cases == 0) first[cases] = h;
        CHECK_MSG(first[cases] == h, "%s, %s, %s: other bits than in portable C", isa_name, what, amp_dtype_name(a->t));
    }
    cases++;
    free(a->p);
    return nans;
}
/* The same where element i must be a NaN if (and only if) `expected` is at i / run. */
static void finish_as(const char* what, array* a, const char* expected, size_t run) {
    size_t i, wrong = 0;
    for (i = 0; i < a->n; i++) wrong += is_nan_at(a, i) != (expected[i / run] != 0);
    CHECK_MSG(wrong == 0, "%s, %s, %s: %lu of %lu elements are NaNs or numbers, against what went in", isa_name, what,
              amp_dtype_name(a->t), (unsigned long)wrong, (unsigned long)a->n);
    finish(what, a);
}
/* Which runs of elements of a have a NaN. */
static void mark(char* marks, const array* a, size_t run) {
    size_t i;
    for (i = 0; i < a->n; i++) if (is_nan_at(a, i)) marks[i / run] = 1;
}
static char marks[4096];
static void unmark(void) { memset(marks, 0, sizeof marks); }

static void elements(amp_dtype t, amp_dtype o, int kind) {
    #define X(NAME, name, ...) #name,
    static const char* const names[] = { AMP_ACTIVATION_LIST(X) };
#undef X
    static const size_t sizes[] = { 5, 2063 };
    int f, s;
    for (s = 0; s < 2; s++) {
        const size_t n = sizes[s];
        for (f = AMP_RELU; f < AMP_ACTIVATION_COUNT; f++) {
            array x = random_array(t, n, kind, 3), dy = random_array(t, n, kind, 4), y = make(o, n), dx = make(o, n);
            CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t),
                amp_ref_of(y.p, o), n, NULL) == AMP_OK);
            CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, t),
                amp_ref_of(x.p, t), amp_ref_of(dx.p, o), 0, n, NULL) == AMP_OK);
            unmark();
            mark(marks, &x, 1);
            if (kind == 1 || f == AMP_TANH || f == AMP_SIGMOID) finish_as(names[f], &y, marks, 1); else finish(names[f], &y);
            finish(names[f], &dx);
            free(x.p); free(dy.p);
        }
        {
            array a = random_array(t, n, kind, 3), b = random_array(t, n, kind, 4), y = make(o, n), z = make(o, n);
            size_t i;
            CHECK(amp_add_forward(amp_ref_of(a.p, t), amp_ref_of(b.p, t), amp_ref_of(y.p, o), n,
                NULL) == AMP_OK);
            CHECK(amp_dropout_forward(amp_ref_of(a.p, t), amp_ref_of(z.p, o), n, 0.25f, 3, 1, NULL) == AMP_OK);
            unmark();
            mark(marks, &a, 1);
            mark(marks, &b, 1);
            if (kind == 1) finish_as("add", &y, marks, 1); else finish("add", &y);
            y = make(o, n);
            CHECK(amp_mul_forward(amp_ref_of(a.p, t), amp_ref_of(b.p, t), amp_ref_of(y.p, o), n, 1, NULL) == AMP_OK);
            finish("mul", &y);
            y = make(o, 1);
            CHECK(amp_mul_backward(amp_ref_of(a.p, t), amp_ref_of(b.p, t), amp_ref_of(b.p, t), AMP_NONE,
                amp_ref_of(y.p, o), 0, n, n, NULL) == AMP_OK);
            finish("mul backward", &y);
            unmark();
            for (i = 0; i < n; i++) marks[i] = is_nan_at(&a, i) && amp_random_uniform(3, 1 + i) >= 0.25f;
            finish_as("dropout", &z, marks, 1);
            free(a.p);
            a = random_array(o, n, kind, 5);
            CHECK(amp_concat_backward(amp_ref_of(b.p, t), n, 0, amp_ref_of(a.p, o), n, 1,
                AMP_ACCUMULATE_INPUT, NULL) == AMP_OK);
            finish("concat backward", &a);
            free(b.p);
        }
    }
}
/* Many elements of 16 bits, by tables. */
static void tables(amp_dtype t, int kind) {
    static char memory[AMP_ACTIVATION_WORKSPACE];
    const size_t n = 5 * 65536;
    amp_exec e;
    int f;
    memset(&e, 0, sizeof e);
    e.workspace = memory;
    e.workspace_size = sizeof memory;
    for (f = AMP_GELU; f <= AMP_SILU; f++) {
        if (f == AMP_TANH || f == AMP_SIGMOID) continue;
        array x = random_array(t, n, kind, 31), dy = random_array(t, n, kind, 7), y = make(t, n), dx = make(t, n);
        CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t), amp_ref_of(y.p, t), n,
            &e) == AMP_OK);
        CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, t), amp_ref_of(x.p, t),
            amp_ref_of(dx.p, t), 0, n, &e) == AMP_OK);
        finish("activation by table", &y); finish("gradient by table", &dx);
        free(x.p); free(dy.p);
    }
}
static void rows_of(amp_dtype t, amp_dtype o, int kind, size_t rows, size_t d) {
    array x = random_array(t, rows * d, kind, d + 3), dy = random_array(t, rows * d, kind, 2 * d + 1);
    array y = make(o, rows * d), dx = make(o, rows * d), mean = make(AMP_F32, rows), inv = make(AMP_F32, rows);
    array g = random_array(AMP_F32, d, kind == 3, 5), dg = make(o, d), db = random_array(o, d, kind, 6);
    array loss = make(AMP_F32, 1);
    const amp_cross_entropy_desc smooth = { 0.1f, 0, NULL, NULL, 0 };
    int32_t* labels = (int32_t*)calloc(rows, sizeof *labels);
    size_t i;
    for (i = 0; i < rows; i++) labels[i] = (int32_t)(i * 7 % d);
    unmark();
    mark(marks, &x, d);
    CHECK(amp_softmax_forward(amp_ref_of(x.p, t), amp_ref_of(y.p, o), rows, d, NULL) == AMP_OK);
    CHECK(amp_softmax_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(dx.p, o), 0,
        rows, d, NULL) == AMP_OK);
    if (kind == 1) finish_as("softmax", &y, marks, d); else finish("softmax", &y);
    finish("softmax backward", &dx);
    dx = make(o, rows * d);
    CHECK(amp_softmax_cross_entropy_forward(amp_ref_of(x.p, t), labels, &smooth, (float*)loss.p,
        rows, d, NULL) == AMP_OK);
    CHECK(amp_softmax_cross_entropy_backward(amp_ref_of(x.p, t), labels, &smooth, NULL, 1.0f,
        amp_ref_of(dx.p, o), rows, d, NULL) == AMP_OK);
    if (kind == 1) finish_as("cross-entropy backward", &dx, marks, d); else finish("cross-entropy backward", &dx);
    CHECK(finish("cross-entropy", &loss) == 1 || kind != 1);
    y = make(o, rows * d); dx = make(o, rows * d);
    CHECK(amp_layer_norm_forward(amp_ref_of(x.p, t), amp_f32(g.p), AMP_NONE, 0, (float*)mean.p,
        (float*)inv.p, amp_ref_of(y.p, o), rows, d, NULL)
          == AMP_OK);
    CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_f32(g.p), 0.0f,
        (float*)mean.p, (float*)inv.p, amp_ref_of(dx.p, o), amp_ref_of(dg.p, o),
        amp_ref_of(db.p, o), 1, rows, d, NULL) == AMP_OK);
    if (kind == 1) {
        finish_as("layer norm", &y, marks, d); finish_as("mean", &mean, marks, 1); finish_as("invstd", &inv, marks, 1);
    } else { finish("layer norm", &y); finish("mean", &mean); finish("invstd", &inv); }
    finish("layer norm backward", &dx); finish("dgamma", &dg); finish("dbeta", &db);
    y = make(o, rows * d); dx = make(o, rows * d); mean = make(AMP_F32, rows); inv = make(AMP_F32, rows); dg = make(o, d);
    {   /* groups of one image are those rows */
        const amp_group_norm_shape group = { 1, (int)rows, (int)d, 0, 0.0f };
        array dgs = make(o, rows);
        CHECK(amp_group_norm_forward(&group, amp_ref_of(x.p, t), AMP_NONE, AMP_NONE, (float*)mean.p, (float*)inv.p,
            amp_ref_of(y.p, o), NULL) == AMP_OK);
        CHECK(amp_group_norm_backward(&group, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), AMP_NONE, (float*)mean.p, (float*)inv.p,
            amp_ref_of(dx.p, o), amp_ref_of(dgs.p, o), AMP_NONE, 0, NULL) == AMP_OK);
        if (kind == 1) {
            finish_as("group norm", &y, marks, d); finish_as("mean", &mean, marks, 1); finish_as("invstd", &inv, marks, 1);
        } else { finish("group norm", &y); finish("mean", &mean); finish("invstd", &inv); }
        finish("group norm backward", &dx); finish("dgamma", &dgs);
    }
    y = make(o, rows * d); dx = make(o, rows * d); inv = make(AMP_F32, rows);
    CHECK(amp_rms_norm_forward(amp_ref_of(x.p, t), amp_f32(g.p), 0, (float*)inv.p, amp_ref_of(y.p, o), rows, d, NULL) == AMP_OK);
    CHECK(amp_rms_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_f32(g.p), 0.0f, (float*)inv.p,
        amp_ref_of(dx.p, o), amp_ref_of(dg.p, o), 1, rows, d, NULL) == AMP_OK);
    if (kind == 1) { finish_as("rms norm", &y, marks, d); finish_as("invstd", &inv, marks, 1); }
    else { finish("rms norm", &y); finish("invstd", &inv); }
    finish("rms norm backward", &dx); finish("dgamma", &dg);
    free(labels); free(x.p); free(dy.p); free(g.p);
}
static void batch_norm(amp_dtype t, amp_dtype o, int kind, int n, int channels, int spatial, int frozen) {
    const size_t c = (size_t)channels, all = (size_t)(n * channels * spatial);
    array x = random_array(t, all, kind, 61), dy = random_array(t, all, kind, 73), y = make(o, all), dx = make(o, all);
    array mean = random_array(AMP_F32, c, frozen ? kind : 0, 2), var = random_array(AMP_F32, c, 0, 9), m = make(AMP_F32, c);
    array s = make(AMP_F32, c), dg = random_array(o, c, kind, 3), db = random_array(o, c, kind, 4);
    amp_batch_norm_shape shape;
    size_t i;
    memset(&shape, 0, sizeof shape);
    shape.n = n; shape.channels = channels; shape.spatial = spatial; shape.frozen = frozen;
    for (i = 0; i < c; i++) set_bits(&var, i, bits_of(&var, i) & 0x7fffffffu);
    if (frozen && kind & 2) set_bits(&var, 0, infinity_of(AMP_F32));
    unmark();
    for (i = 0; i < all; i++) if (!frozen && is_nan_at(&x, i)) marks[i / (size_t)spatial % c] = 1;
    for (i = c; i < all / (size_t)spatial; i++) marks[i] = marks[i - c];
    CHECK(amp_batch_norm_forward(&shape, 1, amp_ref_of(x.p, t), AMP_NONE, AMP_NONE,
        (float*)mean.p, (float*)var.p, (float*)m.p, (float*)s.p, amp_ref_of(y.p, o), NULL) == AMP_OK);
    CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), AMP_NONE,
        (float*)m.p, (float*)s.p, amp_ref_of(dx.p, o), amp_ref_of(dg.p, o), amp_ref_of(db.p, o),
        1, NULL) == AMP_OK);
    if (kind == 1 && !frozen) {
        finish_as("batch norm", &y, marks, (size_t)spatial);
        finish_as("save_mean", &m, marks, 1); finish_as("save_invstd", &s, marks, 1);
    } else {
        finish("batch norm", &y);
        finish("save_mean", &m); finish("save_invstd", &s);
    }
    finish("batch norm backward", &dx); finish("dgamma", &dg); finish("dbeta", &db);
    if (!frozen) { finish("running_mean", &mean); finish("running_var", &var); }
    else { free(mean.p); free(var.p); }
    free(x.p); free(dy.p);
}
static void losses(amp_dtype t, amp_dtype o, int kind) {
    const size_t n = 2063;
    array x = random_array(t, n, kind, 100), target = random_array(t, n, kind, 150), a = make(AMP_F32, 1);
    array b = make(AMP_F32, 1), da = make(o, n), db = make(o, n);
    CHECK(amp_mse_forward(amp_ref_of(x.p, t), amp_ref_of(target.p, t), (float*)a.p, n, NULL) == AMP_OK);
    CHECK(amp_bce_with_logits_forward(amp_ref_of(x.p, t), amp_ref_of(target.p, t), (float*)b.p, n,
        NULL) == AMP_OK);
    CHECK(amp_mse_backward(amp_ref_of(x.p, t), amp_ref_of(target.p, t), NULL, 1.0f,
        amp_ref_of(da.p, o), n, NULL) == AMP_OK);
    CHECK(amp_bce_with_logits_backward(amp_ref_of(x.p, t), amp_ref_of(target.p, t), NULL, 1.0f,
        amp_ref_of(db.p, o), n, NULL) == AMP_OK);
    unmark();
    mark(marks, &x, 1);
    mark(marks, &target, 1);
    CHECK(finish("mse", &a) == 1 || kind == 2);
    CHECK(finish("bce", &b) == 1 || kind == 2);
    if (kind == 1) { finish_as("mse backward", &da, marks, 1); finish_as("bce backward", &db, marks, 1); }
    else { finish("mse backward", &da); finish("bce backward", &db); }
    free(x.p); free(target.p);
}
static void pool(amp_dtype t, amp_dtype o, int kind, amp_pool max, int side, int kernel, int stride, int pad) {
    amp_pool2d_shape s;
    const size_t planes = 3, pixels = (size_t)(side * side);
    array x, y, dy, dx;
    int oh = 0, ow = 0, i, j, h, w;
    size_t p;
    memset(&s, 0, sizeof s);
    s.kind = max; s.n = 1; s.channels = (int)planes; s.height = s.width = side;
    s.kernel_h = s.kernel_w = kernel; s.stride_h = s.stride_w = stride; s.pad_h = s.pad_w = pad;
    CHECK(amp_pool2d_output(&s, &oh, &ow, NULL) == AMP_OK);
    x = random_array(t, planes * pixels, kind, 17); dx = make(o, x.n);
    y = make(o, planes * (size_t)(oh * ow)); dy = random_array(t, y.n, kind, 5);
    CHECK(amp_pool2d_forward(&s, amp_ref_of(x.p, t), amp_ref_of(y.p, o), NULL) == AMP_OK);
    CHECK(amp_pool2d_backward(&s, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(dx.p, o), 0,
        NULL) == AMP_OK);
    unmark();
    for (p = 0; p < planes; p++)
        for (i = 0; i < oh; i++)
            for (j = 0; j < ow; j++)
                for (h = i * stride - pad; h < i * stride - pad + kernel; h++)
                    for (w = j * stride - pad; w < j * stride - pad + kernel; w++)
                        if (h >= 0 && h < side && w >= 0 && w < side
                            && is_nan_at(&x, p * pixels + (size_t)(h * side + w)))
                            marks[p * (size_t)(oh * ow) + (size_t)(i * ow + j)] = 1;
    if (kind == 1) finish_as("pooling", &y, marks, 1); else finish("pooling", &y);
    finish("pooling backward", &dx);
    free(x.p); free(dy.p);
}
static void products(amp_dtype t, amp_dtype o, int kind) {
    const size_t m = 20, n = 40, k = 33;
    array a = random_array(t, m * k, kind, 200), b = random_array(t, k * n, kind & 2, 300), c = random_array(o, m * n, kind & 2, 90);
    array dx = make(o, m * k), dw = random_array(o, n * k, kind & 2, 50), db = random_array(o, n, kind, 4);
    unmark();
    mark(marks, &a, k);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, m, n, k, k, n, n), 0.5f,
        amp_ref_of(a.p, t), amp_ref_of(b.p, t), 2.0f, amp_ref_of(c.p, o), NULL) == AMP_OK);
    CHECK(amp_linear_backward(amp_ref_of(c.p, o), amp_ref_of(a.p, t), amp_ref_of(b.p, t),
        amp_ref_of(dx.p, o), amp_ref_of(dw.p, o), amp_ref_of(db.p, o), 1, m, k, n, NULL) == AMP_OK);
    if (kind == 1) finish_as("gemm", &c, marks, n); else finish("gemm", &c);
    finish("linear dx", &dx); finish("linear dw", &dw); finish("linear db", &db);
    free(a.p); free(b.p);
}
static void convolution(amp_dtype t, amp_dtype o, int kind, int channels, int groups) {
    amp_conv2d_shape s;
    const size_t n = (size_t)(2 * channels * 81);
    array x = random_array(t, n, kind, 97), w = random_array(t, (size_t)(8 * channels / groups * 9), kind & 2, 41);
    array y = make(o, 2 * 8 * 81), dy = random_array(t, 2 * 8 * 81, kind, 211), dx = make(o, n), dw = random_array(o, w.n, kind & 2, 19);
    array db = random_array(o, 8, kind, 3);
    memset(&s, 0, sizeof s);
    s.n = 2; s.channels = channels; s.height = s.width = 9; s.out_channels = 8; s.kernel_h = s.kernel_w = 3;
    s.pad_h = s.pad_w = 1; s.groups = groups;
    CHECK(amp_conv2d_forward(&s, amp_ref_of(x.p, t), amp_ref_of(w.p, t), AMP_NONE,
        amp_ref_of(y.p, o), NULL) == AMP_OK);
    CHECK(amp_conv2d_backward(&s, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(w.p, t),
        amp_ref_of(dx.p, o), amp_ref_of(dw.p, o), amp_ref_of(db.p, o), 1, NULL) == AMP_OK);
    CHECK(finish("convolution", &y) > 0 || kind == 2);
    finish("conv dx", &dx); finish("conv dw", &dw); finish("conv db", &db);
    free(x.p); free(w.p); free(dy.p);
}
static void all_operators(void) {
    int a, b, kind, i;
    for (kind = 1; kind <= 3; kind++)
        for (a = 0; a < 3; a++) {
            for (b = 0; b < 3; b++) {
                const amp_dtype t = TYPES[a], o = TYPES[b];
                if (test_every() > 1 && (kind + a + b) % 3) continue;     /* of a long list a third, the same for each set */
                elements(t, o, kind);
                rows_of(t, o, kind, 3, 700);
                rows_of(t, o, kind, 70, 10);
                rows_of(t, o, kind, 5, 2100);
                for (i = 0; i < 2; i++) {
                    batch_norm(t, o, kind, 4, 5, 30, i);
                    batch_norm(t, o, kind, 3, 6, 300, i);
                    batch_norm(t, o, kind, 40, 20, 1, i);
                }
                losses(t, o, kind);
                for (i = 0; i < 2; i++) {
                    pool(t, o, kind, (amp_pool)i, 16, 2, 2, 0);
                    pool(t, o, kind, (amp_pool)i, 35, 2, 2, 0);
                    pool(t, o, kind, (amp_pool)i, 19, 3, 2, 1);
                    pool(t, o, kind, (amp_pool)i, 20, 3, 1, 1);
                    pool(t, o, kind, (amp_pool)i, 24, 5, 3, 0);
                    pool(t, o, kind, (amp_pool)i, 7, 7, 7, 0);
                    pool(t, o, kind, (amp_pool)i, 70, 3, 3, 0);
                }
                products(t, o, kind);
                convolution(t, o, kind, 8, 1);
                convolution(t, o, kind, 8, 8);
            }
            if (a > 0 && (kind == 3 || test_every() == 1)) tables(TYPES[a], kind);
        }
}
static void test_all_operators(void) {
    int i;
    for (i = 0; i < COUNT(ISAS); i++) {
        if (amp_cpu_force_isa(ISAS[i]) != AMP_OK) continue;
        isa_name = amp_isa_name(ISAS[i]);
        cases = 0;
        numbers = 0;
        all_operators();
        CHECK_MSG(cases == first_cases || first_cases == 0, "%lu cases", (unsigned long)cases);
        first_cases = cases;
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
    CHECK(cases > 0 && cases <= sizeof first / sizeof first[0]);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_all_operators);
    TEST_END();
}
