/* Layers and losses on the device. What is computed element by element has the CPU's bits. Sums have another order:
   they are compared with sums in double, within bounds that follow from the roundings on the way (u = 2^-24 each),
   and give the same bits in every order of threads and blocks. */
#define AMP_IMPLEMENTATION      /* this test looks inside, at a copy of its own */
#define AMP_STATIC
#include "tensor.h"

#include <cstddef>
#include <initializer_list>

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

/* The smallest number that rounds to infinity: half a unit above the largest of the type. */
static double overflow_of(amp_dtype t) {
    return std::ldexp(1 - unit_of(t) / 2, t == AMP_F16 ? 16 : 128);
}

/* Terms of the second order are far below the hundredth that is added. */
static void check_bounded(const char* what, const Tensor& t, const Bounded& b) {
    const std::vector<double> got = t.values();
    double worst = 0;
    size_t bad = 0, place = 0;
    CHECK(b.value.size() == t.n);
    for (size_t i = 0; i < t.n; i++) {
        const double allowed = 1.01 * b.error[i] + unit_of(t.type) * fabs(got[i]) + tiny_of(t.type);
        if (std::isnan(b.value[i]) && std::isnan(got[i])) continue;
        if (std::isinf(got[i]) && got[i] * b.value[i] > 0
            && fabs(b.value[i]) + 1.01 * b.error[i] >= overflow_of(t.type)) continue;
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

/* --- element by element ---------------------------------------------------------------------- */

#define X(NAME, ...) AMP_##NAME,
static const amp_activation ACTIVATIONS[] = { AMP_ACTIVATION_LIST(X) };
#undef X

static void check_activation(amp_activation f, Tensor& x, Tensor& dy, Tensor& y) {
    y.poison();
    BOTH(amp_activation_forward(f, amp_ref_of(x.at(), x.type), amp_ref_of(y.at(), y.type), x.n,
        nullptr),
         cuda->activation_forward(f, amp_ref_of(x.dev, x.type), amp_ref_of(y.dev, y.type), x.n,
             nullptr));
    CHECK_BITS(y, 0);                          /* the CPU has one kind of NaN, a GPU hands them on */
    y.poison();
    BOTH(amp_activation_backward(f, amp_ref_of(dy.at(), dy.type), amp_ref_of(x.at(), x.type),
        amp_ref_of(y.at(), y.type), 0, x.n, nullptr),
         cuda->activation_backward(f, amp_ref_of(dy.dev, dy.type), amp_ref_of(x.dev, x.type),
             amp_ref_of(y.dev, y.type), 0, x.n, nullptr));
    CHECK_BITS(y, 0);                          /* the CPU has one kind of NaN, a GPU hands them on */
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
            BOTH(amp_activation_backward(f, amp_ref_of(dy.at(), t), amp_ref_of(x.at(), t),
                amp_ref_of(dy.at(), t), 0, x.n, nullptr),
                 cuda->activation_backward(f, amp_ref_of(dy.dev, t), amp_ref_of(x.dev, t),
                     amp_ref_of(dy.dev, t), 0, x.n, nullptr));
            CHECK_BITS(dy, f == AMP_RELU);
            BOTH(amp_activation_forward(f, amp_ref_of(x.at(), t), amp_ref_of(x.at(), t), x.n,
                nullptr),
                 cuda->activation_forward(f, amp_ref_of(x.dev, t), amp_ref_of(x.dev, t), x.n,
                     nullptr));
            CHECK_BITS(x, f == AMP_RELU);
            CHECK(cuda->activation_backward(f, amp_ref_of(dy.dev, t), amp_ref_of(x.dev, t),
                AMP_NONE, 0, x.n, nullptr) == AMP_OK);
        }
}
/* The kernel of all such functions, when its blocks loop over the elements. */
static void test_grid_stride() {
    const size_t n = 5 * AMPI_CUDA_TILE + 77;
    Tensor x(AMP_F16, n), y(AMP_F32, n);
    const ampi_op_activation f = { AMP_TANH };
    x.fill(awkward);
    const ampi_cuda_map m = ampi_cuda_map_of(amp_ref_of(x.dev, x.type), AMP_NONE,
        amp_ref_of(y.dev, y.type), n);
    CHECK(amp_activation_forward(AMP_TANH, amp_ref_of(x.at(), x.type), amp_ref_of(y.at(), y.type),
        n, nullptr) == AMP_OK);
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_map<ampi_op_activation>, dim3(2), dim3(AMPI_CUDA_BLOCK), 0, m, f)
          == AMP_OK);
    CHECK_BITS(y, 0);
}

static void test_leaky_relu() {
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES)
        for (size_t n : { 0, 1, 9, 2049, 4101 }) {
            Tensor x(a, n, n % 5), dy(b, n, n % 3), y(c, n, n % 2);
            x.fill(awkward);
            dy.fill(ordinary);
            BOTH(amp_leaky_relu_forward(amp_ref_of(x.at(), a), amp_ref_of(y.at(), c), n, 0.1f, nullptr),
                 cuda->leaky_relu_forward(amp_ref_of(x.dev, a), amp_ref_of(y.dev, c), n, 0.1f, nullptr));
            CHECK_BITS(y, 0);
            BOTH(amp_leaky_relu_backward(amp_ref_of(dy.at(), b), amp_ref_of(x.at(), a),
                amp_ref_of(y.at(), c), AMP_ACCUMULATE_INPUT, n, 0.2f, nullptr),
                 cuda->leaky_relu_backward(amp_ref_of(dy.dev, b), amp_ref_of(x.dev, a),
                     amp_ref_of(y.dev, c), AMP_ACCUMULATE_INPUT, n, 0.2f, nullptr));
            CHECK_BITS(y, 0);
            BOTH(amp_leaky_relu_forward(amp_ref_of(x.at(), a), amp_ref_of(x.at(), a), n, 3.0f, nullptr),
                 cuda->leaky_relu_forward(amp_ref_of(x.dev, a), amp_ref_of(x.dev, a), n, 3.0f, nullptr));
            CHECK_BITS(x, 0);
        }
}

static void test_add() {
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES)
        for (size_t n : { 0, 1, 8, 9, 2047, 4099 }) {
            Tensor x(a, n, n % 5), z(b, n, n % 3), y(c, n, n % 2);
            x.fill(awkward);
            for (size_t i = 0; i < n; i++) z.set(i, awkward(i / 8 + i));
            z.send();
            BOTH(amp_add_forward(amp_ref_of(x.at(), a), amp_ref_of(z.at(), b),
                amp_ref_of(y.at(), c), n, nullptr),
                 cuda->add_forward(amp_ref_of(x.dev, a), amp_ref_of(z.dev, b),
                     amp_ref_of(y.dev, c), n, nullptr));
            CHECK_BITS(y, 0);
            if (a != b) continue;
            BOTH(amp_add_forward(amp_ref_of(x.at(), a), amp_ref_of(z.at(), b),
                amp_ref_of(x.at(), a), n, nullptr),
                 cuda->add_forward(amp_ref_of(x.dev, a), amp_ref_of(z.dev, b),
                     amp_ref_of(x.dev, a), n, nullptr));
            CHECK_BITS(x, 0);
            BOTH(amp_add_forward(amp_ref_of(x.at(), a), amp_ref_of(z.at(), b),
                amp_ref_of(z.at(), b), n, nullptr),
                 cuda->add_forward(amp_ref_of(x.dev, a), amp_ref_of(z.dev, b),
                     amp_ref_of(z.dev, b), n, nullptr));
            CHECK_BITS(z, 0);
        }
}

static void test_mul() {
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES)
        for (size_t repeat : { 1, 3, 49, 1025, 9001 }) for (size_t count : { 1, 8, 43 }) {
            const size_t n = count * repeat;
            if (n > 99000) continue;
            Tensor x(a, n, n % 5), z(b, count, count % 3), y(c, n, n % 2), dz(c, count);
            x.fill(awkward);
            z.fill(ordinary);
            BOTH(amp_mul_forward(amp_ref_of(x.at(), a), amp_ref_of(z.at(), b), amp_ref_of(y.at(), c), n, repeat, nullptr),
                 cuda->mul_forward(amp_ref_of(x.dev, a), amp_ref_of(z.dev, b), amp_ref_of(y.dev, c), n, repeat, nullptr));
            CHECK_BITS(y, 0);
            x.fill(ordinary);
            y.fill(ordinary);
            dz.fill(ordinary);
            Tensor dx(c, n);
            dx.fill(ordinary);
            Bounded expected;
            for (size_t i = 0; i < count; i++) {
                double sum = 0, size = 0;
                for (size_t j = i * repeat; j < (i + 1) * repeat; j++) {
                    sum += (double)y[j] * (double)x[j];
                    size += fabs((double)y[j] * (double)x[j]);
                }
                expected.add(sum, 5 * U * size);   /* a product, a tree of eight, the total */
            }
            expected = onto(expected, dz, 1);
            BOTH(amp_mul_backward(amp_ref_of(y.at(), c), amp_ref_of(x.at(), a), amp_ref_of(z.at(), b), amp_ref_of(dx.at(), c),
                amp_ref_of(dz.at(), c), AMP_ACCUMULATE_INPUT, n, repeat, nullptr),
                 cuda->mul_backward(amp_ref_of(y.dev, c), amp_ref_of(x.dev, a), amp_ref_of(z.dev, b), amp_ref_of(dx.dev, c),
                     amp_ref_of(dz.dev, c), AMP_ACCUMULATE_INPUT, n, repeat, nullptr));
            CHECK_BITS(dx, 0);
            check_bounded("db", dz, expected);
            CHECK(cuda->mul_backward(amp_ref_of(y.dev, c), amp_ref_of(x.dev, a), amp_ref_of(z.dev, b), AMP_NONE, AMP_NONE, 0, n,
                repeat, nullptr) == AMP_OK);
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
                BOTH(amp_dropout_forward(amp_ref_of(x.at(), a), amp_ref_of(y.at(), b), n, p,
                    42 + offset, offset, nullptr),
                     cuda->dropout_forward(amp_ref_of(x.dev, a), amp_ref_of(y.dev, b), n, p,
                         42 + offset, offset, nullptr, 0, nullptr));
                CHECK_BITS(y, 0);
            }
    /* The mask of every position, in place. */
    for (float p : { 0.001f, amp_random_uniform(9, 82), 0.999f }) {      /* one number is the probability itself */
        Tensor x(AMP_F32, 100000);
        x.fill([](size_t) { return 1.0f; });
        CHECK(cuda->dropout_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), x.n, p, 9, 5, nullptr, 0,
            nullptr) == AMP_OK);
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
        OK(cudaMemcpy(cell.dev, &position, sizeof position, cudaMemcpyHostToDevice));
        BOTH(amp_dropout_forward(amp_ref_of(x.at(), AMP_F16), amp_ref_of(y.at(), AMP_F16), x.n, 0.4f, 3,
            17 + position * 3001, nullptr),
             cuda->dropout_forward(amp_ref_of(x.dev, AMP_F16), amp_ref_of(y.dev, AMP_F16), x.n, 0.4f, 3, 17,
                 (const uint64_t*)cell.dev, 3001, nullptr));
        CHECK_BITS(y, 0);
    }
}

