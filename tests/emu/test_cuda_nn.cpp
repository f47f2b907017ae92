/* Layers and losses on the device. What is computed element by element has the CPU's bits. Sums have another order:
   they are compared with sums in double, within bounds that follow from the roundings on the way (u = 2^-24 each),
   and give the same bits in every order of threads and blocks. */
#define AMP_IMPLEMENTATION
#include "../../amp_cuda.cuh"

#include "tensor.h"

#include <memory>

/* Both sides accept the call. */
#define BOTH(cpu, gpu)                                                                    \
    do {                                                                                  \
        CHECK((cpu) == AMP_OK);                                                           \
        const amp_result r_ = (gpu);                                                      \
        CHECK_MSG(r_ == AMP_OK, "%s", amp_result_string(r_));                             \
    } while (0)

static const double U = 1.0 / 16777216.0;

/* --- what a sum may differ by ---------------------------------------------------------------- */

/* Expected values, and how far a result may lie from them before it is rounded to its type. */
struct Bounded {
    std::vector<double> value, error;
    explicit Bounded(size_t n = 0) : value(n), error(n) {}
    void add(double v, double e) {
        value.push_back(v);
        error.push_back(e);
    }
};
static double unit_of(amp_dtype t) { return t == AMP_F16 ? ldexp(1, -11) : t == AMP_BF16 ? ldexp(1, -8) : U; }
static double tiny_of(amp_dtype t) { return ldexp(1, t == AMP_F16 ? -25 : t == AMP_BF16 ? -134 : -150); }

/* Terms of the second order are far below the hundredth that is added. */
static void check_bounded(const char* what, const Tensor& t, const Bounded& b) {
    const std::vector<double> got = t.values();
    double worst = 0;
    size_t bad = 0, place = 0;
    CHECK(b.value.size() == t.n);
    for (size_t i = 0; i < t.n; i++) {
        const double allowed = 1.01 * b.error[i] + unit_of(t.type) * fabs(got[i]) + tiny_of(t.type);
        if (std::isnan(b.value[i]) && std::isnan(got[i])) continue;
        const double off = fabs(got[i] - b.value[i]) / allowed;
        if (off <= 1) continue;
        bad++;
        if (!(off <= worst)) worst = off, place = i;
    }
    CHECK_MSG(bad == 0, "%s: %zu of %zu, worst at %zu: %.9g for %.9g, %.3g of the bound", what, bad, t.n, place,
              got[place], b.value[place], worst);
}
/* What `accumulate` adds to: one more rounding. */
static Bounded onto(const Bounded& b, const Tensor& old, int accumulate) {
    Bounded r = b;
    for (size_t i = 0; accumulate && i < old.n; i++) {
        r.value[i] += (double)old[i];
        r.error[i] += U * fabs(r.value[i]);
    }
    return r;
}

/* Device memory as a workspace of an exec. */
struct Workspace {
    Tensor memory;
    amp_exec exec;
    explicit Workspace(size_t bytes, size_t skip = 0) : memory(AMP_F32, bytes / 4 + 8), exec() {
        exec.workspace = (char*)memory.dev + skip;
        exec.workspace_size = bytes;
    }
};

/* --- element by element ---------------------------------------------------------------------- */

static const amp_activation ACTIVATIONS[] = { AMP_RELU, AMP_GELU, AMP_GELU_TANH, AMP_TANH, AMP_SIGMOID };

