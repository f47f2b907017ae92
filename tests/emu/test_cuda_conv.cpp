/* test_cuda_conv.cpp - convolutions on the device, forward and backward.
   References: the CPU's bits on whole numbers, whose sums are exact in every order; the CPU's bits on any numbers
   where the same order is promised; plain loops in double precision with a derived bound. */
#include "device.h"

#include <climits>

/* --- a convolution with all its tensors -------------------------------------------------------- */

struct Types { amp_dtype act, weight, grad; };

static amp_conv2d_shape shape_of(const int* z) {
    amp_conv2d_shape s = { z[0], z[1], z[2],  z[3],  z[4],  z[5],  z[6], z[7],
                           z[8], z[9], z[10], z[11], z[12], z[13], 0,    0,    0,    0 };
    return s;
}

/* The defaults filled in, and the sizes that follow. */
struct Sizes {
    amp_conv2d_shape s;
    int oh, ow, cg, og;
    size_t x, w, y;
    explicit Sizes(amp_conv2d_shape z) : s(z), oh(0), ow(0) {
        CHECK(amp_conv2d_output(&z, &oh, &ow, nullptr) == AMP_OK);
        for (int* v : { &s.stride_h, &s.stride_w, &s.dilation_h, &s.dilation_w, &s.groups })
            if (*v == 0) *v = 1;
        cg = s.channels / s.groups;
        og = s.out_channels / s.groups;
        x = (size_t)(s.n * s.channels * s.height * s.width);
        w = (size_t)(s.out_channels * cg * s.kernel_h * s.kernel_w);
        y = (size_t)(s.n * s.out_channels * oh * ow);
    }
    size_t x_at(int n, int c, int i, int j) const {
        return (size_t)(((n * s.channels + c) * s.height + i) * s.width + j);
    }
    size_t w_at(int o, int c, int a, int b) const {
        return (size_t)(((o * cg + c) * s.kernel_h + a) * s.kernel_w + b);
    }
    size_t y_at(int n, int o, int i, int j) const {
        return (size_t)(((n * s.out_channels + o) * oh + i) * ow + j);
    }
};

struct Conv {
    amp_conv2d_shape shape;
    Sizes z;
    Types t;
    Array x, w, b, y, dy, dx, dw, db;
    Conv(amp_conv2d_shape s, Types types, Numbers kind, size_t offset = 0)
        : shape(s), z(s), t(types), x(t.act, z.x, false, offset), w(t.weight, z.w, false, offset),
          b(t.weight, outputs(), false, offset), y(t.act, z.y, true, offset), dy(t.act, z.y, false, offset),
          dx(t.act, z.x, true, offset), dw(t.grad, z.w, true, offset), db(t.grad, outputs(), true, offset) {
        x.fill(z.x, kind);
        w.fill(z.w, kind);
        b.fill(outputs(), kind == SPECIAL ? WHOLE : kind);
        dy.fill(z.y, kind);
        for (Array* a : { &x, &w, &b, &dy }) a->upload();
    }
    size_t outputs() const { return (size_t)shape.out_channels; }

    amp_result forward(bool bias, const amp_exec* e) const {
        return cuda->conv2d_forward(&shape, amp_ref_of(x.there(), x.type),
            amp_ref_of(w.there(), w.type), amp_ref_of(bias ? b.there() : nullptr, b.type),
            amp_ref_of(y.there(), y.type), e);
    }
    /* wanted: 1 dx, 2 dw, 4 db; what none of them needs is NULL. */
    amp_result backward(int wanted, int accumulate, const amp_exec* e) const {
        return cuda->conv2d_backward(&shape, amp_ref_of(dy.there(), dy.type),
            amp_ref_of(wanted & 2 ? x.there() : nullptr, x.type),
            amp_ref_of(wanted & 1 ? w.there() : nullptr, w.type),
            amp_ref_of(wanted & 1 ? dx.there() : nullptr, dx.type),
            amp_ref_of(wanted & 2 ? dw.there() : nullptr, dw.type),
            amp_ref_of(wanted & 4 ? db.there() : nullptr, db.type), accumulate, e);
    }
    void cpu(bool bias, int wanted, int accumulate) {
        CHECK(amp_conv2d_forward(&shape, amp_ref_of(x.here(), x.type),
            amp_ref_of(w.here(), w.type), amp_ref_of(bias ? b.here() : nullptr, b.type),
            amp_ref_of(y.here(), y.type), nullptr)
              == AMP_OK);
        CHECK(amp_conv2d_backward(&shape, amp_ref_of(dy.here(), dy.type),
            amp_ref_of(x.here(), x.type), amp_ref_of(w.here(), w.type),
            amp_ref_of(wanted & 1 ? dx.here() : nullptr, dx.type),
            amp_ref_of(wanted & 2 ? dw.here() : nullptr, dw.type),
            amp_ref_of(wanted & 4 ? db.here() : nullptr, db.type), accumulate, nullptr)
              == AMP_OK);
    }
};

static const char* describe(const Conv& c) {
    static char text[256];
    const amp_conv2d_shape& s = c.z.s;
    snprintf(text, sizeof text,
             "%dx%dx%dx%d -> %d kernel %dx%d stride %dx%d pad %dx%d dilation %dx%d groups %d, %s %s %s",
             s.n, s.channels, s.height, s.width, s.out_channels, s.kernel_h, s.kernel_w, s.stride_h,
             s.stride_w, s.pad_h, s.pad_w, s.dilation_h, s.dilation_w, s.groups, amp_dtype_name(c.t.act),
             amp_dtype_name(c.t.weight), amp_dtype_name(c.t.grad));
    return text;
}

static void check_array(const Array& a, const Bytes& want, const char* what, const Conv& c) {
    size_t first = 0;
    Bytes got = a.download();
    size_t bad = differences(got, want, a.size, &first);
    CHECK_MSG(bad == 0, "%s of %s: %zu differ, the first at %zu: %.9g, not %.9g", what, describe(c), bad,
              first - a.lead, (double)get(&got[first * a.size], a.type),
              (double)get(&want[first * a.size], a.type));
}

/* Forward and backward have the CPU's bits; nothing else is written; gradients that are not wanted stay. */
static void check_bits(Conv& c, int wanted, int accumulate, bool bias, size_t workspace, size_t skip = 0) {
    static int calls;
    amp_exec e = quiet_exec();
    Workspace w(&e, workspace, skip);
    Array* outputs[] = { &c.y, &c.dx, &c.dw, &c.db };
    Bytes before[4];
    if (accumulate) {
        c.dw.fill(c.z.w, WHOLE);
        c.db.fill(c.outputs(), WHOLE);
        c.dx.fill(c.z.x, WHOLE);
        if (calls++ % 2) accumulate |= AMP_ACCUMULATE_INPUT;
    }
    for (int i = 0; i < 4; i++) outputs[i]->upload(), before[i] = outputs[i]->host;
    amp_result r = c.forward(bias, &e);
    CHECK_MSG(r == AMP_OK, "%d \"%s\"", (int)r, last_sentence);
    r = c.backward(wanted, accumulate, &e);
    CHECK_MSG(r == AMP_OK, "%d \"%s\"", (int)r, last_sentence);
    CHECK(amp_cuda_synchronize(&e) == AMP_OK);
    c.cpu(bias, wanted, accumulate);
    check_array(c.y, c.y.host, "y", c);
    check_array(c.dx, c.dx.host, "dx", c);
    check_array(c.dw, c.dw.host, "dw", c);
    check_array(c.db, c.db.host, "db", c);
    for (int i = 0; i < 4; i++) outputs[i]->host = before[i];
}