static void check_concat(amp_dtype a, amp_dtype b, size_t rows, size_t d, size_t total, size_t column, size_t shift) {
    Tensor x(a, rows * d, shift), y(b, rows * total, 3 * shift % 8);
    x.fill(awkward);
    BOTH(amp_concat_forward(amp_ref_of(x.at(), a), d, amp_ref_of(y.at(), b), total, column, rows,
        nullptr),
         cuda->concat_forward(amp_ref_of(x.dev, a), d, amp_ref_of(y.dev, b), total, column, rows,
             nullptr));
    CHECK_BITS(y, 1);
    y.fill(awkward);
    for (int accumulate : { 0, 1 }) {
        BOTH(amp_concat_backward(amp_ref_of(y.at(), b), total, column, amp_ref_of(x.at(), a), d,
            rows, accumulate, nullptr),
             cuda->concat_backward(amp_ref_of(y.dev, b), total, column, amp_ref_of(x.dev, a), d,
                 rows, accumulate, nullptr));
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

/* --- places -------------------------------------------------------------------------------- */

static __global__ void divide_kernel(uint32_t* x, ampi_cuda_divisor by, unsigned n) {
    ampi_ptx_grid_wait();
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = ampi_d_divide(x[i], by);
}
/* A division by multiplication is exact for all numbers below 2^31: first of all around the multiples. */
static void test_division() {
    for (uint32_t d : { 1u, 2u, 3u, 5u, 7u, 10u, 641u, 65535u, 65537u, 0x40000001u, 0x7fffffffu }) {
        std::vector<uint32_t> x, quotients;
        for (uint32_t k = 0; k < 100; k++)
            for (uint32_t multiple : { k, 0x7fffffffu / d - k, test_random() % (0x7fffffffu / d + 1) })
                for (uint32_t near : { multiple * d - 1, multiple * d, multiple * d + 1 })
                    if (near <= 0x7fffffffu) x.push_back(near);
        for (uint32_t u : x) quotients.push_back(u / d);
        Tensor t(AMP_F32, x.size());
        fill_bits(t, x);
        CHECK(ampi_cuda_launch(nullptr, "test", divide_kernel, dim3((unsigned)x.size() / 256 + 1), dim3(256), 0,
                               (uint32_t*)t.dev, ampi_cuda_divisor_of(d), (unsigned)x.size()) == AMP_OK);
        memcpy(t.at(), quotients.data(), t.bytes);
        CHECK_BITS(t, 1);
    }
}

/* --- pooling ------------------------------------------------------------------------------- */

static const amp_pool2d_shape POOLS[] = {
    /* kind, n, c, h, w, kernel, stride, pad, exclude_pad; both kinds are tried */
    { AMP_POOL_MAX, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 2, 3, 8, 8, 2, 2, 0, 0, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 2, 2, 9, 7, 2, 2, 2, 2, 0, 0, 0, 0, 0 },      /* a row and a column that no window covers */
    { AMP_POOL_MAX, 1, 2, 10, 11, 3, 3, 2, 2, 1, 1, 0, 0, 0 },
    { AMP_POOL_MAX, 1, 2, 10, 11, 3, 3, 2, 2, 1, 1, 1, 0, 0 },
    { AMP_POOL_MAX, 1, 3, 13, 9, 3, 5, 1, 1, 1, 2, 1, 0, 0 },     /* windows that overlap much */
    { AMP_POOL_MAX, 2, 1, 12, 12, 2, 3, 4, 5, 0, 0, 0, 0, 0 },    /* gaps between windows */
    { AMP_POOL_MAX, 2, 2, 7, 7, 7, 7, 0, 0, 0, 0, 0, 0, 0 },      /* global, by one thread */
    { AMP_POOL_MAX, 2, 2, 9, 8, 9, 8, 0, 0, 0, 0, 0, 0, 0 },      /* global, by a warp */
    { AMP_POOL_MAX, 1, 2, 20, 31, 20, 31, 0, 0, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 1, 1, 30, 30, 12, 11, 3, 4, 5, 5, 0, 0, 0 },  /* a warp to each of many windows */
    { AMP_POOL_MAX, 1, 1, 30, 30, 12, 11, 3, 4, 5, 5, 1, 0, 0 },
    { AMP_POOL_MAX, 1, 1, 3, 70, 1, 70, 1, 1, 0, 20, 1, 0, 0 },
    { AMP_POOL_MAX, 1, 2, 40, 37, 3, 3, 1, 1, 1, 1, 0, 0, 0 },    /* a plane that the CPU takes in another order */
    { AMP_POOL_MAX, 300, 3, 4, 4, 2, 2, 0, 0, 0, 0, 0, 0, 0 },
    { AMP_POOL_MAX, 2, 3, 8, 8, 2, 2, 0, 0, 0, 0, 0, 1, 1 },      /* windows that begin in the last row and column */
    { AMP_POOL_MAX, 1, 2, 11, 9, 3, 3, 2, 2, 1, 1, 0, AMP_ZERO, AMP_ZERO },
};

/* Few values, so that many pixels share the maximum; NaNs and infinities in some windows. */
static float tied(size_t i) {
    const unsigned r = test_random() % 40;
    if (i % 97 == 5) return NAN;
    return r == 0 ? INFINITY : r == 1 ? -INFINITY : r == 2 ? -0.0f : (float)(int)(r % 4) - 1.0f;
}
static float tied_without_zeros(size_t i) { return tied(i) + 0.5f; }

/* Does the CPU sum and search this window pixel by pixel, row after row, as one thread of the device does? */
static bool in_rows(const ampi_pool_plan& p) { return ampi_pool_is_small(&p); }
static bool by_one_thread(const ampi_pool_plan& p) {
    return ampi_min_int(p.h.kernel, p.h.size) <= 64 / ampi_min_int(p.w.kernel, p.w.size);
}

/* Averages in double, and the error of a float sum one by one. */
static Bounded averages(const ampi_pool_plan& p, const Tensor& x) {
    Bounded b;
    for (size_t plane = 0; plane < p.planes; plane++)
        for (int oh = 0; oh < p.h.out; oh++)
            for (int ow = 0; ow < p.w.out; ow++) {
                double sum = 0, size = 0, count = (double)ampi_pool_count(&p, oh, ow), terms = 0;
                const ampi_span r = ampi_window(p.h, oh), c = ampi_window(p.w, ow);
                for (int i = r.first; i < r.last; i++)
                    for (int j = c.first; j < c.last; j++, terms++) {
                        const double v = (double)x[(plane * (size_t)p.h.size + (size_t)i) * (size_t)p.w.size + (size_t)j];
                        sum += v;
                        size += fabs(v);
                    }
                if (!by_one_thread(p)) terms = 4;      /* a tree of eight, then double */
                b.add(sum / count, U * terms * size / count + U * fabs(sum / count));
            }
    return b;
}
static Bounded average_slopes(const ampi_pool_plan& p, const Tensor& dy) {
    const size_t n = p.x_n;
    std::vector<double> windows(n);
    Bounded b(n);
    for (size_t o = 0; o < dy.n; o++) {
        const int ow = (int)(o % (size_t)p.w.out), oh = (int)(o / (size_t)p.w.out % (size_t)p.h.out);
        const size_t plane = o / (size_t)p.w.out / (size_t)p.h.out;
        const ampi_span r = ampi_window(p.h, oh), c = ampi_window(p.w, ow);
        for (int i = r.first; i < r.last; i++)
            for (int j = c.first; j < c.last; j++) {
                const size_t at = (plane * (size_t)p.h.size + (size_t)i) * (size_t)p.w.size + (size_t)j;
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
    const size_t n = p.x_n, out = p.y_n;
    const bool exact = in_rows(p) && by_one_thread(p);
    Tensor x(a, n, shift), y(b, out, shift), dy(b, out, shift), dx(c, n, shift);
    if (!p.max) x.fill(ordinary);
    else if (exact) x.fill(tied);
    else x.fill(tied_without_zeros);
    BOTH(amp_pool2d_forward(&s, amp_ref_of(x.at(), a), amp_ref_of(y.at(), b), nullptr),
         cuda->pool2d_forward(&s, amp_ref_of(x.dev, a), amp_ref_of(y.dev, b), nullptr));
    if (p.max || exact) CHECK_BITS(y, exact);
    else check_bounded("average pool", y, averages(p, x));
    dy.fill(ordinary);
    BOTH(amp_pool2d_backward(&s, amp_ref_of(dy.at(), b), amp_ref_of(p.max ? x.at() : nullptr, a),
        amp_ref_of(dx.at(), c), 0, nullptr),
         cuda->pool2d_backward(&s, amp_ref_of(dy.dev, b), amp_ref_of(p.max ? x.dev : nullptr, a),
             amp_ref_of(dx.dev, c), 0, nullptr));
    if (p.max || in_rows(p)) CHECK_BITS(dx, 0);
    else check_bounded("average pool, backward", dx, average_slopes(p, dy));
}
static void test_pool() {
    for (amp_pool2d_shape s : POOLS)
        for (amp_pool kind : { AMP_POOL_MAX, AMP_POOL_AVERAGE, AMP_POOL_SUM }) {
            s.kind = kind;
            check_pool(s, AMP_F32, AMP_F32, AMP_F32, 0);
            check_pool(s, AMP_F16, AMP_F16, AMP_F16, 1);
            check_pool(s, AMP_BF16, AMP_F32, AMP_F16, 3);
        }
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES) check_pool(POOLS[3], a, b, c, 1);
}
/* Windows side by side that fill the image are taken one or two at a time, by their number and the alignment. */
static void test_pool_side_by_side() {
    struct Case { int n, c, k, h, w; };
    const Case cases[] = { { 1, 1, 2, 2, 2 },   { 1, 1, 2, 2, 4 },   { 3, 1, 2, 4, 6 },    { 1, 5, 2, 2, 8 },
                           { 2, 3, 2, 14, 14 }, { 2, 2, 2, 28, 28 }, { 1, 2, 2, 10, 30 },  { 700, 4, 2, 6, 10 },
                           { 1, 1, 3, 3, 3 },   { 2, 3, 3, 9, 6 },   { 1, 2, 3, 12, 15 } };
    for (const Case& s : cases)
        for (amp_pool kind : { AMP_POOL_MAX, AMP_POOL_AVERAGE, AMP_POOL_SUM }) {
            const amp_pool2d_shape pool = { kind, s.n, s.c, s.h, s.w, s.k, s.k, 0, 0, 0, 0, 0, 0, 0 };
            check_pool(pool, AMP_F32, AMP_F32, AMP_F32, 0);
            for (size_t shift : { 0u, 1u, 2u, 4u }) check_pool(pool, AMP_F16, AMP_F16, AMP_F16, shift);
            check_pool(pool, AMP_BF16, AMP_BF16, AMP_BF16, 0);
            check_pool(pool, AMP_F32, AMP_BF16, AMP_F16, 2);
        }
    const amp_pool2d_shape pool = { AMP_POOL_MAX, 2, 2, 4, 12, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES) check_pool(pool, a, b, c, 0);
}
/* Each array by itself lies at an odd address. */
static void test_pool_odd() {
    const amp_pool2d_shape s = { AMP_POOL_MAX, 1, 3, 4, 8, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    for (size_t odd = 0; odd < 16; odd++)
        for (size_t shift : { 1u, 2u }) {
            Tensor x(AMP_F16, 96, odd & 1 ? shift : 0), y(AMP_F16, 24, odd & 2 ? shift : 0),
                   dy(AMP_F16, 24, odd & 4 ? shift : 0), dx(AMP_F16, 96, odd & 8 ? shift : 0);
            x.fill(tied);
            dy.fill([](size_t i) { return i % 3 == 0 ? -0.0f : ordinary(i); });
            BOTH(amp_pool2d_forward(&s, amp_ref_of(x.at(), AMP_F16), amp_ref_of(y.at(), AMP_F16), nullptr),
                 cuda->pool2d_forward(&s, amp_ref_of(x.dev, AMP_F16), amp_ref_of(y.dev, AMP_F16), nullptr));
            CHECK_BITS(y, 1);
            BOTH(amp_pool2d_backward(&s, amp_ref_of(dy.at(), AMP_F16), amp_ref_of(x.at(), AMP_F16), amp_ref_of(dx.at(), AMP_F16), 0,
                nullptr),
                 cuda->pool2d_backward(&s, amp_ref_of(dy.dev, AMP_F16), amp_ref_of(x.dev, AMP_F16), amp_ref_of(dx.dev, AMP_F16), 0,
                     nullptr));
            CHECK_BITS(dx, 1);
        }
}
/* All pixels lie below zero: what a warp's lanes hold beyond the end of a window is not a pixel. */
static void test_pool_below_zero() {
    for (const amp_pool2d_shape& s : POOLS) {
        ampi_pool_plan p;
        CHECK(ampi_pool_plan_make(&s, &p, nullptr) == AMP_OK);
        Tensor x(AMP_F32, p.x_n), y(AMP_F32, p.y_n);
        x.fill([](size_t) { return test_uniform() - 2.0f; });
        BOTH(amp_pool2d_forward(&s, amp_ref_of(x.at(), AMP_F32), amp_ref_of(y.at(), AMP_F32), nullptr),
             cuda->pool2d_forward(&s, amp_ref_of(x.dev, AMP_F32), amp_ref_of(y.dev, AMP_F32), nullptr));
        CHECK_BITS(y, 1);
    }
}
/* A NaN is the largest value, the first of several; so is the first of equal values. */
static void test_pool_first() {
    const amp_pool2d_shape s = { AMP_POOL_MAX, 1, 1, 2, 6, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
    Tensor x(AMP_F32, 12), y(AMP_F32, 3), dy(AMP_F32, 3), dx(AMP_F32, 12);
    const uint32_t bits[12] = { 0x3f800000u, 0x7fc00001u, 0x80000000u, 0u, 0xff800000u, 0xff800000u,
                                0xffc00002u, 0x7f800000u, 0x80000000u, 0u, 0xff800000u, 0xff800000u };
    fill_bits(x, std::vector<uint32_t>(bits, bits + 12));
    dy.fill([](size_t i) { return (float)(i + 1); });
    CHECK(cuda->pool2d_forward(&s, amp_ref_of(x.dev, AMP_F32), amp_ref_of(y.dev, AMP_F32), nullptr) == AMP_OK);
    CHECK(cuda->pool2d_backward(&s, amp_ref_of(dy.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), amp_ref_of(dx.dev, AMP_F32), 0, nullptr) == AMP_OK);
    const uint32_t most[3] = { 0x7fc00001u, 0x80000000u, 0xff800000u };
    const float slopes[12] = { 0, 1, 2, 0, 3, 0, 0, 0, 0, 0, 0, 0 };
    memcpy(y.at(), most, sizeof most);
    memcpy(dx.at(), slopes, sizeof slopes);
    CHECK_BITS(y, 1);
    CHECK_BITS(dx, 1);
    CHECK(cuda->pool2d_backward(&s, amp_ref_of(dy.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0, nullptr) == AMP_OK);
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
    Norm q = { { n, c, s, 0.0f, 0.0f, 0, NULL }, (size_t)n, (size_t)c, (size_t)s };
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
    CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, a),
        amp_ref_of(params ? gamma.dev : nullptr, pt), amp_ref_of(params ? beta.dev : nullptr, pt),
        run_mean.floats(), run_var.floats(), mean.floats(), invstd.floats(), amp_ref_of(y.dev, b),
        nullptr) == AMP_OK);
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
        BOTH(amp_batch_norm_forward(&q.shape, 0, amp_ref_of(x.at(), a),
            amp_ref_of(params ? gamma.at() : nullptr, pt),
            amp_ref_of(params ? beta.at() : nullptr, pt), (float*)run_mean.at(),
            (float*)run_var.at(), save ? (float*)mean.at() : nullptr,
            save ? (float*)invstd.at() : nullptr, amp_ref_of(y.at(), b), nullptr),
             cuda->batch_norm_forward(&q.shape, 0, amp_ref_of(x.dev, a),
                 amp_ref_of(params ? gamma.dev : nullptr, pt),
                 amp_ref_of(params ? beta.dev : nullptr, pt), run_mean.floats(), run_var.floats(),
                 save ? mean.floats() : nullptr, save ? invstd.floats() : nullptr,
                 amp_ref_of(y.dev, b), nullptr));
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
    const int input = params || shift, accumulate = (params ? AMP_ACCUMULATE_PARAMS : 0) | (input ? AMP_ACCUMULATE_INPUT : 0);
    fill_channels(x, q);
    dy.fill(ordinary);
    gamma.fill(ordinary);
    mean.fill(ordinary);
    dx.fill(ordinary);
    dgamma.fill(ordinary);
    dbeta.fill(ordinary);
    invstd.fill([](size_t) { return 2.0f + test_uniform(); });
    CHECK(cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, b), amp_ref_of(x.dev, a),
        amp_ref_of(params ? gamma.dev : nullptr, pt), mean.floats(), invstd.floats(),
        amp_ref_of(dx.dev, b), amp_ref_of(dgamma.dev, pt), amp_ref_of(dbeta.dev, pt), accumulate,
        nullptr)
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
    check_bounded("batch norm, dx", dx, onto(bx, dx, input));
    check_bounded("batch norm, dgamma", dgamma, onto(bg, dgamma, params));
    check_bounded("batch norm, dbeta", dbeta, onto(bb, dbeta, params));
}

/* Frozen: forward is evaluation; dx is the CPU's to the bit, with dx apart and in dy's place; the sums are those of the
   training form. */
static void check_norm_frozen(Norm q, amp_dtype a, amp_dtype pt, amp_dtype b, int params, size_t shift) {
    static int calls;
    const size_t all = q.n * q.c * q.s;
    Tensor x(a, all, shift), dy(b, all, shift), dx(b, all, shift), gamma(pt, q.c, 1), mean(AMP_F32, q.c), y(b, all, shift),
        invstd(AMP_F32, q.c), dgamma(pt, q.c), dbeta(pt, q.c), run_mean(AMP_F32, q.c), run_var(AMP_F32, q.c);
    void *g = params ? gamma.dev : nullptr, *cpu_g = params ? gamma.at() : nullptr;
    fill_channels(x, q);
    dy.fill(ordinary);
    gamma.fill(ordinary);
    run_mean.fill(ordinary);
    run_var.fill([](size_t) { return 3.0f + 2.9f * test_uniform(); });
    q.shape.frozen = 1;
    BOTH(amp_batch_norm_forward(&q.shape, 1, amp_ref_of(x.at(), a), amp_ref_of(cpu_g, pt),
        AMP_NONE, (float*)run_mean.at(), (float*)run_var.at(), (float*)mean.at(),
        (float*)invstd.at(), amp_ref_of(y.at(), b), nullptr),
         cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, a), amp_ref_of(g, pt), AMP_NONE,
             run_mean.floats(), run_var.floats(), mean.floats(), invstd.floats(),
             amp_ref_of(y.dev, b), nullptr));
    CHECK_BITS(y, 0);
    CHECK_BITS(mean, 1);
    CHECK_BITS(invstd, 1);
    CHECK_BITS(run_mean, 1);
    CHECK_BITS(run_var, 1);
    q.shape.frozen = 0;
    if (q.n * q.s > 1)
        CHECK(cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, b), amp_ref_of(x.dev, a),
            amp_ref_of(g, pt), mean.floats(), invstd.floats(), AMP_NONE,
            amp_ref_of(dgamma.dev, pt), amp_ref_of(dbeta.dev, pt), 0, nullptr) == AMP_OK);
    const Bytes sums[2] = { dgamma.get(), dbeta.get() };
    q.shape.frozen = 1;
    CHECK(cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, b), amp_ref_of(x.dev, a),
        amp_ref_of(g, pt), mean.floats(), invstd.floats(), AMP_NONE, amp_ref_of(dgamma.dev, pt),
        amp_ref_of(dbeta.dev, pt), 0, nullptr) == AMP_OK);
    if (q.n * q.s > 1) CHECK(dgamma.get() == sums[0] && dbeta.get() == sums[1]);
    dy.fill(awkward);
    dx.fill(ordinary);
    for (Tensor* to : { &dx, &dx, &dy }) {
        const int add = to == &dx && calls++ % 2 ? AMP_ACCUMULATE_INPUT : 0;
        BOTH(amp_batch_norm_backward(&q.shape, amp_ref_of(dy.at(), b), amp_ref_of(x.at(), a),
            amp_ref_of(cpu_g, pt), (float*)mean.at(), (float*)invstd.at(),
            amp_ref_of(to->at(), b), AMP_NONE, AMP_NONE, add, nullptr),
             cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, b), amp_ref_of(x.dev, a),
                 amp_ref_of(g, pt), mean.floats(), invstd.floats(), amp_ref_of(to->dev, b),
                 AMP_NONE, AMP_NONE, add, nullptr));
        CHECK_BITS(*to, 0);
    }
}

static void check_norm(const Norm& q, amp_dtype a, amp_dtype pt, amp_dtype b, int params, size_t shift) {
    check_norm_forward(q, a, pt, b, params, shift);
    check_norm_evaluate(q, a, pt, b, params, shift);
    check_norm_backward(q, a, pt, b, params, shift);
    check_norm_frozen(q, a, pt, b, params, shift);
}
static void test_norm_sizes() {
    static const int sizes[][3] = { { 2, 1, 1 }, { 1, 1, 2 }, { 3, 5, 1 }, { 130, 4, 1 }, { 5, 3, 7 }, { 4, 3, 8 },
                                    { 3, 4, 49 }, { 2, 3, 1029 }, { 700, 2, 9 }, { 2, 2, 21001 } };
    for (auto& s : sizes) {
        check_norm(norm_of(s[0], s[1], s[2]), AMP_F32, AMP_F32, AMP_F32, 1, 0);
        check_norm(norm_of(s[0], s[1], s[2]), AMP_F16, AMP_F32, AMP_F16, 0, 1);
    }
    check_norm_frozen(norm_of(1, 9, 1), AMP_F16, AMP_F32, AMP_BF16, 1, 0);
}
/* Blocks that take several channels, one after the other. */
static void test_norm_turns() {
    const Norm q = norm_of(3, 7, 33);
    Tensor x(AMP_F32, 693), dy(AMP_F32, 693), y(AMP_F32, 693), dx(AMP_F32, 693), mean(AMP_F32, 7), invstd(AMP_F32, 7),
        sums(AMP_F32, 14);
    fill_channels(x, q);
    dy.fill(ordinary);
    CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, nullptr,
        nullptr, mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), nullptr) == AMP_OK);
    CHECK(cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE,
        mean.floats(), invstd.floats(), amp_ref_of(dx.dev, AMP_F32), AMP_NONE, AMP_NONE, 0, nullptr)
          == AMP_OK);
    const Bytes y1 = y.get(), dx1 = dx.get();
    ampi_cuda_bn k = {};
    k.x = amp_f32(x.floats()); k.dy = amp_f32(dy.floats()); k.y = amp_f32(y.floats());
    k.save_mean = mean.floats(); k.save_invstd = invstd.floats();
    k.n = q.n; k.channels = q.c; k.spatial = q.s;
    k.eps = 1e-5f; k.momentum = 0.1f; k.training = 1;
    y.poison();
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_batch_norm, dim3(2), dim3(AMPI_CUDA_BN_BLOCK), AMPI_CUDA_BN_SHARED,
                           k) == AMP_OK);
    CHECK(y.get() == y1);
    k.y = amp_f32(dx.floats()); k.mean = mean.floats(); k.invstd = invstd.floats();
    dx.poison();
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_batch_norm_backward, dim3(2), dim3(AMPI_CUDA_BN_BLOCK),
                           AMPI_CUDA_BN_SHARED, k) == AMP_OK);
    CHECK(dx.get() == dx1);
    Norm frozen = q;
    frozen.shape.frozen = 1;
    CHECK(cuda->batch_norm_backward(&frozen.shape, amp_ref_of(dy.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE,
        mean.floats(), invstd.floats(), amp_ref_of(dx.dev, AMP_F32), amp_ref_of(sums.dev, AMP_F32),
        amp_f32(sums.floats() + 7), 0, nullptr)
          == AMP_OK);
    const Bytes dx2 = dx.get(), sums2 = sums.get();
    dx.poison();
    sums.poison();
    k.dgamma = amp_f32(sums.floats()); k.dbeta = amp_f32(sums.floats() + 7);
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_batch_norm_frozen, dim3(2), dim3(AMPI_CUDA_BN_BLOCK),
                           AMPI_CUDA_BN_SHARED, k) == AMP_OK);
    CHECK(dx.get() == dx2 && sums.get() == sums2);
    k.y = amp_f32(y.floats()); k.running_mean = mean.floats(); k.running_var = invstd.floats(); k.training = 0;
    CHECK(cuda->batch_norm_forward(&q.shape, 0, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, mean.floats(),
        invstd.floats(), nullptr, nullptr, amp_ref_of(y.dev, AMP_F32), nullptr) == AMP_OK);
    k.save_mean = k.save_invstd = nullptr;
    const Bytes y2 = y.get();
    y.poison();
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_batch_norm, dim3(2), dim3(AMPI_CUDA_BN_BLOCK), AMPI_CUDA_BN_SHARED,
                           k) == AMP_OK);
    CHECK(y.get() == y2);
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
    CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, nullptr,
        nullptr, mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), nullptr) == AMP_OK);
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
        if (momentum != 1.0f) {      /* not even by an infinity, or to a zero of the other sign */
            x.set(7, INFINITY);
            x.send();
            run.set(0, -0.0f);
            run.send();
        }
        CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE,
            run.floats(), var.floats(), mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), nullptr)
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
            CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE,
                nullptr, var.floats(), mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), nullptr)
                  == AMP_OK);
            CHECK(var.get() == before);
            x.set(7, 1e21f);                /* channel 1 stays, as its variance would be infinite */
            x.send();
            CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE,
                run.floats(), var.floats(), mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32),
                nullptr)
                  == AMP_OK);
            check_bounded("running mean beside 1e21", run, bm);
            check_bounded("running variance beside 1e21", var, bv);
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
        CHECK(cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, AMP_F16), amp_ref_of(x.dev, AMP_F16), AMP_NONE,
            mean.floats(), invstd.floats(), amp_ref_of(to->dev, AMP_F16), AMP_NONE, AMP_NONE, 0, nullptr)
              == AMP_OK);
    CHECK(dx.get() == dy.get());
    for (float bad : { (float)NAN, INFINITY, -INFINITY })
        for (size_t place : { 3u, 21u + 2u * 63u + 20u }) {      /* in the first channel, in the second */
            fill_channels(x, q);
            x.set(place, bad);
            x.send();
            run.fill(ordinary);
            var.fill(ordinary);
            BOTH(amp_batch_norm_forward(&q.shape, 1, amp_ref_of(x.at(), AMP_F16), AMP_NONE, AMP_NONE,
                (float*)run.at(), (float*)var.at(), (float*)mean.at(), (float*)invstd.at(),
                amp_ref_of(y.at(), AMP_F32), nullptr),
                 cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F16), AMP_NONE, AMP_NONE,
                     run.floats(), var.floats(), mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32),
                     nullptr));
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