static void check_activation(amp_activation f, Tensor& x, Tensor& dy, Tensor& y) {
    y.poison();
    BOTH(amp_activation_forward(f, x.at(), x.type, y.at(), y.type, x.n, nullptr),
         amp_cuda_activation_forward(f, x.dev, x.type, y.dev, y.type, x.n, nullptr));
    CHECK_BITS(y, f == AMP_RELU);
    y.poison();
    BOTH(amp_activation_backward(f, dy.at(), dy.type, x.at(), x.type, y.at(), y.type, x.n, nullptr),
         amp_cuda_activation_backward(f, dy.dev, dy.type, x.dev, x.type, y.dev, y.type, x.n, nullptr));
    CHECK_BITS(y, f == AMP_RELU);
}
static void test_activation_values() {
    for (amp_activation f : ACTIVATIONS) {
        for (amp_dtype t : { AMP_F16, AMP_BF16 }) {
            Tensor x(t, 65536), dy(AMP_F32, 65536), y(AMP_F32, 65536);
            fill_every_value(x);
            dy.fill(awkward);
            check_activation(f, x, dy, y);
        }
        Tensor x(AMP_F32, 50000), dy(AMP_F32, 50000), y(AMP_F32, 50000);
        fill_bits(x, random_floats(x.n));
        dy.fill(ordinary);
        check_activation(f, x, dy, y);
        for (size_t i = 0; i < x.n; i++) x.set(i, 20.0f * test_uniform());
        x.send();
        check_activation(f, x, dy, y);
    }
}
static void test_activation_types() {
    for (amp_activation f : ACTIVATIONS)
        for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES)
            for (size_t n : { 0, 1, 7, 8, 63, 2049 }) {
                const size_t shift = n % 8;
                Tensor x(a, n, shift), dy(b, n, 2 * shift % 8), y(c, n, 3 * shift % 8);
                x.fill(awkward);
                dy.fill(awkward);
                check_activation(f, x, dy, y);
            }
}
static void test_activation_in_place() {
    for (amp_activation f : ACTIVATIONS)
        for (amp_dtype t : TYPES) {
            Tensor x(t, 4100), dy(t, 4100);
            x.fill(awkward);
            dy.fill(ordinary);
            BOTH(amp_activation_backward(f, dy.at(), t, x.at(), t, dy.at(), t, x.n, nullptr),
                 amp_cuda_activation_backward(f, dy.dev, t, x.dev, t, dy.dev, t, x.n, nullptr));
            CHECK_BITS(dy, f == AMP_RELU);
            BOTH(amp_activation_forward(f, x.at(), t, x.at(), t, x.n, nullptr),
                 amp_cuda_activation_forward(f, x.dev, t, x.dev, t, x.n, nullptr));
            CHECK_BITS(x, f == AMP_RELU);
            CHECK(amp_cuda_activation_backward(f, dy.dev, t, x.dev, t, nullptr, t, x.n, nullptr) == AMP_OK);
        }
}
/* The kernel of all such functions, when its blocks take more than one turn. */
static void test_turns() {
    const size_t n = 5 * AMPI_CUDA_TILE + 77;
    Tensor x(AMP_F16, n), y(AMP_F32, n);
    const ampi_op_activation f = { AMP_TANH };
    x.fill(awkward);
    const ampi_cuda_map m = ampi_cuda_map_of(x.dev, x.type, nullptr, AMP_F32, y.dev, y.type, n);
    CHECK(amp_activation_forward(AMP_TANH, x.at(), x.type, y.at(), y.type, n, nullptr) == AMP_OK);
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_map<ampi_op_activation>, dim3(2), dim3(AMPI_CUDA_BLOCK), 0, m, f)
          == AMP_OK);
    CHECK_BITS(y, 0);
}

static void test_add() {
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES)
        for (size_t n : { 0, 1, 8, 9, 2047, 4099 }) {
            Tensor x(a, n, n % 5), z(b, n, n % 3), y(c, n, n % 2);
            x.fill(awkward);
            for (size_t i = 0; i < n; i++) z.set(i, awkward(i / 8 + i));
            z.send();
            BOTH(amp_add_forward(x.at(), a, z.at(), b, y.at(), c, n, nullptr),
                 amp_cuda_add_forward(x.dev, a, z.dev, b, y.dev, c, n, nullptr));
            CHECK_BITS(y, 0);
            if (a != b) continue;
            BOTH(amp_add_forward(x.at(), a, z.at(), b, x.at(), a, n, nullptr),
                 amp_cuda_add_forward(x.dev, a, z.dev, b, x.dev, a, n, nullptr));
            CHECK_BITS(x, 0);
            BOTH(amp_add_forward(x.at(), a, z.at(), b, z.at(), b, n, nullptr),
                 amp_cuda_add_forward(x.dev, a, z.dev, b, z.dev, b, n, nullptr));
            CHECK_BITS(z, 0);
        }
}

static void test_dropout() {
    static const uint64_t offsets[] = { 0, 1, 2, 3, 1000001, ~(uint64_t)0 - 1000 };
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES)
        for (size_t n : { 0, 1, 3, 8, 13, 4101 })
            for (uint64_t offset : offsets) {
                const float p = n % 2 ? 0.3f : 0.0f;
                Tensor x(a, n, n % 4), y(b, n, n % 7);
                x.fill(awkward);
                BOTH(amp_dropout_forward(x.at(), a, y.at(), b, n, p, 42 + offset, offset, nullptr),
                     amp_cuda_dropout_forward(x.dev, a, y.dev, b, n, p, 42 + offset, offset, nullptr));
                CHECK_BITS(y, 0);
            }
    /* The mask of every position, in place. */
    for (float p : { 0.001f, 0.5f, 0.999f }) {
        Tensor x(AMP_F32, 100000);
        x.fill([](size_t) { return 1.0f; });
        CHECK(amp_cuda_dropout_forward(x.dev, AMP_F32, x.dev, AMP_F32, x.n, p, 9, 5, nullptr) == AMP_OK);
        for (size_t i = 0; i < x.n; i++)
            x.set(i, amp_random_uniform(9, 5 + i) < p ? 0.0f : 1.0f / (1.0f - p));
        CHECK_BITS(x, 1);
    }
}
/* A part of the offset comes from the device's memory, read when the kernel runs. */
static void test_dropout_position() {
    Tensor x(AMP_F16, 3000), y(AMP_F16, 3000), cell(AMP_F32, 2);
    x.fill(ordinary);
    for (uint64_t position : { (uint64_t)0, (uint64_t)1, (uint64_t)5, (uint64_t)1 << 40 }) {
        CUDA_OK(cudaMemcpy(cell.dev, &position, sizeof position, cudaMemcpyHostToDevice));
        BOTH(amp_dropout_forward(x.at(), AMP_F16, y.at(), AMP_F16, x.n, 0.4f, 3, 17 + position * 3001, nullptr),
             ampi_cuda_dropout(x.dev, AMP_F16, y.dev, AMP_F16, x.n, 0.4f, 3, 17, (const uint64_t*)cell.dev, 3001,
                               nullptr));
        CHECK_BITS(y, 0);
    }
}