/* --- tests: shapes and types -------------------------------------------------------------------- */

/* n c h w, o kh kw, stride, pad, dilation, groups */
static const int SHAPES[][14] = {
    { 2, 3, 7, 9, 4, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 2, 1, 12, 12, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1 },
    { 1, 4, 9, 11, 6, 3, 2, 2, 3, 1, 0, 1, 1, 2 },     /* strides, groups, unequal sides */
    { 2, 2, 10, 7, 3, 3, 3, 1, 2, 2, 3, 2, 1, 1 },     /* dilation */
    { 1, 2, 13, 13, 2, 3, 3, 3, 2, 4, 4, 3, 4, 1 },    /* with a common divisor, and without */
    { 2, 5, 6, 6, 5, 3, 3, 1, 1, 1, 1, 1, 1, 5 },      /* depthwise */
    { 1, 3, 9, 9, 6, 3, 3, 2, 2, 1, 1, 1, 1, 3 },      /* depthwise with a multiplier and a stride */
    { 3, 7, 5, 4, 9, 1, 1, 1, 1, 0, 0, 1, 1, 1 },      /* 1 x 1 */
    { 2, 8, 4, 4, 16, 1, 1, 1, 1, 0, 0, 1, 1, 1 },     /* 1 x 1, all sides multiples of eight */
    { 2, 3, 8, 8, 4, 1, 1, 2, 2, 0, 0, 1, 1, 1 },      /* 1 x 1 with a stride: pixels that meet no output */
    { 1, 2, 4, 5, 3, 1, 1, 1, 1, 1, 2, 1, 1, 1 },      /* 1 x 1 with padding: outputs that see nothing */
    { 2, 3, 5, 6, 4, 5, 6, 1, 1, 0, 0, 1, 1, 1 },      /* kernel = input */
    { 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1 },
    { 1, 2, 3, 3, 2, 5, 5, 1, 1, 4, 4, 1, 1, 1 },      /* padding larger than the input */
    { 1, 1, 3, 40, 2, 2, 2, 1, 25, 0, 30, 1, 1, 1 },   /* stride larger than a kernel */
    { 1, 2, 4, 70, 3, 1, 7, 1, 1, 0, 3, 1, 1, 1 },     /* rows longer than a tile */
    { 1, 3, 70, 2, 2, 5, 1, 2, 1, 2, 0, 1, 1, 1 },
    { 2, 24, 5, 5, 20, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    /* long sums */
    { 1, 2, 6, 6, 70, 3, 3, 1, 1, 1, 1, 1, 1, 1 },     /* more outputs than a tile has rows */
    { 1, 36, 4, 4, 36, 3, 3, 1, 1, 1, 1, 1, 1, 4 },    /* wide groups */
    { 2, 2, 5, 6, 3, 3, 2, 2, 1, 1, 1, 1, 2, 1 },
};
enum { SHAPE_COUNT = sizeof SHAPES / sizeof SHAPES[0], SMALL = SHAPE_COUNT - 1 };

static void test_shapes() {
    for (unsigned i = 0; i < SHAPE_COUNT; i++)
        for (unsigned t = i % 2; t < 3; t += 2) {
            Conv c(shape_of(SHAPES[i]), { TYPES[t], TYPES[t], TYPES[(t + i) % 3] }, WHOLE, i % 4 == 1);
            check_bits(c, 7, (int)((i + t) & 1u), (i + t) % 3 != 0,
                       i & 1 ? cuda->conv2d_workspace(&c.shape) : 0);
        }
}

static void test_type_mixes() {
    for (unsigned t = 0; t < 27; t++) {
        Conv c(shape_of(SHAPES[SMALL]), { TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3] }, WHOLE, t & 1);
        check_bits(c, 7, (int)(t >> 1 & 1u), true, 0);
    }
}

static void test_random_convolutions() {
    for (int i = 0; i < 40; i++) {
        int z[14], groups = 1 + (int)(test_random() % 3);
        amp_dtype t = TYPES[test_random() % 3];
        z[0] = 1 + (int)(test_random() % 3);
        z[1] = groups * (1 + (int)(test_random() % 4));
        z[4] = groups * (1 + (int)(test_random() % 5));
        for (int side = 0; side < 2; side++) {
            z[5 + side] = 1 + (int)(test_random() % 4);
            z[7 + side] = 1 + (int)(test_random() % 4);
            z[9 + side] = (int)(test_random() % 4);
            z[11 + side] = 1 + (int)(test_random() % 3);
            z[2 + side] = z[11 + side] * (z[5 + side] - 1) + 1 + (int)(test_random() % 10);
        }
        z[13] = groups;
        amp_conv2d_shape shape = shape_of(z);
        if (i % 3 == 1) { shape.pad_end_h = i % 2 ? 1 : AMP_ZERO; shape.pad_end_w = i % 4 ? 2 : AMP_ZERO; }
        Conv c(shape, { t, t, TYPES[test_random() % 3] }, WHOLE);
        check_bits(c, 7, i & 1, i % 3 != 0, 0);
    }
}