/* --- rows: layer norm ------------------------------------------------------------------------ */

/* Rows that a warp, a block, and a block in several iterations take; ends of eights and of groups. */
static const size_t WIDTHS[] = { 1, 2, 7, 8, 9, 31, 255, 256, 257, 1000, 1023, 1024, 1025, 2051, 8192, 8193, 16391 };
static size_t rows_for(size_t d) { return d < 300 ? 11 : d < 2000 ? 3 : 2; }

/* Of each row: the mean errs by 3 u of the mean magnitude, and by its rounding; a difference by 2 u of itself and of
   the mean's rounding, so the squares' mean by 8 u, and by the square of the mean's error. RMS norm's mean is 0. */
static Moments row_moments(const Tensor& x, size_t start, size_t d, int rms) {
    double mean = 0, var = 0, size = 0;
    for (size_t i = 0; i < d && rms; i++) var += pow((double)x[start + i], 2) / (double)d;
    if (rms) return { 0, var, 0, 8 * U * var };
    for (size_t i = 0; i < d; i++) mean += (double)x[start + i] / (double)d;
    for (size_t i = 0; i < d; i++) size += fabs((double)x[start + i]) / (double)d;
    for (size_t i = 0; i < d; i++) var += pow((double)x[start + i] - mean, 2) / (double)d;
    const double off = 3 * U * size + 2 * U * U * fabs(mean);
    return { mean, var, 3 * U * size + U * fabs(mean), 8 * U * var + off * off };
}
/* Rows of different means; one of them constant. */
static void fill_rows(Tensor& x, size_t d) {
    x.fill([&](size_t i) {
        const size_t row = i / d;
        return row % 4 == 3 ? 3.0f : (row % 2 ? 30.0f : 0.0f) + 2.0f * test_uniform();
    });
}

static void check_layer_norm_forward(size_t rows, size_t d, amp_dtype a, amp_dtype p, amp_dtype b, int params, int save,
                                     size_t shift, int rms = 0) {
    const double eps = rms ? 1e-6 : 1e-5;
    Tensor x(a, rows * d, shift), y(b, rows * d, shift), gamma(p, d, 1), beta(p, d, 2), mean(AMP_F32, rows),
        invstd(AMP_F32, rows);
    Bounded by, bm, bi;
    fill_rows(x, d);
    gamma.fill(ordinary);
    beta.fill(ordinary);
    const amp_ref xr = amp_ref_of(x.dev, a), gr = amp_ref_of(params ? gamma.dev : nullptr, p), yr = amp_ref_of(y.dev, b);
    float* save_invstd = save ? invstd.floats() : nullptr;
    CHECK((rms ? cuda->rms_norm_forward(xr, gr, 0.0f, save_invstd, yr, rows, d, nullptr)
        : cuda->layer_norm_forward(xr, gr, amp_ref_of(params ? beta.dev : nullptr, p), 0.0f,
            save ? mean.floats() : nullptr, save_invstd, yr, rows, d, nullptr)) == AMP_OK);
    for (size_t r = 0; r < rows; r++) {
        const Moments m = row_moments(x, r * d, d, rms);
        for (size_t i = 0; i < d; i++)
            normalise(by, m, eps, (double)x[r * d + i], params ? (double)gamma[i] : 1,
                      params && !rms ? (double)beta[i] : 0);
        bm.add(m.mean, m.e_mean);
        bi.add(1 / sqrt(m.var + eps), (m.e_var / (m.var + eps) / 2 + 2 * U) / sqrt(m.var + eps));
    }
    check_bounded(rms ? "rms norm" : "layer norm", y, by);
    if (!save) return;
    if (!rms) check_bounded("layer norm, mean", mean, bm);
    check_bounded(rms ? "rms norm, invstd" : "layer norm, invstd", invstd, bi);
}

/* The slopes as those of batch norm, over g = dy * gamma. The parameters' gradients: dy * ((x - mean) * invstd), of
   which four are added in float, then in double, each part rounded: 2 + 4 + 1 roundings, 3 + 1 of dy's sum. */
static void check_layer_norm_backward(size_t rows, size_t d, amp_dtype a, amp_dtype p, amp_dtype b, int params,
                                      size_t shift, int rms = 0) {
    Tensor x(a, rows * d, shift), dy(b, rows * d, shift), dx(a, rows * d, shift), gamma(p, d, 1), mean(AMP_F32, rows),
        invstd(AMP_F32, rows), dgamma(p, d, 3), dbeta(p, d);
    Bounded bx, bg(d), bb(d);
    const int input = params || shift, accumulate = (params ? AMP_ACCUMULATE_PARAMS : 0) | (input ? AMP_ACCUMULATE_INPUT : 0);
    fill_rows(x, d);
    dy.fill(ordinary);
    dx.fill(ordinary);
    gamma.fill(ordinary);
    dgamma.fill(ordinary);
    dbeta.fill(ordinary);
    mean.fill(ordinary);
    invstd.fill([](size_t) { return 2.0f + test_uniform(); });
    const amp_ref dyr = amp_ref_of(dy.dev, b), xr = amp_ref_of(x.dev, a), gr = amp_ref_of(params ? gamma.dev : nullptr, p);
    const amp_ref dxr = amp_ref_of(dx.dev, a), dgr = amp_ref_of(dgamma.dev, p);
    CHECK((rms ? cuda->rms_norm_backward(dyr, xr, gr, 0.0f, invstd.floats(), dxr, dgr, accumulate, rows, d, nullptr)
        : cuda->layer_norm_backward(dyr, xr, gr, 0.0f, mean.floats(), invstd.floats(), dxr, dgr,
            amp_ref_of(dbeta.dev, p), accumulate, rows, d, nullptr)) == AMP_OK);
    for (size_t r = 0; r < rows; r++) {
        const double m = rms ? 0 : (double)mean[r], s = (double)invstd[r];
        double sum = 0, dot = 0, size = 0, weight = 0;
        for (size_t i = 0; i < d; i++) {
            const double w = (double)dy[r * d + i], v = (double)x[r * d + i], g = w * (params ? (double)gamma[i] : 1);
            sum += g;
            size += fabs(g);
            dot += g * (v - m);
            weight += fabs(g * (v - m));
            bg.value[i] += w * (v - m) * s;
            bg.error[i] += 7 * U * fabs(w * (v - m) * s);
            bb.value[i] += w;
            bb.error[i] += 4 * U * fabs(w);
        }
        const double n = (double)d, ma = rms ? 0 : sum / n, mb = dot * s * s / n;
        const double ea = rms ? 0 : U * (4 * size / n + fabs(ma)), eb = U * (6 * weight * s * s / n + fabs(mb));
        for (size_t i = 0; i < d; i++) {
            const double g = (double)dy[r * d + i] * (params ? (double)gamma[i] : 1), v = (double)x[r * d + i];
            const double inner = g - ma - (v - m) * mb;
            const double error = fabs(v - m) * (U * fabs(mb) + eb) + U * (fabs(g - ma) + fabs(inner)) + ea;
            bx.add(inner * s, error * s + U * fabs(inner * s));
        }
    }
    for (size_t i = 0; i < d; i++) bg.error[i] += U * fabs(bg.value[i]);
    for (size_t i = 0; i < d; i++) bb.error[i] += U * fabs(bb.value[i]);
    check_bounded(rms ? "rms norm, dx" : "layer norm, dx", dx, onto(bx, dx, input));
    check_bounded(rms ? "rms norm, dgamma" : "layer norm, dgamma", dgamma, onto(bg, dgamma, params));
    if (!rms) check_bounded("layer norm, dbeta", dbeta, onto(bb, dbeta, params));
}

static void test_layer_norm() {
    for (size_t d : WIDTHS)
        for (int variant : { 0, 1 }) {
            const amp_dtype a = variant ? AMP_F16 : AMP_F32, p = variant ? AMP_BF16 : AMP_F32;
            check_layer_norm_forward(rows_for(d), d, a, p, a, 1, variant, (size_t)variant * 3);
            check_layer_norm_backward(rows_for(d), d, a, p, AMP_F32, variant, (size_t)variant * 3);
        }
    for (amp_dtype a : TYPES) for (amp_dtype p : TYPES) for (amp_dtype b : TYPES)
        for (int params : { 0, 1 }) {
            check_layer_norm_forward(9, 77, a, p, b, params, 1, 5);
            check_layer_norm_backward(9, 77, a, p, b, params, 5);
        }
}
static void test_rms_norm() {
    for (size_t d : WIDTHS)
        for (int variant : { 0, 1 }) {
            const amp_dtype a = variant ? AMP_F16 : AMP_F32, p = variant ? AMP_BF16 : AMP_F32;
            check_layer_norm_forward(rows_for(d), d, a, p, a, 1, variant, (size_t)variant * 3, 1);
            check_layer_norm_backward(rows_for(d), d, a, p, AMP_F32, variant, (size_t)variant * 3, 1);
        }
    for (amp_dtype a : TYPES)
        for (int params : { 0, 1 }) {
            check_layer_norm_forward(9, 77, a, AMP_F32, AMP_BF16, params, 1, 5, 1);
            check_layer_norm_backward(9, 77, a, AMP_F32, AMP_BF16, params, 5, 1);
        }
    check_layer_norm_backward(515, 265, AMP_F16, AMP_F32, AMP_F32, 1, 0, 1);
}
/* Against the CPU's operator, whose test has a double reference: both err by a few units of what they add. */
static void check_group_norm(const amp_group_norm_shape& s, amp_dtype a, amp_dtype p, int params, int accumulate) {
    const size_t c = (size_t)s.channels, groups = s.groups ? (size_t)s.groups : c, rows = (size_t)s.n * groups;
    const size_t all = (size_t)s.n * c * (size_t)s.spatial, d = all / rows;
    Tensor x(a, all, 3), dy(AMP_F32, all), dx(a, all, 5), y(AMP_F32, all, 1), gamma(p, c, 1), beta(p, c, 2), mean(AMP_F32, rows),
        invstd(AMP_F32, rows), dgamma(p, c, 3), dbeta(p, c);
    fill_rows(x, d);
    for (Tensor* t : { &dy, &dx, &gamma, &beta, &dgamma, &dbeta }) t->fill(ordinary);
    const Bytes hx = x.get(), hg = gamma.get(), hb = beta.get(), hdy = dy.get();
    Bytes hdx = dx.get(), hdg = dgamma.get(), hdb = dbeta.get();
    std::vector<float> hy(all), hm(rows), hi(rows);
    const auto at = [](const Bytes& bytes, amp_dtype t) { return amp_ref_of(bytes.data(), t); };
    const amp_ref g = params ? amp_ref_of(gamma.dev, p) : AMP_NONE, b = params ? amp_ref_of(beta.dev, p) : AMP_NONE;
    const amp_ref cg = params ? at(hg, p) : AMP_NONE, cb = params ? at(hb, p) : AMP_NONE;
    CHECK(cuda->group_norm_forward(&s, amp_ref_of(x.dev, a), g, b, mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32),
        nullptr) == AMP_OK);
    CHECK(amp_group_norm_forward(&s, at(hx, a), cg, cb, hm.data(), hi.data(), amp_f32(hy.data()), nullptr) == AMP_OK);
    const auto close = [](const char* what, const Tensor& t, const float* want) {
        Bounded bound(t.n);
        for (size_t i = 0; i < t.n; i++) bound.value[i] = (double)want[i];
        for (size_t i = 0; i < t.n; i++)
            bound.error[i] = (t.type == AMP_F32 ? 64 * U : t.type == AMP_F16 ? 1e-3 : 8e-3) * (2 + fabs(bound.value[i]));
        check_bounded(what, t, bound);
    };
    close("group norm, mean", mean, hm.data());
    close("group norm, invstd", invstd, hi.data());
    close("group norm", y, hy.data());

    /* with the CPU's statistics, so that differences are those of sums */
    mean.fill([&](size_t i) { return hm[i]; });
    invstd.fill([&](size_t i) { return hi[i]; });
    CHECK(cuda->group_norm_backward(&s, amp_ref_of(dy.dev, AMP_F32), amp_ref_of(x.dev, a), g, mean.floats(), invstd.floats(),
        amp_ref_of(dx.dev, a), amp_ref_of(dgamma.dev, p), amp_ref_of(dbeta.dev, p), accumulate, nullptr) == AMP_OK);
    CHECK(amp_group_norm_backward(&s, at(hdy, AMP_F32), at(hx, a), cg, hm.data(), hi.data(), at(hdx, a), at(hdg, p), at(hdb, p),
        accumulate, nullptr) == AMP_OK);
    const auto gradient = [&](const char* what, const Tensor& t, const Bytes& want) {
        std::vector<float> w(t.n);
        CHECK(amp_convert(amp_f32(w.data()), at(want, t.type), t.n) == AMP_OK);
        close(what, t, w.data());
    };
    gradient("group norm, dx", dx, hdx);
    gradient("group norm, dgamma", dgamma, hdg);
    gradient("group norm, dbeta", dbeta, hdb);
}
static void test_group_norm() {
    for (const amp_group_norm_shape& s : std::initializer_list<amp_group_norm_shape>{ { 2, 6, 1, 3, 0 }, { 3, 4, 5, 2, 0 },
            { 2, 12, 49, 0, 0 }, { 1, 8, 130, 1, 0 }, { 2, 2, 9001, 1, 0 }, { 5, 300, 1, 1, 0 } })
        for (amp_dtype a : TYPES)
            for (int variant : { 0, 1 })
                check_group_norm(s, a, variant ? AMP_BF16 : AMP_F32, a != AMP_F16,
                    variant ? AMP_ACCUMULATE_PARAMS | AMP_ACCUMULATE_INPUT : 0);
}
/* Rows in one part, in some, in the most. The workspace changes who adds, not the bits. */
static void test_layer_norm_columns() {
    for (size_t rows : { 1, 63, 64, 129, 515, 4101 })
        for (size_t d : { 3, 265 }) {
            if (rows * d > 200000) continue;
            const size_t bytes = cuda->layer_norm_workspace(rows, d);
            check_layer_norm_backward(rows, d, AMP_F16, AMP_F32, AMP_F32, 1, 0);
            CHECK(bytes > rows * 8);
            Tensor x(AMP_F16, rows * d), dy(AMP_BF16, rows * d), mean(AMP_F32, rows), invstd(AMP_F32, rows);
            Tensor dgamma(AMP_F32, d), dbeta(AMP_F32, d);
            fill_rows(x, d);
            dy.fill(ordinary);
            mean.fill(ordinary);
            invstd.fill(ordinary);
            Bytes first;
            for (size_t held : { (size_t)0, bytes, bytes + 100, bytes / 2 }) {
                amp_exec exec = quiet_exec();
                Workspace w(&exec, held, held == bytes ? 4 : 0);
                dgamma.poison();
                dbeta.poison();
                CHECK(cuda->layer_norm_backward(amp_ref_of(dy.dev, AMP_BF16), amp_ref_of(x.dev, AMP_F16), AMP_NONE, 0.0f,
                    mean.floats(), invstd.floats(), AMP_NONE, amp_ref_of(dgamma.dev, AMP_F32),
                    amp_ref_of(dbeta.dev, AMP_F32), 0, rows, d, &exec) == AMP_OK);
                Bytes got = dgamma.get(), more = dbeta.get();
                got.insert(got.end(), more.begin(), more.end());
                if (first.empty()) first = got;
                CHECK_MSG(got == first, "%zu rows of %zu with %zu bytes", rows, d, held);
            }
            CHECK(cuda->layer_norm_backward(amp_ref_of(dy.dev, AMP_BF16), amp_ref_of(x.dev, AMP_F16), AMP_NONE, 0.0f,
                mean.floats(), invstd.floats(), AMP_NONE, AMP_NONE, amp_ref_of(dbeta.dev, AMP_F32), 0, rows,
                d, nullptr) == AMP_OK);
            const Bytes alone = dbeta.get();
            CHECK(memcmp(alone.data(), first.data() + d * 4, d * 4) == 0);
        }
    CHECK(cuda->layer_norm_workspace(1000, SIZE_MAX / 2) == 0);
}