static void check_concat(amp_dtype a, amp_dtype b, size_t rows, size_t d, size_t total, size_t column, size_t shift) {
    Tensor x(a, rows * d, shift), y(b, rows * total, 3 * shift % 8);
    x.fill(awkward);
    BOTH(amp_concat_forward(x.at(), a, d, y.at(), b, total, column, rows, nullptr),
         amp_cuda_concat_forward(x.dev, a, d, y.dev, b, total, column, rows, nullptr));
    CHECK_BITS(y, 1);
    y.fill(awkward);
    for (int accumulate : { 0, 1 }) {
        BOTH(amp_concat_backward(y.at(), b, total, column, x.at(), a, d, rows, accumulate, nullptr),
             amp_cuda_concat_backward(y.dev, b, total, column, x.dev, a, d, rows, accumulate, nullptr));
        CHECK_BITS(x, !accumulate);
    }
}
static void test_concat() {
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES)
        for (size_t shift : { 0, 1 }) {
            check_concat(a, b, 5, 0, 7, 3, shift);
            check_concat(a, b, 0, 2, 7, 3, shift);
            check_concat(a, b, 1, 1, 1, 0, shift);
            check_concat(a, b, 3, 8, 24, 8, shift);
            check_concat(a, b, 7, 13, 29, 16, shift);
            check_concat(a, b, 70, 64, 192, 128, shift);
            check_concat(a, b, 9, 1001, 1030, 29, shift);
            check_concat(a, b, 400, 3, 3, 0, shift);
        }
}

/* --- pooling ------------------------------------------------------------------------------- */

static const amp_pool2d_shape POOLS[] = {
    /* kind, n, c, h, w, kernel, stride, pad, exclude_pad; both kinds are tried */
    { AMP_POOL_MAX, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 2, 3, 8, 8, 2, 2, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 2, 2, 9, 7, 2, 2, 2, 2, 0, 0, 0 },      /* a row and a column that no window covers */
    { AMP_POOL_MAX, 1, 2, 10, 11, 3, 3, 2, 2, 1, 1, 0 },
    { AMP_POOL_MAX, 1, 2, 10, 11, 3, 3, 2, 2, 1, 1, 1 },
    { AMP_POOL_MAX, 1, 3, 13, 9, 3, 5, 1, 1, 1, 2, 1 },     /* windows that overlap much */
    { AMP_POOL_MAX, 2, 1, 12, 12, 2, 3, 4, 5, 0, 0, 0 },    /* gaps between windows */
    { AMP_POOL_MAX, 2, 2, 7, 7, 7, 7, 0, 0, 0, 0, 0 },      /* global, by one thread */
    { AMP_POOL_MAX, 2, 2, 9, 8, 9, 8, 0, 0, 0, 0, 0 },      /* global, by a warp */
    { AMP_POOL_MAX, 1, 2, 20, 31, 20, 31, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 1, 1, 30, 30, 12, 11, 3, 4, 5, 5, 0 },  /* a warp to each of many windows */
    { AMP_POOL_MAX, 1, 1, 30, 30, 12, 11, 3, 4, 5, 5, 1 },
    { AMP_POOL_MAX, 1, 1, 3, 70, 1, 70, 1, 1, 0, 20, 1 },
    { AMP_POOL_MAX, 1, 2, 40, 37, 3, 3, 1, 1, 1, 1, 0 },    /* a plane that the CPU takes in another order */
    { AMP_POOL_MAX, 300, 3, 4, 4, 2, 2, 0, 0, 0, 0, 0 },
};

/* Few values, so that many pixels share the maximum; NaNs and infinities in some windows. */
static float tied(size_t i) {
    const unsigned r = test_random() % 40;
    if (i % 97 == 5) return NAN;
    return r == 0 ? INFINITY : r == 1 ? -INFINITY : r == 2 ? -0.0f : (float)(int)(r % 4) - 1.0f;
}
static float tied_without_zeros(size_t i) { return tied(i) + 0.5f; }