/* The transposed convolution from c's y to its x: reads dy, x where c's dy, x are read as x, dy; has the CPU's bits. */
static void check_transposed(Conv& c, int accumulate, bool bias, size_t workspace) {
    const size_t channels = (size_t)c.shape.channels;
    amp_exec e = quiet_exec();
    Workspace w(&e, workspace, 0);
    Array b(c.t.weight, channels, false, 1), db(c.t.grad, channels, true, 0);
    Array* outputs[] = { &c.dx, &c.y, &c.dw, &db };
    amp_conv2d_shape s = c.z.s;
    int oh, ow;
    const int end_h = c.shape.pad_end_h ? std::max(c.shape.pad_end_h, 0) : s.pad_h;
    const int end_w = c.shape.pad_end_w ? std::max(c.shape.pad_end_w, 0) : s.pad_w;
    s.channels = c.shape.out_channels; s.out_channels = c.shape.channels;
    s.height = c.z.oh; s.width = c.z.ow;
    s.output_pad_h = (c.shape.height + s.pad_h + end_h - s.dilation_h * (s.kernel_h - 1) - 1) % s.stride_h;
    s.output_pad_w = (c.shape.width + s.pad_w + end_w - s.dilation_w * (s.kernel_w - 1) - 1) % s.stride_w;
    CHECK(amp_conv_transpose2d_output(&s, &oh, &ow, nullptr) == AMP_OK && oh == c.shape.height && ow == c.shape.width);
    b.fill(channels, WHOLE);
    b.upload();
    c.y.fill(c.z.y, WHOLE);
    c.dw.fill(c.z.w, WHOLE);
    db.fill(channels, WHOLE);
    for (Array* a : outputs) a->upload();
    CHECK(cuda->conv_transpose2d_forward(&s, amp_ref_of(c.dy.there(), c.dy.type), amp_ref_of(c.w.there(), c.w.type),
        amp_ref_of(bias ? b.there() : nullptr, b.type), amp_ref_of(c.dx.there(), c.dx.type), &e) == AMP_OK);
    CHECK(cuda->conv_transpose2d_backward(&s, amp_ref_of(c.x.there(), c.x.type), amp_ref_of(c.dy.there(), c.dy.type),
        amp_ref_of(c.w.there(), c.w.type), amp_ref_of(c.y.there(), c.y.type), amp_ref_of(c.dw.there(), c.dw.type),
        amp_ref_of(db.there(), db.type), accumulate, &e) == AMP_OK);
    CHECK(amp_cuda_synchronize(&e) == AMP_OK);
    CHECK(amp_conv_transpose2d_forward(&s, amp_ref_of(c.dy.here(), c.dy.type), amp_ref_of(c.w.here(), c.w.type),
        amp_ref_of(bias ? b.here() : nullptr, b.type), amp_ref_of(c.dx.here(), c.dx.type), nullptr) == AMP_OK);
    CHECK(amp_conv_transpose2d_backward(&s, amp_ref_of(c.x.here(), c.x.type), amp_ref_of(c.dy.here(), c.dy.type),
        amp_ref_of(c.w.here(), c.w.type), amp_ref_of(c.y.here(), c.y.type), amp_ref_of(c.dw.here(), c.dw.type),
        amp_ref_of(db.here(), db.type), accumulate, nullptr) == AMP_OK);
    check_array(c.dx, c.dx.host, "transposed y", c);
    check_array(c.y, c.y.host, "transposed dx", c);
    check_array(c.dw, c.dw.host, "transposed dw", c);
    check_array(db, db.host, "transposed db", c);
}
static void test_transposed() {
    for (unsigned i = 0; i < SHAPE_COUNT; i++)
        for (unsigned t = 0; t < 3; t++) {
            Conv c(shape_of(SHAPES[i]), { TYPES[t], TYPES[(t + i / 2 % 2) % 3], TYPES[(t + i) % 3] }, WHOLE, i % 4 == 1);
            check_transposed(c, i % 3 == t ? 0 : AMP_ACCUMULATE_PARAMS | AMP_ACCUMULATE_INPUT, (i + t) % 4 != 0,
                             i & 1 ? cuda->conv2d_workspace(&c.shape) : 0);
        }
}