/* --- softmax ------------------------------------------------------------------------------- */

/* A row's largest value, probabilities, and the relative error of each e = exp(x - max): 1.02 units in the last place
   (2.04 u) for exp, and u |x - max| for its argument; of their sum, which is rounded to float, 3 u + u more. */
struct Softmax {
    std::vector<double> p, rel;
    double max, log_sum, rel_sum;
    Softmax(const Tensor& x, size_t start, size_t d) : p(d), rel(d), max((double)-INFINITY), log_sum(0), rel_sum(4 * U) {
        double sum = 0;
        for (size_t i = 0; i < d; i++) max = fmax(max, (double)x[start + i]);
        for (size_t i = 0; i < d; i++) sum += exp((double)x[start + i] - max);
        for (size_t i = 0; i < d; i++) {
            const double z = (double)x[start + i] - max;
            p[i] = exp(z) / sum;
            rel[i] = z > -200 ? 2.04 * U + fabs(z) * U : 0;
            rel_sum += p[i] * rel[i];
        }
        log_sum = log(sum);
    }
};
static const double FLUSHED = ldexp(1, -126);      /* smaller values of exp become 0 */

static void fill_logits(Tensor& x, size_t d) {
    x.fill([&](size_t i) {
        const size_t row = i / d;
        return (row % 3 == 1 ? 500.0f : -3.0f) + (row % 3 == 2 ? 60.0f : 5.0f) * test_uniform();
    });
}
static void check_softmax(size_t rows, size_t d, amp_dtype a, amp_dtype b, amp_dtype c, size_t shift) {
    Tensor x(a, rows * d, shift), y(b, rows * d, shift), dy(c, rows * d, shift), dx(a, rows * d, shift);
    Bounded by, bx;
    fill_logits(x, d);
    CHECK(cuda->softmax_forward(amp_ref_of(x.dev, a), amp_ref_of(y.dev, b), rows, d, nullptr) == AMP_OK);
    for (size_t r = 0; r < rows; r++) {
        const Softmax s(x, r * d, d);
        for (size_t i = 0; i < d; i++) by.add(s.p[i], s.p[i] * (s.rel[i] + s.rel_sum + 2 * U) + FLUSHED);
    }
    check_bounded("softmax", y, by);
    y.host = y.get();
    dy.fill(ordinary);
    CHECK(cuda->softmax_backward(amp_ref_of(dy.dev, c), amp_ref_of(y.dev, b),
        amp_ref_of(dx.dev, a), 0, rows, d, nullptr) == AMP_OK);
    for (size_t r = 0; r < rows; r++) {
        double sum = 0, size = 0;
        for (size_t i = r * d; i < (r + 1) * d; i++) {
            sum += (double)y[i] * (double)dy[i];
            size += fabs((double)y[i] * (double)dy[i]);
        }
        for (size_t i = r * d; i < (r + 1) * d; i++) {
            const double off = (double)dy[i] - sum, v = (double)y[i] * off;
            bx.add(v, fabs((double)y[i]) * U * (4 * size + fabs(sum) + fabs(off)) + U * fabs(v) + FLUSHED);
        }
    }
    check_bounded("softmax, backward", dx, bx);
}
static void test_softmax() {
    for (size_t d : WIDTHS) {
        check_softmax(rows_for(d), d, AMP_F32, AMP_F32, AMP_F32, 0);
        check_softmax(rows_for(d), d, AMP_F16, AMP_F16, AMP_BF16, 3);
    }
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES) check_softmax(10, 75, a, b, c, 1);
}

/* Warps and blocks that take several rows, one after the other, with the bits of those that take one. */
template <int T> static void check_row_turns(size_t d) {
    const size_t rows = T == 32 ? 21 : 4, n = rows * d;
    const dim3 one(1), block(AMPI_CUDA_THREADS(T));
    Tensor x(AMP_F32, n), dy(AMP_F32, n), y(AMP_F32, n), dx(AMP_F32, n), mean(AMP_F32, rows), invstd(AMP_F32, rows);
    fill_rows(x, d);
    dy.fill(ordinary);
    CHECK(cuda->softmax_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(y.dev, AMP_F32), rows, d, nullptr) == AMP_OK);
    CHECK(cuda->softmax_backward(amp_ref_of(dy.dev, AMP_F32), amp_ref_of(y.dev, AMP_F32), amp_ref_of(dx.dev, AMP_F32), 0, rows, d,
        nullptr) == AMP_OK);
    const Bytes y1 = y.get(), dx1 = dx.get();
    ampi_cuda_softmax s = { amp_f32(x.floats()), AMP_NONE, amp_f32(y.floats()), rows, d, 0 };
    y.poison();
    dx.poison();
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_softmax<T, 4>, one, block, AMPI_CUDA_ROW_SHARED, s) == AMP_OK);
    CHECK(y.get() == y1);
    s.x = amp_f32(y.floats()); s.dy = amp_f32(dy.floats()); s.y = amp_f32(dx.floats());
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_softmax_backward<T, 4>, one, block, AMPI_CUDA_ROW_SHARED, s)
          == AMP_OK);
    CHECK(dx.get() == dx1);
    CHECK(cuda->layer_norm_forward(amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, 0, mean.floats(),
        invstd.floats(), amp_ref_of(y.dev, AMP_F32), rows, d, nullptr) == AMP_OK);
    CHECK(cuda->layer_norm_backward(amp_ref_of(dy.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0.0f,
        mean.floats(), invstd.floats(), amp_ref_of(dx.dev, AMP_F32), AMP_NONE, AMP_NONE, 0, rows, d, nullptr)
          == AMP_OK);
    const Bytes y2 = y.get(), dx2 = dx.get(), mean2 = mean.get();
    ampi_cuda_ln q = {};
    q.x = amp_f32(x.floats()); q.dy = amp_f32(dy.floats()); q.y = amp_f32(y.floats());
    q.save_mean = mean.floats(); q.save_invstd = invstd.floats();
    q.rows = rows; q.d = d; q.inverse_d = 1.0 / (double)d; q.eps = 1e-5f;
    y.poison();
    dx.poison();
    mean.poison();
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_layer_norm<T, 4>, one, block, AMPI_CUDA_ROW_SHARED, q) == AMP_OK);
    CHECK(y.get() == y2 && mean.get() == mean2);
    q.y = amp_f32(dx.floats()); q.mean = mean.floats(); q.invstd = invstd.floats();
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_layer_norm_backward<T, 4>, one, block, AMPI_CUDA_ROW_SHARED, q)
          == AMP_OK);
    CHECK(dx.get() == dx2);
}
static void test_row_turns() {
    check_row_turns<32>(50);
    check_row_turns<256>(1500);
}
/* In place; rows of -inf, +inf and NaN as on the CPU; nothing to do. */
static void test_softmax_special() {
    for (size_t d : { 5, 1030, 8200 }) {
        Tensor x(AMP_F32, 5 * d), y(AMP_F32, 5 * d);
        fill_logits(x, d);
        for (size_t i = 0; i < d; i++) x.set(i, -INFINITY);
        x.set(d + 2, INFINITY);
        x.set(2 * d + 1, NAN);
        x.set(3 * d, -INFINITY);
        x.send();
        BOTH(amp_softmax_forward(amp_ref_of(x.at(), AMP_F32), amp_ref_of(y.at(), AMP_F32), 5, d, nullptr),
             cuda->softmax_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(y.dev, AMP_F32), 5, d, nullptr));
        const std::vector<double> v = y.values();
        for (size_t i = 0; i < 3 * d; i++) CHECK(std::isnan(v[i]) && std::isnan(y[i]));
        for (size_t i = 3 * d; i < 5 * d; i++) CHECK(fabs(v[i] - (double)y[i]) <= 1e-6 * v[i]);
        CHECK(v[3 * d] == 0);
        CHECK(cuda->softmax_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), 5, d, nullptr) == AMP_OK);
        memcpy(x.at(), y.get().data(), x.bytes);
        CHECK_BITS(x, 0);
    }
    CHECK(cuda->softmax_forward(AMP_NONE, AMP_NONE, 0, 5, nullptr) == AMP_OK);
    CHECK(cuda->softmax_forward(AMP_NONE, AMP_NONE, 5, 0, nullptr) == AMP_OK);
    CHECK(cuda->softmax_backward(AMP_NONE, AMP_NONE, AMP_NONE, 0, 5, 0, nullptr) == AMP_OK);
}

/* --- losses ------------------------------------------------------------------------------ */

/* Labels of rows in device memory. */
struct Labels {
    std::vector<int32_t> host;
    Tensor memory;
    Labels(size_t n, size_t classes) : host(n), memory(AMP_F32, n) {
        for (int32_t& label : host) label = (int32_t)(test_random() % classes);
        send();
    }
    void send() {
        memcpy(memory.at(), host.data(), memory.bytes);
        memory.send();
    }
    const int32_t* dev() const { return (const int32_t*)memory.dev; }
};

/* log(sum) errs by 0.98 units (2 u) and by what the sum does; the label's term and the mean's by their roundings. */
static Bounded cross_entropy(const Tensor& x, const Labels& labels, double smoothing, size_t n, size_t d) {
    double loss = 0, error = 0;
    for (size_t r = 0; r < n; r++) {
        const Softmax s(x, r * d, d);
        double total = 0, size = 0;
        for (size_t i = 0; i < d; i++) {
            total += (double)x[r * d + i] / (double)d;
            size += fabs((double)x[r * d + i]) / (double)d;
        }
        const double z = (double)x[r * d + (size_t)labels.host[r]] - s.max;
        const double first = s.log_sum - (1 - smoothing) * z, mean = total - s.max, all = first - smoothing * mean;
        loss += all / (double)n;
        error += (s.rel_sum + 2 * U * fabs(s.log_sum) + 2 * U * fabs(z) + U * fabs(first)) / (double)n;
        if (smoothing > 0) error += (smoothing * U * (3 * size + fabs(mean)) + U * fabs(all)) / (double)n;
    }
    Bounded b;
    b.add(loss, error);
    return b;
}
/* (softmax - target) * factor. */
static Bounded cross_entropy_slope(const Tensor& x, const Labels& labels, double smoothing, double factor, size_t n,
                                   size_t d) {
    Bounded b;
    for (size_t r = 0; r < n; r++) {
        const Softmax s(x, r * d, d);
        for (size_t i = 0; i < d; i++) {
            const double base = smoothing / (double)d, target = base + ((size_t)labels.host[r] == i) * (1 - smoothing);
            const double v = s.p[i] - target;
            const double error = s.p[i] * (s.rel[i] + s.rel_sum + U) + 3 * U * target + U * fabs(v) + FLUSHED;
            b.add(v * factor, (error + 2 * U * fabs(v)) * fabs(factor));
        }
    }
    return b;
}

/* A desc of a cross-entropy with smoothing alone, for one call. */
struct Smoothed {
    amp_cross_entropy_desc desc;
    explicit Smoothed(float smoothing) : desc{ smoothing, 0, nullptr, nullptr, 0 } {}
    operator const amp_cross_entropy_desc*() const { return &desc; }
};

static void check_cross_entropy(size_t n, size_t d, amp_dtype a, amp_dtype b, float smoothing, size_t shift) {
    Tensor x(a, n * d, shift), dx(b, n * d, shift), loss(AMP_F32, 1), scale(AMP_F32, 1);
    Labels labels(n, d);
    Bytes alone;
    fill_logits(x, d);
    const Bounded expected = cross_entropy(x, labels, (double)smoothing, n, d);
    for (size_t held : { 0, AMP_CUDA_LOSS_WORKSPACE + 16 }) {
        amp_exec exec = quiet_exec();
        Workspace w(&exec, held, 4);
        loss.poison();
        CHECK(cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, a), labels.dev(), Smoothed(smoothing),
            loss.floats(), n, d, &exec)
              == AMP_OK);
        check_bounded("cross-entropy", loss, expected);
        if (alone.empty()) alone = loss.get();
        CHECK_MSG(loss.get() == alone, "%zu rows of %zu", n, d);
    }
    scale.fill([](size_t) { return 1024.0f; });
    for (int scaled : { 0, 1 }) {
        CHECK(cuda->softmax_cross_entropy_backward(amp_ref_of(x.dev, a), labels.dev(), Smoothed(smoothing),
            scaled ? scale.floats() : nullptr, 0.75f, amp_ref_of(dx.dev, b), n, d, nullptr) == AMP_OK);
        const double factor = (scaled ? 1024.0 : 1.0) * 0.75 / (double)n;
        check_bounded("cross-entropy, backward", dx,
                      cross_entropy_slope(x, labels, (double)smoothing, factor, n, d));
    }
}
static void test_cross_entropy() {
    for (size_t d : WIDTHS) {
        check_cross_entropy(rows_for(d), d, AMP_F32, AMP_F32, 0.0f, 0);
        check_cross_entropy(rows_for(d), d, AMP_F16, AMP_F16, 0.1f, 1);
    }
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) check_cross_entropy(19, 37, a, b, 0.25f, 3);
    check_cross_entropy(2200, 33, AMP_F32, AMP_F32, 0.0f, 0);      /* parts of two rows, in the workspace */
    for (size_t n : { 15, 16, 17 }) check_cross_entropy(n, 33, AMP_F16, AMP_F32, 0.1f, 0);
    check_cross_entropy(12, 2000, AMP_F32, AMP_F16, 0.1f, 0);
    check_cross_entropy(3, 9000, AMP_BF16, AMP_F16, 0.1f, 0);
}
/* A thread for each row: one tile, with a row more, and several; both eights of a thread. */
static void test_few_classes() {
    for (size_t d : { 1, 3, 10, 11, 32 }) {
        const size_t rows = ampi_cuda_few_rows(d);
        CHECK(rows % 8 == 0 && rows <= AMPI_CUDA_FEW_BLOCK && rows * d <= AMPI_CUDA_FEW_TILE);
        for (size_t n : { rows, rows + 1, 2 * rows + 5 }) {
            check_cross_entropy(n, d, n == rows ? AMP_F32 : AMP_F16, AMP_F32, d == 3 ? 0.0f : 0.1f, n == rows ? 0 : 3);
            check_cross_entropy(n - 1, d, AMP_BF16, AMP_F16, 0.1f, d % 2);
        }
    }
}
/* Parts of several tiles, a block of several parts. */
static void test_few_classes_turns() {
    const size_t n = 5 * 16 + 3, d = 7;
    Tensor x(AMP_F16, n * d), loss(AMP_F32, 1);
    Labels labels(n, d);
    ampi_cuda_loss q = {};
    fill_logits(x, d);
    q.x = amp_ref_of(x.dev, AMP_F16); q.labels = labels.dev(); q.loss = loss.floats(); q.smoothing = 0.1f;
    q.n = n; q.d = d; q.count = 2; q.tile = 16;
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_cross_entropy_few, dim3(1), dim3(AMPI_CUDA_FEW_BLOCK),
                           AMPI_CUDA_FEW_SHARED, q) == AMP_OK);
    check_bounded("cross-entropy, two parts", loss, cross_entropy(x, labels, (double)0.1f, n, d));
}
/* A label that is none makes the loss and its own row NaN. */
static void test_wrong_labels() {
    for (size_t d : { 10, 1500, 8300 })
        for (int32_t wrong : { -1, (int32_t)d, INT32_MAX, INT32_MIN }) {
            Tensor x(AMP_F16, 4 * d), dx(AMP_F16, 4 * d), loss(AMP_F32, 1);
            Labels labels(4, d);
            fill_logits(x, d);
            labels.host[2] = wrong;
            labels.send();
            CHECK(cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F16), labels.dev(), Smoothed(0.1f),
                loss.floats(), 4, d, nullptr) == AMP_OK);
            CHECK(cuda->softmax_cross_entropy_backward(amp_ref_of(x.dev, AMP_F16), labels.dev(), Smoothed(0.1f),
                nullptr, 1.0f, amp_ref_of(dx.dev, AMP_F16), 4, d, nullptr) == AMP_OK);
            CHECK(std::isnan(loss.values()[0]));
            const std::vector<double> v = dx.values();
            for (size_t i = 0; i < 4 * d; i++) CHECK(std::isnan(v[i]) == (i / d == 2));
        }
}

/* Differences err by u, their squares by 3 u, the tree by 3; cross-entropies by 1.08 units (2.2 u) of their
   logarithm, by 2.04 u of the exp in it, and by u of their two parts and of their sum. */