/* Does the CPU sum and search this window pixel by pixel, row after row, as one thread of the device does? */
static bool in_rows(const ampi_pool_plan& p) { return ampi_pool_is_small(&p, AMPI_LANES); }
static bool by_one_thread(const ampi_pool_plan& p) {
    return ampi_min_int(p.kh, p.h) <= 64 / ampi_min_int(p.kw, p.w);
}

/* Averages in double, and the error of a float sum one by one. */
static Bounded averages(const ampi_pool_plan& p, const Tensor& x) {
    Bounded b;
    for (size_t plane = 0; plane < p.planes; plane++)
        for (int oh = 0; oh < p.oh; oh++)
            for (int ow = 0; ow < p.ow; ow++) {
                double sum = 0, size = 0, count = (double)ampi_pool_count(&p, oh, ow), terms = 0;
                const ampi_span r = ampi_window(oh, p.sh, p.ph, p.kh, p.h), c = ampi_window(ow, p.sw, p.pw, p.kw, p.w);
                for (int i = r.first; i < r.last; i++)
                    for (int j = c.first; j < c.last; j++, terms++) {
                        const double v = (double)x[(plane * (size_t)p.h + (size_t)i) * (size_t)p.w + (size_t)j];
                        sum += v;
                        size += fabs(v);
                    }
                if (!by_one_thread(p)) terms = 4;      /* a tree of eight, then double */
                b.add(sum / count, U * terms * size / count + U * fabs(sum / count));
            }
    return b;
}
static Bounded average_slopes(const ampi_pool_plan& p, const Tensor& dy) {
    const size_t n = p.planes * (size_t)p.h * (size_t)p.w;
    std::vector<double> windows(n);
    Bounded b(n);
    for (size_t o = 0; o < dy.n; o++) {
        const int ow = (int)(o % (size_t)p.ow), oh = (int)(o / (size_t)p.ow % (size_t)p.oh);
        const size_t plane = o / (size_t)p.ow / (size_t)p.oh;
        const ampi_span r = ampi_window(oh, p.sh, p.ph, p.kh, p.h), c = ampi_window(ow, p.sw, p.pw, p.kw, p.w);
        for (int i = r.first; i < r.last; i++)
            for (int j = c.first; j < c.last; j++) {
                const size_t at = (plane * (size_t)p.h + (size_t)i) * (size_t)p.w + (size_t)j;
                b.value[at] += (double)dy[o] / (double)ampi_pool_count(&p, oh, ow);
                b.error[at] += U * fabs((double)dy[o]) / (double)ampi_pool_count(&p, oh, ow);
                windows[at]++;
            }
    }
    for (size_t i = 0; i < n; i++) b.error[i] *= windows[i] + 1;
    return b;
}

static void check_pool(const amp_pool2d_shape& s, amp_dtype a, amp_dtype b, amp_dtype c, size_t shift) {
    ampi_pool_plan p;
    CHECK(ampi_pool_plan_make(&s, &p, nullptr) == AMP_OK);
    const size_t n = p.planes * (size_t)p.h * (size_t)p.w, out = p.planes * (size_t)p.oh * (size_t)p.ow;
    const bool exact = in_rows(p) && by_one_thread(p);
    Tensor x(a, n, shift), y(b, out, shift), dy(b, out, shift), dx(c, n, shift);
    if (!p.max) x.fill(ordinary);
    else if (exact) x.fill(tied);
    else x.fill(tied_without_zeros);
    BOTH(amp_pool2d_forward(&s, x.at(), a, y.at(), b, nullptr),
         amp_cuda_pool2d_forward(&s, x.dev, a, y.dev, b, nullptr));
    if (p.max || exact) CHECK_BITS(y, exact);
    else check_bounded("average pool", y, averages(p, x));
    dy.fill(ordinary);
    BOTH(amp_pool2d_backward(&s, dy.at(), b, p.max ? x.at() : nullptr, a, dx.at(), c, nullptr),
         amp_cuda_pool2d_backward(&s, dy.dev, b, p.max ? x.dev : nullptr, a, dx.dev, c, nullptr));
    if (p.max || in_rows(p)) CHECK_BITS(dx, 0);
    else check_bounded("average pool, backward", dx, average_slopes(p, dy));
}
static void test_pool() {
    for (amp_pool2d_shape s : POOLS)
        for (amp_pool kind : { AMP_POOL_MAX, AMP_POOL_AVERAGE }) {
            s.kind = kind;
            check_pool(s, AMP_F32, AMP_F32, AMP_F32, 0);
            check_pool(s, AMP_F16, AMP_F16, AMP_F16, 1);
            check_pool(s, AMP_BF16, AMP_F32, AMP_F16, 3);
        }
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES) check_pool(POOLS[3], a, b, c, 1);
}
/* A NaN is the largest value, the first of several; so is the first of equal values. */
static void test_pool_first() {
    const amp_pool2d_shape s = { AMP_POOL_MAX, 1, 1, 2, 6, 2, 2, 0, 0, 0, 0, 0 };
    Tensor x(AMP_F32, 12), y(AMP_F32, 3), dy(AMP_F32, 3), dx(AMP_F32, 12);
    const uint32_t bits[12] = { 0x3f800000u, 0x7fc00001u, 0x80000000u, 0u, 0xff800000u, 0xff800000u,
                                0xffc00002u, 0x7f800000u, 0x80000000u, 0u, 0xff800000u, 0xff800000u };
    fill_bits(x, std::vector<uint32_t>(bits, bits + 12));
    dy.fill([](size_t i) { return (float)(i + 1); });
    CHECK(amp_cuda_pool2d_forward(&s, x.dev, AMP_F32, y.dev, AMP_F32, nullptr) == AMP_OK);
    CHECK(amp_cuda_pool2d_backward(&s, dy.dev, AMP_F32, x.dev, AMP_F32, dx.dev, AMP_F32, nullptr) == AMP_OK);
    const uint32_t most[3] = { 0x7fc00001u, 0x80000000u, 0xff800000u };
    const float slopes[12] = { 0, 1, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0 };
    memcpy(y.at(), most, sizeof most);
    memcpy(dx.at(), slopes, sizeof slopes);
    CHECK_BITS(y, 1);
    CHECK_BITS(dx, 1);
    CHECK(amp_cuda_pool2d_backward(&s, dy.dev, AMP_F32, x.dev, AMP_F32, nullptr, AMP_F32, nullptr) == AMP_OK);
}