/* The layers of LeNet-5 and the kinds of a small ResNet, narrow. */
static void test_networks() {
    static const int LAYERS[][14] = {
        { 1, 1, 28, 28, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1 },    { 2, 6, 14, 14, 16, 5, 5, 1, 1, 0, 0, 1, 1, 1 },
        { 1, 3, 20, 20, 8, 7, 7, 2, 2, 3, 3, 1, 1, 1 },    { 2, 16, 8, 8, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
        { 1, 16, 8, 8, 32, 3, 3, 2, 2, 1, 1, 1, 1, 1 },    { 2, 16, 8, 8, 32, 1, 1, 2, 2, 0, 0, 1, 1, 1 },
        { 1, 32, 7, 7, 8, 1, 1, 1, 1, 0, 0, 1, 1, 1 },
    };
    for (unsigned i = 0; i < sizeof LAYERS / sizeof LAYERS[0]; i++) {
        Types types = { TYPES[1 + i % 2], TYPES[1 + i % 2], AMP_F32 };
        Conv c(shape_of(LAYERS[i]), types, WHOLE);
        check_bits(c, 7, 0, true, cuda->conv2d_workspace(&c.shape));
    }
}

/* Zeroed strides, dilations and groups mean 1; so does a type of 0 mean F32. */
static void test_defaults() {
    amp_conv2d_shape s = {};
    s.n = 2; s.channels = 3; s.height = 6; s.width = 5; s.out_channels = 4; s.kernel_h = 3; s.kernel_w = 2;
    Conv c(s, { AMP_F32, AMP_F32, AMP_F32 }, WHOLE);
    check_bits(c, 7, 0, true, 0);
    c.y.upload();
    CHECK(cuda->conv2d_forward(&s, amp_ref_of(c.x.there(), AMP_DTYPE_DEFAULT),
        amp_ref_of(c.w.there(), AMP_DTYPE_DEFAULT), AMP_NONE,
        amp_ref_of(c.y.there(), AMP_DTYPE_DEFAULT), nullptr)
          == AMP_OK);
    c.cpu(false, 0, 0);
    check_array(c.y, c.y.host, "y", c);
}

/* Only the wanted gradients are computed, and only what they need has to be there. */
static void test_single_gradients() {
    for (int wanted = 0; wanted < 7; wanted++)
        for (unsigned t = 0; t < 2; t++) {
            Conv c(shape_of(SHAPES[t ? 7 : 0]), { AMP_F16, AMP_F16, AMP_F32 }, WHOLE);
            check_bits(c, wanted, wanted & 1, true, 0);
        }
}

/* Infinities and NaN. Weights that the stride keeps from a pixel of dx are not multiplied by zeros. */
static void test_special_values() {
    static const int WHICH[4] = { 0, 7, 2, 4 };
    for (unsigned t = 0; t < 12; t++) {
        Conv c(shape_of(SHAPES[WHICH[t % 4]]), { TYPES[t / 4], TYPES[t / 4], TYPES[t % 3] }, SPECIAL);
        check_bits(c, 3, 0, true, 0);
    }
}

/* dx is a product for each phase of its pixels that meets a kernel position; for the others it becomes 0, or stays. */
static void test_phases() {
    static const struct { int shape, products; } CASES[] = { { 0, 1 }, { 2, 4 }, { 4, 1 }, { 9, 1 }, { 14, 2 } };
    for (auto& q : CASES)
        for (int accumulate : { 0, (int)AMP_ACCUMULATE_INPUT }) {
            Conv c(shape_of(SHAPES[q.shape]), { AMP_F32, AMP_F32, AMP_F32 }, WHOLE);
            c.dx.fill(c.z.x, WHOLE);
            c.dx.upload();
            const long before = launches();
            CHECK(c.backward(1, accumulate, nullptr) == AMP_OK);
            CHECK_MSG(launched(before, q.products), "%ld of %s", launches() - before, describe(c));
            CHECK(amp_cuda_synchronize(nullptr) == AMP_OK);
            c.cpu(false, 1, accumulate);
            check_array(c.dx, c.dx.host, "dx", c);
        }
}

/* None, too little, exactly enough (its memory ends there), misaligned. */
static void test_workspace() {
    static const int LONG[][14] = {
        { 2, 4, 16, 16, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    /* long sums in dw */
        { 1, 60, 3, 3, 60, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    /* in y and dx */
        { 2, 4, 16, 17, 4, 3, 3, 1, 1, 1, 1, 1, 1, 2 },    /* in the dw of groups */
    };
    for (unsigned i = 0; i < 3; i++)
        for (unsigned t = 1; t < 3; t++) {
            Conv c(shape_of(LONG[i]), { TYPES[t], TYPES[t], TYPES[(i + t) % 3] }, WHOLE);
            size_t full = cuda->conv2d_workspace(&c.shape);
            if (t == 1) CHECK(full > 0);
            check_bits(c, 7, 0, true, full);
            if (t == 1) check_bits(c, 7, 1, true, full + 3, 5);
            if (t == 2 && i == 0) check_bits(c, 7, 1, true, full / 2 + 1);
            if (t == 2 && i == 1) check_bits(c, 7, 0, true, full > 0 ? full - 1 : 0);
        }
}

/* A workspace that grows in the device's memory gives the bits of one that was large enough. */
static void test_workspace_grows() {
    static const int LONG[14] = { 2, 4, 16, 16, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1 };
    Conv c(shape_of(LONG), { AMP_F16, AMP_F16, AMP_F32 }, WHOLE);
    amp_workspace grows = {};
    grows.backend = cuda;
    Bytes results[2][2];
    for (int i = 0; i < 2; i++) {
        amp_exec e = quiet_exec();
        Workspace w(&e, i ? 0 : cuda->conv2d_workspace(&c.shape));
        if (i) e.grows = &grows;
        c.dw.upload();
        c.dx.upload();
        const long before = launches();
        CHECK(c.backward(7, 0, &e) == AMP_OK);
        CHECK(i == 0 || (grows.size > 0 && grows.size <= cuda->conv2d_workspace(&c.shape)));
        CHECK(launched_some(before));
        results[i][0] = c.dx.download();
        results[i][1] = c.dw.download();
    }
    CHECK(results[0][0] == results[1][0] && results[0][1] == results[1][1]);
    amp_workspace_free(&grows);
    CHECK(!grows.data && grows.size == 0);
}

/* Enough pixels that the parts of db's sums meet in the workspace: one launch more. */
static void test_many_pixels() {
    static const int MANY[14] = { 3, 1, 150, 152, 2, 1, 1, 1, 1, 0, 0, 1, 1, 1 };
    for (unsigned t = 0; t < 3; t++) {
        Conv c(shape_of(MANY), { TYPES[t], TYPES[t], AMP_F32 }, WHOLE, t);
        const size_t full = cuda->conv2d_workspace(&c.shape);
        for (size_t held : { full, full / 2 }) {
            amp_exec e = quiet_exec();
            Workspace w(&e, held, 1);
            const long before = launches();
            c.db.upload();
            CHECK(c.backward(4, 0, &e) == AMP_OK && launched(before, 1 + (held == full)));
        }
        check_bits(c, 4, (int)(t & 1u), false, full, 1);
    }
}

/* --- tests: any numbers ---------------------------------------------------------------------------- */

/* Mixed types and FP32 follow the CPU's order: its bits, but for db, which is summed in an order of its own. */
static void test_plain_kernels() {
    static const Types MIXES[] = { { AMP_F32, AMP_F32, AMP_F32 },
                                   { AMP_F16, AMP_F32, AMP_F16 },
                                   { AMP_BF16, AMP_F32, AMP_F32 } };
    for (unsigned i = 0; i < SHAPE_COUNT; i += 2) {
        Conv c(shape_of(SHAPES[i]), MIXES[i / 2 % 3], ANY);
        check_bits(c, on_tensor_cores(c.t.act, c.t.act) ? 1 : 3, 0, true, 0);
    }
    for (unsigned i = 0; i < SHAPE_COUNT && !on_tensor_cores(AMP_BF16, AMP_BF16); i += 2) {
        Conv c(shape_of(SHAPES[i]), { AMP_BF16, AMP_BF16, AMP_F32 }, ANY);
        check_bits(c, 3, 0, true, 0);
    }
}

/* Sums and sums of magnitudes of all outputs in double precision. */
struct Exact {
    std::vector<double> y, ys, dx, dxs, dw, dws, db, dbs;
    explicit Exact(Conv& c)
        : y(c.z.y), ys(c.z.y), dx(c.z.x), dxs(c.z.x), dw(c.z.w), dws(c.z.w), db(c.outputs()), dbs(c.outputs()) {
        const amp_conv2d_shape& s = c.z.s;
        for (int n = 0; n < s.n; n++)
            for (int o = 0; o < s.out_channels; o++)
                for (int i = 0; i < c.z.oh; i++)
                    for (int j = 0; j < c.z.ow; j++) pixel(c, n, o, i, j);
    }
    static void add(std::vector<double>& sum, std::vector<double>& size, size_t at, double v) {
        sum[at] += v;
        size[at] += std::fabs(v);
    }
    void pixel(Conv& c, int n, int o, int i, int j) {
        const amp_conv2d_shape& s = c.z.s;
        size_t y_at = c.z.y_at(n, o, i, j);
        double g = (double)c.dy.value(y_at);
        add(y, ys, y_at, (double)c.b.value((size_t)o));
        add(db, dbs, (size_t)o, g);
        for (int ch = 0; ch < c.z.cg; ch++)
            for (int a = 0; a < s.kernel_h; a++)
                for (int b = 0; b < s.kernel_w; b++) {
                    int row = i * s.stride_h - s.pad_h + a * s.dilation_h,
                        column = j * s.stride_w - s.pad_w + b * s.dilation_w;
                    if (row < 0 || column < 0 || row >= s.height || column >= s.width) continue;
                    size_t x_at = c.z.x_at(n, o / c.z.og * c.z.cg + ch, row, column),
                           w_at = c.z.w_at(o, ch, a, b);
                    double x = (double)c.x.value(x_at), w = (double)c.w.value(w_at);
                    add(y, ys, y_at, x * w);
                    add(dx, dxs, x_at, w * g);
                    add(dw, dws, w_at, x * g);
                }
    }
};

/* The sum's error over k terms, an addition on the way (bias or old value), the rounding to the type. */
static void check_near(const Array& a, const std::vector<double>& want, const std::vector<double>& size,
                       double k, const char* what, const Conv& c) {
    Bytes got = a.download();
    size_t bad = 0;
    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double limit = sum_error(k + 1, size[i]),
               error = std::fabs((double)get(&got[(a.lead + i) * a.size], a.type) - want[i]);
        limit += (std::fabs(want[i]) + limit) * unit_of(a.type) + tiny_of(a.type);
        if (!(error <= limit)) bad++;
        if (error > worst * limit) worst = error / limit;
    }
    CHECK_MSG(bad == 0, "%s of %s: %zu beyond the bound, by up to %g", what, describe(c), bad, worst);
}

/* Near the exact result; the same bits in every order of threads. */
static void check_bound(Conv& c, size_t workspace) {
    amp_exec e = quiet_exec();
    Workspace w(&e, workspace);
    const amp_conv2d_shape& s = c.z.s;
    Exact exact(c);
    Array* outputs[] = { &c.y, &c.dx, &c.dw, &c.db };
    Bytes first[4];
    for (int i = 0; i < ORDERS; i++) {
        set_schedule(i);
        for (Array* a : outputs) a->upload();
        CHECK(c.forward(true, &e) == AMP_OK && c.backward(7, 0, &e) == AMP_OK);
        CHECK(amp_cuda_synchronize(&e) == AMP_OK);
        for (int o = 0; o < 4 && i == 0; o++) first[o] = outputs[o]->download();
        for (int o = 0; o < 4 && i > 0; o++)
            check_array(*outputs[o], first[o], "another order of threads", c);
    }
    set_schedule(0);
    double area = s.kernel_h * s.kernel_w;
    check_near(c.y, exact.y, exact.ys, c.z.cg * area, "y", c);
    check_near(c.dx, exact.dx, exact.dxs, c.z.og * area, "dx", c);
    check_near(c.dw, exact.dw, exact.dws, s.n * c.z.oh * c.z.ow, "dw", c);
    check_near(c.db, exact.db, exact.dbs, s.n * c.z.oh * c.z.ow, "db", c);
}

static void test_error_bound() {
    static const int WHICH[] = { 2, SMALL, 8, 19 };
    for (unsigned i = 0; i < 4; i++)
        for (unsigned t = i < 3 ? 1 : 0; t < 3; t++) {
            Conv c(shape_of(SHAPES[WHICH[i]]), { TYPES[t], TYPES[t], TYPES[(i + t) % 3] }, ANY);
            check_bound(c, i & 1 ? cuda->conv2d_workspace(&c.shape) : 0);
        }
}

/* --- tests: direct sums of few channels ----------------------------------------------------------- */

/* At the borders of what is summed directly; see ampi_cuda_direct_fits. The emulator has four multiprocessors: from 512
   columns of four pixels on, a thread takes such a column. */
static const int DIRECT[][14] = {
    { 1, 1, 9, 11, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1 },      /* 1, 6, 8, 9, 16, 17 channels */
    { 2, 6, 9, 7, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 3, 8, 7, 5, 9, 5, 3, 1, 1, 2, 1, 1, 1, 1 },
    { 1, 9, 6, 7, 16, 7, 7, 1, 1, 3, 3, 1, 1, 1 },
    { 1, 16, 5, 6, 17, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 17, 5, 6, 16, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 1, 32, 6, 6, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1 },      /* 512 weights for an output, and more */
    { 1, 16, 7, 8, 4, 6, 6, 1, 1, 3, 3, 1, 1, 1 },
    { 2, 3, 11, 13, 5, 5, 3, 2, 3, 1, 2, 1, 1, 1 },     /* strides, dilation */
    { 2, 3, 11, 13, 10, 3, 5, 1, 2, 3, 4, 1, 2, 1 },
    { 2, 3, 11, 13, 10, 3, 5, 1, 1, 3, 4, 2, 3, 1 },
    { 1, 2, 130, 131, 2, 3, 3, 1, 1, 0, 0, 60, 60, 1 }, /* too far apart for a tile */
    { 1, 2, 5, 6, 3, 3, 3, 1, 1, 4, 5, 1, 1, 1 },       /* padding larger than a kernel */
    { 1, 1, 6, 256, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1 },     /* as many columns as threads, and more */
    { 1, 1, 6, 257, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 300, 1, 3, 3, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1 },     /* more images than shares */
    { 521, 1, 4, 3, 9, 2, 2, 1, 1, 0, 0, 1, 1, 1 },
    { 4, 2, 27, 30, 6, 5, 5, 1, 1, 2, 2, 1, 1, 1 },     /* four pixels for a thread */
    { 9, 6, 14, 14, 16, 5, 5, 1, 1, 0, 0, 1, 1, 1 },
    { 8, 16, 20, 20, 8, 3, 3, 1, 1, 1, 1, 1, 1, 1 },    /* the channels one part after the other */
    { 13, 3, 15, 14, 8, 2, 3, 1, 1, 1, 1, 1, 1, 1 },
    { 20, 2, 29, 20, 5, 3, 1, 1, 1, 1, 0, 1, 1, 1 },    /* large blocks */
    { 30, 2, 13, 12, 5, 3, 3, 2, 1, 1, 1, 1, 1, 1 },    /* rows that share nothing */
};
enum { DIRECT_COUNT = sizeof DIRECT / sizeof DIRECT[0] };

static void test_direct_shapes() {
    for (unsigned i = 0; i < DIRECT_COUNT; i++)
        for (unsigned t = 1; t < 3; t++) {
            Conv c(shape_of(DIRECT[i]), { TYPES[t], TYPES[t], TYPES[(i + t) % 3] }, WHOLE, i % 4 == 1);
            size_t full = cuda->conv2d_workspace(&c.shape);
            check_bits(c, 7, (int)((i + t) & 1u), (i + t) % 3 != 0, full, t == 2 ? 16 : 0);
            if (i % 5 == t) check_bits(c, 7, (int)(t & 1u), true, 0);
        }
}

/* The same in two groups, and with too many outputs: by the im2col matrix. */
static void test_im2col_shapes() {
    for (unsigned i = 0; i < SHAPE_COUNT + 12; i++) {
        amp_conv2d_shape s = shape_of(i < SHAPE_COUNT ? SHAPES[i] : DIRECT[i - SHAPE_COUNT]);
        if (i % 2) {
            s.channels *= 2; s.out_channels *= 2; s.groups *= 2;
        } else {
            s.channels += 17 * s.groups; s.out_channels += 17 * s.groups;
        }
        Conv c(s, { TYPES[1 + i % 3 / 2], TYPES[1 + i % 3 / 2], TYPES[i % 3] }, WHOLE, i % 4 == 2);
        check_bits(c, 7, (int)(i & 1u), i % 3 != 0, i % 4 < 2 ? cuda->conv2d_workspace(&s) : 0);
    }
}

/* Kernel rows that go together: a sum runs over (channel, rows / kh, column, row % kh). */
static int kh_of(int kernel_h) { return kernel_h % 5 == 0 ? 5 : kernel_h % 3 == 0 ? 3 : 1; }

/* y, or dx by the mirrored kernel, in this order, whatever the batch and the tiles are. */
static float direct_sum(Conv& c, int dx, int n, int o, int i, int j) {
    const amp_conv2d_shape& s = c.z.s;
    const int kh = kh_of(s.kernel_h), height = dx ? c.z.oh : s.height, width = dx ? c.z.ow : s.width;
    const int top = i * s.stride_h - (dx ? (s.kernel_h - 1) * s.dilation_h - s.pad_h : s.pad_h);
    const int left = j * s.stride_w - (dx ? (s.kernel_w - 1) * s.dilation_w - s.pad_w : s.pad_w);
    float sum = 0;
    for (int ch = 0; ch < (dx ? s.out_channels : s.channels); ch++)
        for (int r = 0; r < s.kernel_h; r += kh)
            for (int b = 0; b < s.kernel_w; b++)
                for (int a = r; a < r + kh; a++) {
                    int y = top + a * s.dilation_h, x = left + b * s.dilation_w;
                    if (y < 0 || x < 0 || y >= height || x >= width) continue;
                    sum = dx ? std::fma(c.dy.value(c.z.y_at(n, ch, y, x)),
                                        c.w.value(c.z.w_at(ch, o, s.kernel_h - 1 - a, s.kernel_w - 1 - b)), sum)
                             : std::fma(c.x.value(c.z.x_at(n, ch, y, x)), c.w.value(c.z.w_at(o, ch, a, b)), sum);
                }
    return sum;
}
static void check_order(Conv& c, int dx) {
    const amp_conv2d_shape& s = c.z.s;
    const int outputs = dx ? s.channels : s.out_channels, rows = dx ? s.height : c.z.oh, cols = dx ? s.width : c.z.ow;
    Array got(AMP_F32, dx ? c.z.x : c.z.y, true);
    got.upload();
    if (dx)
        CHECK(cuda->conv2d_backward(&c.shape, amp_ref_of(c.dy.there(), c.dy.type), AMP_NONE,
            amp_ref_of(c.w.there(), c.w.type), amp_ref_of(got.there(), AMP_F32), AMP_NONE, AMP_NONE, 0,
            nullptr)
              == AMP_OK);
    else
        CHECK(cuda->conv2d_forward(&c.shape, amp_ref_of(c.x.there(), c.x.type),
            amp_ref_of(c.w.there(), c.w.type), AMP_NONE, amp_ref_of(got.there(), AMP_F32), nullptr)
              == AMP_OK);
    for (int n = 0; n < s.n; n++)
        for (int o = 0; o < outputs; o++)
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < cols; j++)
                    got.set((size_t)(((n * outputs + o) * rows + i) * cols + j), direct_sum(c, dx, n, o, i, j));
    check_array(got, got.host, dx ? "dx" : "y", c);
}
static void test_direct_order() {
    static const int Y[] = { 0, 2, 3, 5, 6, 8, 9, 10, 13, 17, 18, 19, 20, 22 }, DX[] = { 0, 2, 4, 10, 12, 17, 18, 20 };
    for (int i : Y) {
        Conv c(shape_of(DIRECT[i]), { AMP_F16, AMP_F16, AMP_F32 }, ANY);
        check_order(c, 0);
    }
    for (int i : DX) {
        Conv c(shape_of(DIRECT[i]), { AMP_F16, AMP_F16, AMP_F32 }, ANY);
        check_order(c, 1);
    }
}

static void test_direct_bound() {
    static const int WHICH[] = { 0, 2, 8, 10, 16, 18 };
    for (unsigned i = 0; i < 6; i++) {
        amp_dtype t = TYPES[1 + i % 2];
        Conv c(shape_of(DIRECT[WHICH[i]]), { t, t, TYPES[i % 3] }, ANY);
        check_bound(c, i == 2 ? 0 : cuda->conv2d_workspace(&c.shape));
    }
}

/* Infinities and NaN meet the zeros beside an image. */
static void test_direct_special_values() {
    static const int WHICH[] = { 0, 2, 10, 16 };
    for (unsigned i = 0; i < 8; i++) {
        amp_dtype t = TYPES[1 + i % 2];
        Conv c(shape_of(DIRECT[WHICH[i / 2]]), { t, t, TYPES[i % 3] }, SPECIAL);
        check_bits(c, 3, 0, true, cuda->conv2d_workspace(&c.shape));
    }
}

/* dw is summed directly where its workspace is there, in two launches; else in one. */
static void test_direct_workspace() {
    static const int ONE[14] = { 1, 2, 5, 6, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1 };
    Conv c(shape_of(ONE), { AMP_F16, AMP_F16, AMP_F32 }, WHOLE);
    size_t full = cuda->conv2d_workspace(&c.shape);
    CHECK(full > 0);
#if defined(AMP_CUDA_EMU)
    for (int less = 0; less < 2; less++) {
        amp_exec e = quiet_exec();
        Workspace w(&e, less ? full - 17 : full);
        long before = launches();
        CHECK(c.backward(2, 0, &e) == AMP_OK && launched(before, less ? 1 : 2));
        CHECK(amp_cuda_synchronize(&e) == AMP_OK);
    }
#endif
}

/* --- tests: groups of few channels ----------------------------------------------------------------- */

static const int GROUPED[][14] = {
    { 2, 5, 6, 6, 5, 3, 3, 1, 1, 1, 1, 1, 1, 5 },       /* depthwise */
    { 1, 6, 9, 7, 12, 3, 3, 2, 1, 1, 2, 1, 1, 3 },      /* 2 channels and 4 outputs to a group */
    { 2, 4, 11, 9, 4, 5, 5, 2, 3, 2, 2, 1, 1, 4 },
    { 2, 8, 9, 11, 2, 2, 3, 1, 2, 0, 3, 3, 2, 2 },      /* 4 channels and 1 output, dilation */
    { 1, 10, 6, 5, 10, 3, 3, 1, 1, 1, 1, 1, 1, 2 },     /* 5 and 5: products */
    { 1, 3, 12, 13, 6, 4, 1, 3, 1, 4, 0, 2, 1, 3 },     /* more padding than a kernel sees */
    { 3, 2, 9, 8, 4, 3, 3, 4, 1, 0, 1, 1, 1, 2 },       /* pixels of x that meet nothing */
    { 1, 6, 5, 6, 6, 1, 1, 1, 1, 0, 0, 1, 1, 6 },
    { 2, 3, 50, 47, 3, 3, 3, 1, 1, 1, 1, 1, 1, 3 },     /* pixels for two blocks of dw, and for three */
    { 7, 2, 33, 32, 2, 5, 5, 1, 1, 2, 2, 1, 1, 2 },
    { 3, 2, 40, 41, 4, 3, 2, 1, 1, 0, 0, 1, 1, 2 },
};
enum { GROUPED_COUNT = sizeof GROUPED / sizeof GROUPED[0] };

/* y and dx have the CPU's bits for any numbers of one type; dw, whose pixels are shared out, for whole ones. */
static void test_grouped_shapes() {
    for (unsigned i = 0; i < GROUPED_COUNT; i++)
        for (unsigned t = 0; t < 3; t++) {
            const Types types = { TYPES[t], TYPES[t], TYPES[(t + i) % 3] };
            Conv c(shape_of(GROUPED[i]), types, WHOLE, i % 3 == 1);
            check_bits(c, 7, (int)((i + t) & 1u), (i + t) % 3 != 0, i + t == 3 ? 0 : cuda->conv2d_workspace(&c.shape));
            if (i == 4 || (t == 2 && !on_tensor_cores(AMP_BF16, AMP_BF16))) continue;
            Conv any(shape_of(GROUPED[i]), types, ANY);
            check_bits(any, 1, 0, true, 0);
            Conv special(shape_of(GROUPED[i]), types, SPECIAL);
            check_bits(special, i < 8 ? 3 : 1, 0, i % 2, cuda->conv2d_workspace(&c.shape));
        }
}

static void test_grouped_bound() {
    static const int WHICH[] = { 1, 3, 8, 10 };
    for (unsigned i = 0; i < 4; i++) {
        const amp_dtype t = TYPES[1 + i % 2];
        Conv c(shape_of(GROUPED[WHICH[i]]), { t, t, TYPES[i % 3] }, ANY);
        check_bound(c, cuda->conv2d_workspace(&c.shape));
    }
}

/* A depthwise layer: y, dx, and dw with its second pass, are a launch each; those of FP32 sum in the CPU's order. */
static void test_grouped_launches() {
    for (unsigned t = 0; t < 2; t++) {
        Conv c(shape_of(GROUPED[2]), { TYPES[t], TYPES[t], AMP_F32 }, WHOLE);
        amp_exec e = quiet_exec();
        Workspace w(&e, cuda->conv2d_workspace(&c.shape));
        long before = launches();
        CHECK(c.forward(true, &e) == AMP_OK && launched(before, 1));
        before = launches();
        CHECK(c.backward(1, 0, &e) == AMP_OK && launched(before, 1));
        before = launches();
        CHECK(c.backward(2, 0, &e) == AMP_OK && launched(before, t ? 2 : 1));
        CHECK(amp_cuda_synchronize(&e) == AMP_OK);
    }
}

/* --- tests: engines, graphs ------------------------------------------------------------------------- */

static void test_engines() {
    for (int engine = 0; engine < 3; engine++) {
        amp_cuda_desc d = {};
        amp_cuda* context = nullptr;
        d.gemm = (amp_cuda_gemm_engine)engine;
        CHECK(amp_cuda_create(&context, &d) == AMP_OK);
        for (unsigned i = 0; i < 4; i++) {
            static const int WHICH[] = { 0, 7, 8, 5 };
            Conv c(shape_of(SHAPES[WHICH[i]]), { TYPES[i % 3], TYPES[i % 3], AMP_F32 }, WHOLE);
            amp_exec e = quiet_exec(context);
            for (Array* a : { &c.y, &c.dx, &c.dw, &c.db }) a->upload();
            CHECK(c.forward(true, &e) == AMP_OK && c.backward(7, 0, &e) == AMP_OK);
            CHECK(amp_cuda_synchronize(&e) == AMP_OK);
            c.cpu(true, 7, 0);
            check_array(c.y, c.y.host, "y", c);
            check_array(c.dx, c.dx.host, "dx", c);
            check_array(c.dw, c.dw.host, "dw", c);
            check_array(c.db, c.db.host, "db", c);
        }
        amp_cuda_destroy(context);
    }
}

/* Captured once, replayed twice. */
static void test_capture() {
    amp_cuda* context = nullptr;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CHECK(amp_cuda_create(&context, nullptr) == AMP_OK);
    Conv c(shape_of(SHAPES[0]), { AMP_F16, AMP_F16, AMP_F32 }, ANY);
    amp_exec e = quiet_exec(context);
    Workspace w(&e, cuda->conv2d_workspace(&c.shape));
    Array* outputs[] = { &c.y, &c.dx, &c.dw, &c.db };
    Bytes want[4];
    for (Array* a : outputs) a->upload();
    CHECK(c.forward(true, &e) == AMP_OK && c.backward(7, 0, &e) == AMP_OK);      /* loads the kernels */
    CHECK(amp_cuda_synchronize(&e) == AMP_OK);
    for (int o = 0; o < 4; o++) want[o] = outputs[o]->download();
    OK(cudaStreamBeginCapture((cudaStream_t)e.stream, cudaStreamCaptureModeThreadLocal));
    CHECK(c.forward(true, &e) == AMP_OK && c.backward(7, 0, &e) == AMP_OK);
    OK(cudaStreamEndCapture((cudaStream_t)e.stream, &graph));
    OK(cudaGraphInstantiateWithFlags(&ready, graph, 0));
    for (int i = 0; i < 2; i++) {
        for (Array* a : outputs) a->upload();
        OK(cudaGraphLaunch(ready, (cudaStream_t)e.stream));
        CHECK(amp_cuda_synchronize(&e) == AMP_OK);
        for (int o = 0; o < 4; o++) check_array(*outputs[o], want[o], "replayed", c);
    }
    OK(cudaGraphExecDestroy(ready));
    OK(cudaGraphDestroy(graph));
    amp_cuda_destroy(context);
}

/* --- tests: refusals ---------------------------------------------------------------------------------- */

/* Operands that lie apart, whatever their shape: none of them is read. */
static void refuse_shape(const int* z, void* first, amp_result code, const char* words) {
    amp_conv2d_shape s = shape_of(z);
    amp_exec e = quiet_exec();
    long before = launches();
    void* p[6];
    for (int i = 0; i < 6; i++) p[i] = (void*)((uintptr_t)first + ((uintptr_t)i << 42));
    check_refused(cuda->conv2d_forward(&s, amp_ref_of(p[0], AMP_F32), amp_ref_of(p[1], AMP_F32), AMP_NONE, amp_ref_of(p[2], AMP_F32),
        &e),
                  code, words, before);
    check_refused(cuda->conv2d_backward(&s, amp_ref_of(p[0], AMP_F32), amp_ref_of(p[1], AMP_F32), amp_ref_of(p[2], AMP_F32),
        amp_ref_of(p[3], AMP_F32), amp_ref_of(p[4], AMP_F32), amp_ref_of(p[5], AMP_F32), 0, &e),
                  code, words, before);
    if (code != AMP_ERR_UNSUPPORTED) CHECK(cuda->conv2d_workspace(&s) == 0);
}

static void test_refused_shapes() {
    static const int BAD[][14] = {
        { 1, 1, 5, 5, 1, 7, 7, 1, 1, 0, 0, 1, 1, 1 },
        { 1, 1, 5, 5, 1, 3, 3, 1, 1, 0, 0, INT_MAX, 1, 1 },
        { 0, 1, 5, 5, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1 },
        { 1, 1, 5, 5, 1, 3, 3, 1, 1, -1, 0, 1, 1, 1 },
        { 1, 4, 5, 5, 6, 3, 3, 1, 1, 0, 0, 1, 1, 3 },
        { INT_MAX, INT_MAX, INT_MAX, 5, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1 },
        { 1, 1, 5, 5, 1, 1, 1, 1, 1, INT_MAX, INT_MAX, 1, 1, 1 },
        { 1 << 20, 1, 1, 1, 1 << 26, 1, 1, 1, 1, 1000, 1000, 1, 1, 1 },
        { 1, 1 << 20, 1, 1, 1 << 20, 1 << 26, 1, 1, 1, 1 << 25, 0, 1, 1, 1 },
    };
    static const amp_result CODES[] = { AMP_ERR_SHAPE, AMP_ERR_SHAPE, AMP_ERR_DESC,  AMP_ERR_DESC,
                                        AMP_ERR_SHAPE, AMP_ERR_SHAPE, AMP_ERR_SHAPE, AMP_ERR_SHAPE,
                                        AMP_ERR_SHAPE };
    static const char* const WORDS[] = {
        "conv2d: kernel 7x7 with dilation 1x1 is larger than its 5x5 input",
        "is larger than",
        "conv2d: n is 0",
        "conv2d: pad_h is -1",
        "conv2d: 3 groups do not divide",
        "conv2d: x has more elements",
        "has sides over 2^31 - 1",
        "conv2d: y has more",
        "conv2d: w has more"
    };
    static const int HUGE_ONES[][14] = {
        { 1, 1, 1 << 16, 1 << 16, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1 }, /* an input plane of 2^32 pixels */
        { 1, 1, 1, INT_MAX, 1, 1, 1, 1 << 10, 1 << 10, 0, 0, 1, 1, 1 }, /* a side of 2^31 - 1 */
        { 1, 1, 5, 5, 1, 3, 3, 1 << 20, 1, 1 << 29, 0, 1, 1, 1 }, /* a padded side of 2^30 */
        { 1, 1, 5, 5, 1, 3, 3, 1, 1 << 20, 0, 1 << 29, 1, 1, 1 },
        { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 << 15, 1 << 15, 1, 1, 1 }, /* an output plane of 2^32 */
    };
    Array d(AMP_F32, 64, true);
    d.upload();
    for (unsigned i = 0; i < sizeof BAD / sizeof BAD[0]; i++)
        refuse_shape(BAD[i], d.there(), CODES[i], WORDS[i]);
    for (const int* z : HUGE_ONES) refuse_shape(z, d.there(), AMP_ERR_UNSUPPORTED, "conv2d");
    CHECK(d.download() == d.host && cuda->conv2d_workspace(nullptr) == 0);
}

static void test_refused_calls() {
    static const int SMALL[14] = { 1, 1, 4, 4, 1, 3, 3, 1, 1, 0, 0, 1, 1, 1 };
    amp_conv2d_shape s = shape_of(SMALL);
    Array d(AMP_F32, 384, true);
    float host[64] = { 0 };
    void* p = d.there();
    amp_exec e = quiet_exec();
    long before = launches();
    auto at = [&](const void* q, int i) { return q == p ? (float*)p + 64 * i : (float*)(uintptr_t)q; };
    d.upload();
    auto forward = [&](const amp_conv2d_shape* shape, const void* x, amp_dtype xt, const void* w,
                       const void* b, void* y) {
        return cuda->conv2d_forward(shape, amp_ref_of(x, xt), amp_f32(at(w, 1)),
            amp_f32(at(b, 2)), amp_f32(at(y, 3)), &e);
    };
    auto backward = [&](const void* dy, const void* x, const void* w, void* dx, void* dw, void* db,
                        amp_dtype dbt) {
        return cuda->conv2d_backward(&s, amp_ref_of(dy, AMP_F32), amp_f32(at(x, 1)), amp_f32(at(w, 2)),
            amp_f32(at(dx, 3)), amp_f32(at(dw, 4)), amp_ref_of(at(db, 5), dbt), 0, &e);
    };
    check_refused(forward(nullptr, p, AMP_F32, p, nullptr, p), AMP_ERR_ARGUMENT,
                  "conv2d: the shape is NULL", before);
    check_refused(forward(&s, p, AMP_F32, nullptr, nullptr, p), AMP_ERR_ARGUMENT,
                  "w is NULL, but it has 1 x 9 elements", before);
    check_refused(forward(&s, p, AMP_F64, p, nullptr, p), AMP_ERR_DTYPE, "x has type f64 (4)", before);
    check_refused(forward(&s, host, AMP_F32, p, nullptr, p), AMP_ERR_ARGUMENT, "x is host memory", before);
    check_refused(forward(&s, p, AMP_F32, host, nullptr, p), AMP_ERR_ARGUMENT, "w is host memory", before);
    check_refused(forward(&s, p, AMP_F32, p, host, p), AMP_ERR_ARGUMENT, "b is host memory", before);
    check_refused(forward(&s, p, AMP_F32, p, p, host), AMP_ERR_ARGUMENT, "y is host memory", before);
    check_refused(backward(nullptr, p, p, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "dy is NULL", before);
    check_refused(backward(p, nullptr, p, p, p, p, AMP_F32), AMP_ERR_ARGUMENT,
                  "x is NULL, but it has 1 x 16", before);
    check_refused(backward(p, p, p, p, p, p, AMP_F64), AMP_ERR_DTYPE, "db has type f64 (4)", before);
    check_refused(backward(host, p, p, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "dy is host memory", before);
    check_refused(backward(p, host, p, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "x is host memory", before);
    check_refused(backward(p, p, host, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "w is host memory", before);
    check_refused(backward(p, p, p, host, p, p, AMP_F32), AMP_ERR_ARGUMENT, "dx is host memory", before);
    check_refused(backward(p, p, p, p, host, p, AMP_F32), AMP_ERR_ARGUMENT, "dw is host memory", before);
    check_refused(backward(p, p, p, p, p, host, AMP_F32), AMP_ERR_ARGUMENT, "db is host memory", before);
    check_refused(backward(p, p, p, (float*)p + 128, p, p, AMP_F32), AMP_ERR_ARGUMENT, "dx would be written over w",
                  before);
    CHECK(cuda->conv2d_forward(&s, amp_ref_of(p, AMP_F32), AMP_NONE, AMP_NONE, amp_ref_of(p, AMP_F32), nullptr)
          == AMP_ERR_ARGUMENT);
    CHECK(d.download() == d.host);
}

static void test_failing_launches() {
    static const int LONG[14] = { 2, 4, 16, 16, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1 };
    for (unsigned t = 0; t < 2; t++) {
        Conv c(shape_of(LONG), { TYPES[t], TYPES[t], AMP_F32 }, WHOLE);
        amp_exec e = quiet_exec();
        Workspace w(&e, cuda->conv2d_workspace(&c.shape));
        check_failures([&] { return c.forward(true, &e); });
        check_failures([&] { return c.backward(7, 0, &e); });
    }
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_shapes);
    TEST(test_type_mixes);
    TEST(test_random_convolutions);
    TEST(test_transposed);
    TEST(test_networks);
    TEST(test_defaults);
    TEST(test_single_gradients);
    TEST(test_special_values);
    TEST(test_phases);
    TEST(test_workspace);
    TEST(test_workspace_grows);
    TEST(test_many_pixels);
    TEST(test_plain_kernels);
    TEST(test_error_bound);
    TEST(test_direct_shapes);
    TEST(test_im2col_shapes);
    TEST(test_direct_order);
    TEST(test_direct_bound);
    TEST(test_direct_special_values);
    TEST(test_direct_workspace);
    TEST(test_grouped_shapes);
    TEST(test_grouped_bound);
    TEST(test_grouped_launches);
    TEST(test_engines);
    TEST(test_capture);
    TEST(test_refused_shapes);
    TEST(test_refused_calls);
    TEST(test_failing_launches);
    TEST_END();
}