static Bounded mean_loss(ampi_loss kind, const Tensor& x, const Tensor& t) {
    double loss = 0, error = 0;
    for (size_t i = 0; i < x.n; i++) {
        const double v = (double)x[i], w = (double)t[i], e = exp(-fabs(v));
        const double linear = fmax(v, 0) - v * w, rest = log1p(e);
        const double term = kind == AMPI_MSE ? (v - w) * (v - w) : linear + rest;
        const double own = U * (fabs(linear) + 2.2 * rest + 2.04 * e + fabs(term));
        loss += term / (double)x.n;
        error += (kind == AMPI_MSE ? 6 * U * term : 3 * U * fabs(term) + own) / (double)x.n;
    }
    Bounded b;
    b.add(loss, error);
    return b;
}
static amp_result mean_loss_of(ampi_loss kind, const Tensor& x, const Tensor& t, Tensor& loss, const amp_exec* exec) {
    return (kind == AMPI_MSE ? cuda->mse_forward
                             : cuda->bce_with_logits_forward)(amp_ref_of(x.dev, x.type),
        amp_ref_of(t.dev, t.type), loss.floats(), x.n, exec);
}
static void check_mean_loss(ampi_loss kind, size_t n, amp_dtype a, amp_dtype b, size_t shift) {
    Tensor x(a, n, shift), t(b, n, 3 * shift % 8), loss(AMP_F32, 1);
    Bytes alone;
    x.fill([](size_t) { return 6.0f * test_uniform(); });
    t.fill([](size_t) { return 0.5f + 0.5f * test_uniform(); });
    const Bounded expected = mean_loss(kind, x, t);
    for (size_t held : { 0, AMP_CUDA_LOSS_WORKSPACE }) {
        amp_exec exec = quiet_exec();
        Workspace w(&exec, held);
        loss.poison();
        CHECK(mean_loss_of(kind, x, t, loss, &exec) == AMP_OK);
        check_bounded(kind == AMPI_MSE ? "mean square" : "binary cross-entropy", loss, expected);
        if (alone.empty()) alone = loss.get();
        CHECK_MSG(loss.get() == alone, "%zu elements", n);
    }
}
static void test_mean_losses() {
    for (ampi_loss kind : { AMPI_MSE, AMPI_BCE }) {
        for (size_t n : { 1, 5, 8, 9, 2049, 4096, 4099, 8192, 8193, 50001 }) {
            check_mean_loss(kind, n, AMP_F32, AMP_F32, n % 3);
            check_mean_loss(kind, n, AMP_F16, AMP_F32, 1);
        }
        for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) check_mean_loss(kind, 77, a, b, 2);
    }
}
/* Parts of several tiles, blocks of several parts. */
static void test_mean_loss_turns() {
    Tensor x(AMP_F16, 5 * AMPI_CUDA_TILE + 99), t(AMP_F16, x.n), loss(AMP_F32, 1);
    ampi_cuda_loss q = {};
    x.fill(ordinary);
    t.fill(ordinary);
    q.x = amp_ref_of(x.dev, AMP_F16); q.target = amp_ref_of(t.dev, AMP_F16); q.loss = loss.floats();
    q.n = x.n; q.count = 2; q.tile = AMPI_CUDA_TILE; q.kind = AMPI_MSE;
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_loss, dim3(1), dim3(AMPI_CUDA_BLOCK), AMPI_CUDA_LOSS_SHARED, q)
          == AMP_OK);
    check_bounded("mean square, two parts", loss, mean_loss(AMPI_MSE, x, t));
}
/* Their gradients are computed element by element. */
static void test_mean_loss_slopes() {
    Tensor scale(AMP_F32, 1);
    for (float s : { 65536.0f, 3.7f }) {
        scale.fill([&](size_t) { return s; });
        for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) for (amp_dtype c : TYPES)
            for (size_t n : { 1, 13, 4101 })
                for (int scaled : { 0, 1 }) {
                    Tensor x(a, n, n % 5), t(b, n, n % 3), dx(c, n, 2);
                    const float* host = scaled ? (const float*)scale.at() : nullptr;
                    const float* dev = scaled ? scale.floats() : nullptr;
                    x.fill(awkward);
                    t.fill(ordinary);
                    BOTH(amp_mse_backward(amp_ref_of(x.at(), a), amp_ref_of(t.at(), b), host,
                        0.3f, amp_ref_of(dx.at(), c), n, nullptr),
                         cuda->mse_backward(amp_ref_of(x.dev, a), amp_ref_of(t.dev, b), dev, 0.3f,
                             amp_ref_of(dx.dev, c), n, nullptr));
                    CHECK_BITS(dx, 0);
                    BOTH(amp_bce_with_logits_backward(amp_ref_of(x.at(), a),
                        amp_ref_of(t.at(), b), host, 0.3f, amp_ref_of(dx.at(), c), n, nullptr),
                         cuda->bce_with_logits_backward(amp_ref_of(x.dev, a),
                             amp_ref_of(t.dev, b), dev, 0.3f, amp_ref_of(dx.dev, c), n, nullptr));
                    CHECK_BITS(dx, 0);
                }
    }
}
/* An infinity or a NaN among the inputs shows in every loss. */
static void test_loss_special() {
    for (float bad : { (float)NAN, INFINITY, -INFINITY })
        for (size_t n : { 30, 20000 }) {
            Tensor x(AMP_F32, n), t(AMP_F32, n), loss(AMP_F32, 1);
            Labels labels(n / 10, 10);
            float host = 0;
            x.fill(ordinary);
            t.fill(ordinary);
            x.set(n - 4, bad);
            x.send();
            labels.host[n / 10 - 1] = 6;
            labels.send();
            BOTH(amp_mse_forward(amp_ref_of(x.at(), AMP_F32), amp_ref_of(t.at(), AMP_F32), &host, n, nullptr),
                 cuda->mse_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(t.dev, AMP_F32), loss.floats(), n, nullptr));
            CHECK(std::isnan(host) ? std::isnan(loss.values()[0]) : loss.values()[0] == (double)host);
            BOTH(amp_bce_with_logits_forward(amp_ref_of(x.at(), AMP_F32), amp_ref_of(t.at(), AMP_F32), &host, n, nullptr),
                 cuda->bce_with_logits_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(t.dev, AMP_F32), loss.floats(), n,
                     nullptr));
            CHECK(std::isnan(host) ? std::isnan(loss.values()[0]) : loss.values()[0] == (double)host);
            BOTH(amp_softmax_cross_entropy_forward(amp_ref_of(x.at(), AMP_F32), labels.host.data(), NULL,
                &host, n / 10, 10, nullptr),
                 cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F32), labels.dev(), NULL,
                     loss.floats(), n / 10, 10, nullptr));
            CHECK(std::isnan(host) ? std::isnan(loss.values()[0]) : loss.values()[0] == (double)host);
        }
}

/* --- sequences ----------------------------------------------------------------------------- */

/* The bits of the CPU, in any types; a token that is none makes a row of NaNs, and has no gradient. */
static void test_embedding() {
    const size_t n = 70, vocabulary = 11, d = 300;
    std::vector<int32_t> tokens(n);
    for (size_t i = 0; i < n; i++) tokens[i] = (int32_t)(i * i % (vocabulary - 1));
    for (amp_dtype t : TYPES) for (amp_dtype o : TYPES) for (int add : { 0, 1 }) {
        Tensor w(t, vocabulary * d, 1), y(o, n * d, 3), dw(t, vocabulary * d, 2);
        Labels device(n, 1);
        device.host = tokens;
        device.send();
        w.fill(ordinary); y.fill(ordinary); dw.fill(ordinary);
        Bytes hdw = dw.get(), hy(n * d * amp_dtype_size(o));
        const Bytes hw = w.get(), hdy = y.get();
        CHECK(cuda->embedding_backward(amp_ref_of(y.dev, o), device.dev(), amp_ref_of(dw.dev, t), add, n, vocabulary, d, nullptr)
            == AMP_OK);
        CHECK(amp_embedding_backward(amp_ref_of(hdy.data(), o), tokens.data(), amp_ref_of(hdw.data(), t), add, n, vocabulary, d,
            nullptr) == AMP_OK);
        CHECK(dw.get() == hdw);
        CHECK(cuda->embedding_forward(device.dev(), amp_ref_of(w.dev, t), amp_ref_of(y.dev, o), n, vocabulary, d, nullptr) == AMP_OK);
        CHECK(amp_embedding_forward(tokens.data(), amp_ref_of(hw.data(), t), amp_ref_of(hy.data(), o), n, vocabulary, d, nullptr)
            == AMP_OK);
        CHECK(y.get() == hy);
    }
    Tensor w(AMP_F32, vocabulary * d), y(AMP_F32, n * d), dw(AMP_F32, vocabulary * d);
    Labels device(n, 1);
    w.fill(ordinary); y.fill(ordinary);
    tokens.assign(n, -1);
    tokens[n / 2] = (int32_t)vocabulary;
    device.host = tokens;
    device.send();
    CHECK(cuda->embedding_backward(amp_f32(y.floats()), device.dev(), amp_f32(dw.floats()), 0, n, vocabulary, d, nullptr) == AMP_OK);
    CHECK(cuda->embedding_forward(device.dev(), amp_f32(w.floats()), amp_f32(y.floats()), n, vocabulary, d, nullptr) == AMP_OK);
    for (double v : dw.values()) CHECK(v == 0);
    for (double v : y.values()) CHECK(std::isnan(v));
}

static void test_transpose() {
    for (amp_dtype t : TYPES) for (amp_dtype o : TYPES) {
        const size_t n = 3, rows = 7, columns = 45;
        Tensor x(t, n * rows * columns, 1), y(o, n * rows * columns, 2);
        x.fill(ordinary);
        const Bytes hx = x.get();
        Bytes hy = y.get();
        CHECK(cuda->transpose_forward(amp_ref_of(x.dev, t), amp_ref_of(y.dev, o), n, rows, columns, nullptr) == AMP_OK);
        CHECK(amp_transpose_forward(amp_ref_of(hx.data(), t), amp_ref_of(hy.data(), o), n, rows, columns, nullptr) == AMP_OK);
        CHECK(y.get() == hy);
    }
}

/* The bits of the CPU, forward and back, in place and added. */
static void test_rope() {
    const amp_rope_shape shapes[] = { { 2, 7, 3, 8, 0, 0, 0, 0 }, { 1, 5, 2, 6, 20, 500000.0f, 1, 1000000 }, { 3, 1, 1, 1024, 1030, 0, 0, 3 } };
    for (const amp_rope_shape& s : shapes) for (amp_dtype t : TYPES) for (int variant : { 0, 1, 2 }) {
        const size_t n = s.batch * s.positions * (s.width ? s.width : s.heads * s.head_size);
        Tensor x(t, n, 1), y(variant ? AMP_F32 : t, n, 2);
        x.fill(ordinary); y.fill(ordinary);
        Bytes hx = x.get(), hy = y.get();
        if (variant == 0) {      /* in place */
            CHECK(cuda->rope_forward(&s, amp_ref_of(x.dev, t), amp_ref_of(x.dev, t), nullptr) == AMP_OK);
            CHECK(amp_rope_forward(&s, amp_ref_of(hx.data(), t), amp_ref_of(hx.data(), t), nullptr) == AMP_OK);
            CHECK(x.get() == hx);
        }
        const int add = variant == 2 ? AMP_ACCUMULATE_INPUT : 0;
        CHECK(cuda->rope_backward(&s, amp_ref_of(x.dev, t), amp_ref_of(y.dev, y.type), add, nullptr) == AMP_OK);
        CHECK(amp_rope_backward(&s, amp_ref_of(hx.data(), t), amp_ref_of(hy.data(), y.type), add, nullptr) == AMP_OK);
        CHECK(y.get() == hy);
    }
}

/* Against the CPU's operator, which has a double reference of its own. Sums differ in their order, exp and the rounding
   of weights in their last place. fused: operands lie as Tensor Cores want them, and there is memory for what their
   kernels keep; else they begin one element after such a place. */
static void check_attention(amp_attention_shape s, amp_dtype t, const std::vector<int32_t>& lengths, int add, bool fused = false) {
    amp_attention_shape c = s;
    Labels device(s.batch, 1);
    if (!lengths.empty()) {
        device.host = lengths;
        device.send();
        s.lengths = device.dev();
        c.lengths = lengths.data();
    }
    const size_t keys = s.keys ? s.keys : s.queries, kv = s.kv_heads ? s.kv_heads : s.heads, stride = s.key_stride ? s.key_stride : keys;
    const size_t row = s.ldq ? s.ldq : s.heads * s.head_size, kv_row = s.ldk ? s.ldk : kv * s.head_size;
    const size_t nq = s.batch * s.queries * row, nk = s.batch * stride * kv_row, ny = s.batch * s.queries * s.heads * s.head_size;
    const size_t shift = !fused;
    Tensor q(t, nq, shift), k(t, nk, 2 * shift), v(t, nk), y(t, ny), dy(t, ny, 3 * shift), lse(AMP_F32, s.batch * s.heads * s.queries);
    Tensor dq(AMP_F32, nq, 1), dk(t, nk), dv(AMP_F32, nk);
    for (Tensor* x : { &q, &k, &v, &y, &dy, &dq, &dk, &dv, &lse }) x->fill(ordinary);
    const Bytes hq = q.get(), hk = k.get(), hv = v.get(), hdy = dy.get();
    Bytes hy = y.get(), hl = lse.get(), hdq = dq.get(), hdk = dk.get(), hdv = dv.get();
    const auto host = [](const Bytes& b, amp_dtype type) { return amp_ref_of(b.data(), type); };
    CHECK(cuda->attention_forward(&s, amp_ref_of(q.dev, t), amp_ref_of(k.dev, t), amp_ref_of(v.dev, t), amp_ref_of(y.dev, t),
        lse.floats(), nullptr) == AMP_OK);
    CHECK(amp_attention_forward(&c, host(hq, t), host(hk, t), host(hv, t), host(hy, t), (float*)(void*)hl.data(), nullptr) == AMP_OK);
    amp_exec exec = quiet_exec();
    Workspace room(&exec, fused ? cuda->attention_workspace(&s) : 0);
    const auto close = [&](const char* what, const Tensor& x, const Bytes& want) {
        Bounded b(x.n);
        for (size_t i = 0; i < x.n; i++) b.value[i] = (double)x.value(want, i);
        for (size_t i = 0; i < x.n; i++)
            b.error[i] = (t == AMP_F32 ? 2e-5 : t == AMP_F16 ? 4e-3 : 3e-2) * (1 + fabs(b.value[i]));
        check_bounded(what, x, b);
    };
    close("attention, lse", lse, hl);
    close("attention, y", y, hy);
    OK(cudaMemcpy(y.dev, hy.data(), hy.size(), cudaMemcpyHostToDevice));
    OK(cudaMemcpy(lse.dev, hl.data(), hl.size(), cudaMemcpyHostToDevice));
    const long before = launches();
    CHECK(cuda->attention_backward(&s, amp_ref_of(dy.dev, t), amp_ref_of(q.dev, t), amp_ref_of(k.dev, t), amp_ref_of(v.dev, t),
        amp_ref_of(y.dev, t), lse.floats(), amp_ref_of(dq.dev, AMP_F32), amp_ref_of(dk.dev, t), amp_ref_of(dv.dev, AMP_F32), add,
        &exec) == AMP_OK);
    CHECK(launched(before, fused && on_tensor_cores(AMP_BF16, AMP_BF16) ? 3 : 2));
    CHECK(amp_attention_backward(&c, host(hdy, t), host(hq, t), host(hk, t), host(hv, t), host(hy, t),
        (const float*)(const void*)hl.data(), host(hdq, AMP_F32), host(hdk, t), host(hdv, AMP_F32), add, nullptr) == AMP_OK);
    close("attention, dq", dq, hdq);
    close("attention, dk", dk, hdk);
    close("attention, dv", dv, hdv);
}
static amp_attention_shape attention_shape(size_t batch, size_t queries, size_t keys, size_t heads, size_t kv_heads, size_t head_size,
                                           int causal, size_t window, float scale) {
    amp_attention_shape s = {};
    s.batch = batch; s.queries = queries; s.keys = keys; s.heads = heads; s.kv_heads = kv_heads; s.head_size = head_size;
    s.causal = causal; s.window = window; s.scale = scale;
    return s;
}
static void test_attention() {
    const auto shape = attention_shape;
    for (amp_dtype t : TYPES) {
        check_attention(shape(2, 5, 0, 2, 0, 8, 1, 0, 0), t, {}, 0);
        check_attention(shape(1, 7, 19, 4, 2, 3, 1, 4, 0.5f), t, {}, AMP_ACCUMULATE_INPUT);
        check_attention(shape(3, 4, 6, 2, 1, 16, 0, 0, 0), t, { 6, 0, 3 }, 0);
    }
    check_attention(shape(1, 3, 600, 1, 1, 4, 1, 0, 0), AMP_F32, {}, 0);        /* several rounds of keys */
    check_attention(shape(1, 530, 2, 2, 1, 2, 0, 0, 0), AMP_F32, { 1 }, 0);     /* and of queries */
    check_attention(shape(1, 2, 3, 1, 1, 256, 0, 0, 0), AMP_F32, {}, AMP_ACCUMULATE_INPUT);
    amp_attention_shape s = shape(2, 3, 4, 2, 2, 4, 1, 0, 0);
    s.key_stride = 6;
    s.ldq = 24; s.ldk = 24; s.ldv = 24;
    check_attention(s, AMP_F16, { 4, 2 }, 0);
}

/* By Tensor Cores: several tiles, ragged ends, heads that are not whole tiles, rows that see nothing. */
static void test_attention_fused() {
    const auto shape = attention_shape;
    for (amp_dtype t : { AMP_F16, AMP_BF16 }) {
        check_attention(shape(1, 150, 164, 2, 1, 64, 1, 0, 0), t, {}, 0, true);
        check_attention(shape(1, 70, 201, 2, 0, 40, 1, 50, -0.5f), t, {}, AMP_ACCUMULATE_INPUT, true);
        check_attention(shape(3, 66, 130, 1, 0, 128, 0, 0, 0.7f), t, { 130, 0, 70 }, 0, true);
    }
    check_attention(shape(1, 200, 90, 2, 0, 72, 1, 17, 0), AMP_F16, {}, 0, true);      /* 110 queries see nothing */
    check_attention(shape(2, 5, 0, 2, 0, 8, 1, 0, 0), AMP_BF16, { 5, 3 }, AMP_ACCUMULATE_INPUT, true);
    amp_attention_shape s = shape(2, 65, 67, 2, 2, 16, 1, 0, 0);      /* rows [q|k|v] */
    s.key_stride = 70;
    s.ldq = 96; s.ldk = 96; s.ldv = 96;
    check_attention(s, AMP_F16, { 67, 66 }, 0, true);
}