/* --- batch norm ---------------------------------------------------------------------------- */

struct Moments { double mean, var, e_mean, e_var; };

/* Mean and variance of values that a kernel sums as differences from a pivot, which is the mean of the first `part`
   of them. The mean square of the differences, s, is at most (1 + M/part) var, but for the pivot's own rounding.
   A sum of differences errs by 4 u sqrt(s) (one difference, a tree of three levels). Of the squares' mean, s: 2 u for
   the differences, 1 for the product, 3 for the tree; and twice 4 u s for what the mean's error does. */
static Moments moments(const std::vector<double>& v, size_t part) {
    const double n = (double)v.size();
    double mean = 0, var = 0, most = 0;
    for (double x : v) mean += x / n;
    for (double x : v) var += (x - mean) * (x - mean) / n;
    for (double x : v) most = fmax(most, fabs(x));
    const double pivot = sqrt(n / (double)part * var) + 8 * U * most, s = var + pivot * pivot;
    return { mean, var, 4 * U * sqrt(s) + U * fabs(mean), 14 * U * s };
}
/* (x - mean) * invstd * gamma + beta, and its error. */
static void normalise(Bounded& b, const Moments& m, double eps, double x, double gamma, double beta) {
    const double invstd = 1 / sqrt(m.var + eps), rel = m.e_var / (m.var + eps) / 2 + 2 * U, z = (x - m.mean) * invstd;
    const double error = fabs(gamma) * (invstd * m.e_mean + fabs(z) * (2 * U + rel)), y = z * gamma + beta;
    b.add(y, error + U * fabs(y));
}

struct Norm {
    amp_batch_norm_shape shape;
    size_t n, c, s;
    size_t at(size_t i, size_t channel, size_t k) const { return (i * c + channel) * s + k; }
    std::vector<double> channel(const Tensor& x, size_t ch) const {
        std::vector<double> v;
        for (size_t i = 0; i < n; i++) for (size_t k = 0; k < s; k++) v.push_back((double)x[at(i, ch, k)]);
        return v;
    }
    /* Values that the first 512 eights of a channel hold. */
    size_t part() const {
        const size_t eights = (s + 7) / 8, images = 512 / eights;
        if (images >= n) return n * s;
        return images * s + (512 - images * eights) * 8;
    }
};
static Norm norm_of(int n, int c, int s) {
    Norm q = { { n, c, s, 0.0f, 0.0f }, (size_t)n, (size_t)c, (size_t)s };
    return q;
}

/* Channels of different means and widths; the width of one is small beside its mean. */
static void fill_channels(Tensor& x, const Norm& q) {
    for (size_t i = 0; i < x.n; i++) {
        const size_t c = i / q.s % q.c;
        x.set(i, c % 3 == 0 ? test_uniform() : c % 3 == 1 ? 100.0f + test_uniform() : -7.0f + 30.0f * test_uniform());
    }
    x.send();
}

static void check_norm_forward(const Norm& q, amp_dtype a, amp_dtype pt, amp_dtype b, int params, size_t shift) {
    const size_t all = q.n * q.c * q.s;
    const double momentum = q.shape.momentum == 0 ? (double)0.1f : (double)q.shape.momentum;
    Tensor x(a, all, shift), y(b, all, shift), gamma(pt, q.c, 1), beta(pt, q.c, 2), mean(AMP_F32, q.c),
        invstd(AMP_F32, q.c), run_mean(AMP_F32, q.c), run_var(AMP_F32, q.c);
    Bounded by(all), bm, bi, brm, brv;
    fill_channels(x, q);
    gamma.fill(ordinary);
    beta.fill(ordinary);
    run_mean.fill(ordinary);
    run_var.fill(ordinary);
    CHECK(amp_cuda_batch_norm_forward(&q.shape, 1, x.dev, a, params ? gamma.dev : nullptr, params ? beta.dev : nullptr,
                                      pt, run_mean.floats(), run_var.floats(), mean.floats(), invstd.floats(), y.dev,
                                      b, nullptr) == AMP_OK);
    for (size_t c = 0; c < q.c; c++) {
        const Moments m = moments(q.channel(x, c), q.part());
        const double count = (double)(q.n * q.s), unbiased = m.var * count / (count - 1);
        const double old_mean = (double)run_mean[c], old_var = (double)run_var[c];
        const double new_mean = old_mean + momentum * (m.mean - old_mean);
        const double new_var = old_var + momentum * (unbiased - old_var);
        for (size_t i = 0; i < q.n; i++)
            for (size_t k = 0; k < q.s; k++) {
                Bounded one;
                normalise(one, m, 1e-5, (double)x[q.at(i, c, k)], params ? (double)gamma[c] : 1,
                          params ? (double)beta[c] : 0);
                by.value[q.at(i, c, k)] = one.value[0];
                by.error[q.at(i, c, k)] = one.error[0];
            }
        bm.add(m.mean, m.e_mean);
        bi.add(1 / sqrt(m.var + 1e-5), (m.e_var / (m.var + 1e-5) / 2 + U) / sqrt(m.var + 1e-5));
        brm.add(new_mean, momentum * m.e_mean + U * (2 * fabs(old_mean) + fabs(new_mean)));
        brv.add(new_var, momentum * (m.e_var * count / (count - 1) + U * unbiased) + U * (2 * fabs(old_var) + new_var));
    }
    check_bounded("batch norm", y, by);
    check_bounded("batch norm, mean", mean, bm);
    check_bounded("batch norm, invstd", invstd, bi);
    check_bounded("batch norm, running mean", run_mean, brm);
    check_bounded("batch norm, running variance", run_var, brv);
}

/* With running statistics nothing is summed. */
static void check_norm_evaluate(const Norm& q, amp_dtype a, amp_dtype pt, amp_dtype b, int params, size_t shift) {
    const size_t all = q.n * q.c * q.s;
    Tensor x(a, all, shift), y(b, all, shift), gamma(pt, q.c, 1), beta(pt, q.c, 2), mean(AMP_F32, q.c),
        invstd(AMP_F32, q.c), run_mean(AMP_F32, q.c), run_var(AMP_F32, q.c);
    x.fill(awkward);
    gamma.fill(ordinary);
    beta.fill(ordinary);
    run_mean.fill(ordinary);
    run_var.fill([](size_t i) { return i % 5 == 0 ? 0.0f : 3.0f + 2.9f * test_uniform(); });
    for (int save : { 0, 1 }) {
        BOTH(amp_batch_norm_forward(&q.shape, 0, x.at(), a, params ? gamma.at() : nullptr,
                                    params ? beta.at() : nullptr, pt, (float*)run_mean.at(), (float*)run_var.at(),
                                    save ? (float*)mean.at() : nullptr, save ? (float*)invstd.at() : nullptr, y.at(),
                                    b, nullptr),
             amp_cuda_batch_norm_forward(&q.shape, 0, x.dev, a, params ? gamma.dev : nullptr,
                                         params ? beta.dev : nullptr, pt, run_mean.floats(), run_var.floats(),
                                         save ? mean.floats() : nullptr, save ? invstd.floats() : nullptr, y.dev, b,
                                         nullptr));
        CHECK_BITS(y, 0);
        CHECK_BITS(mean, 1);
        CHECK_BITS(invstd, 1);
        CHECK_BITS(run_mean, 1);
        CHECK_BITS(run_var, 1);
    }
}