/* A NaN of k or v comes to the queries that see it, and to few others. */
static void test_attention_nan() {
    const size_t T = 150, at = 140, d = 16;
    const amp_attention_shape s = attention_shape(1, T, 0, 1, 0, d, 1, 0, 0);
    for (size_t shift : { 0, 1 }) for (int of_v : { 0, 1 }) {
        Tensor q(AMP_F16, T * d, shift), k(AMP_F16, T * d, shift), v(AMP_F16, T * d, shift), y(AMP_F16, T * d);
        for (Tensor* x : { &q, &k, &v, &y }) x->fill(ordinary);
        Tensor& x = of_v ? v : k;
        x.set(at * d + 3, NAN);
        x.send();
        CHECK(cuda->attention_forward(&s, amp_ref_of(q.dev, AMP_F16), amp_ref_of(k.dev, AMP_F16), amp_ref_of(v.dev, AMP_F16),
            amp_ref_of(y.dev, AMP_F16), nullptr, nullptr) == AMP_OK);
        const std::vector<double> got = y.values();
        for (size_t i = 0; i < T; i++)
            for (size_t c = 0; c < d; c++) {
                const bool reached = i >= at && (!of_v || c == 3), apart = i + 63 < at || (of_v && c != 3);
                CHECK(std::isnan(got[i * d + c]) ? !apart : !reached);
            }
    }
}

/* --- gradients that are added to, rows apart, labels ignored, statistics computed anew --- */

/* `run` writes dx of n elements: what it adds is its FP32 result, rounded once with what was there. */
template <typename F>
static void check_added(const char* what, size_t n, amp_dtype t, F run) {
    Tensor dx(t, n), wanted(AMP_F32, n);
    dx.fill(ordinary);
    CHECK(run(amp_ref_of(wanted.dev, AMP_F32), (int)AMP_ACCUMULATE_PARAMS) == AMP_OK);
    CHECK(run(amp_ref_of(dx.dev, t), (int)AMP_ACCUMULATE_INPUT) == AMP_OK);
    const std::vector<double> got = dx.values(), added = wanted.values();
    size_t wrong = 0;
    for (size_t i = 0; i < n; i++) {
        const float sum = dx[i] + (float)added[i];
        Tensor one(t, 1);
        one.set(0, sum);
        wrong += (double)one[0] != got[i];
    }
    CHECK_MSG(wrong == 0, "%s, type %d: %zu of %zu", what, (int)t, wrong, n);
}
static void test_accumulate_dx() {
    const size_t rows = 3, d = 131, n = rows * d;
    for (amp_dtype t : { AMP_F32, AMP_F16, AMP_BF16 }) {
        Tensor dy(t, n), saved(t, n);
        dy.fill(ordinary);
        saved.fill(ordinary);
        const amp_ref g = amp_ref_of(dy.dev, t), s = amp_ref_of(saved.dev, t);
        for (int f = 0; f < AMP_ACTIVATION_COUNT; f++)
            check_added("activation", n, t, [&](amp_ref dx, int add) {
                return amp_cuda_backend()->activation_backward((amp_activation)f, g, s, dx, add, n, nullptr); });
        check_added("softmax", n, t, [&](amp_ref dx, int add) {
            return amp_cuda_backend()->softmax_backward(g, s, dx, add, rows, d, nullptr); });
        for (amp_pool kind : { AMP_POOL_MAX, AMP_POOL_AVERAGE, AMP_POOL_SUM })
            for (int kernel : { 2, 3 }) {
                amp_pool2d_shape q = {};
                q.kind = kind; q.n = 1; q.channels = 3; q.height = 8; q.width = 16;
                q.kernel_h = q.kernel_w = kernel; q.stride_h = q.stride_w = 2;
                q.pad_h = q.pad_w = kernel == 3;
                check_added("pool", 3 * 8 * 16, t, [&](amp_ref dx, int add) {
                    return amp_cuda_backend()->pool2d_backward(&q, g, s, dx, add, nullptr); });
            }
    }
}
/* The statistics that backward computes are those that forward would have saved; they take their
   part of the workspace, given or grown. */
static void test_layer_norm_without_statistics() {
    for (size_t rows : { 2, 70, 200 }) {
        const size_t d = 77, bytes = amp_cuda_backend()->layer_norm_workspace(rows, d);
        Tensor x(AMP_F16, rows * d), dy(AMP_F16, rows * d), y(AMP_F16, rows * d);
        Tensor mean(AMP_F32, rows), invstd(AMP_F32, rows);
        Bytes results[3][3];
        fill_rows(x, d);
        dy.fill(ordinary);
        const amp_ref xr = amp_ref_of(x.dev, AMP_F16), dyr = amp_ref_of(dy.dev, AMP_F16);
        CHECK(amp_cuda_backend()->layer_norm_forward(xr, AMP_NONE, AMP_NONE, 0.01f, mean.floats(), invstd.floats(),
            amp_ref_of(y.dev, AMP_F16), rows, d, nullptr) == AMP_OK);
        for (int anew : { 0, 1, 2 }) {
            Tensor dx(AMP_F16, rows * d), dgamma(AMP_F32, d), dbeta(AMP_BF16, d);
            amp_exec exec = quiet_exec();
            Workspace w(&exec, anew < 2 ? bytes : 0, 4);
            amp_workspace grows = {};
            grows.backend = amp_cuda_backend();
            if (anew == 2) exec.grows = &grows;
            CHECK(amp_cuda_backend()->layer_norm_backward(dyr, xr, AMP_NONE, 0.01f, anew ? nullptr : mean.floats(),
                invstd.floats(), amp_ref_of(dx.dev, AMP_F16), amp_f32(dgamma.floats()),
                amp_ref_of(dbeta.dev, AMP_BF16), 0, rows, d, &exec) == AMP_OK);
            CHECK(grows.size == (anew == 2 ? bytes : 0));
            amp_workspace_free(&grows);
            results[anew][0] = dx.get(); results[anew][1] = dgamma.get(); results[anew][2] = dbeta.get();
        }
        for (int i = 0; i < 3; i++) CHECK_MSG(results[0][i] == results[1][i] && results[0][i] == results[2][i], "%zu rows, %d", rows, i);

        /* RMS norm */
        CHECK(cuda->rms_norm_forward(xr, AMP_NONE, 0.01f, invstd.floats(), amp_ref_of(y.dev, AMP_F16), rows, d, nullptr) == AMP_OK);
        for (int anew : { 0, 1 }) {
            Tensor dx(AMP_F16, rows * d), dgamma(AMP_F32, d);
            amp_exec exec = quiet_exec();
            Workspace w(&exec, bytes, 4);
            CHECK(cuda->rms_norm_backward(dyr, xr, AMP_NONE, 0.01f, anew ? nullptr : invstd.floats(),
                amp_ref_of(dx.dev, AMP_F16), amp_f32(dgamma.floats()), 0, rows, d, &exec) == AMP_OK);
            results[anew][0] = dx.get(); results[anew][1] = dgamma.get();
        }
        CHECK(results[0][0] == results[1][0] && results[0][1] == results[1][1]);
    }
}
/* As test_cross_entropy_rows_apart of test_ops.c: losses and gradients of the rows that count are those
   of a call on them alone. */
static void test_cross_entropy_rows_apart() {
    const int32_t ignored = 1;
    for (size_t d : { 10, 40, 600 })
        for (int with = 1; with < 4; with++) {
            const size_t n = 37, ld = with & 1 ? d + 3 : d;
            const amp_cross_entropy_desc desc = { 0.1f, with & 1 ? ld : 0, with & 2 ? &ignored : nullptr, nullptr, 0 };
            Tensor x(AMP_F16, n * ld), dx(AMP_F16, n * ld), loss(AMP_F32, 1);
            Labels labels(n, d), left(n, d);
            size_t used = 0;
            x.fill(ordinary);
            labels.host[3] = ignored;
            labels.send();
            for (size_t r = 0; r < n; r++)
                if (!((with & 2) && labels.host[r] == ignored)) left.host[used++] = labels.host[r];
            left.send();
            Tensor few(AMP_F16, used * d), dfew(AMP_F16, used * d), few_loss(AMP_F32, 1);
            for (size_t r = 0, k = 0; r < n; r++)
                if (!((with & 2) && labels.host[r] == ignored)) {
                    for (size_t c = 0; c < d; c++) few.set(k * d + c, x[r * ld + c]);
                    k++;
                }
            few.send();
            const amp_ref xr = amp_ref_of(x.dev, AMP_F16), fr = amp_ref_of(few.dev, AMP_F16);
            CHECK(amp_cuda_backend()->softmax_cross_entropy_forward(xr, labels.dev(), &desc, loss.floats(), n, d,
                nullptr) == AMP_OK);
            CHECK(amp_cuda_backend()->softmax_cross_entropy_forward(fr, left.dev(), Smoothed(0.1f), few_loss.floats(),
                used, d, nullptr) == AMP_OK);
            CHECK(fabs(loss.values()[0] - few_loss.values()[0]) <= 1e-6 * few_loss.values()[0]);
            dx.poison();
            CHECK(amp_cuda_backend()->softmax_cross_entropy_backward(xr, labels.dev(), &desc, nullptr, 64,
                amp_ref_of(dx.dev, AMP_F16), n, d, nullptr) == AMP_OK);
            CHECK(amp_cuda_backend()->softmax_cross_entropy_backward(fr, left.dev(), Smoothed(0.1f), nullptr, 64,
                amp_ref_of(dfew.dev, AMP_F16), used, d, nullptr) == AMP_OK);
            const Bytes all = dx.get(), some = dfew.get();
            for (size_t r = 0, k = 0; r < n; r++) {
                const bool gone = (with & 2) && labels.host[r] == ignored;
                const unsigned char *row = &all[r * ld * 2], *other = &some[std::min(k, used - 1) * d * 2];
                size_t wrong = 0;
                for (size_t b = 0; b < ld * 2; b++)
                    wrong += row[b] != (b >= d * 2 ? (unsigned char)POISON : gone ? 0 : other[b]);
                CHECK_MSG(wrong == 0, "row %zu of %zu classes, %d: %zu", r, d, with, wrong);
                k += !gone;
            }
        }
}

/* As check_weighted_cross_entropy of test_ops.c: maps, weights of classes (1), smoothing (2), an ignored label (4),
   rows apart in place of maps (8); with a workspace for the parts and without. */
static void check_weighted_cross_entropy(amp_dtype a, amp_dtype b, size_t images, size_t pixels, size_t d, int with) {
    const size_t n = images * pixels, ld = with & 8 ? d + 3 : d, all = n * ld;
    const int32_t ignored = -100;
    const double s = with & 2 ? (double)0.1f : 0;
    Tensor x(a, all), dx(b, all), loss(AMP_F32, 1), weights(AMP_F32, d);
    Labels labels(n, d);
    x.fill(ordinary);
    weights.fill([&](size_t c) { return !(with & 1) ? 1.0f : c % 3 == 1 && c > 1 ? 0.0f : 0.25f + fabsf(test_uniform()); });
    for (size_t r = 2; with & 4 && r < n; r += 3) labels.host[r] = ignored;
    labels.send();
    const amp_cross_entropy_desc desc = { (float)s, with & 8 ? ld : 0, with & 4 ? &ignored : nullptr,
                                          with & 1 ? weights.floats() : nullptr, with & 8 ? 0 : pixels };
    double used = 0, mean = 0, total = 0, error = 0;
    for (size_t c = 0; c < d; c++) mean += (double)weights[c] / (double)d;
    for (int32_t label : labels.host) used += label == ignored ? 0 : (double)weights[(size_t)label];
    const double share = used > 0 ? 64 / used : 0;      /* labels without any weight: nothing counts */
    Bounded slope(all), value(1);
    for (double& e : slope.error) e = FLUSHED;
    for (size_t r = 0; r < n; r++) {
        const size_t first = with & 8 ? r * ld : r / pixels * d * pixels + r % pixels, step = with & 8 ? 1 : pixels;
        double max = -INFINITY, sum = 0;
        for (size_t c = 0; c < d; c++) max = std::max(max, (double)x[first + c * step]);
        for (size_t c = 0; c < d; c++) sum += exp((double)x[first + c * step] - max);
        if (labels.host[r] == ignored) continue;
        const double own = (double)weights[(size_t)labels.host[r]], whole = (1 - s) * own + s * mean;
        for (size_t c = 0; c < d; c++) {
            const double z = (double)x[first + c * step] - max, p = exp(z) / sum;
            const double target = (double)weights[c] * (s / (double)d + ((size_t)labels.host[r] == c ? 1 - s : 0));
            slope.value[first + c * step] = share * (whole * p - target);
            slope.error[first + c * step] = share * (whole * p * (12 + fabs(z)) + 6 * target) * U + FLUSHED;
            total += target * (log(sum) - z);
            error += (target * (6 * fabs(z) + 6 * log(sum)) + whole) * U;
        }
    }
    value.value[0] = used > 0 ? total / used : 0;
    value.error[0] = used > 0 ? error / used : FLUSHED;
    for (size_t held : { 0, AMP_CUDA_LOSS_WORKSPACE + 16 }) {
        amp_exec exec = quiet_exec();
        Workspace w(&exec, held, 4);
        loss.poison();
        dx.poison();
        CHECK(cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, a), labels.dev(), &desc, loss.floats(), n, d, &exec) == AMP_OK);
        CHECK(cuda->softmax_cross_entropy_backward(amp_ref_of(x.dev, a), labels.dev(), &desc, nullptr, 64, amp_ref_of(dx.dev, b),
            n, d, &exec) == AMP_OK);
        check_bounded("cross-entropy of maps", loss, value);
        const Bytes got = dx.get();
        for (size_t i = 0; with & 8 && i < all; i++) {      /* what lies between rows stays */
            if (i % ld < d) continue;
            CHECK(got[i * amp_dtype_size(b)] == (unsigned char)POISON);
            slope.value[i] = (double)dx.value(got, i);
        }
        check_bounded("cross-entropy of maps, backward", dx, slope);
    }
}
static void test_cross_entropy_of_maps() {
    for (int with = 0; with < 16; with++) {
        check_weighted_cross_entropy(AMP_F16, AMP_F32, 2, 70, 21, with);
        check_weighted_cross_entropy(AMP_F32, AMP_F16, 3, 1, 40, with);
        check_weighted_cross_entropy(AMP_BF16, AMP_BF16, 2, 150, 3, with);      /* several parts */
        check_weighted_cross_entropy(AMP_F32, AMP_F32, 2, 3, 1, with);
    }
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) check_weighted_cross_entropy(a, b, 2, 9, 5, 7);
}
/* Parts of several turns. */
static void test_maps_turns() {
    const size_t n = 5 * 300, d = 2;
    Tensor x(AMP_F16, n * d), loss(AMP_F32, 1);
    Labels labels(n, d);
    ampi_cuda_loss q = {};
    x.fill(ordinary);
    q.x = amp_ref_of(x.dev, AMP_F16); q.labels = labels.dev(); q.loss = loss.floats();
    q.n = n; q.d = q.ld = d; q.count = 2; q.pixels = 1;
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_map_parts, dim3(1), dim3(AMPI_CUDA_BLOCK), AMPI_CUDA_LOSS_SHARED, q)
          == AMP_OK);
    check_bounded("maps, two parts", loss, cross_entropy(x, labels, 0, n, d));
}
/* A pixel whose label is none makes the loss and its own gradients NaN; where all are ignored both are 0. */
static void test_labels_of_maps() {
    const int32_t ignored = 1;
    const amp_cross_entropy_desc desc = { 0.1f, 0, &ignored, nullptr, 4 };
    Tensor x(AMP_F16, 24), dx(AMP_F16, 24), loss(AMP_F32, 1);
    Labels labels(8, 3);
    x.fill(ordinary);
    for (int wrong : { 0, 1 }) {
        for (int32_t& label : labels.host) label = ignored;
        if (wrong) labels.host[5] = 3;
        labels.send();
        CHECK(cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F16), labels.dev(), &desc, loss.floats(), 8, 3,
            nullptr) == AMP_OK);
        CHECK(cuda->softmax_cross_entropy_backward(amp_ref_of(x.dev, AMP_F16), labels.dev(), &desc, nullptr, 1,
            amp_ref_of(dx.dev, AMP_F16), 8, 3, nullptr) == AMP_OK);
        CHECK(wrong ? std::isnan(loss.values()[0]) : loss.values()[0] == 0);
        const std::vector<double> v = dx.values();
        for (size_t i = 0; i < 24; i++) CHECK(wrong && i >= 12 && i % 4 == 1 ? std::isnan(v[i]) : v[i] == 0);
    }
}

/* --- gradients of biases ------------------------------------------------------------------------ */

/* Eights by a tree, or four rows: at most three roundings each, u of the size; the rest in double. */
static Bounded bias_grad(const Tensor& dy, size_t n, size_t outputs, size_t pixels) {
    Bounded b;
    for (size_t o = 0; o < outputs; o++) {
        double sum = 0, size = 0;
        for (size_t i = 0; i < n * pixels; i++) {
            const double v = (double)dy[(i / pixels * outputs + o) * pixels + i % pixels];
            sum += v;
            size += fabs(v);
        }
        b.add(sum, 3 * U * size + U * fabs(sum));
    }
    return b;
}
/* A workspace changes who adds, not the bits; it is used from 65 parts on. */
static void check_bias_grad(size_t n, size_t outputs, size_t pixels, amp_dtype a, amp_dtype b, int accumulate) {
    Tensor dy(a, n * outputs * pixels, n % 5), db(b, outputs);
    const size_t bytes = ampi_cuda_bias_bytes(n, outputs, pixels);
    Bytes alone;
    dy.fill(ordinary);
    db.fill(ordinary);
    const Bounded expected = onto(bias_grad(dy, n, outputs, pixels), db, accumulate);
    for (size_t held : { (size_t)0, bytes ? bytes - 1 : 0, bytes + 12 }) {
        amp_exec exec = quiet_exec();
        Workspace w(&exec, held, bytes && held > bytes ? 4 : 0);
        const long before = launches();
        db.send();
        CHECK(ampi_cuda_bias_grad(&exec, "test", amp_ref_of(dy.dev, a), amp_ref_of(db.dev, b),
            accumulate, n, outputs, pixels) == AMP_OK);
        CHECK(launched(before, 1 + (bytes && held > bytes)));
        check_bounded("gradient of a bias", db, expected);
        if (alone.empty()) alone = db.get();
        CHECK_MSG(db.get() == alone, "%zu x %zu x %zu", n, outputs, pixels);
    }
}
static void test_bias_planes() {
    CHECK(ampi_cuda_bias_bytes(64, 1, 1024) == 0 && ampi_cuda_bias_bytes(65, 1, 1024) == 65 * 8);
    CHECK(ampi_cuda_bias_bytes(65, 252, 1024) == 65 * 252 * 8 && ampi_cuda_bias_bytes(65, 253, 1024) == 0);
    for (size_t pixels : { 2, 7, 8, 49, 100, 1024, 1025 })
        for (size_t n : { 1, 3, 9 }) check_bias_grad(n, 3, pixels, n == 3 ? AMP_F32 : AMP_F16, AMP_F32, n == 9);
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) check_bias_grad(2, 5, 33, a, b, 1);
    check_bias_grad(33, 2, 1024, AMP_F16, AMP_F32, 0);      /* more than one part for each warp */
    check_bias_grad(64, 1, 1024, AMP_F16, AMP_F32, 0);
    check_bias_grad(65, 2, 1024, AMP_BF16, AMP_F16, 1);     /* in the workspace, three blocks */
    check_bias_grad(41, 2, 1999, AMP_F32, AMP_F32, 0);
}
/* Parts of several chunks. */
static void test_bias_turns() {
    Tensor dy(AMP_F16, 9 * 2 * 500), db(AMP_F32, 2);
    ampi_cuda_bias_sum s = { amp_ref_of(dy.dev, AMP_F16), amp_f32(db.floats()), 9, 2, 500, 0, 2, nullptr };
    dy.fill(ordinary);
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_bias_planes, dim3(2), dim3(AMPI_CUDA_BLOCK), AMPI_CUDA_BIAS_SHARED,
                           s) == AMP_OK);
    check_bounded("gradient of a bias, two parts", db, bias_grad(dy, 9, 2, 500));
}
static void test_bias_columns() {
    for (size_t outputs : { 1, 7, 8, 9, 15, 16, 17, 40 })
        for (size_t n : { 1, 2, 255, 256, 257, 1025 })
            if (n < 1000 || outputs < 10) check_bias_grad(n, outputs, 1, n % 2 ? AMP_F16 : AMP_F32, AMP_F32, n == 2);
    for (amp_dtype a : TYPES) for (amp_dtype b : TYPES) check_bias_grad(700, 24, 1, a, b, 1);
}

/* --- orders, graphs, errors -------------------------------------------------------------------- */

/* Every sum, in every order of threads and blocks. */
static void test_orders() {
    const Norm q = norm_of(5, 3, 47);
    const size_t rows = 130, d = 150;
    Tensor x(AMP_F16, rows * d), dy(AMP_F16, rows * d), y(AMP_F32, rows * d), mean(AMP_F32, rows),
        invstd(AMP_F32, rows), a(AMP_F32, d), b(AMP_F32, d), loss(AMP_F32, 1);
    Labels labels(rows, d), many(5400, 3);
    amp_exec exec = quiet_exec();
    Workspace w(&exec, cuda->layer_norm_workspace(rows, d) + AMP_CUDA_LOSS_WORKSPACE);
    const amp_pool2d_shape pool = { AMP_POOL_AVERAGE, 1, 1, 130, 150, 20, 20, 10, 10, 0, 0, 0, 0, 0 };
    fill_rows(x, d);
    dy.fill(ordinary);
    const auto results = [&](std::initializer_list<const Tensor*> list) {
        Bytes all;
        for (const Tensor* t : list) {
            const Bytes part = t->get();
            all.insert(all.end(), part.begin(), part.end());
        }
        return all;
    };
    check_repeatable([&]() {
        CHECK(cuda->batch_norm_forward(&q.shape, 1, amp_ref_of(x.dev, AMP_F16), AMP_NONE, AMP_NONE, nullptr,
            nullptr, mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), nullptr) == AMP_OK);
        return results({ &y, &mean, &invstd });
    });
    check_repeatable([&]() {
        CHECK(cuda->batch_norm_backward(&q.shape, amp_ref_of(dy.dev, AMP_F16), amp_ref_of(x.dev, AMP_F16), AMP_NONE,
            mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), amp_ref_of(a.dev, AMP_F32), amp_ref_of(b.dev, AMP_F32), 0,
            nullptr)
              == AMP_OK);
        return results({ &y, &a, &b });
    });
    for (size_t columns : { d, rows * d / 2, rows * d })      /* one kernel for each length of rows */
        check_repeatable([&]() {
            const size_t n = rows * d / columns;
            amp_result r = cuda->layer_norm_forward(amp_ref_of(x.dev, AMP_F16), AMP_NONE, AMP_NONE, 0,
                mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), n, columns, nullptr);
            CHECK(r == AMP_OK);
            Bytes all = results({ &y, &mean, &invstd });
            r = cuda->softmax_forward(amp_ref_of(x.dev, AMP_F16), amp_ref_of(y.dev, AMP_F32), n, columns, nullptr);
            CHECK(r == AMP_OK);
            const Bytes more = results({ &y });
            all.insert(all.end(), more.begin(), more.end());
            return all;
        });
    check_repeatable([&]() {
        CHECK(cuda->layer_norm_backward(amp_ref_of(dy.dev, AMP_F16), amp_ref_of(x.dev, AMP_F16), AMP_NONE, 0.0f,
            mean.floats(), invstd.floats(), amp_ref_of(y.dev, AMP_F32), amp_ref_of(a.dev, AMP_F32), amp_ref_of(b.dev, AMP_F32), 0,
            rows, d, &exec)
              == AMP_OK);
        return results({ &y, &a, &b });
    });
    for (const amp_exec* with : { (const amp_exec*)nullptr, (const amp_exec*)&exec })
        check_repeatable([&]() {
            CHECK(cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F16), labels.dev(), Smoothed(0.1f),
                loss.floats(), rows, d, with) == AMP_OK);
            Bytes all = results({ &loss });
            CHECK(cuda->mse_forward(amp_ref_of(x.dev, AMP_F16), amp_ref_of(dy.dev, AMP_F16), loss.floats(), rows * d, with) == AMP_OK);
            const Bytes more = results({ &loss });
            all.insert(all.end(), more.begin(), more.end());
            return all;
        });
    for (const amp_exec* with : { (const amp_exec*)nullptr, (const amp_exec*)&exec })
        for (size_t n : { 1, 2, 9 })      /* few classes, in one tile and in more; biases, of planes and of columns */
            check_repeatable([&]() {
                amp_result r = cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F16), many.dev(),
                    Smoothed(0.1f), loss.floats(), 600 * n, 3, with);
                CHECK(r == AMP_OK);
                r = ampi_cuda_bias_grad(with, "test", amp_ref_of(x.dev, AMP_F16), amp_ref_of(a.dev, AMP_F32), 0, n, 1,
                    rows * d / n);
                CHECK(r == AMP_OK);
                r = ampi_cuda_bias_grad(with, "test", amp_ref_of(x.dev, AMP_F16), amp_ref_of(b.dev, AMP_F32), 0, n * 100,
                    20, 1);
                CHECK(r == AMP_OK);
                return results({ &loss, &a, &b });
            });
    check_repeatable([&]() {
        CHECK(cuda->pool2d_forward(&pool, amp_ref_of(x.dev, AMP_F16), amp_ref_of(y.dev, AMP_F32), nullptr) == AMP_OK);
        return results({ &y });
    });
}

/* A captured chain of layers, replayed: the position of the dropout moves on by itself. */
static void test_graph() {
    const size_t rows = 130, d = 150, n = rows * d;
    Tensor x(AMP_F16, n), y(AMP_F16, n), z(AMP_F32, n), loss(AMP_F32, 1), cell(AMP_F32, 2), host(AMP_F16, n);
    Labels labels(rows, d);
    amp_exec exec = quiet_exec();
    Workspace w(&exec, AMP_CUDA_LOSS_WORKSPACE);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    OK(cudaStreamCreate(&stream));
    exec.stream = stream;
    x.fill(ordinary);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(cuda->dropout_forward(amp_ref_of(x.dev, AMP_F16), amp_ref_of(y.dev, AMP_F16), n, 0.5f, 1, 2,
        (const uint64_t*)cell.dev, n, &exec)
          == AMP_OK);
    CHECK(cuda->layer_norm_forward(amp_ref_of(y.dev, AMP_F16), AMP_NONE, AMP_NONE, 0, nullptr, nullptr,
        amp_ref_of(z.dev, AMP_F32), rows, d, &exec) == AMP_OK);
    CHECK(cuda->softmax_cross_entropy_forward(amp_ref_of(z.dev, AMP_F32), labels.dev(), NULL, loss.floats(),
        rows, d, &exec)
          == AMP_OK);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiateWithFlags(&ready, graph, 0));
    for (uint64_t position : { 0, 1, 7 }) {
        OK(cudaMemcpy(cell.dev, &position, sizeof position, cudaMemcpyHostToDevice));
        OK(cudaGraphLaunch(ready, stream));
        CHECK(amp_dropout_forward(amp_ref_of(x.at(), AMP_F16), amp_ref_of(y.at(), AMP_F16), n, 0.5f, 1, 2 + position * n,
            nullptr) == AMP_OK);
        CHECK(amp_cuda_synchronize(&exec) == AMP_OK);
        CHECK_BITS(y, 0);
        memcpy(z.at(), z.get().data(), z.bytes);
        check_bounded("loss of a graph", loss, cross_entropy(z, labels, 0, rows, d));
    }
    OK(cudaGraphExecDestroy(ready));
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamDestroy(stream));
}

/* What the calls below are made of: sixteen floats, and one place for each argument. */
struct Call {
    const void *x, *y, *z;
    void* out;
    float *f, *g;
    const int32_t* labels;
    const float* scale;
    amp_dtype t;
    const amp_exec* exec;
};
struct Operator {
    const char* name;
    amp_result (*run)(const Call& c);
    const char *x, *y, *z, *out, *f, *labels, *scale;      /* the names of what it takes; NULL = not used */
    int out_optional, f_optional;
};
static const amp_pool2d_shape POOL = { AMP_POOL_MAX, 1, 1, 4, 4, 2, 2, 0, 0, 0, 0, 0, 0, 0 };
static const amp_batch_norm_shape BATCH = { 4, 4, 1, 0, 0, 0, NULL };
static const Operator OPERATORS[] = {
    { "pool2d_forward", [](const Call& c) { return cuda->pool2d_forward(&POOL,
        amp_ref_of(c.x, c.t), amp_ref_of(c.out, c.t), c.exec); },
      "x", 0, 0, "y", 0, 0, 0, 0, 0 },
    { "pool2d_backward",
      [](const Call& c) { return cuda->pool2d_backward(&POOL, amp_ref_of(c.y, c.t),
          amp_ref_of(c.x, c.t), amp_ref_of(c.out, c.t), 0, c.exec); },
      "x", "dy", 0, "dx", 0, 0, 0, 1, 0 },
    { "batch_norm_forward",
      [](const Call& c) {
          return cuda->batch_norm_forward(&BATCH, 1, amp_ref_of(c.x, c.t), amp_ref_of(c.y, AMP_F32),
              amp_ref_of(c.z, AMP_F32), nullptr, nullptr, c.f, c.g, amp_ref_of(c.out, c.t), c.exec);
      },
      "x", 0, 0, "y", "save_mean", 0, 0, 0, 0 },
    { "batch_norm_backward",
      [](const Call& c) {
          return cuda->batch_norm_backward(&BATCH, amp_ref_of(c.y, c.t), amp_ref_of(c.x, c.t),
              AMP_NONE, c.f, c.g, amp_ref_of(c.out, c.t), AMP_NONE, AMP_NONE, 0, c.exec);
      },
      "x", "dy", 0, "dx", "save_mean", 0, 0, 1, 0 },
    { "layer_norm_forward",
      [](const Call& c) {
          return cuda->layer_norm_forward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, AMP_F32), amp_ref_of(c.z, AMP_F32), 0,
              c.f, c.g, amp_ref_of(c.out, c.t), 4, 4, c.exec);
      },
      "x", 0, 0, "y", "save_mean", 0, 0, 0, 1 },
    { "layer_norm_backward",
      [](const Call& c) {
          return cuda->layer_norm_backward(amp_ref_of(c.y, c.t), amp_ref_of(c.x, c.t), AMP_NONE,
              0.0f, c.f, c.g, amp_ref_of(c.out, c.t), AMP_NONE, AMP_NONE, 0, 4, 4, c.exec);
      },
      "x", "dy", 0, "dx", "save_mean", 0, 0, 1, 0 },
    { "group_norm_forward",
      [](const Call& c) {
          static const amp_group_norm_shape s = { 2, 2, 4, 0, 0 };
          return cuda->group_norm_forward(&s, amp_ref_of(c.x, c.t), amp_ref_of(c.y, AMP_F32), amp_ref_of(c.z, AMP_F32),
              c.f, c.g, amp_ref_of(c.out, c.t), c.exec);
      },
      "x", 0, 0, "y", "save_mean", 0, 0, 0, 1 },
    { "group_norm_backward",
      [](const Call& c) {
          static const amp_group_norm_shape s = { 2, 2, 4, 0, 0 };
          return cuda->group_norm_backward(&s, amp_ref_of(c.y, c.t), amp_ref_of(c.x, c.t), AMP_NONE, c.f, c.g,
              amp_ref_of(c.out, c.t), AMP_NONE, AMP_NONE, 0, c.exec);
      },
      "x", "dy", 0, "dx", "save_mean", 0, 0, 1, 0 },
    { "rms_norm_forward",
      [](const Call& c) {
          return cuda->rms_norm_forward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, AMP_F32), 0, c.f, amp_ref_of(c.out, c.t), 4, 4, c.exec);
      },
      "x", 0, 0, "y", "save_invstd", 0, 0, 0, 1 },
    { "rms_norm_backward",
      [](const Call& c) {
          return cuda->rms_norm_backward(amp_ref_of(c.y, c.t), amp_ref_of(c.x, c.t), AMP_NONE,
              0.0f, c.f, amp_ref_of(c.out, c.t), AMP_NONE, 0, 4, 4, c.exec);
      },
      "x", "dy", 0, "dx", "save_invstd", 0, 0, 1, 0 },
    { "activation_forward",
      [](const Call& c) { return cuda->activation_forward(AMP_TANH, amp_ref_of(c.x, c.t),
          amp_ref_of(c.out, c.t), 16, c.exec); }, "x", 0, 0,
      "y", 0, 0, 0, 0, 0 },
    { "activation_backward",
      [](const Call& c) {
          return cuda->activation_backward(AMP_TANH, amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t),
              amp_ref_of(c.out, c.t), 0, 16, c.exec);
      },
      "dy", "saved", 0, "dx", 0, 0, 0, 1, 0 },
    { "leaky_relu_forward", [](const Call& c) { return cuda->leaky_relu_forward(
        amp_ref_of(c.x, c.t), amp_ref_of(c.out, c.t), 16, 0.1f, c.exec); },
      "x", 0, 0, "y", 0, 0, 0, 0, 0 },
    { "leaky_relu_backward", [](const Call& c) { return cuda->leaky_relu_backward(
        amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t), amp_ref_of(c.out, c.t), 0, 16, 0.1f, c.exec); },
      "dy", "saved", 0, "dx", 0, 0, 0, 1, 0 },
    { "softmax_forward", [](const Call& c) { return cuda->softmax_forward(amp_ref_of(c.x, c.t),
        amp_ref_of(c.out, c.t), 4, 4, c.exec); },
      "x", 0, 0, "y", 0, 0, 0, 0, 0 },
    { "softmax_backward",
      [](const Call& c) { return cuda->softmax_backward(amp_ref_of(c.x, c.t),
          amp_ref_of(c.y, c.t), amp_ref_of(c.out, c.t), 0, 4, 4, c.exec); }, "dy", "y",
      0, "dx", 0, 0, 0, 1, 0 },
    { "dropout_forward",
      [](const Call& c) { return cuda->dropout_forward(amp_ref_of(c.x, c.t),
          amp_ref_of(c.out, c.t), 16, 0.5f, 0, 0, nullptr, 0, c.exec); },
      "x", 0, 0, "y", 0, 0, 0, 0, 0 },
    { "add_forward",
      [](const Call& c) { return cuda->add_forward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t),
          amp_ref_of(c.out, c.t), 16, c.exec); }, "a", "b", 0, "y",
      0, 0, 0, 0, 0 },
    { "mul_forward",
      [](const Call& c) { return cuda->mul_forward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t),
          amp_ref_of(c.out, c.t), 16, 1, c.exec); }, "a", "b", 0, "y", 0, 0, 0, 0, 0 },
    { "mul_backward",
      [](const Call& c) { return cuda->mul_backward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t),
          amp_ref_of(c.z, c.t), amp_ref_of(c.out, c.t), AMP_NONE, 0, 16, 4, c.exec); },
      "dy", "a", "b", "da", 0, 0, 0, 1, 0 },
    { "concat_forward",
      [](const Call& c) { return cuda->concat_forward(amp_ref_of(c.x, c.t), 4,
          amp_ref_of(c.out, c.t), 4, 0, 4, c.exec); }, "x", 0, 0, "y",
      0, 0, 0, 0, 0 },
    { "concat_backward",
      [](const Call& c) { return cuda->concat_backward(amp_ref_of(c.x, c.t), 4, 0,
          amp_ref_of(c.out, c.t), 4, 4, 0, c.exec); }, "y", 0, 0,
      "x", 0, 0, 0, 0, 0 },
    { "softmax_cross_entropy_forward",
      [](const Call& c) {
          return cuda->softmax_cross_entropy_forward(amp_ref_of(c.x, c.t), c.labels, NULL, c.f, 4,
              4, c.exec);
      },
      "logits", 0, 0, 0, "loss", "labels", 0, 0, 0 },
    { "softmax_cross_entropy_backward",
      [](const Call& c) {
          return cuda->softmax_cross_entropy_backward(amp_ref_of(c.x, c.t), c.labels, NULL,
              c.scale, 1, amp_ref_of(c.out, c.t), 4, 4, c.exec);
      },
      "logits", 0, 0, "dlogits", 0, "labels", "loss_scale", 1, 0 },
    { "mse_forward", [](const Call& c) { return cuda->mse_forward(amp_ref_of(c.x, c.t),
        amp_ref_of(c.y, c.t), c.f, 16, c.exec); }, "x",
      "target", 0, 0, "loss", 0, 0, 0, 0 },
    { "mse_backward",
      [](const Call& c) { return cuda->mse_backward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t),
          c.scale, 1, amp_ref_of(c.out, c.t), 16, c.exec); }, "x",
      "target", 0, "dx", 0, 0, "loss_scale", 1, 0 },
    { "bce_with_logits_forward",
      [](const Call& c) { return cuda->bce_with_logits_forward(amp_ref_of(c.x, c.t),
          amp_ref_of(c.y, c.t), c.f, 16, c.exec); }, "x",
      "target", 0, 0, "loss", 0, 0, 0, 0 },
    { "bce_with_logits_backward",
      [](const Call& c) {
          return cuda->bce_with_logits_backward(amp_ref_of(c.x, c.t), amp_ref_of(c.y, c.t),
              c.scale, 1, amp_ref_of(c.out, c.t), 16, c.exec);
      },
      "x", "target", 0, "dx", 0, 0, "loss_scale", 1, 0 },
};