/* a and b are means of M products, the trees of which err by 4 u and 5 u; see the formula of the kernel. */
static void check_norm_backward(const Norm& q, amp_dtype a, amp_dtype pt, amp_dtype b, int params, size_t shift) {
    const size_t all = q.n * q.c * q.s;
    const double count = (double)(q.n * q.s);
    Tensor x(a, all, shift), dy(b, all, shift), dx(b, all, shift), gamma(pt, q.c, 1), mean(AMP_F32, q.c),
        invstd(AMP_F32, q.c), dgamma(pt, q.c), dbeta(pt, q.c);
    Bounded bx(all), bg, bb;
    const int accumulate = params;
    fill_channels(x, q);
    dy.fill(ordinary);
    gamma.fill(ordinary);
    mean.fill(ordinary);
    dgamma.fill(ordinary);
    dbeta.fill(ordinary);
    invstd.fill([](size_t) { return 2.0f + test_uniform(); });
    CHECK(amp_cuda_batch_norm_backward(&q.shape, dy.dev, b, x.dev, a, params ? gamma.dev : nullptr, pt, mean.floats(),
                                       invstd.floats(), dx.dev, b, dgamma.dev, dbeta.dev, pt, accumulate, nullptr)
          == AMP_OK);
    for (size_t c = 0; c < q.c; c++) {
        const std::vector<double> v = q.channel(x, c), g = q.channel(dy, c);
        const double m = (double)mean[c], s = (double)invstd[c], k = s * (params ? (double)gamma[c] : 1);
        double sum = 0, dot = 0, size = 0, weight = 0;
        for (size_t i = 0; i < v.size(); i++) {
            sum += g[i];
            size += fabs(g[i]);
            dot += g[i] * (v[i] - m) * s;
            weight += fabs(g[i] * (v[i] - m)) * s;
        }
        const double ma = sum / count, mb = dot * s / count;
        const double ea = U * (3 * size / count + fabs(ma)), eb = U * (5 * weight * s / count + fabs(mb));
        for (size_t i = 0; i < v.size(); i++) {
            const double inner = g[i] - ma - (v[i] - m) * mb, d = inner * k;
            const double error = fabs(v[i] - m) * (U * fabs(mb) + eb) + U * (fabs(g[i] - ma) + fabs(inner)) + ea;
            const size_t at = q.at(i / q.s, c, i % q.s);
            bx.value[at] = d;
            bx.error[at] = error * fabs(k) + 2 * U * fabs(d);
        }
        bg.add(dot, 5 * U * weight + U * fabs(dot));
        bb.add(sum, 3 * U * size + U * fabs(sum));
    }
    check_bounded("batch norm, dx", dx, bx);
    check_bounded("batch norm, dgamma", dgamma, onto(bg, dgamma, accumulate));
    check_bounded("batch norm, dbeta", dbeta, onto(bb, dbeta, accumulate));
}