/* One argument after the other: NULL, or on the host. */
static void check_argument(const Operator& op, Log& log, const Call& good, const char* name, size_t field,
                           int optional) {
    static float on_host[16];
    const void* const wrong[2] = { nullptr, on_host };
    if (!name) return;
    const std::string place = std::string("amp_cuda_") + op.name + ": " + name;
    for (int host = optional; host < 2; host++) {
        Call bad = good;
        memcpy((char*)&bad + field, &wrong[host], sizeof(void*));
        CHECK_REFUSED(log, AMP_ERR_ARGUMENT, place + (host ? " is host memory" : " is NULL"), op.run(bad));
    }
}
static void test_operator_errors() {
    Tensor x(AMP_F32, 16), y(AMP_F32, 16), out(AMP_F32, 16), f(AMP_F32, 16), g(AMP_F32, 16), scale(AMP_F32, 1);
    Labels labels(4, 4);
    Log log;
    x.fill(ordinary);
    y.fill(ordinary);
    for (const Operator& op : OPERATORS) {
        const Call good = { x.dev, y.dev, y.dev, out.dev, f.floats(), g.floats(), labels.dev(), scale.floats(), AMP_F32,
                            &log.exec };
        scale.fill([](size_t) { return 1.0f; });
        f.fill(ordinary);
        g.fill(ordinary);
        for (amp_dtype t : { AMP_F64, (amp_dtype)17 }) {
            Call bad = good;
            bad.t = t;
            CHECK_REFUSED(log, AMP_ERR_DTYPE, std::string("amp_cuda_") + op.name + ": ", op.run(bad));
        }
        check_argument(op, log, good, op.x, offsetof(Call, x), 0);
        check_argument(op, log, good, op.y, offsetof(Call, y), 0);
        check_argument(op, log, good, op.out, offsetof(Call, out), op.out_optional);
        check_argument(op, log, good, op.f, offsetof(Call, f), op.f_optional);
        check_argument(op, log, good, op.labels, offsetof(Call, labels), 0);
        check_argument(op, log, good, op.scale, offsetof(Call, scale), 1);
        for (const void* over : { op.x ? good.x : nullptr, op.y ? good.y : nullptr }) {
            Call bad = good;
            if (!op.out || !over) continue;
            bad.out = (float*)(uintptr_t)over + 1;
            CHECK_REFUSED(log, AMP_ERR_ARGUMENT, " would be written over ", op.run(bad));
        }
        CHECK_LAUNCH_FAILS(log, std::string("amp_cuda_") + op.name + ": CUDA error", 1, op.run(good));
        const long said = log.count;
        Call plain = good;
        plain.t = AMP_DTYPE_DEFAULT;
        CHECK_MSG(op.run(plain) == AMP_OK && log.count == said, "%s: %s", op.name, log.text.c_str());
    }
    OK(cudaDeviceSynchronize());
}

/* What depends on numbers rather than pointers, with the CPU's result codes. */
static void test_number_errors() {
    Tensor x(AMP_F32, 64), out(AMP_F32, 64), f(AMP_F32, 64);
    Labels labels(8, 8);
    Log log;
    const amp_exec* e = &log.exec;
    const size_t huge = SIZE_MAX / 8;
    amp_pool2d_shape p = POOL;
    amp_batch_norm_shape b = BATCH;
    x.fill(ordinary);
    const auto pool = [&](const amp_pool2d_shape* s) {
        return cuda->pool2d_forward(s, amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32), e);
    };
    const auto norm = [&](const amp_batch_norm_shape* s, int training) {
        return cuda->batch_norm_forward(s, training, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, nullptr,
            nullptr, f.floats(), f.floats() + 32, amp_ref_of(out.dev, AMP_F32), e);
    };
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "the shape is NULL", pool(nullptr));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "the shape is NULL",
                  cuda->pool2d_backward(nullptr, amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32),
                      0, e));
    p.kernel_h = 5;
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "larger than its 4x4 input", pool(&p));
    p.kernel_h = 2; p.pad_w = 2;
    CHECK_REFUSED(log, AMP_ERR_DESC, "padding", pool(&p));
    p.kind = (amp_pool)3;
    CHECK_REFUSED(log, AMP_ERR_DESC, "kind 3", pool(&p));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "the shape is NULL", norm(nullptr, 1));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "running_mean is NULL", norm(&b, 0));
    b.n = 1;
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "more than one value", norm(&b, 1));
    b.n = 4; b.eps = -1.0f;
    CHECK_REFUSED(log, AMP_ERR_DESC, "eps", norm(&b, 1));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "rows of no elements",
                  cuda->layer_norm_forward(amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, 0, nullptr,
                      nullptr, amp_ref_of(out.dev, AMP_F32), 8, 0, e));
    CHECK_REFUSED(log, AMP_ERR_DESC, "eps -1",
                  cuda->layer_norm_forward(amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, -1.0f, nullptr,
                      nullptr, amp_ref_of(out.dev, AMP_F32), 8, 8, e));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "rows of no elements",
                  cuda->layer_norm_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0.0f,
                      f.floats(), f.floats(), amp_ref_of(out.dev, AMP_F32), AMP_NONE, AMP_NONE, 0, 8, 0, e));
    const amp_group_norm_shape groups = { 2, 4, 2, 3, 0 };
    CHECK_REFUSED(log, AMP_ERR_DESC, "amp_cuda_group_norm_forward: 3 groups do not divide 4 channels",
                  cuda->group_norm_forward(&groups, amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, nullptr, nullptr,
                      amp_ref_of(out.dev, AMP_F32), e));
    amp_attention_shape attention = {};
    const amp_ref xr = amp_ref_of(x.dev, AMP_F32), outr = amp_ref_of(out.dev, AMP_F32);
    attention.batch = attention.queries = attention.heads = 1;
    attention.head_size = 257;
    CHECK_REFUSED(log, AMP_ERR_UNSUPPORTED, "amp_cuda_attention_forward: heads of 257 elements",
                  cuda->attention_forward(&attention, xr, xr, xr, outr, nullptr, e));
    attention.head_size = 4;
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "amp_cuda_attention_backward: lse is NULL",
                  cuda->attention_backward(&attention, xr, xr, xr, xr, xr, nullptr, outr, AMP_NONE, AMP_NONE, 0, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "amp_cuda_attention_forward: the shape is NULL",
                  cuda->attention_forward(nullptr, xr, xr, xr, outr, nullptr, e));
    amp_rope_shape rope = { 1, 2, 1, 3, 0, 0, 0, 0 };
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "amp_cuda_rope_forward: head_size is 3", cuda->rope_forward(&rope, xr, outr, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "amp_cuda_embedding_forward: tokens is NULL",
                  cuda->embedding_forward(nullptr, xr, outr, 2, 2, 2, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "amp_cuda_embedding_backward: dy is NULL",
                  cuda->embedding_backward(AMP_NONE, labels.dev(), outr, 0, 2, 2, 2, e));
    CHECK_REFUSED(log, AMP_ERR_DESC, "amp_cuda_rms_norm_forward: eps -1",
                  cuda->rms_norm_forward(amp_ref_of(x.dev, AMP_F32), AMP_NONE, -1.0f, nullptr, amp_ref_of(out.dev, AMP_F32), 8, 8, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "amp_cuda_rms_norm_backward: save_invstd is NULL",
                  cuda->rms_norm_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0.0f, nullptr,
                      amp_ref_of(out.dev, AMP_F32), AMP_NONE, 0, 8, 8, e));
    CHECK_REFUSED(log, AMP_ERR_DESC, "99 is not",
                  cuda->activation_forward((amp_activation)99, amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32),
                      64, e));
    CHECK_REFUSED(log, AMP_ERR_DESC, " is not an amp_activation",
                  cuda->activation_backward((amp_activation)AMP_ACTIVATION_COUNT, amp_ref_of(x.dev, AMP_F32),
                      amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32), 0, 64, e));
    for (float wrong : { -0.1f, 1.0f, (float)NAN }) {
        CHECK_REFUSED(log, AMP_ERR_DESC, "probability",
                      cuda->dropout_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32), 64, wrong, 0, 0,
                          nullptr, 0, e));
        CHECK_REFUSED(log, AMP_ERR_DESC, "smoothing",
                      cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F32), labels.dev(), Smoothed(wrong),
                          f.floats(), 8, 8, e));
    }
    for (float wrong : { (float)INFINITY, (float)NAN }) {
        CHECK_REFUSED(log, AMP_ERR_DESC, "eps",
                      cuda->layer_norm_forward(amp_ref_of(x.dev, AMP_F32), AMP_NONE, AMP_NONE, wrong, nullptr,
                          nullptr, amp_ref_of(out.dev, AMP_F32), 8, 8, e));
        CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "weight",
                      cuda->softmax_cross_entropy_backward(amp_ref_of(x.dev, AMP_F32), labels.dev(), NULL,
                          nullptr, wrong, amp_ref_of(out.dev, AMP_F32), 8, 8, e));
        CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "weight",
                      cuda->mse_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), nullptr, wrong,
                          amp_ref_of(out.dev, AMP_F32), 64, e));
        CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "weight",
                      cuda->bce_with_logits_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), nullptr,
                          wrong, amp_ref_of(out.dev, AMP_F32), 64, e));
    }
    float host = 1;
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "dgamma is host memory",
                  cuda->layer_norm_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0.0f,
                      f.floats(), f.floats(), amp_ref_of(out.dev, AMP_F32), amp_f32(&host), AMP_NONE, 0, 0, 1,
                      e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "dbeta is host memory",
                  cuda->layer_norm_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0.0f,
                      f.floats(), f.floats(), amp_ref_of(out.dev, AMP_F32), AMP_NONE, amp_f32(&host), 0, 0, 1,
                      e));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "do not fit",
                  cuda->concat_forward(amp_ref_of(x.dev, AMP_F32), 4, amp_ref_of(out.dev, AMP_F32), 8, 5, 8, e));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "do not fit",
                  cuda->concat_backward(amp_ref_of(x.dev, AMP_F32), 8, 0, amp_ref_of(out.dev, AMP_F32), 9, 7, 0, e));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "rows of",
                  cuda->softmax_cross_entropy_forward(amp_ref_of(x.dev, AMP_F32), labels.dev(), NULL,
                      f.floats(), 0, 8, e));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "not defined",
                  cuda->mse_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), f.floats(), 0, e));
    CHECK_REFUSED(log, AMP_ERR_SHAPE, "not defined",
                  cuda->bce_with_logits_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), nullptr, 1,
                      amp_ref_of(out.dev, AMP_F32), 0, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "more elements",
                  cuda->activation_forward(AMP_RELU, amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32), huge, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "more elements",
                  cuda->softmax_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(out.dev, AMP_F32), huge, huge, e));
    for (unsigned char byte : out.get()) CHECK(byte == POISON);
}
/* No rows: the sums are 0, or stay, and nothing else is written. */
static void test_layer_norm_of_nothing() {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        Tensor dgamma(AMP_F32, 300), dbeta(AMP_F32, 300), out(AMP_F32, 8);
        dgamma.fill([](size_t) { return -0.0f; });
        dbeta.fill([](size_t) { return 3.0f; });
        out.poison();
        CHECK(cuda->layer_norm_forward(AMP_NONE, AMP_NONE, AMP_NONE, 0, out.floats(),
            out.floats(), amp_ref_of(out.dev, AMP_F32), 0, 300, nullptr) == AMP_OK);
        CHECK(cuda->layer_norm_backward(AMP_NONE, AMP_NONE, AMP_NONE, 0.0f, nullptr, nullptr,
            amp_ref_of(out.dev, AMP_F32), amp_ref_of(dgamma.dev, AMP_F32), amp_ref_of(dbeta.dev, AMP_F32), accumulate, 0, 300, nullptr) == AMP_OK);
        OK(cudaDeviceSynchronize());
        for (double v : dgamma.values()) CHECK(v == 0 && std::signbit(v) == (accumulate != 0));
        for (double v : dbeta.values()) CHECK(v == (accumulate ? 3.0 : 0.0));
        for (unsigned char byte : out.get()) CHECK(byte == POISON);
    }
}
/* The second launch of a call fails. */
static void test_second_launch() {
    Tensor x(AMP_F32, 20000), y(AMP_F32, 20000), loss(AMP_F32, 1), g(AMP_F32, 100), rows(AMP_F32, 200);
    amp_exec exec = quiet_exec();
    Workspace w(&exec, cuda->layer_norm_workspace(200, 100) + AMP_CUDA_LOSS_WORKSPACE);
    Log log;
    x.fill(ordinary);
    rows.fill(ordinary);
    exec.logger = &log.logger;
    CHECK_LAUNCH_FAILS(log, "amp_cuda_mse_forward: CUDA error", 2,
                       cuda->mse_forward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), loss.floats(), x.n, &exec));
    CHECK_LAUNCH_FAILS(log, "amp_cuda_layer_norm_backward: CUDA error", 2,
                       cuda->layer_norm_backward(amp_ref_of(x.dev, AMP_F32), amp_ref_of(x.dev, AMP_F32), AMP_NONE, 0.0f,
                           rows.floats(), rows.floats(), amp_ref_of(y.dev, AMP_F32), amp_ref_of(g.dev, AMP_F32), AMP_NONE,
                           0, 200, 100, &exec));
    OK(cudaDeviceSynchronize());
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_activation_values);
    TEST(test_activation_types);
    TEST(test_activation_in_place);
    TEST(test_grid_stride);
    TEST(test_add);
    TEST(test_leaky_relu);
    TEST(test_mul);
    TEST(test_dropout);
    TEST(test_dropout_position);
    TEST(test_concat);
    TEST(test_division);
    TEST(test_pool);
    TEST(test_pool_side_by_side);
    TEST(test_pool_odd);
    TEST(test_pool_below_zero);
    TEST(test_pool_first);
    TEST(test_norm_sizes);
    TEST(test_norm_turns);
    TEST(test_norm_types);
    TEST(test_norm_shifted);
    TEST(test_norm_running);
    TEST(test_norm_special);
    TEST(test_layer_norm);
    TEST(test_layer_norm_columns);
    TEST(test_rms_norm);
    TEST(test_group_norm);
    TEST(test_layer_norm_of_nothing);
    TEST(test_embedding);
    TEST(test_transpose);
    TEST(test_rope);
    TEST(test_attention);
    TEST(test_attention_fused);
    TEST(test_attention_nan);
    TEST(test_softmax);
    TEST(test_row_turns);
    TEST(test_softmax_special);
    TEST(test_cross_entropy);
    TEST(test_few_classes);
    TEST(test_few_classes_turns);
    TEST(test_wrong_labels);
    TEST(test_accumulate_dx);
    TEST(test_layer_norm_without_statistics);
    TEST(test_cross_entropy_rows_apart);
    TEST(test_cross_entropy_of_maps);
    TEST(test_maps_turns);
    TEST(test_labels_of_maps);
    TEST(test_mean_losses);
    TEST(test_mean_loss_turns);
    TEST(test_mean_loss_slopes);
    TEST(test_loss_special);
    TEST(test_bias_planes);
    TEST(test_bias_turns);
    TEST(test_bias_columns);
    TEST(test_orders);
    TEST(test_graph);
    TEST(test_operator_errors);
    TEST(test_number_errors);
    TEST(test_second_launch);
    TEST_END();
}