static void check_norm(const Norm& q, amp_dtype a, amp_dtype pt, amp_dtype b, int params, size_t shift) {
    check_norm_forward(q, a, pt, b, params, shift);
    check_norm_evaluate(q, a, pt, b, params, shift);
    check_norm_backward(q, a, pt, b, params, shift);
}
static void test_norm_sizes() {
    static const int sizes[][3] = { { 2, 1, 1 }, { 1, 1, 2 }, { 3, 5, 1 }, { 130, 4, 1 }, { 5, 3, 7 }, { 4, 3, 8 },
                                    { 3, 4, 49 }, { 2, 3, 1029 }, { 700, 2, 9 }, { 2, 2, 21001 } };
    for (auto& s : sizes) {
        check_norm(norm_of(s[0], s[1], s[2]), AMP_F32, AMP_F32, AMP_F32, 1, 0);
        check_norm(norm_of(s[0], s[1], s[2]), AMP_F16, AMP_F32, AMP_F16, 0, 1);
    }
    check_norm(norm_of(2, 4100, 1), AMP_BF16, AMP_BF16, AMP_F32, 1, 0);      /* more channels than blocks */
}
static void test_norm_types() {
    for (amp_dtype a : TYPES) for (amp_dtype p : TYPES) for (amp_dtype b : TYPES)
        for (int params : { 0, 1 }) check_norm(norm_of(3, 4, 25), a, p, b, params, 3);
}
/* A channel whose first images are far from the others; a constant channel. */
static void test_norm_shifted() {
    const Norm q = norm_of(9, 2, 4096);
    Tensor x(AMP_F32, q.n * q.c * q.s), y(AMP_F32, x.n), mean(AMP_F32, q.c), invstd(AMP_F32, q.c);
    Bounded by(x.n), bm;
    x.fill([&](size_t i) { return i / q.s % 2 ? 0.3f : (i < 2 * q.s ? -40.0f : 40.0f) + test_uniform(); });
    CHECK(amp_cuda_batch_norm_forward(&q.shape, 1, x.dev, AMP_F32, nullptr, nullptr, AMP_F32, nullptr, nullptr,
                                      mean.floats(), invstd.floats(), y.dev, AMP_F32, nullptr) == AMP_OK);
    for (size_t c = 0; c < q.c; c++) {
        const Moments m = moments(q.channel(x, c), q.part());
        for (size_t i = 0; i < q.n; i++)
            for (size_t k = 0; k < q.s; k++) {
                Bounded one;
                normalise(one, m, 1e-5, (double)x[q.at(i, c, k)], 1, 0);
                by.value[q.at(i, c, k)] = one.value[0];
                by.error[q.at(i, c, k)] = one.error[0];
            }
        bm.add(m.mean, m.e_mean);
    }
    check_bounded("batch norm, shifted", y, by);
    check_bounded("batch norm, shifted mean", mean, bm);
}
/* Momentum 1 takes the batch's statistics, AMP_ZERO leaves the old ones; they may also be missing, one or both. */
static void test_norm_running() {
    for (float momentum : { 1.0f, (float)AMP_ZERO }) {
        Norm q = norm_of(4, 3, 5);
        Tensor x(AMP_F32, 60), y(AMP_F32, 60), mean(AMP_F32, 3), invstd(AMP_F32, 3), run(AMP_F32, 3), var(AMP_F32, 3);
        q.shape.momentum = momentum;
        fill_channels(x, q);
        run.fill(ordinary);
        var.fill(ordinary);
        CHECK(amp_cuda_batch_norm_forward(&q.shape, 1, x.dev, AMP_F32, nullptr, nullptr, AMP_F32, run.floats(),
                                          var.floats(), mean.floats(), invstd.floats(), y.dev, AMP_F32, nullptr)
              == AMP_OK);
        if (momentum == 1.0f) {
            Bounded bm, bv;
            for (size_t c = 0; c < 3; c++) {
                const Moments m = moments(q.channel(x, c), q.part());
                bm.add(m.mean, m.e_mean);
                bv.add(m.var * 20 / 19, m.e_var * 20 / 19 + U * m.var * 20 / 19);
            }
            check_bounded("running mean", run, bm);
            check_bounded("running variance", var, bv);
            const Bytes before = var.get();
            CHECK(amp_cuda_batch_norm_forward(&q.shape, 1, x.dev, AMP_F32, nullptr, nullptr, AMP_F32, nullptr,
                                              var.floats(), mean.floats(), invstd.floats(), y.dev, AMP_F32, nullptr)
                  == AMP_OK);
            CHECK(var.get() == before);
        } else {
            CHECK_BITS(run, 1);
            CHECK_BITS(var, 1);
        }
    }
}
/* dx may be dy; gradients that are not wanted; a NaN or an infinity reaches its own channel and no other. */
static void test_norm_special() {
    const Norm q = norm_of(3, 3, 21);
    Tensor x(AMP_F16, 189), dy(AMP_F16, 189), dx(AMP_F16, 189), mean(AMP_F32, 3), invstd(AMP_F32, 3), y(AMP_F32, 189),
        run(AMP_F32, 3), var(AMP_F32, 3);
    fill_channels(x, q);
    dy.fill(ordinary);
    mean.fill(ordinary);
    invstd.fill(ordinary);
    for (Tensor* to : { &dx, &dy })
        CHECK(amp_cuda_batch_norm_backward(&q.shape, dy.dev, AMP_F16, x.dev, AMP_F16, nullptr, AMP_F32, mean.floats(),
                                           invstd.floats(), to->dev, AMP_F16, nullptr, nullptr, AMP_F32, 0, nullptr)
              == AMP_OK);
    CHECK(dx.get() == dy.get());
    for (float bad : { (float)NAN, INFINITY, -INFINITY })
        for (size_t place : { 3u, 21u + 2u * 63u + 20u }) {      /* in the first channel, in the second */
            fill_channels(x, q);
            x.set(place, bad);
            x.send();
            run.fill(ordinary);
            var.fill(ordinary);
            BOTH(amp_batch_norm_forward(&q.shape, 1, x.at(), AMP_F16, nullptr, nullptr, AMP_F32, (float*)run.at(),
                                        (float*)var.at(), (float*)mean.at(), (float*)invstd.at(), y.at(), AMP_F32,
                                        nullptr),
                 amp_cuda_batch_norm_forward(&q.shape, 1, x.dev, AMP_F16, nullptr, nullptr, AMP_F32, run.floats(),
                                             var.floats(), mean.floats(), invstd.floats(), y.dev, AMP_F32, nullptr));
            for (Tensor* t : { &y, &mean, &invstd, &run, &var }) {
                const std::vector<double> v = t->values();
                for (size_t i = 0; i < t->n; i++) {
                    const double w = (double)(*t)[i];
                    CHECK_MSG(std::isfinite(w) ? std::isfinite(v[i]) : std::isnan(w) ? std::isnan(v[i]) : v[i] == w,
                              "%g at %zu: %zu of %zu is %g, not %g", (double)bad, place, i, t->n, v[i], w);
                }
            }
        }
}

int main() {
    TEST(test_activation_values);
    TEST(test_activation_types);
    TEST(test_activation_in_place);
    TEST(test_turns);
    TEST(test_add);
    TEST(test_dropout);
    TEST(test_dropout_position);
    TEST(test_concat);
    TEST(test_pool);
    TEST(test_pool_first);
    TEST(test_norm_sizes);
    TEST(test_norm_types);
    TEST(test_norm_shifted);
    TEST(test_norm_running);
    TEST(test_norm_special);
    TEST_END();
}
