/* test_ops.c - pooling, norms, activations, softmax, losses and the other operators against plain
   references in double. The whole set runs once per instruction set, and every result goes into a hash: all
   must be equal. Bounds. u = 2^-24 is the rounding of one FP32 operation. A result may differ from the
   reference by `error`, a bound for the FP32 arithmetic that each test states, plus one rounding to its
   type: half a unit in the last place. */
#include "helpers.h"
#include <fenv.h>
#include <math.h>

static const double u = 1.0 / 16777216.0;
static const size_t sizes[] = { 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 40, 1023, 1024, 1025, 4999 };
enum { SIZES = sizeof sizes / sizeof sizes[0] };
static unsigned long long hash;

/* --- buffers with guards ------------------------------------------------------------------- */

enum { GUARD = 64 };
typedef struct buffer { unsigned char* block; void* p; amp_dtype t; size_t n; } buffer;

static buffer make(amp_dtype t, size_t n) {
    buffer b;
    b.t = t; b.n = n;
    b.block = (unsigned char*)malloc(n * amp_dtype_size(t) + 2 * GUARD);
    memset(b.block, 0xA5, n * amp_dtype_size(t) + 2 * GUARD);
    b.p = b.block + GUARD;
    return b;
}
static double get(const buffer* b, size_t i) { return value_at(b->p, b->t, i); }
static void put(buffer* b, size_t i, double v) { put_value(b->p, b->t, i, v); }
/* Random numbers of about a normal distribution, scaled. */
static double random_normal(void) {
    double s = 0;
    int i;
    for (i = 0; i < 6; i++) s += (double)test_uniform();
    return s * 0.7071;
}
static buffer random_buffer(amp_dtype t, size_t n, double scale) {
    buffer b = make(t, n);
    size_t i;
    for (i = 0; i < n; i++) put(&b, i, scale * random_normal());
    return b;
}
/* Ends a buffer's life: the guards must be whole, and the bits go into the hash. */
static void finish(buffer* b) {
    size_t bytes = b->n * amp_dtype_size(b->t), i, bad = 0;
    unsigned long long word;
    for (i = 0; i < GUARD; i++) bad += b->block[i] != 0xA5 || b->block[GUARD + bytes + i] != 0xA5;
    CHECK_MSG(bad == 0, "%lu guard bytes overwritten around %lu elements of %s", (unsigned long)bad,
              (unsigned long)b->n, amp_dtype_name(b->t));
    for (i = 0; i < bytes; i += sizeof word) {          /* the guard behind the last bytes fills the word */
        memcpy(&word, b->block + GUARD + i, sizeof word);
        hash = (hash ^ word ^ word >> 32) * 1099511628211ull;
    }
    free(b->block);
}
static double rounding(amp_dtype t, double v) {
    double unit = t == AMP_F16 ? ldexp(1, -11) : t == AMP_BF16 ? ldexp(1, -8) : u;
    double least = t == AMP_F16 ? ldexp(1, -25) : t == AMP_BF16 ? ldexp(1, -134) : ldexp(1, -150);
    return fabs(v) * unit > least ? fabs(v) * unit : least;
}
static int near_enough(const buffer* b, size_t i, double want, double error) {
    return fabs(get(b, i) - want) <= error * (1 + 1e-6) + rounding(b->t, want) * (1 + ldexp(1, -7));
}
#define CLOSE(b, i, want, error)                                                                             \
    CHECK_MSG(near_enough(&(b), i, want, error), "%s: element %lu of %lu %s is %.9g, not %.9g +- %.3g", what,  \
              (unsigned long)(i), (unsigned long)(b).n, amp_dtype_name((b).t), get(&(b), i), want, error)

/* --- activations --------------------------------------------------------------------------- */

static double phi(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }
static double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
static double gelu_z(double x) { return 1.5957691216057307118 * (x + 0.044715 * x * x * x); }
static double activate(int f, double x) {
    switch ((amp_activation)f) {
        case AMP_RELU: return x > 0 ? x : 0;
        case AMP_GELU: return x * phi(x);
        case AMP_GELU_TANH: return x * sigmoid(gelu_z(x));
        case AMP_TANH: return tanh(x);
        case AMP_SIGMOID: return sigmoid(x);
        case AMP_SILU: return x * sigmoid(x);
        case AMP_HARD_SWISH: return x * fmin(fmax(x + 3, 0), 6) / 6;
    }
    return NAN;
}
/* The derivative at x, by formula. */
static double slope(int f, double x) {
    double s;
    switch ((amp_activation)f) {
        case AMP_RELU: return x > 0 ? 1 : 0;
        case AMP_GELU: return phi(x) + x * exp(-x * x / 2) * 0.39894228040143267794;
        case AMP_GELU_TANH:
            s = sigmoid(gelu_z(x));
            return s + x * s * sigmoid(-gelu_z(x)) * 1.5957691216057307118 * (1 + 3 * 0.044715 * x * x);
        case AMP_TANH: return 1 - tanh(x) * tanh(x);
        case AMP_SIGMOID: return sigmoid(x) * sigmoid(-x);
        case AMP_SILU: return sigmoid(x) + x * sigmoid(x) * sigmoid(-x);
        case AMP_HARD_SWISH: return fabs(x) < 3 ? x / 3 + 0.5 : x > 0;
    }
    return NAN;
}
/* The functions are good to 4 ulp (an ulp is at most 2u of the value), and flush what is below 2^-126 in a
   factor. The argument z of the tanh form carries 3 roundings, which exp turns into 3 z u. */
static double activation_error(int f, double x) {
    double z = f == AMP_GELU_TANH ? 3 * fabs(gelu_z(x)) : 0;
    return f == AMP_RELU ? 0 : (8 + z) * u * fabs(activate(f, x)) + (1 + fabs(x)) * ldexp(1, -125);
}

static void test_activation_forward(void) {
    const char* what = "activation";
    int f, a, b;
    size_t s, i;
    for (f = AMP_RELU; f < AMP_ACTIVATION_COUNT; f++)
        for (a = 0; a < 3; a++)
            for (b = 0; b < 3; b++)
                for (s = 0; s < SIZES; s++) {
                    buffer x = random_buffer(TYPES[a], sizes[s], s % 2 ? 2 : 8), y = make(TYPES[b], sizes[s]);
                    CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, x.t),
                        amp_ref_of(y.p, y.t), x.n, NULL) == AMP_OK);
                    for (i = 0; i < x.n; i++)
                        CLOSE(y, i, activate(f, get(&x, i)), activation_error(f, get(&x, i)));
                    if (a == b) {    /* in place */
                        CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, x.t),
                            amp_ref_of(x.p, x.t), x.n, NULL)
                              == AMP_OK);
                        CHECK(memcmp(x.p, y.p, x.n * amp_dtype_size(x.t)) == 0);
                    }
                    finish(&x); finish(&y);
                }
}

static void test_activation_backward(void) {
    const char* what = "activation backward";
    int f, a, b;
    size_t s, i;
    for (f = AMP_RELU; f < AMP_ACTIVATION_COUNT; f++)
        for (a = 0; a < 3; a++)
            for (b = 0; b < 3; b++)
                for (s = 0; s < SIZES; s++) {
                    int from_input = activation_reads_input(f);
                    buffer x = random_buffer(TYPES[a], sizes[s], s % 2 ? 2 : 8), y = make(AMP_F32, sizes[s]);
                    buffer dy = random_buffer(TYPES[b], sizes[s], 3), dx = make(TYPES[b], sizes[s]);
                    buffer* saved = from_input ? &x : &y;
                    amp_activation_forward((amp_activation)f, amp_ref_of(x.p, x.t),
                        amp_ref_of(y.p, y.t), x.n, NULL);
                    CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, dy.t),
                        amp_ref_of(saved->p, saved->t), amp_ref_of(dx.p, dx.t), 0, dx.n, NULL)
                          == AMP_OK);
                    /* A slope is a sum of two terms below 1.2, each good to 4 ulp; a saved output brings
                       1.5 ulp more. */
                    for (i = 0; i < x.n; i++)
                        CLOSE(dx, i, get(&dy, i) * slope(f, get(&x, i)),
                              f == AMP_RELU ? 0 : 16 * u * fabs(get(&dy, i)));
                    CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, dy.t),
                        amp_ref_of(saved->p, saved->t), amp_ref_of(dy.p, dy.t), 0, dx.n, NULL)
                          == AMP_OK);
                    CHECK(memcmp(dx.p, dy.p, dx.n * amp_dtype_size(dx.t)) == 0);
                    finish(&x); finish(&y); finish(&dy); finish(&dx);
                }
}

/* PyTorch's slope, darknet's, those of ReLU and of a line; dx from x, and from y. */
static void test_leaky_relu(void) {
    static const float slopes[] = { 0.01f, 0.1f, 0.0f, 1.0f, 3.0f };
    const char* what = "leaky relu";
    int k, a, b;
    size_t s, i;
    for (k = 0; k < COUNT(slopes); k++)
        for (a = 0; a < 3; a++)
            for (b = 0; b < 3; b++)
                for (s = 0; s < SIZES; s++) {
                    const double p = (double)slopes[k];
                    buffer x = random_buffer(TYPES[a], sizes[s], 3), y = make(TYPES[b], sizes[s]);
                    buffer dy = random_buffer(TYPES[b], sizes[s], 3), dx = make(TYPES[a], sizes[s]);
                    CHECK(amp_leaky_relu_forward(amp_ref_of(x.p, x.t), amp_ref_of(y.p, y.t), x.n,
                        slopes[k], NULL) == AMP_OK);
                    CHECK(amp_leaky_relu_backward(amp_ref_of(dy.p, dy.t),
                        k % 2 ? amp_ref_of(x.p, x.t) : amp_ref_of(y.p, y.t),
                        amp_ref_of(dx.p, dx.t), 0, x.n, slopes[k], NULL) == AMP_OK);
                    for (i = 0; i < x.n; i++) {
                        const double v = get(&x, i), g = get(&dy, i), d = v > 0 ? 1 : p;
                        CLOSE(y, i, d * v, u * fabs(d * v));
                        CLOSE(dx, i, d * g, u * fabs(d * g));
                    }
                    if (a == b) {    /* in place */
                        amp_leaky_relu_backward(amp_ref_of(dy.p, dy.t), amp_ref_of(x.p, x.t),
                            amp_ref_of(dy.p, dy.t), 0, x.n, slopes[k], NULL);
                        CHECK(memcmp(dy.p, dx.p, x.n * amp_dtype_size(x.t)) == 0);
                        amp_leaky_relu_forward(amp_ref_of(x.p, x.t), amp_ref_of(x.p, x.t), x.n,
                            slopes[k], NULL);
                        CHECK(memcmp(x.p, y.p, x.n * amp_dtype_size(x.t)) == 0);
                    }
                    finish(&x); finish(&y); finish(&dy); finish(&dx);
                }
}

/* A user's function, and what it was called with. It writes all of y before it reads: y may be neither x nor dy. */
typedef struct mapped { size_t n, calls; } mapped;
static void quadratic(const float* dy, const float* x, float* y, size_t n, void* user_data) {
    mapped* told = (mapped*)user_data;
    size_t i;
    told->n += n;
    told->calls++;
    CHECK(n >= 1 && n <= 1024 && y != x && y != dy);
    for (i = 0; i < n; i++) y[i] = 1e30f;
    for (i = 0; i < n; i++) y[i] = dy ? dy[i] * (2.0f * x[i] + 1.0f) : x[i] * x[i] + x[i];
}
static void test_map(void) {
    const char* what = "map";
    const amp_logger logger = { listen, NULL };
    amp_exec e;
    int a, b, c;
    size_t s, i;
    float v[2] = { 1, 2 };
    mapped told;
    memset(&e, 0, sizeof e);
    e.logger = &logger;
    for (a = 0; a < 3; a++) for (b = 0; b < 3; b++) for (c = 0; c < 3; c++) for (s = 0; s < SIZES; s++) {
        buffer x = random_buffer(TYPES[a], sizes[s], 3), y = make(TYPES[b], sizes[s]);
        buffer dy = random_buffer(TYPES[c], sizes[s], 3), dx = make(TYPES[b], sizes[s]);
        const amp_ref xr = amp_ref_of(x.p, x.t), yr = amp_ref_of(y.p, y.t), dyr = amp_ref_of(dy.p, dy.t);
        memset(&told, 0, sizeof told);
        CHECK(amp_map(quadratic, &told, AMP_NONE, xr, yr, x.n, NULL) == AMP_OK);
        CHECK(told.n == x.n && told.calls == (x.n + 1023) / 1024);
        CHECK(amp_map(quadratic, &told, dyr, xr, amp_ref_of(dx.p, dx.t), x.n, NULL) == AMP_OK);
        for (i = 0; i < x.n; i++) {
            const double p = get(&x, i), g = get(&dy, i);
            CLOSE(y, i, p * p + p, 2 * u * (p * p + fabs(p)));
            CLOSE(dx, i, g * (2 * p + 1), 2 * u * fabs(g) * (2 * fabs(p) + 1));
        }
        if (b == c) {    /* in place of dy, then of x */
            CHECK(amp_map(quadratic, &told, dyr, xr, dyr, x.n, NULL) == AMP_OK);
            CHECK(memcmp(dy.p, dx.p, x.n * amp_dtype_size(dy.t)) == 0);
        }
        if (a == b) {
            CHECK(amp_map(quadratic, &told, AMP_NONE, xr, xr, x.n, NULL) == AMP_OK);
            CHECK(memcmp(x.p, y.p, x.n * amp_dtype_size(x.t)) == 0);
        }
        finish(&x); finish(&y); finish(&dy); finish(&dx);
    }
    memset(&told, 0, sizeof told);      /* a gradient that is not wanted, and nothing to do */
    CHECK(amp_map(quadratic, &told, amp_f32(v), amp_f32(v), AMP_NONE, 2, &e) == AMP_OK);
    CHECK(amp_map(quadratic, &told, AMP_NONE, AMP_NONE, AMP_NONE, 0, &e) == AMP_OK && told.calls == 0);
    check_refused(amp_map(NULL, NULL, AMP_NONE, amp_f32(v), amp_f32(v), 2, &e), AMP_ERR_ARGUMENT,
        "map: the function is NULL");
    check_refused(amp_map(quadratic, &told, AMP_NONE, amp_f32(v), AMP_NONE, 2, &e), AMP_ERR_ARGUMENT,
        "map: y is NULL, but it has 1 x 2 elements");
    CHECK(amp_map(quadratic, &told, AMP_NONE, amp_f32(v), amp_f32(v + 1), 2, &e) == AMP_ERR_ARGUMENT);
    CHECK(amp_map(quadratic, &told, AMP_NONE, amp_ref_of(v, AMP_U8), amp_f32(v), 2, &e) == AMP_ERR_DTYPE
          && told.calls == 0 && v[0] == 1.0f);
    v[0] = 3e38f;                       /* it overflows, with and without a flag; a NaN is amp's */
    feclearexcept(FE_ALL_EXCEPT);
    e.mask_exceptions = 1;
    CHECK(amp_map(quadratic, &told, AMP_NONE, amp_f32(v), amp_f32(v), 1, &e) == AMP_OK);
    CHECK(to_bits(v[0]) == 0x7f800000u && !fetestexcept(FE_OVERFLOW));
    v[0] = -from_bits(0x7f812345u);
    CHECK(amp_map(quadratic, &told, AMP_NONE, amp_f32(v), amp_f32(v), 1, &e) == AMP_OK);
    CHECK(to_bits(v[0]) == 0x7fc00000u);
}

/* The references themselves: slope against the central difference of activate. Its error is h^2/6 * f''' +
   1e-16/h. */
static void test_slopes_of_reference(void) {
    int f, i;
    for (f = AMP_GELU; f < AMP_ACTIVATION_COUNT; f++)
        for (i = -60; i <= 60; i++) {
            double x = i / 10.0, h = 1e-5, d;
            if (f == AMP_HARD_SWISH && abs(i) == 30) continue;   /* a kink */
            d = (activate(f, x + h) - activate(f, x - h)) / (2 * h);
            CHECK_MSG(fabs(d - slope(f, x)) < 1e-9, "slope %d at %g: %.12g, difference %.12g", f, x,
                      slope(f, x), d);
        }
}

/* Largest error in ulp of an FP32 activation over every `step`th float; ulp(v) = 2^(exponent - 23). */
static void sweep(int f, double low, double high, unsigned step, double limit) {
    enum { N = 4096 };
    static float x[N], y[N];
    double worst = 0, at = 0;
    unsigned long long bits = 1;
    while (bits < 0x100000000ull) {
        size_t n = 0, i;
        for (; n < N && bits < 0x100000000ull; bits += step) {
            unsigned b = (unsigned)bits;
            memcpy(&x[n], &b, 4);
            n += (double)x[n] >= low && (double)x[n] <= high;
        }
        amp_activation_forward((amp_activation)f, amp_f32(x), amp_f32(y), n, NULL);
        for (i = 0; i < n; i++) {
            int e;
            double want = activate(f, (double)x[i]), error;
            frexp(want, &e);
            error = fabs((double)y[i] - want) / ldexp(1, (e < -125 ? -125 : e) - 24);
            if (error > worst) { worst = error; at = (double)x[i]; }
        }
    }
    CHECK_MSG(worst <= limit, "activation %d: %.3f ulp at %.9g, more than %.3f", f, worst, at, limit);
}
static void test_accuracy(void) {
    sweep(AMP_TANH, -1e30, 1e30, 20011, 1.34);
    sweep(AMP_SIGMOID, -87.3, 1e30, 20011, 2.41);
    sweep(AMP_GELU, -12.8, 1e30, 20011, 4.2); /* 3.6 of the distribution function, and the product */
    sweep(AMP_GELU, 1e-4, 0.01, 101, 4.2);    /* where the largest errors are rare */
    sweep(AMP_RELU, -1e30, 1e30, 20011, 0);
    sweep(AMP_SILU, -80, 1e30, 20011, 3.2);   /* 2.41 of the logistic function, and the product */
    sweep(AMP_HARD_SWISH, -1e30, 1e30, 20011, 2.5);   /* four roundings, one of the factor 1/6 */
}

/* --- special values ------------------------------------------------------------------------ */

static int is_nan(float v) { return amp_is_nan(amp_f32(&v)); }

static void test_specials(void) {
    const unsigned bits[8] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u,
                               0u,          0x80000000u, 1u,          0xff7fffffu };
    float x[8], y[8], d[8], one[8];
    int f, i;
    memcpy(x, bits, sizeof x);
    for (i = 0; i < 8; i++) one[i] = 1;
    for (f = AMP_RELU; f < AMP_ACTIVATION_COUNT; f++) {
        amp_activation_forward((amp_activation)f, amp_f32(x), amp_f32(y), 8, NULL);
        amp_activation_backward((amp_activation)f, amp_f32(one), amp_f32(x), amp_f32(d), 0, 8,
            NULL);
        CHECK(is_nan(y[2]) && is_nan(y[3]) && (f == AMP_RELU || (is_nan(d[2]) && is_nan(d[3]))));
        CHECK(f == AMP_TANH || f == AMP_SIGMOID ? y[0] == 1.0f : y[0] == x[0]);
        CHECK(f == AMP_SIGMOID ? y[4] == 0.5f && y[5] == 0.5f : y[4] == 0.0f && y[5] == 0.0f);
        if (f == AMP_RELU || activation_reads_input(f)) CHECK(d[0] == 1.0f && d[1] == 0.0f && d[7] == 0.0f);
    }
    amp_activation_forward(AMP_RELU, amp_f32(x), amp_f32(y), 8, NULL);
    CHECK(y[1] == 0.0f && y[6] == x[6] && y[7] == 0.0f);
    amp_activation_backward(AMP_RELU, amp_f32(x), amp_f32(one), amp_f32(d), 0, 8, NULL);
    memcpy(y, x, sizeof x);
    memcpy(&y[3], &bits[2], 4);                     /* a NaN becomes the one quiet NaN */
    CHECK(memcmp(d, y, sizeof y) == 0);             /* what else passes, passes bit by bit */
    for (i = 0; i < 8; i++) one[i] = 0;
    amp_activation_backward(AMP_RELU, amp_f32(x), amp_f32(one), amp_f32(d), 0, 8, NULL);
    CHECK(memcmp(d, one, sizeof one) == 0);         /* what does not, is +0, an infinity or a NaN too */
    amp_leaky_relu_forward(amp_f32(x), amp_f32(y), 8, 0.5f, NULL);
    for (i = 0; i < 8; i++) one[i] = 1;
    amp_leaky_relu_backward(amp_f32(one), amp_f32(x), amp_f32(d), 0, 8, 0.5f, NULL);
    CHECK(y[0] == x[0] && y[1] == x[1] && is_nan(y[2]) && is_nan(y[3]) && signbit(y[5]) && y[7] == x[7] / 2);
    for (i = 0; i < 8; i++) CHECK(d[i] == (i == 0 || i == 6 ? 1.0f : 0.5f));  /* PyTorch's for a NaN, too */
    amp_softmax_forward(amp_f32(x), amp_f32(y), 1, 8, NULL);
    for (i = 0; i < 8; i++) CHECK(is_nan(y[i]));
    for (i = 0; i < 8; i++) x[i] = i == 3 ? 1.0f : -1.0f / y[7] * 0.0f;
    memcpy(&x[0], &bits[1], 4); memcpy(&x[1], &bits[1], 4);
    x[2] = 0; x[3] = 1;
    amp_softmax_forward(amp_f32(x), amp_f32(y), 1, 4, NULL);
    CHECK(y[0] == 0.0f && y[1] == 0.0f && fabsf(y[3] - 0.7310586f) < 1e-6f);
    amp_softmax_forward(amp_f32(x), amp_f32(y), 1, 2, NULL);
    CHECK(is_nan(y[0]) && is_nan(y[1]));            /* a row of -inf only */
}

/* --- infinities, NaNs, subnormal numbers: the same on every instruction set ------------------------------ */

/* Every seventh element is special; NaNs are signalling ones. Pointers lie one element off. */
static buffer special_buffer(amp_dtype t, size_t n, size_t turn) {
    static const double values[] = { 0.0, -0.0, 1e-40, -1e-40, 6e-8, -3e-6, 65504, -65504, 3e38, -3e38, 12.9, -12.9, 90, -90 };
    const unsigned last = t == AMP_F32 ? 0x7fa00001u : t == AMP_F16 ? 0x7d01u : 0x7fa1u;
    const unsigned inf = t == AMP_F32 ? 0x7f800000u : t == AMP_F16 ? 0x7c00u : 0x7f80u;
    const unsigned sign = t == AMP_F32 ? 0x80000000u : 0x8000u;
    buffer b = random_buffer(t, n + 1, 2);
    size_t i;
    b.p = (char*)b.p + amp_dtype_size(t);
    for (i = turn % 7; i < n; i += 7) {
        size_t k = (i / 7 + turn) % 18;
        unsigned bits = (k & 2 ? last : inf) | (k & 1 ? sign : 0);
        if (k < 14) put(&b, i, values[k]);
        else if (turn < 4) put(&b, i, 0.5);            /* finite ones only */
        else if (t == AMP_F32) memcpy((float*)b.p + i, &bits, 4);
        else ((unsigned short*)b.p)[i] = (unsigned short)bits;
    }
    return b;
}
static int same(const buffer* a, const buffer* b) {
    size_t i;
    for (i = 0; i + 1 < a->n; i++) {
        float x = (float)get(a, i), y = (float)get(b, i);
        if (memcmp(&x, &y, 4) != 0 && !(is_nan(x) && is_nan(y))) return 0;
    }
    return 1;
}
static void check_special_activations(amp_dtype t, size_t n, size_t turn) {
    int f;
    for (f = AMP_RELU; f < AMP_ACTIVATION_COUNT; f++) {
        buffer x = special_buffer(t, n, turn), dy = special_buffer(t, n, turn + 3), y = special_buffer(t, n, 0);
        CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t), amp_ref_of(y.p, t), n,
            NULL) == AMP_OK);
        CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, t), amp_ref_of(x.p, t),
            amp_ref_of(dy.p, t), 0, n, NULL) == AMP_OK);
        CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t), amp_ref_of(x.p, t), n,
            NULL) == AMP_OK);
        CHECK(same(&x, &y));
        finish(&x); finish(&dy); finish(&y);
    }
}
static void check_special_norms(amp_dtype t, size_t n, size_t turn) {
    buffer x = special_buffer(t, 2 * n, turn), dy = special_buffer(t, 2 * n, turn + 3), y = special_buffer(t, 2 * n, 0);
    buffer dx = special_buffer(t, 2 * n, 0), g = random_buffer(AMP_F32, 6 * n, 1);
    float* stats = (float*)g.p;
    amp_batch_norm_shape s;
    memset(&s, 0, sizeof s);
    s.n = 2; s.channels = 1; s.spatial = (int)n;
    CHECK(amp_softmax_forward(amp_ref_of(x.p, t), amp_ref_of(y.p, t), 2, n, NULL) == AMP_OK);
    CHECK(amp_softmax_backward(amp_ref_of(dy.p, t), amp_ref_of(y.p, t), amp_ref_of(dx.p, t), 0, 2,
        n, NULL) == AMP_OK);
    finish(&dx);
    dx = special_buffer(t, 2 * n, 0);
    CHECK(amp_batch_norm_forward(&s, 1, amp_ref_of(x.p, t), AMP_NONE, AMP_NONE, NULL, NULL, stats,
        stats + 1, amp_ref_of(y.p, t), NULL) == AMP_OK);
    CHECK(amp_batch_norm_backward(&s, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), AMP_NONE, stats,
        stats + 1, amp_ref_of(dx.p, t), amp_f32(stats + 2), amp_f32(stats + 3), 0, NULL) == AMP_OK);
    finish(&y); finish(&dx);
    dx = special_buffer(t, 2 * n, 0);
    s.frozen = 1;
    CHECK(amp_batch_norm_backward(&s, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), AMP_NONE, stats,
        stats + 1, amp_ref_of(dx.p, t), AMP_NONE, AMP_NONE, 0, NULL) == AMP_OK);
    finish(&dx);
    y = special_buffer(t, 2 * n, 0); dx = special_buffer(t, 2 * n, 0);
    CHECK(amp_layer_norm_forward(amp_ref_of(x.p, t), amp_f32(stats), amp_f32(stats + n), 0,
        stats + 2 * n, stats + 2 * n + 2, amp_ref_of(y.p, t), 2, n, NULL) == AMP_OK);
    CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_f32(stats), 0.0f,
        stats + 2 * n, stats + 2 * n + 2, amp_ref_of(dx.p, t), amp_f32(stats + 4 * n),
        amp_f32(stats + 5 * n), 1, 2, n, NULL) == AMP_OK);
    CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), AMP_NONE, 0.0f,
        stats + 2 * n, stats + 2 * n + 2, amp_ref_of(dx.p, t), amp_f32(stats + 4 * n),
        amp_f32(stats + 5 * n), 0, 2, n, NULL) == AMP_OK);
    finish(&y); finish(&dx);
    y = special_buffer(t, 2 * n, 0); dx = special_buffer(t, 2 * n, 0);
    {
        const amp_group_norm_shape group = { 1, 2, (int)n, 1, 0.0f };
        CHECK(amp_group_norm_forward(&group, amp_ref_of(x.p, t), amp_f32(stats), amp_f32(stats + n), stats + 2 * n,
            stats + 2 * n + 2, amp_ref_of(y.p, t), NULL) == AMP_OK);
        CHECK(amp_group_norm_backward(&group, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_f32(stats), stats + 2 * n,
            stats + 2 * n + 2, amp_ref_of(dx.p, t), amp_f32(stats + 4 * n), amp_f32(stats + 5 * n), 1, NULL) == AMP_OK);
    }
    finish(&y); finish(&dx);
    y = special_buffer(t, 2 * n, 0); dx = special_buffer(t, 2 * n, 0);
    CHECK(amp_rms_norm_forward(amp_ref_of(x.p, t), amp_f32(stats), 0, NULL, amp_ref_of(y.p, t), 2, n, NULL) == AMP_OK);
    CHECK(amp_rms_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_f32(stats), 0.0f, NULL,
        amp_ref_of(dx.p, t), amp_f32(stats + 4 * n), 1, 2, n, NULL) == AMP_OK);
    finish(&x); finish(&dy); finish(&y); finish(&dx); finish(&g);
}
static void test_special_values(void) {
    static const size_t lengths[] = { 5, 16, 33, 100, 600, 1030 };
    size_t i, turn;
    int t;
    for (t = 0; t < 3; t++)
        for (i = 0; i < 6; i++)
            for (turn = 0; turn < 12; turn++) {
                check_special_activations(TYPES[t], lengths[i], turn);
                check_special_norms(TYPES[t], lengths[i], turn);
            }
}

/* Of many elements of 16 bits, with a workspace: all 65,536 values, and some again, give the bits that few of them give
   without one. */
enum { VALUES = 65536, MANY = 4 * VALUES + 5 };
static void check_every_value(int f, amp_dtype t, amp_dtype other) {
    static char memory[AMP_ACTIVATION_WORKSPACE + 1];
    buffer x = make(t, MANY), y = make(other, MANY), one = make(other, VALUES), dy = make(other, MANY);
    const size_t size = amp_dtype_size(other);
    amp_exec e;
    size_t i, k, bad[4] = { 0, 0, 0, 0 };
    memset(&e, 0, sizeof e);
    e.workspace = memory + 1;
    e.workspace_size = AMP_ACTIVATION_WORKSPACE;
    for (i = 0; i < MANY; i++) ((uint16_t*)x.p)[i] = (uint16_t)(i * 40503u);
    for (i = 0; i < MANY; i++) put(&dy, i, (double)(i % VALUES % 1021) / 64 - 8);
    for (k = 0; k < 2; k++) {              /* forward, then backward */
        if (k == 0) amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t),
            amp_ref_of(one.p, other), VALUES, NULL);
        else        amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, other),
            amp_ref_of(x.p, t), amp_ref_of(one.p, other), 0, VALUES, NULL);
        if (k == 0) CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t),
            amp_ref_of(y.p, other), MANY, &e) == AMP_OK);
        else CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, other),
            amp_ref_of(x.p, t), amp_ref_of(y.p, other), 0, MANY, &e) == AMP_OK);
        for (i = 0; i < MANY; i++)
            bad[k] += memcmp((char*)y.p + i * size, (char*)one.p + i % VALUES * size, size) != 0;
    }
    CHECK(amp_activation_backward((amp_activation)f, amp_ref_of(dy.p, other), amp_ref_of(x.p, t),
        amp_ref_of(dy.p, other), 0, MANY, &e) == AMP_OK);
    bad[2] = memcmp(dy.p, y.p, MANY * size) != 0;      /* in place */
    if (t == other) {
        amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t), amp_ref_of(one.p, t),
            VALUES, NULL);
        CHECK(amp_activation_forward((amp_activation)f, amp_ref_of(x.p, t), amp_ref_of(x.p, t),
            MANY, &e) == AMP_OK);
        for (i = 0; i < MANY; i++) bad[3] += ((uint16_t*)x.p)[i] != ((uint16_t*)one.p)[i % VALUES];
    }
    CHECK_MSG(bad[0] + bad[1] + bad[2] + bad[3] == 0, "activation %d, %s and %s: %lu, %lu, %lu, %lu elements differ", f,
              amp_dtype_name(t), amp_dtype_name(other), (unsigned long)bad[0], (unsigned long)bad[1],
              (unsigned long)bad[2], (unsigned long)bad[3]);
    finish(&x); finish(&y); finish(&one); finish(&dy);
}
static void test_every_value(void) {
    int f, t;
    for (f = AMP_RELU; f < AMP_ACTIVATION_COUNT; f++)
        for (t = 1; t < 3; t++) check_every_value(f, TYPES[t], TYPES[t]);
    check_every_value(AMP_GELU, AMP_F16, AMP_BF16);
    check_every_value(AMP_GELU, AMP_BF16, AMP_F32);
}
/* Each number of 16 bits: a NaN passes, or lets the gradient pass, and becomes the one quiet NaN. */
static void test_relu_bits(void) {
    int t;
    for (t = 1; t < 3; t++) {
        const unsigned infinite = t == 1 ? 0x7c00u : 0x7f80u, nan = t == 1 ? 0x7e00u : 0x7fc0u;
        buffer x = make(TYPES[t], 65536), y = make(TYPES[t], 65536), dx = make(TYPES[t], 65536);
        unsigned i;
        for (i = 0; i < 65536; i++) ((uint16_t*)x.p)[i] = (uint16_t)i;
        CHECK(amp_activation_forward(AMP_RELU, amp_ref_of(x.p, TYPES[t]),
            amp_ref_of(y.p, TYPES[t]), 65536, NULL) == AMP_OK);
        CHECK(amp_activation_backward(AMP_RELU, amp_ref_of(x.p, TYPES[t]),
            amp_ref_of(x.p, TYPES[t]), amp_ref_of(dx.p, TYPES[t]), 0, 65536, NULL) == AMP_OK);
        for (i = 0; i < 65536; i++) {
            unsigned want = (i & 0x7fffu) > infinite ? nan : i < 0x8000u ? i : 0;
            CHECK(((uint16_t*)y.p)[i] == want && ((uint16_t*)dx.p)[i] == want);
        }
        finish(&x); finish(&y); finish(&dx);
    }
}

/* --- softmax and cross-entropy -------------------------------------------------------------- */

static void softmax(const buffer* x, size_t start, size_t d, double* p, double* log_sum) {
    double max = get(x, start), sum = 0;
    size_t i;
    for (i = 0; i < d; i++) max = fmax(max, get(x, start + i));
    for (i = 0; i < d; i++) sum += exp(get(x, start + i) - max);
    for (i = 0; i < d; i++) p[i] = exp(get(x, start + i) - max) / sum;
    *log_sum = log(sum) + max;
}
/* Relative error of a probability: the difference to the maximum is rounded before the exponential (depth *
   u), exp 1 ulp, sum 1, inverse, product. */
static double softmax_error(double p) { return (8 - (p > 0 ? log(p) : -100)) * u; }

static void test_softmax(void) {
    const char* what = "softmax";
    const size_t rows = 3;
    int a, b;
    size_t s, i, r;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < SIZES; s++) {
                size_t d = sizes[s];
                double* p = (double*)malloc(d * sizeof(double));
                double log_sum, dot, error;
                buffer x = random_buffer(TYPES[a], rows * d, 3), y = make(TYPES[b], rows * d),
                       dy = random_buffer(TYPES[a], rows * d, 2);
                buffer dx = make(TYPES[b], rows * d);
                /* far below zero, where a maximum that took a zero of the padding for an element would show */
                for (i = 0; s % 2 && i < x.n; i++) put(&x, i, get(&x, i) - 500);
                CHECK(amp_softmax_forward(amp_ref_of(x.p, x.t), amp_ref_of(y.p, y.t), rows, d,
                    NULL) == AMP_OK);
                CHECK(amp_softmax_backward(amp_ref_of(dy.p, dy.t), amp_ref_of(y.p, y.t),
                    amp_ref_of(dx.p, dx.t), 0, rows, d, NULL) == AMP_OK);
                for (r = 0; r < rows; r++) {
                    softmax(&x, r * d, d, p, &log_sum);
                    for (i = 0, dot = 0, error = 0; i < d; i++) {
                        CLOSE(y, r * d + i, p[i], p[i] * softmax_error(p[i]));
                        dot += get(&dy, r * d + i) * get(&y, r * d + i);
                    }
                    for (i = 0; i < d; i++) {   /* sum rounded, difference, product */
                        error = get(&y, r * d + i) * (2 * fabs(dot) + 2 * fabs(get(&dy, r * d + i))) * u;
                        CLOSE(dx, r * d + i, get(&y, r * d + i) * (get(&dy, r * d + i) - dot), error);
                    }
                }
                if (a == b) {
                    CHECK(amp_softmax_forward(amp_ref_of(x.p, x.t), amp_ref_of(x.p, x.t), rows, d,
                        NULL) == AMP_OK);
                    CHECK(memcmp(x.p, y.p, rows * d * amp_dtype_size(x.t)) == 0);
                }
                free(p);
                finish(&x); finish(&y); finish(&dy); finish(&dx);
            }
}

/* Numbers near the end of the range of exp: below -87.34 it is 0. */
static void test_softmax_end(void) {
    const char* what = "softmax";
    size_t d, i;
    for (d = 2; d < 40; d++) {
        buffer x = make(AMP_F32, d), y = make(AMP_F32, d);
        put(&x, 0, 0);
        for (i = 1; i < d; i++) put(&x, i, i % 3 == 0 ? -87.6 - 0.7 * (double)i : -87.45 + 0.01 * (double)i);
        CHECK(amp_softmax_forward(amp_ref_of(x.p, x.t), amp_ref_of(y.p, y.t), 1, d, NULL) == AMP_OK);
        for (i = 1; i < d; i++) {
            double v = get(&x, i), want = v < -87.3365402 ? 0 : exp(v);
            CLOSE(y, i, want, want * 1e-6);
            CHECK(want > 0 || get(&y, i) == 0);
        }
        finish(&x);
        finish(&y);
    }
}

/* A desc of a cross-entropy with smoothing alone. */
static const amp_cross_entropy_desc* smoothed(float smoothing) {
    static amp_cross_entropy_desc desc;
    desc.smoothing = smoothing;
    return &desc;
}
static void check_cross_entropy(amp_dtype t, amp_dtype dt, size_t n, size_t k, float smoothing) {
    const char* what = "cross-entropy";
    buffer x = random_buffer(t, n * k, 3), dx = make(dt, n * k), loss = make(AMP_F32, 1);
    int32_t* labels = (int32_t*)malloc(n * sizeof(int32_t));
    double *p = (double*)malloc(k * sizeof(double)), total = 0, top = 0, c = 512.0 * 0.5 / (double)n;
    float scale = 512;
    size_t r, i;
    for (r = 0; r < n; r++) labels[r] = (int32_t)(test_random() % k);
    CHECK(amp_softmax_cross_entropy_forward(amp_ref_of(x.p, t), labels, smoothed(smoothing), (float*)loss.p,
        n, k, NULL) == AMP_OK);
    CHECK(amp_softmax_cross_entropy_backward(amp_ref_of(x.p, t), labels, smoothed(smoothing), &scale, 0.5f,
        amp_ref_of(dx.p, dt), n, k, NULL)
          == AMP_OK);
    for (r = 0; r < n; r++) {
        double log_sum, s = (double)smoothing;
        softmax(&x, r * k, k, p, &log_sum);
        for (i = 0; i < k; i++) {
            double target = s / (double)k + (i == (size_t)labels[r] ? 1 - s : 0), v = get(&x, r * k + i);
            total += target * (log_sum - v);
            top = fmax(top, fabs(v));
            /* p with its error, the target's two roundings, the factor, the product */
            CLOSE(dx, r * k + i, c * (p[i] - target),
                  c * (p[i] * softmax_error(p[i]) + 4 * u * (target + fabs(p[i] - target))));
        }
    }
    /* Per row: log of the sum (the sum's 2 u and the log's 1 ulp), differences to the maximum of up to 2
       top, two fmas. */
    CLOSE(loss, 0, total / (double)n, u * (8 + 8 * top + 4 * log((double)k)));
    free(labels); free(p);
    finish(&x); finish(&dx); finish(&loss);
}
static void test_cross_entropy(void) {
    static const size_t n[] = { 1, 3, 17, 130, 2 }, k[] = { 1, 10, 33, 16, 2500 };
    int a, b, s;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < 5; s++) {
                check_cross_entropy(TYPES[a], TYPES[b], n[s], k[s], 0.0f);
                check_cross_entropy(TYPES[a], TYPES[b], n[s], k[s], 0.1f);
            }
}
/* --- short rows: together they give the bits that each gives alone -------------------------------------- */

static void* element(const buffer* b, size_t i) { return (char*)b->p + i * amp_dtype_size(b->t); }
/* The mean over n rows, which are summed in 64 parts. */
static float mean_of_losses(const float* loss, size_t n) {
    double total = 0;
    size_t part, row = 0;
    for (part = 1; part <= 64; part++) {
        double sum = 0;
        for (; row < n / 64 * part + (n % 64 < part ? n % 64 : part); row++) sum += (double)loss[row];
        total += sum;
    }
    return (float)(total / (double)n);
}
static void check_short_softmax(amp_dtype t, amp_dtype other, size_t rows, size_t d, size_t turn) {
    buffer x = special_buffer(t, rows * d, turn), dy = special_buffer(other, rows * d, turn + 3);
    buffer y = special_buffer(other, rows * d, 0), y1 = special_buffer(other, rows * d, 0);
    buffer dx = special_buffer(t, rows * d, 0), dx1 = special_buffer(t, rows * d, 0);
    size_t i;
    CHECK(amp_softmax_forward(amp_ref_of(x.p, t), amp_ref_of(y.p, other), rows, d, NULL) == AMP_OK);
    CHECK(amp_softmax_backward(amp_ref_of(dy.p, other), amp_ref_of(y.p, other),
        amp_ref_of(dx.p, t), 0, rows, d, NULL) == AMP_OK);
    for (i = 0; i < rows * d; i += d) {
        amp_softmax_forward(amp_ref_of(element(&x, i), t), amp_ref_of(element(&y1, i), other), 1,
            d, NULL);
        amp_softmax_backward(amp_ref_of(element(&dy, i), other),
            amp_ref_of(element(&y1, i), other), amp_ref_of(element(&dx1, i), t), 0, 1, d, NULL);
    }
    CHECK(same(&y, &y1));
    CHECK(same(&dx, &dx1));
    if (t == other) {
        CHECK(amp_softmax_forward(amp_ref_of(x.p, t), amp_ref_of(x.p, t), rows, d, NULL) == AMP_OK);
        CHECK(same(&x, &y));
    }
    finish(&x); finish(&dy); finish(&y); finish(&y1); finish(&dx); finish(&dx1);
}
static void check_short_cross_entropy(amp_dtype t, amp_dtype other, size_t n, size_t k, float smoothing, size_t turn) {
    buffer x = special_buffer(t, n * k, turn), dx = special_buffer(other, n * k, 0);
    buffer dx1 = special_buffer(other, n * k, 0), each = make(AMP_F32, n), loss = make(AMP_F32, 1);
    int32_t* labels = (int32_t*)malloc(n * sizeof(int32_t));
    const float scale = 512, factor = (float)(512.0 * 0.3125 / (double)n);
    float want;
    size_t i;
    for (i = 0; i < n; i++) labels[i] = (int32_t)(test_random() % k);
    CHECK(amp_softmax_cross_entropy_forward(amp_ref_of(x.p, t), labels, smoothed(smoothing), (float*)loss.p,
        n, k, NULL) == AMP_OK);
    CHECK(amp_softmax_cross_entropy_backward(amp_ref_of(x.p, t), labels, smoothed(smoothing), &scale,
        0.3125f, amp_ref_of(dx.p, other), n, k, NULL)
          == AMP_OK);
    for (i = 0; i < n; i++) {
        void* row = element(&x, i * k);
        amp_softmax_cross_entropy_forward(amp_ref_of(row, t), labels + i, smoothed(smoothing),
            (float*)each.p + i, 1, k, NULL);
        amp_softmax_cross_entropy_backward(amp_ref_of(row, t), labels + i, smoothed(smoothing), NULL,
            factor, amp_ref_of(element(&dx1, i * k), other), 1, k, NULL);
    }
    CHECK(same(&dx, &dx1));
    want = mean_of_losses((const float*)each.p, n);
    CHECK(memcmp(&want, loss.p, sizeof want) == 0 || (is_nan(want) && is_nan(*(float*)loss.p)));
    free(labels);
    finish(&each); finish(&loss); finish(&x); finish(&dx); finish(&dx1);
}
/* Its column sums are those of doubles, row by row in runs of 64 rows, or of a 32nd of them in whole 64s. */
static void check_columns(const buffer* dy, const buffer* x, const float* mean, const float* inv, size_t rows,
                                size_t d, const float* dg, const float* db) {
    const size_t run = ((rows + 31) / 32 + 63) / 64 * 64;
    size_t i, r;
    for (i = 0; i < d; i++) {
        double sums = 0, dots = 0, sum = 0, dot = 0;
        float want[2];
        for (r = 0; r < rows; r++) {
            const float g = (float)get(dy, r * d + i), centred = (float)get(x, r * d + i) - mean[r];
            sum += (double)g;
            dot += (double)g * (double)(centred * inv[r]);
            if ((r + 1) % run != 0 && r + 1 != rows) continue;
            sums += sum; dots += dot;
            sum = dot = 0;
        }
        want[0] = (float)dots; want[1] = (float)sums;
        CHECK(memcmp(want, dg + i, 4) == 0 || (is_nan(want[0]) && is_nan(dg[i])));
        CHECK(memcmp(want + 1, db + i, 4) == 0 || (is_nan(want[1]) && is_nan(db[i])));
    }
}
/* Numbers that swallow others show where a run ends: one in its first row, and its opposite in the next run's. */
/* An exec with the workspace that layer norm's backward pass asks for, and nothing behind it. */
static amp_exec norm_exec(size_t rows, size_t d) {
    amp_exec e;
    memset(&e, 0, sizeof e);
    e.workspace_size = amp_layer_norm_workspace(rows, d);
    e.workspace = e.workspace_size > 0 ? malloc(e.workspace_size) : NULL;
    if (e.workspace) memset(e.workspace, 0xff, e.workspace_size);
    return e;
}
static void check_runs(size_t rows, size_t run, size_t d) {
    amp_exec e = norm_exec(rows, d);
    buffer x = random_buffer(AMP_F32, rows * d, 1), dy = make(AMP_F32, rows * d), stats = make(AMP_F32, 2 * rows);
    buffer dx = make(AMP_F32, rows * d), sums = make(AMP_F32, 2 * d);
    float *inv = (float*)stats.p + rows, *g = (float*)dy.p, *dg = (float*)sums.p;
    size_t i;
    for (i = 0; i < 2 * rows; i++) ((float*)stats.p)[i] = i < rows ? 0.0f : 1.0f;
    for (i = 0; i < rows * d; i++) g[i] = i < d ? 1.18059162e21f : i / d == run ? -1.18059162e21f : 1;
    CHECK(amp_layer_norm_backward(amp_f32(g), amp_f32(x.p), AMP_NONE, 0.0f, (float*)stats.p, inv,
        amp_f32(dx.p), amp_f32(dg), amp_f32(dg + d), 0, rows, d, &e) == AMP_OK);
    check_columns(&dy, &x, (float*)stats.p, inv, rows, d, dg, dg + d);
    for (i = 0; i < d; i++) CHECK(dg[d + i] == (float)(rows - 2 * run));
    free(e.workspace);
    finish(&x); finish(&dy); finish(&stats); finish(&dx); finish(&sums);
}
static void check_norm(amp_dtype t, amp_dtype other, size_t rows, size_t d, size_t turn) {
    buffer x = special_buffer(t, rows * d, turn), dy = special_buffer(other, rows * d, turn + 3);
    buffer y = special_buffer(other, rows * d, 0), y1 = special_buffer(other, rows * d, 0);
    buffer dx = special_buffer(t, rows * d, 0), dx1 = special_buffer(t, rows * d, 0);
    buffer stats = make(AMP_F32, 2 * rows + 1), stats1 = make(AMP_F32, 2 * rows + 1), sums = make(AMP_F32, 2 * d);
    buffer gamma = random_buffer(other, d, 1), beta = random_buffer(other, d, 1);
    const void *g = turn % 2 ? gamma.p : NULL, *b = turn % 3 ? beta.p : NULL;
    float *mean = (float*)stats.p, *inv = mean + rows, *dg = (float*)sums.p;
    amp_exec e = norm_exec(rows, d);
    int touched = 0;
    size_t i;
    CHECK(amp_layer_norm_forward(amp_ref_of(x.p, t), amp_ref_of(g, other), amp_ref_of(b, other),
        0, mean, inv, amp_ref_of(y.p, other), rows, d, NULL) == AMP_OK);
    CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, other), amp_ref_of(x.p, t),
        amp_ref_of(g, other), 0.0f, mean, inv, amp_ref_of(dx.p, t), amp_f32(dg), amp_f32(dg + d),
        0, rows, d, &e) == AMP_OK);
    check_columns(&dy, &x, mean, inv, rows, d, dg, dg + d);
    for (i = 0; i < 2 * d; i++) dg[i] = -7;
    e.workspace_size -= e.workspace_size > 0 ? 1 : 0;         /* now too small, so not to be touched */
    if (e.workspace) memset(e.workspace, 0x55, e.workspace_size);
    CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, other), amp_ref_of(x.p, t),
        amp_ref_of(g, other), 0.0f, mean, inv, amp_ref_of(dx1.p, t), amp_f32(dg), amp_f32(dg + d),
        0, rows, d, &e) == AMP_OK);
    check_columns(&dy, &x, mean, inv, rows, d, dg, dg + d);
    CHECK(same(&dx, &dx1));
    for (i = 0; i < e.workspace_size; i++) touched |= ((unsigned char*)e.workspace)[i] != 0x55;
    CHECK(!touched);
    free(e.workspace);
    for (i = 0; i < rows; i++) {
        float* m = (float*)stats1.p + i;
        amp_layer_norm_forward(amp_ref_of(element(&x, i * d), t), amp_ref_of(g, other),
            amp_ref_of(b, other), 0, m, m + rows, amp_ref_of(element(&y1, i * d), other), 1, d,
            NULL);
        amp_layer_norm_backward(amp_ref_of(element(&dy, i * d), other),
            amp_ref_of(element(&x, i * d), t), amp_ref_of(g, other), 0.0f, m, m + rows,
            amp_ref_of(element(&dx1, i * d), t), AMP_NONE, AMP_NONE, 0, 1, d, NULL);
    }
    CHECK(same(&y, &y1));
    CHECK(same(&stats, &stats1));
    CHECK(same(&dx, &dx1));
    CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, other), amp_ref_of(x.p, t),
        amp_ref_of(g, other), 0.0f, mean, inv, amp_ref_of(dx1.p, t), AMP_NONE, AMP_NONE, 0, rows,
        d, NULL) == AMP_OK);
    CHECK(same(&dx, &dx1));
    finish(&x); finish(&dy); finish(&y); finish(&y1); finish(&dx); finish(&dx1); finish(&stats); finish(&stats1);
    finish(&sums); finish(&gamma); finish(&beta);
}
static void test_short_rows(void) {
    static const size_t rows[] = { 5, 6, 16, 31, 64, 67, 68, 130, 4100 };
    size_t d, i;
    for (d = 1; d <= 17; d++)
        for (i = 0; i < 9; i++) {
            const amp_dtype t = TYPES[(d + i) % 3], other = TYPES[(d + i + d / 3) % 3];
            const size_t turn = rows[i] > 4000 ? 1 : (d + i) % 12;
            if (rows[i] > 4000 && d % 5 != 0) continue;
            check_short_softmax(t, other, rows[i], d, turn);
            check_norm(t, other, rows[i], d, turn);
            check_norm(other, t, rows[i], d, turn % 4);
            check_short_cross_entropy(t, other, rows[i], d, 0, turn % 4);
            check_short_cross_entropy(t, other, rows[i], d, 0.1f, turn % 4);
            check_short_cross_entropy(t, other, rows[i], d, 0.1f, 4 + turn);
        }
}
/* Longer rows too give, many of them together, what each gives alone. */
static void test_long_rows(void) {
    static const size_t widths[] = { 18, 33, 100, 768, 1024, 1025, 1057, 2048, 2051, 4096 };
    size_t i, rows;
    int t;
    for (t = 0; t < 3; t++)
        for (i = 0; i < 8; i++)
            for (rows = 1; rows < (widths[i] > 2000 ? 4 : 12); rows += 1 + rows / 5)
                check_norm(TYPES[t], TYPES[t], rows, widths[i], rows % 4 + i);
    for (i = 0; i < 8; i++) check_norm(TYPES[i % 3], TYPES[i / 2 % 3], 63 + 34 * i, widths[i], i % 2);
    check_norm(AMP_F32, AMP_F16, 2100, 33, 1);
    for (i = 0; i < 7; i++) {
        check_runs(130, 64, widths[i]);
        check_runs(2049, 128, widths[i] - 17);
    }
    check_norm(AMP_BF16, AMP_BF16, 4100, 18, 1);
    check_norm(AMP_F16, AMP_F16, 70, 16384, 1);
    check_norm(AMP_F32, AMP_F32, 3, 16385, 1);
    CHECK(amp_layer_norm_workspace(100, 1024) == 0 && amp_layer_norm_workspace(1, 1025) == 4 * 1040 * 8 + 64);
    CHECK(amp_layer_norm_workspace(4096, 16384) >= 2 * 262144 && amp_layer_norm_workspace(4096, 16385) == 0);
    CHECK(amp_layer_norm_workspace(0, 2048) == 0 && amp_layer_norm_workspace(SIZE_MAX / 2, 2048) == 0);
}

/* K equal logits: the loss is log(K), which shows the logarithm alone (error below 1 ulp, then none). */
static void test_log(void) {
    static float x[5000];
    int32_t label = 0;
    size_t k;
    for (k = 2; k <= 5000; k += 3) {
        float loss = -1;
        double want = log((double)k);
        int e;
        frexp(want, &e);
        amp_softmax_cross_entropy_forward(amp_f32(x), &label, NULL, &loss, 1, k, NULL);
        CHECK_MSG(fabs((double)loss - want) <= 0.98 * ldexp(1, e - 24), "log(%lu) = %.9g", (unsigned long)k,
                  (double)loss);
    }
}
/* One logit x < 0 with target 0: the loss is log(1 + exp(x)). exp brings 1.02 ulp, log1p 1.08, an ulp being
   2u at most. */
static void test_log1p(void) {
    int i;
    for (i = 0; i < 20000; i++) {
        float x = (float)i * -0.004f, zero = 0, loss = -1;
        double want = log1p(exp((double)x));
        amp_bce_with_logits_forward(amp_f32(&x), amp_f32(&zero), &loss, 1, NULL);
        CHECK_MSG(fabs((double)loss - want) <= 4.2 * u * want, "log1p(exp(%g)) = %.9g, not %.12g",
                  (double)x, (double)loss, want);
    }
}
/* The gradient of the reference, by differences, and the loss scale where it overflows and where it is
   small. */
static void test_loss_gradient(void) {
    float x[4] = { 0.5f, -1.25f, 2.0f, 0.125f }, dx[4] = { 0 }, up, down, h = 0.0078125f, scale = 65536, loss;
    unsigned inf_bits = 0x7f800000u;
    amp_half hx[4];
    int32_t label = 1;
    int i;
    amp_softmax_cross_entropy_backward(amp_f32(x), &label, smoothed(0.25f), NULL, 1, amp_f32(dx), 1, 4, NULL);
    for (i = 0; i < 4;
         i++) { /* central difference: h^2/6 * |f'''| (< 1/8) and two losses' roundings over 2h */
        float v = x[i];
        x[i] = v + h; amp_softmax_cross_entropy_forward(amp_f32(x), &label, smoothed(0.25f), &up, 1, 4, NULL);
        x[i] = v - h; amp_softmax_cross_entropy_forward(amp_f32(x), &label, smoothed(0.25f), &down, 1, 4,
            NULL);
        x[i] = v;
        CHECK(fabs((double)(up - down) / (2 * (double)h) - (double)dx[i])
              < (double)(h * h) / 48 + 16 * u / (double)h);
    }
    amp_softmax_cross_entropy_backward(amp_f32(x), &label, NULL, &scale, 1, amp_f16(hx), 1, 4,
        NULL);
    CHECK(amp_is_finite(amp_f16(&hx[0])) && amp_is_finite(amp_f16(&hx[3])));
    scale = 65536 * 2;
    amp_softmax_cross_entropy_backward(amp_f32(x), &label, NULL, &scale, 1, amp_f16(hx), 1, 4,
        NULL);
    CHECK(amp_is_inf(amp_f16(&hx[1])) && amp_is_inf(amp_f16(&hx[2])));
    memcpy(&scale, &inf_bits, 4);
    amp_softmax_cross_entropy_backward(amp_f32(x), &label, NULL, &scale, 1, amp_f32(dx), 1, 4,
        NULL);
    for (i = 0; i < 4; i++) CHECK(!amp_is_finite(amp_f32(&dx[i])));
    x[2] = 1e30f;
    amp_softmax_cross_entropy_forward(amp_f32(x), &label, NULL, &loss, 1, 4, NULL);
    CHECK(loss == 1e30f);
}

/* --- losses over single elements ------------------------------------------------------------ */

static void test_element_losses(void) {
    const char* what = "mse, bce";
    int a, b, bce;
    size_t s, i;
    for (bce = 0; bce < 2; bce++)
        for (a = 0; a < 3; a++)
            for (b = 0; b < 3; b++)
                for (s = 0; s < SIZES; s++) {
                    size_t n = sizes[s];
                    buffer x = random_buffer(TYPES[a], n, 3), t = random_buffer(TYPES[b], n, 1),
                           dx = make(TYPES[b], n);
                    buffer loss = make(AMP_F32, 1);
                    float scale = 1024, *l = (float*)loss.p;
                    double total = 0, size = 0, c = 512 / (double)n;
                    for (i = 0; bce && i < n; i++) put(&t, i, fmin(1, fabs(get(&t, i))));
                    if (bce) {
                        CHECK(amp_bce_with_logits_forward(amp_ref_of(x.p, x.t),
                            amp_ref_of(t.p, t.t), l, n, NULL) == AMP_OK);
                        CHECK(amp_bce_with_logits_backward(amp_ref_of(x.p, x.t),
                            amp_ref_of(t.p, t.t), &scale, 0.5f, amp_ref_of(dx.p, dx.t), n, NULL)
                              == AMP_OK);
                    } else {
                        CHECK(amp_mse_forward(amp_ref_of(x.p, x.t), amp_ref_of(t.p, t.t), l, n,
                            NULL) == AMP_OK);
                        CHECK(amp_mse_backward(amp_ref_of(x.p, x.t), amp_ref_of(t.p, t.t), &scale,
                            0.5f, amp_ref_of(dx.p, dx.t), n, NULL)
                              == AMP_OK);
                    }
                    for (i = 0; i < n; i++) {
                        double v = get(&x, i), w = get(&t, i), d = bce ? sigmoid(v) - w : 2 * (v - w);
                        total += bce ? fmax(v, 0) - v * w + log1p(exp(-fabs(v))) : (v - w) * (v - w);
                        size += bce ? fabs(v) + 1 : (v - w) * (v - w);
                        /* sigmoid 2.3 ulp; difference, factor, product */
                        CLOSE(dx, i, c * d, c * u * (3 * fabs(d) + (bce ? 5 * sigmoid(v) : 0)));
                    }
                    /* terms: difference rounded before it is squared; or log1p 1.1 ulp of exp 1 ulp, fma,
                       sum */
                    CLOSE(loss, 0, total / (double)n, u * 4 * size / (double)n);
                    finish(&x); finish(&t); finish(&dx); finish(&loss);
                }
}

/* --- dropout, sums, columns ------------------------------------------------------------------ */

static void test_dropout(void) {
    const char* what = "dropout";
    const uint64_t offsets[5] = { 0, 1, 6, 4095, 0xfffffffffffffffdull };
    int a, b, o;
    size_t s, i;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < SIZES; s++)
                for (o = 0; o < 5; o++) {
                    /* o == 3: p is the first element's own number, which is not below p */
                    float p = o == 2 ? 0.0f : o == 3 ? amp_random_uniform(77, offsets[o]) : 0.3f;
                    buffer x = random_buffer(TYPES[a], sizes[s], 1), y = make(TYPES[b], sizes[s]);
                    CHECK(amp_dropout_forward(amp_ref_of(x.p, x.t), amp_ref_of(y.p, y.t), x.n, p,
                        77, offsets[o], NULL) == AMP_OK);
                    for (i = 0; i < x.n; i++) {
                        int dropped = amp_random_uniform(77, offsets[o] + i) < p;
                        if (dropped) CHECK(get(&y, i) == 0 && !signbit(get(&y, i)));
                        else
                            CLOSE(y, i, get(&x, i) / (1 - (double)p),
                                  3 * u * fabs(get(&x, i))); /* 1-p, inverse, product */
                    }
                    if (a == b) {
                        amp_dropout_forward(amp_ref_of(x.p, x.t), amp_ref_of(x.p, x.t), x.n, p,
                            77, offsets[o], NULL);
                        CHECK(memcmp(x.p, y.p, x.n * amp_dtype_size(x.t)) == 0);
                    }
                    finish(&x); finish(&y);
                }
}

static void test_add(void) {
    const char* what = "add";
    int a, b, c;
    size_t s, i;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (c = 0; c < 3; c++)
                for (s = 0; s < SIZES; s++) {
                    buffer x = random_buffer(TYPES[a], sizes[s], 5),
                           z = random_buffer(TYPES[b], sizes[s], 1), y = make(TYPES[c], sizes[s]);
                    CHECK(amp_add_forward(amp_ref_of(x.p, x.t), amp_ref_of(z.p, z.t),
                        amp_ref_of(y.p, y.t), y.n, NULL) == AMP_OK);
                    for (i = 0; i < y.n; i++)
                        CLOSE(y, i, get(&x, i) + get(&z, i), c ? u * fabs(get(&x, i) + get(&z, i)) : 0);
                    if (a == c) {
                        amp_add_forward(amp_ref_of(x.p, x.t), amp_ref_of(z.p, z.t),
                            amp_ref_of(x.p, x.t), y.n, NULL);
                        CHECK(memcmp(x.p, y.p, y.n * amp_dtype_size(y.t)) == 0);
                    }
                    finish(&x); finish(&z); finish(&y);
                }
}

/* Element by element, and runs that share an element of b: short ones, some a tile, some longer than one. */
static void test_mul(void) {
    static const size_t runs[] = { 1, 4, 16, 49, 300, 5003 };
    const char* what = "mul";
    int ta, tb, k, r;
    size_t i, j;
    for (ta = 0; ta < 3; ta++)
        for (tb = 0; tb < 3; tb++)
            for (k = 0; k < 3; k++)
                for (r = 0; r < COUNT(runs); r++) {
                    const size_t repeat = runs[r], count = r ? 3 + 70 / repeat : 2063, n = count * repeat;
                    const amp_dtype t = TYPES[k];
                    buffer a = random_buffer(TYPES[ta], n, 3), b = random_buffer(TYPES[tb], count, 1);
                    buffer y = make(t, n), dy = random_buffer(t, n, 1), da = make(TYPES[ta], n), db = make(TYPES[tb], count);
                    const amp_ref x = amp_ref_of(a.p, a.t), z = amp_ref_of(b.p, b.t), g = amp_ref_of(dy.p, t);
                    CHECK(amp_mul_forward(x, z, amp_ref_of(y.p, t), n, repeat, NULL) == AMP_OK);
                    CHECK(amp_mul_backward(g, x, z, amp_ref_of(da.p, da.t), amp_ref_of(db.p, db.t), 0, n, repeat, NULL) == AMP_OK);
                    for (i = 0; i < count; i++) {
                        double sum = 0, size = 0;
                        for (j = i * repeat; j < (i + 1) * repeat; j++) {
                            const double v = get(&a, j), w = get(&b, i), d = get(&dy, j);
                            CLOSE(y, j, v * w, k ? u * fabs(v * w) : 0);
                            CLOSE(da, j, d * w, ta ? u * fabs(d * w) : 0);
                            sum += d * v;
                            size += fabs(d * v);
                        }
                        CLOSE(db, i, sum, u * fabs(sum) + 1e-15 * size);
                    }
                    if (ta == k) {    /* in place */
                        CHECK(amp_mul_forward(x, z, x, n, repeat, NULL) == AMP_OK);
                        CHECK(memcmp(a.p, y.p, n * amp_dtype_size(t)) == 0);
                    }
                    finish(&a); finish(&b); finish(&y); finish(&dy); finish(&da); finish(&db);
                }
}
/* `wanted` in FP32 is what `added` was given: `old` + it, rounded once. */
static void check_added(const char* what, const buffer* added, const buffer* old,
        const buffer* wanted) {
    size_t i, wrong = 0;
    for (i = 0; i < added->n; i++) {
        float sum = (float)get(old, i) + ((const float*)wanted->p)[i], got = (float)get(added, i);
        buffer one = make(added->t, 1);
        put(&one, 0, (double)sum);
        wrong += get(&one, 0) != (double)got;
        free(one.block);
    }
    CHECK_MSG(wrong == 0, "%s, %s: %lu of %lu differ", what, amp_dtype_name(added->t),
        (unsigned long)wrong, (unsigned long)added->n);
}
/* Gradients that are added to are rounded once; those not wanted are left out. */
static void test_mul_gradients(void) {
    enum { N = 4 * 49 };
    int t;
    size_t repeat;
    for (t = 0; t < 3; t++)
        for (repeat = 1; repeat <= 49; repeat += 48) {
            const size_t count = N / repeat;
            buffer a = random_buffer(TYPES[t], N, 1), b = random_buffer(TYPES[t], count, 1), dy = random_buffer(AMP_F32, N, 1);
            buffer da = random_buffer(TYPES[t], N, 1), db = random_buffer(TYPES[t], count, 1);
            buffer old_a = make(TYPES[t], N), old_b = make(TYPES[t], count), want_a = make(AMP_F32, N), want_b = make(AMP_F32, count);
            const amp_ref x = amp_ref_of(a.p, a.t), z = amp_ref_of(b.p, b.t), g = amp_ref_of(dy.p, dy.t);
            memcpy(old_a.p, da.p, N * amp_dtype_size(a.t));
            memcpy(old_b.p, db.p, count * amp_dtype_size(a.t));
            CHECK(amp_mul_backward(g, x, z, AMP_NONE, AMP_NONE, 0, N, repeat, NULL) == AMP_OK);
            CHECK(amp_mul_backward(g, x, z, amp_f32(want_a.p), AMP_NONE, AMP_ACCUMULATE_PARAMS, N, repeat, NULL) == AMP_OK);
            CHECK(amp_mul_backward(g, x, z, AMP_NONE, amp_f32(want_b.p), AMP_ACCUMULATE_PARAMS, N, repeat, NULL) == AMP_OK);
            CHECK(amp_mul_backward(g, x, z, amp_ref_of(da.p, da.t), amp_ref_of(db.p, db.t), AMP_ACCUMULATE_INPUT, N, repeat,
                NULL) == AMP_OK);
            check_added("da", &da, &old_a, &want_a);
            check_added("db", &db, &old_b, &want_b);
            finish(&a); finish(&b); finish(&dy); finish(&da); finish(&db);
            finish(&old_a); finish(&old_b); finish(&want_a); finish(&want_b);
        }
}

/* Many elements whose result begins anywhere in a cache line: the bits, in place too, are those of one that begins a
   line, and nothing is written beside them. Operators: the activations, their slopes, the sum, two losses' slopes. */
enum { AWAY_GUARD = 64, AWAY_OPERATORS = 13, AWAY_TABLES = 4 * 65536 + 77 };
static void operate(int which, const void* a, amp_dtype t, const buffer* b, void* y, amp_dtype yt) {
    static unsigned char workspace[AMP_ACTIVATION_WORKSPACE];
    const amp_activation f = (amp_activation)(which % 5);
    amp_exec exec;
    amp_result r;
    memset(&exec, 0, sizeof exec);
    exec.workspace = workspace; exec.workspace_size = sizeof workspace;
    if (which < 5) r = amp_activation_forward(f, amp_ref_of(a, t), amp_ref_of(y, yt), b->n, &exec);
    else if (which < 10) r = amp_activation_backward(f, amp_ref_of(a, t), amp_ref_of(b->p, b->t),
        amp_ref_of(y, yt), 0, b->n, &exec);
    else if (which == 10) r = amp_add_forward(amp_ref_of(a, t), amp_ref_of(b->p, b->t),
        amp_ref_of(y, yt), b->n, NULL);
    else if (which == 11) r = amp_mse_backward(amp_ref_of(a, t), amp_ref_of(b->p, b->t), NULL, 9,
        amp_ref_of(y, yt), b->n, NULL);
    else r = amp_bce_with_logits_backward(amp_ref_of(a, t), amp_ref_of(b->p, b->t), NULL, 9,
        amp_ref_of(y, yt), b->n, NULL);
    CHECK(r == AMP_OK);
}
static void check_away(int which, amp_dtype t, amp_dtype yt, size_t n, size_t step) {
    static unsigned char memory[AWAY_TABLES * sizeof(uint16_t) + 4 * AWAY_GUARD], as_before[sizeof memory];
    unsigned char* line = memory + (64 - (size_t)((uintptr_t)memory % 64)) % 64;
    const size_t size = amp_dtype_size(yt), bytes = n * size, lined = (size_t)(line - memory) + AWAY_GUARD;
    const size_t all = bytes + 4 * AWAY_GUARD;
    buffer a = random_buffer(t, n, 3), b = random_buffer(t, n, 1), want = make(yt, n);
    size_t away, i;
    int in_place;
    for (i = 0; i + 2 < n; i += 37) { put(&a, i, -0.0); put(&a, i + 1, 1e-39); put(&b, i + 2, -1e-7); }
    operate(which, a.p, t, &b, line + AWAY_GUARD, yt);
    memcpy(want.p, line + AWAY_GUARD, bytes);
    for (away = 0; away < 64; away += step * size)
        for (in_place = 0; in_place < (t == yt && which < 11 ? 2 : 1); in_place++) {
            unsigned char* y = memory + lined + away;
            memset(memory, 0x5a, all);
            memcpy(as_before, memory, all);
            memcpy(as_before + lined + away, want.p, bytes);
            if (in_place) memcpy(y, a.p, bytes);
            operate(which, in_place ? y : a.p, t, &b, y, yt);
            CHECK_MSG(!memcmp(memory, as_before, all), "operator %d: %lu elements of %s, %lu bytes behind a line",
                      which, (unsigned long)n, amp_dtype_name(yt), (unsigned long)away);
        }
    finish(&a); finish(&b); finish(&want);
}
static void test_away_from_a_line(void) {
    static const size_t many[] = { 100, 4095, 4096, 4097, 5003, 8191, 8192, 8200, 9003 };
    size_t s;
    int which, k;
    for (which = 0; which < AWAY_OPERATORS; which++)
        for (k = 0; k < 3; k++)
            for (s = 0; s < sizeof many / sizeof many[0]; s++) {
                const amp_dtype yt = TYPES[(k + (int)s / 4 % 2) % 3];      /* other than the operands' now and then */
                if (which % 5 != 0 && s % 3 != 0 && which < 10) continue;
                check_away(which, TYPES[k], yt, many[s], yt == AMP_F32 ? 5 : 9);
            }
    for (which = AMP_GELU; which < 10; which += 5) check_away(which, AMP_F16, AMP_F16, AWAY_TABLES, 21);
}

static void test_concat(void) {
    const char* what = "concat";
    int a, b;
    size_t s, i, r;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < SIZES; s++) {
                size_t d = sizes[s], total = d + 5;
                buffer x = random_buffer(TYPES[a], 3 * d, 1), y = random_buffer(TYPES[b], 3 * total, 1),
                       before = make(TYPES[b], 3 * total);
                buffer back = random_buffer(TYPES[a], 3 * d, 1);
                memcpy(before.p, y.p, y.n * amp_dtype_size(y.t));
                CHECK(amp_concat_forward(amp_ref_of(x.p, x.t), d, amp_ref_of(y.p, y.t), total, 2,
                    3, NULL) == AMP_OK);
                for (r = 0; r < 3; r++)
                    for (i = 0; i < total; i++) {
                        if (i >= 2 && i < 2 + d) CLOSE(y, r * total + i, get(&x, r * d + i - 2), 0.0);
                        else CHECK(get(&y, r * total + i) == get(&before, r * total + i));
                    }
                CHECK(amp_concat_backward(amp_ref_of(y.p, y.t), total, 2,
                    amp_ref_of(back.p, back.t), d, 3, 0, NULL) == AMP_OK);
                CHECK(amp_concat_backward(amp_ref_of(y.p, y.t), total, 2,
                    amp_ref_of(back.p, back.t), d, 3, AMP_ACCUMULATE_INPUT, NULL) == AMP_OK);
                for (r = 0; r < 3; r++)
                    for (i = 0; i < d;
                         i++) { /* rounded when it was taken out, and when it was added again */
                        double v = get(&y, r * total + i + 2);
                        CLOSE(back, r * d + i, 2 * v, rounding(back.t, v) + u * fabs(v));
                    }
                finish(&x); finish(&y); finish(&before); finish(&back);
            }
}

/* Each matrix, transposed and converted. */
static void test_transpose(void) {
    static const size_t shapes[][3] = { { 1, 1, 1 }, { 3, 5, 7 }, { 2, 32, 33 }, { 1, 64, 31 }, { 2, 1, 100 }, { 2, 65, 129 }, { 0, 3, 4 } };
    const char* what = "transpose";
    int a, b, k;
    size_t i;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (k = 0; k < 7; k++) {
                const size_t rows = shapes[k][1], columns = shapes[k][2], n = shapes[k][0] * rows * columns;
                buffer x = random_buffer(TYPES[a], n, 1), y = make(TYPES[b], n);
                CHECK(amp_transpose_forward(amp_ref_of(x.p, x.t), amp_ref_of(y.p, y.t), shapes[k][0], rows, columns, NULL) == AMP_OK);
                for (i = 0; i < n; i++)
                    CLOSE(y, i, get(&x, i / (rows * columns) * rows * columns + i % rows * columns + i / rows % columns), 0.0);
                finish(&x); finish(&y);
            }
}

/* Row i of y is row tokens[i] of w; a row of dw is the sum of its tokens' rows of dy, in FP32 as they come, and is 0 without. */
static void test_embedding(void) {
    enum { WORDS = 37 };
    const char* what = "embedding";
    int a, b, adds;
    size_t s, i, k;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < SIZES; s++) {
                const size_t d = sizes[s], n = d < 100 ? 331 : 41;
                if (a != b && s % 5) continue;
                int32_t* tokens = (int32_t*)malloc(n * sizeof *tokens);
                buffer w = random_buffer(TYPES[a], WORDS * d, 1), y = make(TYPES[b], n * d), dy, dw, before;
                for (i = 0; i < n; i++) tokens[i] = (int32_t)(test_random() % 3 ? test_random() % (WORDS - 1) : 5u);
                CHECK(amp_embedding_forward(tokens, amp_ref_of(w.p, w.t), amp_ref_of(y.p, y.t), n, WORDS, d, NULL) == AMP_OK);
                for (i = 0; i < n * d; i++) CLOSE(y, i, get(&w, (size_t)tokens[i / d] * d + i % d), 0.0);
                for (adds = 0; adds < 2; adds++) {
                    dy = random_buffer(TYPES[a], n * d, 1); dw = random_buffer(TYPES[b], WORDS * d, 1); before = make(TYPES[b], WORDS * d);
                    memcpy(before.p, dw.p, dw.n * amp_dtype_size(dw.t));
                    CHECK(amp_embedding_backward(amp_ref_of(dy.p, dy.t), tokens, amp_ref_of(dw.p, dw.t), adds ? AMP_ACCUMULATE_PARAMS : 0,
                                                 n, WORDS, d, NULL) == AMP_OK);
                    for (k = 0; k < WORDS * d; k++) {
                        float sum = 0.0f;
                        int terms = 0;
                        for (i = 0; i < n; i++)
                            if ((size_t)tokens[i] == k / d) sum = terms++ ? sum + (float)get(&dy, i * d + k % d) : (float)get(&dy, i * d + k % d);
                        if (adds) sum += (float)get(&before, k);
                        CLOSE(dw, k, (double)sum, 0.0);                 /* the order of the sum is part of the contract */
                        CHECK(dw.t != AMP_F32 || to_bits((float)get(&dw, k)) == to_bits(sum));
                    }
                    finish(&dy); finish(&dw); finish(&before);
                }
                CHECK(amp_embedding_backward(amp_ref_of(y.p, y.t), tokens, AMP_NONE, 0, n, WORDS, d, NULL) == AMP_OK);
                finish(&w); finish(&y);
                free(tokens);
            }
}

/* --- norms ------------------------------------------------------------------------------------ */

/* Statistics and gradients of one normalised set of m values in double; index(i) gives their places. */
typedef struct norm {
    double mean, var, invstd, dbeta, dgamma, mean_g, mean_gx, size_g, size_gx, max_dev;
} norm;

/* Error of xhat = (x - mean) * invstd: the rounded mean, and 4 roundings. */
static double xhat_error(const norm* q, double xhat) {
    return u * (fabs(q->mean) * q->invstd + 4 * fabs(xhat));
}

static void check_batch_norm(amp_dtype t, amp_dtype pt, int n, int c, int s, double offset) {
    const char* what = "batch norm";
    amp_batch_norm_shape shape;
    size_t count = (size_t)n * (size_t)c * (size_t)s, C = (size_t)c;
    buffer x = random_buffer(t, count, 2), dy = random_buffer(t, count, 1), y = make(t, count),
           dx = make(t, count), e = make(AMP_F32, count);
    buffer gamma = random_buffer(pt, C, 1), beta = random_buffer(pt, C, 1), dg = random_buffer(pt, C, 1),
           db = random_buffer(pt, C, 1);
    buffer rm = random_buffer(AMP_F32, C, 1), rv = random_buffer(AMP_F32, C, 1), mean = make(AMP_F32, C),
           inv = make(AMP_F32, C);
    size_t i, ch;
    memset(&shape, 0, sizeof shape);
    shape.n = n; shape.channels = c; shape.spatial = s; shape.momentum = 0.25f;
    for (i = 0; i < count; i++) put(&x, i, get(&x, i) + offset);
    for (ch = 0; ch < C; ch++) put(&rv, ch, fabs(get(&rv, ch)) + 0.1);
    {
        buffer m0 = make(AMP_F32, C), v0 = make(AMP_F32, C), g0 = make(pt, C), b0 = make(pt, C);
        memcpy(m0.p, rm.p, C * 4); memcpy(v0.p, rv.p, C * 4);
        memcpy(g0.p, dg.p, C * amp_dtype_size(pt)); memcpy(b0.p, db.p, C * amp_dtype_size(pt));
        CHECK(amp_batch_norm_forward(&shape, 1, amp_ref_of(x.p, t), amp_ref_of(gamma.p, pt),
            amp_ref_of(beta.p, pt), (float*)rm.p, (float*)rv.p, (float*)mean.p, (float*)inv.p,
            amp_ref_of(y.p, t), NULL)
              == AMP_OK);
        CHECK(amp_batch_norm_forward(&shape, 0, amp_ref_of(x.p, t), amp_ref_of(gamma.p, pt),
            amp_ref_of(beta.p, pt), (float*)rm.p, (float*)rv.p, NULL, NULL, amp_f32(e.p), NULL)
              == AMP_OK);
        CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, t),
            amp_ref_of(gamma.p, pt), (float*)mean.p, (float*)inv.p, amp_ref_of(dx.p, t),
            amp_ref_of(dg.p, pt), amp_ref_of(db.p, pt), 1, NULL)
              == AMP_OK);
        for (ch = 0; ch < C; ch++) {
            norm q;
            double m = (double)n * (double)s, g = get(&gamma, ch), b = get(&beta, ch), xhat, w, error;
            int im, px;
#define PLACE ((size_t)((im * c + (int)ch) * s + px))
#define EACH for (im = 0; im < n; im++) for (px = 0; px < s; px++)
            memset(&q, 0, sizeof q);
            EACH q.mean += get(&x, PLACE) / m;
            EACH q.var += (get(&x, PLACE) - q.mean) * (get(&x, PLACE) - q.mean) / m;
            q.invstd = 1 / sqrt(q.var + 1e-5);
            EACH {
                w = get(&dy, PLACE); xhat = (get(&x, PLACE) - q.mean) * q.invstd;
                q.dbeta += w; q.dgamma += w * xhat;
                q.size_g += fabs(w); q.size_gx += fabs(w) * (xhat_error(&q, xhat) / u);
            }
            CLOSE(mean, ch, q.mean, 0.0);
            CLOSE(inv, ch, q.invstd, 2 * u * q.invstd);
            CLOSE(rm, ch, 0.75 * get(&m0, ch) + 0.25 * q.mean, u * (fabs(get(&m0, ch)) + fabs(q.mean)));
            CLOSE(rv, ch, 0.75 * get(&v0, ch) + 0.25 * q.var * m / (m - 1),
                  u * (fabs(get(&v0, ch)) + 2 * q.var));
            /* accumulated: the gradient, rounded to FP32, is added to what was there */
            CLOSE(dg, ch, get(&g0, ch) + q.dgamma, u * (q.size_gx + 2 * fabs(q.dgamma) + fabs(get(&g0, ch))));
            CLOSE(db, ch, get(&b0, ch) + q.dbeta, u * (2 * fabs(q.dbeta) + fabs(get(&b0, ch))));
            EACH {
                w = get(&dy, PLACE); xhat = (get(&x, PLACE) - q.mean) * q.invstd;
                error = fabs(g) * xhat_error(&q, xhat);
                CLOSE(y, PLACE, xhat * g + b, error + u * fabs(xhat * g + b));
                error = 4 * u * (fabs(w) + q.size_g / m + fabs(xhat * q.dgamma) / m)
                        + xhat_error(&q, xhat) * fabs(q.dgamma) / m + fabs(xhat) * u * q.size_gx / m;
                CLOSE(dx, PLACE, g * q.invstd * (w - q.dbeta / m - xhat * q.dgamma / m),
                      fabs(g) * q.invstd * error);
                xhat = (get(&x, PLACE) - get(&rm, ch)) / sqrt(get(&rv, ch) + 1e-5);
                CLOSE(e, PLACE, xhat * g + b, u * (4 * fabs(xhat * g) + fabs(b)));
            }
        }
        if (t == AMP_F32) {
            CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, t),
                amp_ref_of(gamma.p, pt), (float*)mean.p, (float*)inv.p, amp_ref_of(dy.p, t),
                AMP_NONE, AMP_NONE, 0, NULL)
                  == AMP_OK);
            CHECK(memcmp(dx.p, dy.p, count * 4) == 0);
        }
        finish(&m0); finish(&v0); finish(&g0); finish(&b0);
    }
    finish(&x);
    finish(&dy);
    finish(&y);
    finish(&dx);
    finish(&e);
    finish(&gamma);
    finish(&beta);
    finish(&dg);
    finish(&db);
    finish(&rm); finish(&rv); finish(&mean); finish(&inv);
}

static void test_batch_norm(void) {
    static const int shapes[10][3] = { { 2, 1, 1 },    { 70, 19, 1 }, { 3, 16, 1 }, { 3, 2, 144 },
                                      { 5, 3, 7 },    { 4, 2, 16 },  { 3, 2, 100 },
                                      { 2, 2, 1030 }, { 1, 3, 2 },   { 130, 2, 9 } };
    int a, b, s;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < 10; s++)
                check_batch_norm(TYPES[a], TYPES[b], shapes[s][0], shapes[s][1], shapes[s][2], 0);
    /* A mean far from zero: a variance from E[x^2] - E[x]^2 in FP32 would be noise. */
    check_batch_norm(AMP_F32, AMP_F32, 30, 2, 40, 10000);
    check_batch_norm(AMP_F32, AMP_F32, 300, 3, 1, -3000);
    check_batch_norm(AMP_F32, AMP_F32, 300, 3, 1, -100000);        /* as the sums of squares of x itself would not do */
}

/* One pixel makes the variance of channel 1 infinite, or all of it NaN: its running statistics stay, the others move. */
static void test_batch_norm_overflow(void) {
    static const float bad[3] = { 1e21f, -3e38f, 0.0f };
    amp_batch_norm_shape shape;
    float x[2 * 20 * 9], y[2 * 20 * 9], mean[20], var[20], want_mean[20], want_var[20], m[20], s[20];
    const uint32_t nan_bits = 0x7fc00000u;
    int i, k, c;
    memset(&shape, 0, sizeof shape);
    shape.n = 2; shape.channels = 20; shape.spatial = 9;
    for (i = 0; i < 2 * 20 * 9; i++) x[i] = test_uniform();
    for (k = 0; k < 3; k++) {
        for (c = 0; c < 20; c++) { mean[c] = want_mean[c] = 0.25f; var[c] = want_var[c] = 2; }
        CHECK(amp_batch_norm_forward(&shape, 1, amp_f32(x), AMP_NONE, AMP_NONE, want_mean,
            want_var, m, s, amp_f32(y), NULL)
              == AMP_OK);
        CHECK(want_mean[1] != 0.25f && want_var[1] != 2);
        want_mean[1] = 0.25f; want_var[1] = 2;
        if (k < 2) x[9 + 4] = bad[k];
        else memcpy(&x[9 + 4], &nan_bits, sizeof nan_bits);
        CHECK(amp_batch_norm_forward(&shape, 1, amp_f32(x), AMP_NONE, AMP_NONE, mean, var, m, s,
            amp_f32(y), NULL) == AMP_OK);
        CHECK(memcmp(mean, want_mean, sizeof mean) == 0 && memcmp(var, want_var, sizeof var) == 0);
        CHECK(amp_batch_norm_forward(&shape, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, var, m, s,
            amp_f32(y), NULL) == AMP_OK);
        CHECK(var[1] == 2 && var[0] != want_var[0]);
        x[9 + 4] = 0.5f;
    }
}

/* Frozen: the forward pass is that of evaluation and moves nothing; dx is two products, to the bit; the sums are those
   of the training form with the same statistics. x and dy have types of their own. */
static void check_frozen_norm(amp_dtype xt, amp_dtype t, amp_dtype pt, int n, int c, int s) {
    amp_batch_norm_shape shape;
    const size_t C = (size_t)c, S = (size_t)s, count = (size_t)n * C * S, bytes = count * amp_dtype_size(t);
    buffer x = random_buffer(xt, count, 2), dy = special_buffer(t, count, 1), y = make(xt, count), y1 = make(xt, count);
    buffer gamma = random_buffer(pt, C, 1), beta = random_buffer(pt, C, 1), rm = random_buffer(AMP_F32, C, 1);
    buffer rv = random_buffer(AMP_F32, C, 1), m0 = make(AMP_F32, C), v0 = make(AMP_F32, C), mean = make(AMP_F32, C);
    buffer inv = make(AMP_F32, C), dg = random_buffer(pt, C, 1), db = random_buffer(pt, C, 1), g1 = make(pt, C);
    buffer b1 = make(pt, C), dx = make(t, count), want = make(t, count);
    float *M = (float*)mean.p, *I = (float*)inv.p, *R = (float*)rm.p, *V = (float*)rv.p;
    size_t i, pb = C * amp_dtype_size(pt);
    int k;
    memset(&shape, 0, sizeof shape);
    shape.n = n; shape.channels = c; shape.spatial = s; shape.momentum = 0.25f;
    for (i = 0; i < C; i++) put(&rv, i, fabs(get(&rv, i)) + 0.1);
    memcpy(m0.p, R, C * 4); memcpy(v0.p, V, C * 4); memcpy(g1.p, dg.p, pb); memcpy(b1.p, db.p, pb);
    CHECK(amp_batch_norm_forward(&shape, 0, amp_ref_of(x.p, xt), amp_ref_of(gamma.p, pt),
        amp_ref_of(beta.p, pt), R, V, M, I, amp_ref_of(y1.p, xt), NULL) == AMP_OK);
    for (i = 0; i < C; i++) CHECK(get(&mean, i) == get(&m0, i));
    if (n * s > 1)
        CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, xt),
            amp_ref_of(gamma.p, pt), M, I, AMP_NONE, amp_ref_of(g1.p, pt), amp_ref_of(b1.p, pt),
            1, NULL)
              == AMP_OK);
    shape.frozen = 1;
    for (k = 0; k < 2; k++) {
        memset(M, 1, C * 4); memset(I, 1, C * 4);
        CHECK(amp_batch_norm_forward(&shape, k, amp_ref_of(x.p, xt), amp_ref_of(gamma.p, pt),
            amp_ref_of(beta.p, pt), R, V, M, I, amp_ref_of(y.p, xt), NULL) == AMP_OK);
        CHECK(memcmp(y.p, y1.p, count * amp_dtype_size(xt)) == 0 && memcmp(M, m0.p, C * 4) == 0);
        CHECK(memcmp(R, m0.p, C * 4) == 0 && memcmp(V, v0.p, C * 4) == 0);
    }
    for (i = 0; i < count; i++) {
        size_t ch = i / S % C;
        float factor = (float)get(&gamma, ch) * I[ch];
        put(&want, i, (double)((float)get(&dy, i) * factor));
    }
    CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, xt),
        amp_ref_of(gamma.p, pt), M, I, amp_ref_of(dx.p, t), amp_ref_of(dg.p, pt),
        amp_ref_of(db.p, pt), 1, NULL) == AMP_OK);
    CHECK_MSG(memcmp(dx.p, want.p, bytes) == 0, "%dx%dx%d %s", n, c, s, amp_dtype_name(t));
    if (n * s > 1) CHECK(memcmp(dg.p, g1.p, pb) == 0 && memcmp(db.p, b1.p, pb) == 0);
    CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, xt),
        amp_ref_of(gamma.p, pt), M, I, amp_ref_of(dy.p, t), AMP_NONE, AMP_NONE, 0, NULL) == AMP_OK);
    CHECK(memcmp(dy.p, want.p, bytes) == 0);
    dy.p = dy.block + GUARD;
    finish(&x); finish(&dy); finish(&y); finish(&y1); finish(&gamma); finish(&beta); finish(&rm); finish(&rv);
    finish(&m0); finish(&v0); finish(&mean); finish(&inv); finish(&dg); finish(&db); finish(&g1); finish(&b1);
    finish(&dx); finish(&want);
}

static void test_frozen_norm(void) {
    static const int shapes[11][3] = { { 1, 3, 1 },   { 70, 19, 1 }, { 3, 16, 1 },    { 3, 2, 144 }, { 5, 3, 7 }, { 4, 2, 16 },
                                      { 3, 2, 100 }, { 2, 2, 1030 }, { 2, 3, 2064 }, { 1, 3, 2 },   { 130, 2, 9 } };
    int a, b, s;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < 11; s++)
                check_frozen_norm(TYPES[a], TYPES[b], TYPES[(a + s) % 3], shapes[s][0], shapes[s][1], shapes[s][2]);
}

/* Small planes in one type, many channels at once, and with a result of another one, where a channel's tiles are
   widened: to the bit, the statistics, the sums, and the result once it has that type too. `far`: the first image and
   the last one hold numbers that cancel, so that the order of sums is seen. */
static void check_norm_rows(amp_dtype t, int n, int c, int s, int frozen, int far) {
    const amp_dtype other = t == AMP_F32 ? AMP_F16 : AMP_F32, low = t == AMP_F32 ? AMP_F16 : t;
    const size_t C = (size_t)c, count = (size_t)n * C * (size_t)s, bytes = count * amp_dtype_size(low);
    buffer x = random_buffer(t, count, 2), dy = random_buffer(t, count, 1), gamma = random_buffer(AMP_F32, C, 1);
    buffer beta = random_buffer(AMP_F32, C, 1), running = random_buffer(AMP_F32, 2 * C, 1), y[2], saved[2], sums[2], got;
    amp_batch_norm_shape shape;
    int k, pass;
    memset(&shape, 0, sizeof shape);
    shape.n = n; shape.channels = c; shape.spatial = s; shape.frozen = frozen;
    for (k = 0; k < (int)C; k++) put(&running, C + (size_t)k, fabs(get(&running, C + (size_t)k)) + 0.1);
    for (k = 0; far && n > 1 && k < c * s; k++) {
        put(&x, (size_t)k, ldexp(1, t == AMP_F16 ? 15 : 45));
        put(&x, count - C * (size_t)s + (size_t)k, -ldexp(1, t == AMP_F16 ? 15 : 45));
    }
    got = make(low, count);
    for (k = 0; k < 2; k++) {
        y[k] = make(k ? other : t, count);
        saved[k] = make(AMP_F32, 2 * C);
        sums[k] = make(AMP_F32, 2 * C);
    }
    for (pass = 0; pass < 2; pass++) {
        for (k = 0; k < 2; k++) {
            float *mean = (float*)saved[k].p, *to = (float*)sums[k].p, *run = (float*)running.p;
            if (pass == 0)
                CHECK(amp_batch_norm_forward(&shape, 1, amp_ref_of(x.p, t), amp_f32(gamma.p),
                    amp_f32(beta.p), frozen ? run : NULL, frozen ? run + C : NULL, mean, mean + C,
                    amp_ref_of(y[k].p, k ? other : t), NULL)
                      == AMP_OK);
            else
                CHECK(amp_batch_norm_backward(&shape, amp_ref_of(dy.p, t), amp_ref_of(x.p, t),
                    amp_f32(gamma.p), mean, mean + C, amp_ref_of(y[k].p, k ? other : t),
                    amp_f32(to), amp_f32(to + C), 0, NULL) == AMP_OK);
        }
        k = t == AMP_F32;                          /* the one that has the lower type already */
        CHECK(amp_convert(amp_ref_of(got.p, low), amp_ref_of(y[!k].p, k ? t : other), count) == AMP_OK);
        CHECK_MSG(memcmp(got.p, y[k].p, bytes) == 0, "%dx%dx%d %s, pass %d", n, c, s, amp_dtype_name(t), pass);
    }
    CHECK_MSG(memcmp(saved[0].p, saved[1].p, 8 * C) == 0, "%dx%dx%d %s", n, c, s, amp_dtype_name(t));
    CHECK_MSG(memcmp(sums[0].p, sums[1].p, 8 * C) == 0, "%dx%dx%d %s", n, c, s, amp_dtype_name(t));
    for (k = 0; k < 2; k++) { finish(&y[k]); finish(&saved[k]); finish(&sums[k]); }
    finish(&x); finish(&dy); finish(&gamma); finish(&beta); finish(&running); finish(&got);
}
static void test_norm_rows(void) {
    static const int shapes[14][3] = { { 70, 19, 1 }, { 3, 300, 1 }, { 17, 256, 1 }, { 70, 40, 2 }, { 1, 5, 2 },
                                       { 130, 3, 2 }, { 37, 21, 4 }, { 19, 17, 8 },  { 20, 33, 16 }, { 9, 11, 3 },
                                       { 33, 7, 7 },  { 5, 37, 49 }, { 4, 3, 127 },  { 6, 5, 32 } };
    int t, s, k;
    for (t = 0; t < 3; t++)
        for (s = 0; s < 14; s++)
            for (k = 0; k < 3; k++)
                check_norm_rows(TYPES[t], shapes[s][0], shapes[s][1], shapes[s][2], k == 1, k == 2);
}

/* The number near the mean from which a batch norm's sums start: of the first pixels, at most 16, the mean, rounded to
   their type. */
static double pivot_of(const buffer* x, size_t ch, size_t spatial) {
    const size_t n = spatial < 16 ? spatial : 16;
    buffer rounded = make(x->t, 1);
    double sum = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += get(x, ch * spatial + i);
    put(&rounded, 0, (double)(float)(sum / (double)n));
    sum = get(&rounded, 0);
    finish(&rounded);
    return sum;
}
/* First pixels far from the others: differences d from their mean are large, and squares of d round by 2^-24 each. With
   K = (mean - pivot) / sigma that is 1 + K^2 roundings of the variance. All pixels alike: no variance at all. */
static void check_norm_pivot(amp_dtype t, int n, int c, int s) {
    const size_t C = (size_t)c, S = (size_t)s, size = (size_t)n * C * S;
    buffer x = random_buffer(t, size, 1), y = make(t, size), mean = make(AMP_F32, C), inv = make(AMP_F32, C);
    amp_batch_norm_shape shape;
    size_t ch, i, k;
    memset(&shape, 0, sizeof shape);
    shape.n = n; shape.channels = c; shape.spatial = s;
    for (ch = 0; ch < C; ch++) for (i = 0; i < S && i < 16; i++) put(&x, ch * S + i, -3000 + 17.3 * get(&x, ch * S + i));
    CHECK(amp_batch_norm_forward(&shape, 1, amp_ref_of(x.p, t), AMP_NONE, AMP_NONE, NULL, NULL,
        (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, t), NULL) == AMP_OK);
    for (ch = 0; ch < C; ch++) {
        const double m = (double)n * (double)s, pivot = pivot_of(&x, ch, S);
        double average = 0, var = 0, off;
        for (k = 0; k < (size_t)n; k++) for (i = 0; i < S; i++) average += get(&x, (k * C + ch) * S + i) / m;
        for (k = 0; k < (size_t)n; k++)
            for (i = 0; i < S; i++) var += pow(get(&x, (k * C + ch) * S + i) - average, 2) / m;
        off = fabs(average - pivot);
        CHECK(off * off > 2 * var);
        CHECK_MSG(fabs(get(&mean, ch) - average) <= u * (fabs(average) + (t == AMP_F32 ? 0 : off)),
                  "%dx%dx%d %s: mean %.9g, not %.9g", n, c, s, amp_dtype_name(t), get(&mean, ch), average);
        CHECK_MSG(fabs(get(&inv, ch) * sqrt(var + 1e-5) - 1) <= 2 * u + u * (1 + off * off / var),
                  "%dx%dx%d %s: 1/sigma %.9g, not %.9g", n, c, s, amp_dtype_name(t), get(&inv, ch), 1 / sqrt(var + 1e-5));
    }
    for (i = 0; i < size; i++) put(&x, i, 777.77 * (1 + (double)(i / S % C)));
    CHECK(amp_batch_norm_forward(&shape, 1, amp_ref_of(x.p, t), AMP_NONE, AMP_NONE, NULL, NULL,
        (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, t), NULL) == AMP_OK);
    for (ch = 0; ch < C; ch++)
        CHECK(get(&mean, ch) == get(&x, ch * S) && get(&inv, ch) == (double)(float)(1 / sqrt((double)1e-5f)));
    finish(&x); finish(&y); finish(&mean); finish(&inv);
}
static void test_norm_pivot(void) {
    static const int shapes[7][3] = { { 50, 19, 1 }, { 30, 16, 1 }, { 21, 3, 4 }, { 9, 3, 49 }, { 1, 2, 1030 }, { 3, 2, 2064 },
                                     { 2, 3, 144 } };
    int t, i;
    for (t = 0; t < 3; t++) for (i = 0; i < 7; i++) check_norm_pivot(TYPES[t], shapes[i][0], shapes[i][1], shapes[i][2]);
}

/* In a layer norm a difference from the mean that is no float any more is infinite, and so is the variance; a batch
   norm's squares are those of numbers as large as its values. */
static void test_norm_overflow(void) {
    static const amp_batch_norm_shape shapes[3] = { { 2, 2, 128, 0, 0, 0, NULL }, { 64, 8, 1, 0, 0, 0, NULL }, { 7, 1, 911, 0, 0, 0, NULL } };
    const size_t size = 8 * 800;
    size_t d;
    int t, i, k;
    for (t = 0; t < 3; t += 2) {
        buffer x = make(TYPES[t], size), y = make(TYPES[t], size), mean = make(AMP_F32, 8), inv = make(AMP_F32, 8);
        for (d = 0; d < size; d++) put(&x, d, d / 8 % 4 == 3 ? -3e38 : 3e38);
        for (d = 64; d <= 800; d += 736) {
            CHECK(amp_layer_norm_forward(amp_ref_of(x.p, TYPES[t]), AMP_NONE, AMP_NONE, 0,
                (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, TYPES[t]), 8, d, NULL) == AMP_OK);
            for (i = 0; i < 8; i++)
                CHECK(fabs(get(&mean, (size_t)i) / 1.5e38 - 1) < 0.01 && get(&inv, (size_t)i) == 0);
        }
        for (k = 0; k < 2; k++) {
            CHECK(amp_batch_norm_forward(&shapes[k], 1, amp_ref_of(x.p, TYPES[t]), AMP_NONE,
                AMP_NONE, NULL, NULL, (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, TYPES[t]),
                NULL) == AMP_OK);
            for (i = 0; i < shapes[k].channels; i++)      /* a quarter of the values are -v, the others v */
                CHECK(fabs(get(&inv, (size_t)i) * get(&x, 0) * sqrt(0.75) - 1) < 1e-6);
        }
        for (d = 0; d < size; d++) put(&x, d, 3e38);          /* squares that cancel, but not below zero */
        for (k = 0; k < 3; k++) {
            CHECK(amp_batch_norm_forward(&shapes[k], 1, amp_ref_of(x.p, TYPES[t]), AMP_NONE,
                AMP_NONE, NULL, NULL, (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, TYPES[t]),
                NULL) == AMP_OK);
            for (i = 0; i < shapes[k].channels; i++) CHECK(get(&mean, (size_t)i) == get(&x, 0) && get(&inv, (size_t)i) > 0);
        }
        finish(&x); finish(&y); finish(&mean); finish(&inv);
    }
}

static void check_layer_norm(amp_dtype t, amp_dtype pt, size_t rows, size_t d, double offset, int affine, int rms) {
    const char* what = rms ? "rms norm" : "layer norm";
    const double eps = rms ? 1e-6 : 1e-5;
    buffer x = random_buffer(t, rows * d, 2), dy = random_buffer(t, rows * d, 1), y = make(t, rows * d),
           dx = make(t, rows * d);
    buffer gamma = random_buffer(pt, d, 1), beta = random_buffer(pt, d, 1), dg = make(pt, d),
           db = make(pt, d);
    buffer mean = make(AMP_F32, rows), inv = make(AMP_F32, rows);
    double* sums = (double*)calloc(3 * d, sizeof(double));
    const void *gp = affine ? gamma.p : NULL, *bp = affine ? beta.p : NULL;
    size_t r, i;
    for (i = 0; i < rows * d; i++) put(&x, i, get(&x, i) + offset);
    if (rms) {
        CHECK(amp_rms_norm_forward(amp_ref_of(x.p, t), amp_ref_of(gp, pt), 0, (float*)inv.p, amp_ref_of(y.p, t), rows, d, NULL)
            == AMP_OK);
        CHECK(amp_rms_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(gp, pt), 0.0f, (float*)inv.p,
            amp_ref_of(dx.p, t), amp_ref_of(dg.p, pt), 0, rows, d, NULL) == AMP_OK);
    } else {
        CHECK(amp_layer_norm_forward(amp_ref_of(x.p, t), amp_ref_of(gp, pt), amp_ref_of(bp, pt), 0,
            (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, t), rows, d, NULL) == AMP_OK);
        CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(gp, pt),
            0.0f, (float*)mean.p, (float*)inv.p, amp_ref_of(dx.p, t), amp_ref_of(dg.p, pt),
            amp_ref_of(db.p, pt), 0, rows, d, NULL) == AMP_OK);
    }
    for (r = 0; r < rows; r++) {
        norm q;
        double m = (double)d;
        memset(&q, 0, sizeof q);
#define X get(&x, r * d + i)
#define G (get(&dy, r * d + i) * (affine ? get(&gamma, i) : 1))
        for (i = 0; i < d && !rms; i++) q.mean += X / m;
        for (i = 0; i < d; i++) q.var += (X - q.mean) * (X - q.mean) / m;
        q.invstd = 1 / sqrt(q.var + eps);
        for (i = 0; i < d; i++) {
            double xhat = (X - q.mean) * q.invstd, w = get(&dy, r * d + i);
            q.mean_g += rms ? 0 : G / m; q.mean_gx += G * xhat / m;
            q.size_g += fabs(G) / m; q.size_gx += fabs(G) * (xhat_error(&q, xhat) / u + fabs(xhat)) / m;
            sums[i] += w * xhat; sums[d + i] += w; sums[2 * d + i] += fabs(w) * xhat_error(&q, xhat);
        }
        if (!rms) CLOSE(mean, r, q.mean, 0.0);
        CLOSE(inv, r, q.invstd, 2 * u * q.invstd);
        for (i = 0; i < d; i++) {
            double xhat = (X - q.mean) * q.invstd, g = affine ? get(&gamma, i) : 1,
                   b = affine && !rms ? get(&beta, i) : 0, error;
            CLOSE(y, r * d + i, xhat * g + b, fabs(g) * xhat_error(&q, xhat) + u * fabs(xhat * g + b));
            error = 4 * u * (fabs(G) + q.size_g + fabs(xhat * q.mean_gx))
                    + xhat_error(&q, xhat) * fabs(q.mean_gx) + fabs(xhat) * u * q.size_gx;
            CLOSE(dx, r * d + i, q.invstd * (G - q.mean_g - xhat * q.mean_gx), q.invstd * error);
        }
    }
    for (i = 0; i < d; i++) {
        CLOSE(dg, i, sums[i], sums[2 * d + i] + u * fabs(sums[i]));
        if (!rms) CLOSE(db, i, sums[d + i], u * fabs(sums[d + i]));
    }
    /* The same gradient once more, added to itself: twice as much, where that is not rounded. */
    for (i = 0; i < d; i++) sums[i] = get(&dg, i);
    if (rms)
        CHECK(amp_rms_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(gp, pt), 0.0f, (float*)inv.p,
            AMP_NONE, amp_ref_of(dg.p, pt), 1, rows, d, NULL) == AMP_OK);
    else CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(gp, pt),
        0.0f, (float*)mean.p, (float*)inv.p, AMP_NONE, amp_ref_of(dg.p, pt), amp_ref_of(db.p, pt),
        1, rows, d, NULL) == AMP_OK);
    for (i = 0; i < d && pt == AMP_F32; i++) CHECK(get(&dg, i) == 2 * sums[i]);
    free(sums);
    finish(&x);
    finish(&dy);
    finish(&y);
    finish(&dx);
    finish(&gamma);
    finish(&beta);
    finish(&dg);
    finish(&db);
    finish(&mean);
    finish(&inv);
}
static void test_layer_norm(void) {
    int a, b;
    size_t s;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < SIZES; s++) {
                check_layer_norm(TYPES[a], TYPES[b], 3, sizes[s], 0, s % 4 != 3, 0);
                check_layer_norm(TYPES[a], TYPES[b], 3, sizes[s], (double)(s % 3), s % 4 != 3, 1);
            }
    check_layer_norm(AMP_F32, AMP_F32, 5, 100, 10000, 1, 0);
    check_layer_norm(AMP_F32, AMP_F32, 5, 100, 10000, 1, 1);
}
/* Of each image and group the moments in double; the parameters' gradients go to sums: dgamma, dbeta, error of dgamma. */
static void check_group_norm(amp_dtype t, amp_dtype pt, int n, int c, int s, int groups, int affine) {
    const char* what = "group norm";
    const amp_group_norm_shape shape = { n, c, s, groups, 0.0f };
    const size_t C = (size_t)c, S = (size_t)s, count = (size_t)n * C * S, per_image = groups ? (size_t)groups : C, d = C / per_image * S;
    const size_t rows = (size_t)n * per_image;
    buffer x = random_buffer(t, count, 2), dy = random_buffer(t, count, 1), y = make(t, count), dx = make(t, count);
    buffer gamma = random_buffer(pt, C, 1), beta = random_buffer(pt, C, 1), dg = random_buffer(pt, C, 1), db = make(pt, C);
    buffer mean = make(AMP_F32, rows), inv = make(AMP_F32, rows), old = make(pt, C), again = random_buffer(t, count, 1), sum = make(AMP_F32, count);
    double* sums = (double*)calloc(3 * C, sizeof(double));
    const amp_ref xr = amp_ref_of(x.p, t), dyr = amp_ref_of(dy.p, t), gr = amp_ref_of(affine ? gamma.p : NULL, pt);
    size_t r, i;
    memcpy(old.p, dg.p, C * amp_dtype_size(pt));
    memset(db.p, 0, C * amp_dtype_size(pt));
    CHECK(amp_group_norm_forward(&shape, xr, gr, amp_ref_of(affine ? beta.p : NULL, pt), (float*)mean.p, (float*)inv.p,
        amp_ref_of(y.p, t), NULL) == AMP_OK);
    CHECK(amp_group_norm_backward(&shape, dyr, xr, gr, (float*)mean.p, (float*)inv.p, amp_ref_of(dx.p, t), amp_ref_of(dg.p, pt),
        amp_ref_of(db.p, pt), AMP_ACCUMULATE_PARAMS, NULL) == AMP_OK);
    for (r = 0; r < rows; r++) {
        const size_t first = r % per_image * (C / per_image);
        norm q;
        double m = (double)d;
        memset(&q, 0, sizeof q);
#define CH (first + i / S)
#define GROUP_G (get(&dy, r * d + i) * (affine ? get(&gamma, CH) : 1))
        for (i = 0; i < d; i++) q.mean += X / m;
        for (i = 0; i < d; i++) q.var += (X - q.mean) * (X - q.mean) / m;
        q.invstd = 1 / sqrt(q.var + 1e-5);
        for (i = 0; i < d; i++) {
            double xhat = (X - q.mean) * q.invstd, w = get(&dy, r * d + i);
            q.mean_g += GROUP_G / m; q.mean_gx += GROUP_G * xhat / m;
            q.size_g += fabs(GROUP_G) / m; q.size_gx += fabs(GROUP_G) * (xhat_error(&q, xhat) / u + fabs(xhat)) / m;
            sums[CH] += w * xhat; sums[C + CH] += w; sums[2 * C + CH] += fabs(w) * xhat_error(&q, xhat);
        }
        CLOSE(mean, r, q.mean, 0.0);
        CLOSE(inv, r, q.invstd, 2 * u * q.invstd);
        for (i = 0; i < d; i++) {
            double xhat = (X - q.mean) * q.invstd, g = affine ? get(&gamma, CH) : 1, b = affine ? get(&beta, CH) : 0, error;
            CLOSE(y, r * d + i, xhat * g + b, fabs(g) * xhat_error(&q, xhat) + u * fabs(xhat * g + b));
            error = 4 * u * (fabs(GROUP_G) + q.size_g + fabs(xhat * q.mean_gx))
                    + xhat_error(&q, xhat) * fabs(q.mean_gx) + fabs(xhat) * u * q.size_gx;
            CLOSE(dx, r * d + i, q.invstd * (GROUP_G - q.mean_g - xhat * q.mean_gx), q.invstd * error);
        }
    }
    for (i = 0; i < C; i++) {
        CLOSE(dg, i, get(&old, i) + sums[i], sums[2 * C + i] + u * (2 * fabs(sums[i]) + fabs(get(&old, i))));
        CLOSE(db, i, sums[C + i], u * fabs(sums[C + i]));
    }
    /* alone, and added to what is there */
    CHECK(amp_group_norm_backward(&shape, dyr, xr, gr, (float*)mean.p, (float*)inv.p, amp_f32(sum.p), AMP_NONE, AMP_NONE, 0, NULL)
        == AMP_OK);
    for (i = 0; i < count; i++) put(&dx, i, (double)(float)(get(&again, i) + get(&sum, i)));
    CHECK(amp_group_norm_backward(&shape, dyr, xr, gr, (float*)mean.p, (float*)inv.p, amp_ref_of(again.p, t), AMP_NONE, AMP_NONE,
        AMP_ACCUMULATE_INPUT, NULL) == AMP_OK);
    CHECK(memcmp(dx.p, again.p, count * amp_dtype_size(t)) == 0);
    /* a group of all channels of one pixel is a layer norm's row */
    if (s == 1 && groups == 1) {
        CHECK(amp_layer_norm_forward(xr, gr, amp_ref_of(affine ? beta.p : NULL, pt), 0, NULL, NULL, amp_ref_of(again.p, t), rows, d,
            NULL) == AMP_OK);
        CHECK(memcmp(y.p, again.p, count * amp_dtype_size(t)) == 0);
    }
    free(sums);
    finish(&x); finish(&dy); finish(&y); finish(&dx); finish(&gamma); finish(&beta); finish(&dg); finish(&db);
    finish(&mean); finish(&inv); finish(&old); finish(&again); finish(&sum);
}
static void test_group_norm(void) {
    static const int shapes[][4] = { { 1, 1, 1, 1 }, { 3, 6, 1, 1 }, { 2, 6, 1, 3 }, { 2, 3, 5, 0 }, { 3, 4, 16, 2 }, { 2, 12, 49, 4 },
        { 1, 8, 49, 8 }, { 2, 70, 9, 1 }, { 2, 160, 3, 2 }, { 2, 4, 1500, 2 }, { 2, 2, 2100, 1 }, { 1, 3, 2048, 3 }, { 3, 200, 1, 2 } };
    int a, b;
    size_t i;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
                check_group_norm(TYPES[a], TYPES[b], shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], i % 4 != 3);
    check_group_norm(AMP_F16, AMP_F32, 3, 96, 784, 8, 1);      /* enough for threads */
}
/* RMS norm is layer norm about a mean of 0: the same y and dgamma, bit by bit, where rows have such a mean; and
   sums that are shared, in a workspace or not, are the same. */
static void test_rms_norm_is_layer_norm(void) {
    static const size_t rows[] = { 1, 7, 300, 5 }, widths[] = { 2, 34, 20, 2050 };
    size_t i, k;
    int t;
    for (t = 0; t < 3; t++)
        for (i = 0; i < 4; i++) {
            const size_t n = rows[i], d = widths[i];
            buffer x = random_buffer(TYPES[t], n * d, 2), dy = random_buffer(TYPES[t], n * d, 1), gamma = random_buffer(AMP_F32, d, 1);
            buffer y[2], dg[3], inv[2], mean = make(AMP_F32, n), dx = make(AMP_F32, n * d);
            amp_exec e = norm_exec(n, d);
            for (k = 0; k < n * d; k += 2) put(&x, k + 1, -get(&x, k));
            for (k = 0; k < 2; k++) { y[k] = make(AMP_BF16, n * d); inv[k] = make(AMP_F32, n); }
            for (k = 0; k < 3; k++) dg[k] = make(AMP_F32, d);
            CHECK(amp_layer_norm_forward(amp_ref_of(x.p, x.t), amp_f32(gamma.p), AMP_NONE, 0.1f, (float*)mean.p, (float*)inv[0].p,
                amp_ref_of(y[0].p, AMP_BF16), n, d, NULL) == AMP_OK);
            CHECK(amp_rms_norm_forward(amp_ref_of(x.p, x.t), amp_f32(gamma.p), 0.1f, (float*)inv[1].p,
                amp_ref_of(y[1].p, AMP_BF16), n, d, NULL) == AMP_OK);
            CHECK(same(&y[0], &y[1]) && same(&inv[0], &inv[1]));
            CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, dy.t), amp_ref_of(x.p, x.t), amp_f32(gamma.p), 0.0f, (float*)mean.p,
                (float*)inv[0].p, AMP_NONE, amp_f32(dg[0].p), AMP_NONE, 0, n, d, NULL) == AMP_OK);
            for (k = 0; k < 2; k++) {
                CHECK(amp_rms_norm_backward(amp_ref_of(dy.p, dy.t), amp_ref_of(x.p, x.t), amp_f32(gamma.p), 0.1f,
                    k ? (float*)inv[1].p : NULL, amp_f32(dx.p), amp_f32(dg[1 + k].p), 0, n, d, k ? &e : NULL) == AMP_OK);
                CHECK(same(&dg[0], &dg[1 + k]));
            }
            free(e.workspace);
            for (k = 0; k < 2; k++) { finish(&y[k]); finish(&inv[k]); }
            for (k = 0; k < 3; k++) finish(&dg[k]);
            finish(&x); finish(&dy); finish(&gamma); finish(&mean); finish(&dx);
        }
}

/* With AMP_ACCUMULATE_INPUT a norm's dx is what it overwrites else, as FP32, added to the old value and rounded once; the
   parameters' gradients are as without. spatial: that of batch norm over (rows, d, spatial), 0 = layer norm. */
/* spatial: 0 is a layer norm, or frozen an RMS norm. */
typedef struct norm_call { const buffer *dy, *x, *gamma; const float *mean, *inv; size_t rows, d; int spatial, frozen; } norm_call;
static amp_result norm_backward(const norm_call* v, void* dx, amp_dtype dxt, void* dg, void* db, int accumulate,
                                const amp_exec* e) {
    amp_batch_norm_shape s;
    if (v->spatial == 0 && v->frozen)
        return amp_rms_norm_backward(amp_ref_of(v->dy->p, v->dy->t), amp_ref_of(v->x->p, v->x->t), amp_f32(v->gamma->p),
            0.0f, v->inv, amp_ref_of(dx, dxt), amp_f32(dg), accumulate, v->rows, v->d, e);
    if (v->spatial == 0)
        return amp_layer_norm_backward(amp_ref_of(v->dy->p, v->dy->t),
            amp_ref_of(v->x->p, v->x->t), amp_f32(v->gamma->p), 0.0f, v->mean, v->inv,
            amp_ref_of(dx, dxt), amp_f32(dg), amp_f32(db), accumulate, v->rows, v->d, e);
    memset(&s, 0, sizeof s);
    s.n = (int)v->rows; s.channels = (int)v->d; s.spatial = v->spatial; s.frozen = v->frozen;
    return amp_batch_norm_backward(&s, amp_ref_of(v->dy->p, v->dy->t),
        amp_ref_of(v->x->p, v->x->t), amp_f32(v->gamma->p), v->mean, v->inv, amp_ref_of(dx, dxt),
        amp_f32(dg), amp_f32(db), accumulate, e);
}
static void check_added_norm(amp_dtype t, amp_dtype dxt, size_t rows, size_t d, int spatial, int frozen) {
    const size_t n = rows * d * (size_t)(spatial ? spatial : 1), few = spatial ? d : rows;
    buffer dy = random_buffer(t, n, 1), x = random_buffer(t, n, 1), gamma = random_buffer(AMP_F32, d, 1);
    buffer mean = random_buffer(AMP_F32, few, 0.1), inv = random_buffer(AMP_F32, few, 1);
    buffer dx = random_buffer(dxt, n, 1), want = make(dxt, n), sum = make(AMP_F32, n), dg[4];
    norm_call v;
    amp_exec e;
    size_t i;
    int k;
    v.dy = &dy; v.x = &x; v.gamma = &gamma; v.mean = (const float*)mean.p; v.inv = (const float*)inv.p;
    v.rows = rows; v.d = d; v.spatial = spatial; v.frozen = frozen;
    memset(&e, 0, sizeof e);
    e.workspace_size = spatial ? 0 : amp_layer_norm_workspace(rows, d);
    e.workspace = malloc(e.workspace_size + 1);
    for (k = 0; k < 4; k++) dg[k] = make(AMP_F32, d);
    CHECK(norm_backward(&v, sum.p, AMP_F32, dg[0].p, dg[1].p, 0, NULL) == AMP_OK);
    for (k = 0; k < 3; k++) {                      /* with the parameters' gradients, with a workspace, alone */
        for (i = 0; i < n; i++) put(&want, i, (double)(float)(get(&dx, i) + get(&sum, i)));
        CHECK(norm_backward(&v, dx.p, dxt, k < 2 ? dg[2].p : NULL, k < 2 ? dg[3].p : NULL, AMP_ACCUMULATE_INPUT,
                            k == 1 ? &e : NULL) == AMP_OK);
        CHECK_MSG(memcmp(dx.p, want.p, n * amp_dtype_size(dxt)) == 0, "%s to %s, %lu x %lu x %d, %d", amp_dtype_name(t),
                  amp_dtype_name(dxt), (unsigned long)rows, (unsigned long)d, spatial, frozen);
        CHECK(memcmp(dg[0].p, dg[2].p, d * sizeof(float)) == 0 && memcmp(dg[1].p, dg[3].p, d * sizeof(float)) == 0);
    }
    if (spatial && t == dxt) {                     /* over dy itself */
        for (i = 0; i < n; i++) put(&want, i, (double)(float)(get(&dy, i) + get(&sum, i)));
        CHECK(norm_backward(&v, dy.p, t, dg[2].p, NULL, AMP_ACCUMULATE_INPUT, NULL) == AMP_OK);
        CHECK(memcmp(dy.p, want.p, n * amp_dtype_size(t)) == 0);
    }
    for (k = 0; k < 4; k++) finish(&dg[k]);
    free(e.workspace);
    finish(&dy); finish(&x); finish(&gamma); finish(&mean); finish(&inv); finish(&dx); finish(&want); finish(&sum);
}
static void test_added_norms(void) {
    static const size_t layers[][2] = { { 3, 1 }, { 37, 5 }, { 2, 16 }, { 70, 33 }, { 5, 700 }, { 3, 1024 }, { 66, 1100 } };
    static const int batches[][3] = { { 4, 3, 5 }, { 2, 40, 49 }, { 33, 17, 1 }, { 3, 5, 1200 }, { 70, 64, 1 } };
    size_t i;
    int a;
    for (i = 0; i < sizeof layers / sizeof layers[0]; i++)
        for (a = 0; a < 8; a++)
            check_added_norm(TYPES[a / 2 % 3], TYPES[a / 2 == 3 ? 1 : a / 2], layers[i][0], layers[i][1], 0, a % 2);
    for (i = 0; i < sizeof batches / sizeof batches[0]; i++)
        for (a = 0; a < 8; a++)
            check_added_norm(TYPES[a / 2 % 3], TYPES[a / 2 == 3 ? 1 : a / 2], (size_t)batches[i][0], (size_t)batches[i][1],
                             batches[i][2], a % 2);
}

/* The order of a sum: element i goes to lane i % 16, and the lanes are added up in a tree. Where numbers
   cancel, what is left of their roundings shows another order. */
static void cancelling(buffer* x, size_t first, size_t d) {
    size_t i;
    for (i = 0; i < d; i++)
        put(x, first + i, 2 * i < d ? ldexp(random_normal(), (int)(test_random() % 90)) : -get(x, first + d - 1 - i));
}
static float mean_of(const double* lanes_of, double pivot, size_t d) {
    double lanes[16];
    size_t i, l;
    memcpy(lanes, lanes_of, sizeof lanes);
    for (l = 8; l > 0; l /= 2) for (i = 0; i < l; i++) lanes[i] += lanes[i + l];
    return (float)(lanes[0] / (double)d + pivot);
}
static void check_sum_order(amp_dtype t, size_t rows, size_t d) {
    buffer x = make(t, rows * d), y = make(t, rows * d), mean = make(AMP_F32, rows);
    size_t r, i;
    for (r = 0; r < rows; r++) cancelling(&x, r * d, d);
    CHECK(amp_layer_norm_forward(amp_ref_of(x.p, t), AMP_NONE, AMP_NONE, 0, (float*)mean.p, NULL,
        amp_ref_of(y.p, t), rows, d, NULL)
          == AMP_OK);
    for (r = 0; r < rows; r++) {
        double lanes[16] = { 0 };
        for (i = 0; i < d; i++) lanes[i % 16] += get(&x, r * d + i);
        CHECK_MSG((float)get(&mean, r) == mean_of(lanes, 0, d), "%s: mean of row %lu of %lu elements", amp_dtype_name(t),
                  (unsigned long)r, (unsigned long)d);
    }
    finish(&x);
    finish(&y);
    finish(&mean);
}
/* The same down the planes of a channel; planes are whole groups of lanes here. */
static void check_channel_order(amp_dtype t, size_t n, size_t channels, size_t spatial) {
    const size_t size = n * channels * spatial;
    buffer x = make(t, size), y = make(t, size), mean = make(AMP_F32, channels), inv = make(AMP_F32, channels);
    amp_batch_norm_shape shape;
    size_t c, i, k;
    memset(&shape, 0, sizeof shape);
    shape.n = (int)n; shape.channels = (int)channels; shape.spatial = (int)spatial;
    cancelling(&x, 0, size);
    CHECK(amp_batch_norm_forward(&shape, 1, amp_ref_of(x.p, t), AMP_NONE, AMP_NONE, NULL, NULL,
        (float*)mean.p, (float*)inv.p, amp_ref_of(y.p, t), NULL) == AMP_OK);
    for (c = 0; c < channels; c++) {
        const double pivot = t == AMP_F32 ? 0 : pivot_of(&x, c, spatial);
        double lanes[16] = { 0 };
        for (k = 0; k < n; k++)
            for (i = 0; i < spatial; i++)
                lanes[i % 16] += (double)(float)(get(&x, (k * channels + c) * spatial + i) - pivot);
        CHECK_MSG((float)get(&mean, c) == mean_of(lanes, pivot, n * spatial), "%s: mean of channel %lu of %lu pixels",
                  amp_dtype_name(t), (unsigned long)c, (unsigned long)spatial);
    }
    finish(&x);
    finish(&y);
    finish(&mean);
    finish(&inv);
}
static void test_sum_order(void) {
    size_t d, rows;
    int t;
    for (t = 0; t < 3; t++) {
        if (TYPES[t] == AMP_F16) continue;                       /* has too few powers of two to cancel by */
        for (d = 1; d < 1100; d += d < 70 ? 1 : 103)
            for (rows = 1; rows < 4; rows++) check_sum_order(TYPES[t], rows, d);
        for (d = 1; d < 5; d++) {
            check_channel_order(TYPES[t], 4, d, 144);
            check_channel_order(TYPES[t], 2, d, 1040);
        }
    }
}

static int pad_end(int end, int start) { return end == 0 ? start : end == AMP_ZERO ? 0 : end; }
/* --- pooling ---------------------------------------------------------------------------------- */

static void check_pool(const amp_pool2d_shape* s, amp_dtype t, amp_dtype yt, int ties) {
    const char* what = s->kind == AMP_POOL_MAX ? "max pool" : "average pool";
    size_t planes = (size_t)(s->n * s->channels), area = (size_t)(s->height * s->width), plane, i;
    int oh, ow, a, b, h, w, sh = s->stride_h ? s->stride_h : s->kernel_h,
                            sw = s->stride_w ? s->stride_w : s->kernel_w;
    buffer x, dx, y, dy;
    double *sum = (double*)calloc(planes * area, sizeof(double)),
           *size = (double*)calloc(planes * area, sizeof(double));
    CHECK(amp_pool2d_output(s, &oh, &ow, NULL) == AMP_OK);
    CHECK(oh == (s->height + s->pad_h + pad_end(s->pad_end_h, s->pad_h) - s->kernel_h) / sh + 1
          && ow == (s->width + s->pad_w + pad_end(s->pad_end_w, s->pad_w) - s->kernel_w) / sw + 1);
    x = random_buffer(t, planes * area, 2); dx = make(t, planes * area);
    y = make(yt, planes * (size_t)(oh * ow)); dy = random_buffer(yt, planes * (size_t)(oh * ow), 1);
    for (i = 0; ties && i < x.n; i++) put(&x, i, floor(get(&x, i)) * (i % 3 ? 1.0 : -1.0));    /* -0 among 0 */
    CHECK(amp_pool2d_forward(s, amp_ref_of(x.p, t), amp_ref_of(y.p, yt), NULL) == AMP_OK);
    CHECK(amp_pool2d_backward(s, amp_ref_of(dy.p, yt),
        amp_ref_of(s->kind == AMP_POOL_MAX ? x.p : NULL, t), amp_ref_of(dx.p, t), 0, NULL) == AMP_OK);
    for (plane = 0; plane < planes; plane++)
        for (a = 0; a < oh; a++)
            for (b = 0; b < ow; b++) {
                size_t o = plane * (size_t)(oh * ow) + (size_t)(a * ow + b), best = 0;
                double total = 0, magnitude = 0, count = 0, n;
                for (h = a * sh - s->pad_h; h < a * sh - s->pad_h + s->kernel_h; h++)
                    for (w = b * sw - s->pad_w; w < b * sw - s->pad_w + s->kernel_w; w++) {
                        size_t place = plane * area + (size_t)(h * s->width + w);
                        if (h < 0 || w < 0 || h >= s->height || w >= s->width) continue;
                        if (count == 0 || get(&x, place) > get(&x, best)) best = place;
                        total += get(&x, place); magnitude += fabs(get(&x, place)); count++;
                    }
                n = s->exclude_pad ? count : (double)s->kernel_h * s->kernel_w;
                if (s->kind == AMP_POOL_MAX) {
                    CLOSE(y, o, get(&x, best), 0.0);
                    CHECK(!signbit(get(&y, o)) == !signbit(get(&x, best)));
                    sum[best] += get(&dy, o); size[best] += fabs(get(&dy, o));
                    continue;
                }
                CLOSE(y, o, total / n,
                      u * count * magnitude / n); /* count additions at most, each of a partial sum */
                for (h = a * sh - s->pad_h; h < a * sh - s->pad_h + s->kernel_h; h++)
                    for (w = b * sw - s->pad_w; w < b * sw - s->pad_w + s->kernel_w; w++) {
                        size_t place = plane * area + (size_t)(h * s->width + w);
                        if (h < 0 || w < 0 || h >= s->height || w >= s->width) continue;
                        sum[place] += get(&dy, o) / n; size[place] += fabs(get(&dy, o)) / n;
                    }
            }
    /* Windows that overlap in a pixel: as many additions, and a division each. */
    for (i = 0; i < dx.n; i++) CLOSE(dx, i, sum[i], u * (double)(s->kernel_h * s->kernel_w + 1) * size[i]);
    free(sum); free(size);
    finish(&x); finish(&dx); finish(&y); finish(&dy);
}

static void test_pool(void) {
    static const amp_pool2d_shape wide = { AMP_POOL_MAX, 1, 2, 6, 400, 2, 300, 1, 50, 0, 0, 0, 0, 0 };
    int i;
    for (i = 0; i < 160; i++) {
        amp_pool2d_shape s;
        amp_dtype x_type, y_type;
        memset(&s, 0, sizeof s);
        s.kind = (amp_pool)(i % 2);
        s.n = 1 + (int)(test_random() % 2); s.channels = 1 + (int)(test_random() % 2);
        s.kernel_h = 1 + (int)(test_random() % 5); s.kernel_w = 1 + (int)(test_random() % 5);
        s.stride_h = (int)(test_random() % 5); s.stride_w = (int)(test_random() % 5);
        s.pad_h = (int)(test_random() % (unsigned)(s.kernel_h / 2 + 1));
        s.pad_w = (int)(test_random() % (unsigned)(s.kernel_w / 2 + 1));
        if (i % 3 == 2) s.pad_end_h = s.kernel_h > 1 ? 1 : AMP_ZERO;
        if (i % 4 == 3) s.pad_end_w = i % 8 == 3 ? s.kernel_w / 2 : AMP_ZERO;
        s.height = s.kernel_h + (int)(test_random() % 20); s.width = s.kernel_w + (int)(test_random() % 45);
        s.exclude_pad = (int)(test_random() % 2);
        if (i >= 140) {
            s.height = 3 + i % 2;
            s.width = 1500 + 300 * (i % 20);
            s.kernel_h = 3;
            s.pad_h = 0;
        } /* long rows */
        if (i >= 150) {
            s.height = 70;
            s.width = 90;
        } /* several bands */
        if (i >= 156) {
            s.kernel_h = s.height;
            s.kernel_w = s.width;
            s.pad_h = s.pad_w = s.stride_h = s.stride_w = s.pad_end_h = s.pad_end_w = 0;
        } /* global */
        x_type = TYPES[test_random() % 3]; /* one call a statement: the order of arguments is not defined */
        y_type = TYPES[test_random() % 3];
        check_pool(&s, x_type, y_type, i % 3 == 0);
    }
    check_pool(&wide, AMP_F32, AMP_F16, 0);
}

/* Windows of 2x2 side by side that padding at the end lets begin in the last row and column. */
static void test_pool_pad_end(void) {
    int i;
    for (i = 0; i < 12; i++) {
        amp_pool2d_shape s;
        int oh, ow;
        memset(&s, 0, sizeof s);
        s.kind = (amp_pool)(i % 2);
        s.n = 1; s.channels = 19; s.height = 6 + i / 6; s.width = 34 + i / 6;
        s.kernel_h = s.kernel_w = s.stride_h = s.stride_w = 2;
        s.pad_end_h = i % 3 ? 1 : 0; s.pad_end_w = i % 3 == 2 ? 1 : AMP_ZERO;
        CHECK(amp_pool2d_output(&s, &oh, &ow, NULL) == AMP_OK);
        CHECK(oh == (s.height + (i % 3 ? 1 : 0)) / 2 && ow == (s.width + (i % 3 == 2)) / 2);
        check_pool(&s, TYPES[i % 3], TYPES[i % 3], 0);
    }
}

/* The usual windows, in tensors of one type, with rows shorter and longer than vectors. */
static amp_pool2d_shape usual_pool(amp_pool kind, int i, int width) {
    static const int forms[][3] = { { 2, 2, 0 }, { 3, 2, 1 }, { 3, 2, 0 }, { 3, 1, 1 },
                                    { 2, 1, 0 }, { 5, 2, 2 }, { 5, 1, 2 } };                 /* kernel, stride, pad */
    amp_pool2d_shape s;
    memset(&s, 0, sizeof s);
    s.kind = kind;
    s.exclude_pad = i % 2;
    s.n = 2; s.channels = 3;
    s.kernel_h = s.kernel_w = forms[i % 7][0];
    s.stride_h = s.stride_w = forms[i % 7][1];
    s.pad_h = s.pad_w = forms[i % 7][2];
    s.height = 5 + i % 4; s.width = width;
    return s;
}
static void test_usual_pools(void) {
    static const int widths[] = { 5, 6, 8, 10, 14, 16, 28, 31, 32, 33, 34, 35, 64, 70, 96, 130, 700 };
    int i, t;
    for (i = 0; i < 7 * (int)(sizeof widths / sizeof *widths); i++) {
        amp_pool2d_shape max = usual_pool(AMP_POOL_MAX, i, widths[i / 7]);
        amp_pool2d_shape average = usual_pool(AMP_POOL_AVERAGE, i, widths[i / 7]);
        for (t = 0; t < 3; t++) check_pool(&max, TYPES[t], TYPES[t], i % 2);
        for (t = 0; t < 3; t++) check_pool(&average, TYPES[t], TYPES[t], i % 2);
    }
}
/* Any bits at all in x, and where no windows overlap in dy too; each instruction set must make the same of them. Where
   NaNs would meet in a sum there are none, but infinities. */
static void fill_bits(buffer* b, int nans) {
    size_t i;
    for (i = 0; i < b->n; i++) {
        uint32_t r = (uint32_t)test_random();
        if (r % 8 < 2) r = r % 8 == 0 ? 0x80008000u : 0;                                    /* -0, 0 */
        if (b->t == AMP_F32) memcpy((char*)b->p + 4 * i, &r, 4);
        else memcpy((char*)b->p + 2 * i, &r, 2);
        if (!nans && !(fabs(get(b, i)) < 1e30)) put(b, i, 1);
        if (!nans && r % 67 == 0) put(b, i, r % 2 ? HUGE_VAL : -HUGE_VAL);
    }
}
/* Windows of any form, on planes of one band of rows or several. */
static amp_pool2d_shape any_pool(amp_pool kind, int i) {
    amp_pool2d_shape s;
    memset(&s, 0, sizeof s);
    s.kind = kind;
    s.exclude_pad = i % 2;
    s.n = 1; s.channels = i % 5 ? 3 : 33;
    s.kernel_h = 1 + (int)(test_random() % 5); s.kernel_w = 1 + (int)(test_random() % 5);
    s.stride_h = (int)(test_random() % 4); s.stride_w = (int)(test_random() % 3);
    s.pad_h = (int)(test_random() % (unsigned)(s.kernel_h / 2 + 1));
    s.pad_w = (int)(test_random() % (unsigned)(s.kernel_w / 2 + 1));
    s.height = s.kernel_h + (int)(test_random() % (i % 5 ? 60u : 12u));
    s.width = s.kernel_w + (int)(test_random() % (i % 3 ? 40u : 150u));
    return s;
}
static void pool_bits(const amp_pool2d_shape* s, amp_dtype t, int nans) {
    const size_t planes = (size_t)(s->n * s->channels);
    buffer x = make(t, planes * (size_t)(s->height * s->width)), dx = make(t, x.n), y, dy;
    int oh, ow;
    CHECK(amp_pool2d_output(s, &oh, &ow, NULL) == AMP_OK);
    y = make(t, planes * (size_t)(oh * ow)); dy = make(t, y.n);
    fill_bits(&x, nans);
    fill_bits(&dy, s->kind == AMP_POOL_MAX && s->stride_w == s->kernel_w && s->stride_h == s->kernel_h);
    CHECK(amp_pool2d_forward(s, amp_ref_of(x.p, t), amp_ref_of(y.p, t), NULL) == AMP_OK);
    CHECK(amp_pool2d_backward(s, amp_ref_of(dy.p, t), amp_ref_of(x.p, t), amp_ref_of(dx.p, t), 0,
        NULL) == AMP_OK);
    finish(&x); finish(&dx); finish(&y); finish(&dy);
}
/* Few values, so that windows have many largest ones: -inf everywhere at times, which padding must not beat. */
static void fill_few(buffer* b, int i) {
    static const double few[] = { -HUGE_VAL, -HUGE_VAL, -HUGE_VAL, -0.0, 0.0, 1.0, HUGE_VAL, (double)NAN };
    size_t k;
    for (k = 0; k < b->n; k++) put(b, k, few[test_random() % (unsigned)(1 + i % 8)]);
}
/* 3 x 3 places two pixels apart, and 2 x 2 side by side: around whole groups of vectors, and up to the widest that go
   by them. */
static void test_pool_groups(void) {
    static const int widths[] = { 3, 4, 5, 14, 15, 16, 17, 30, 31, 32, 33, 34, 35, 47, 62, 63, 64, 65, 66, 97, 112,
                                  1021, 1022, 1023, 1024, 1025, 1026 };
    int i, t, oh, ow;
    for (i = 0; i < 24 * (int)(sizeof widths / sizeof *widths); i++)
        for (t = 0; t < 3; t++) {
            const int three = i % 24 < 16;
            amp_pool2d_shape s = usual_pool(AMP_POOL_MAX, three, widths[i / 24]);
            buffer x, y, dx, dy;
            s.n = i % 5 == 0 ? 12 : 1;
            s.height = 3 + i % 5;
            if (three) { s.pad_h = i / 2 % 2; s.pad_w = i / 4 % 2; }
            CHECK(amp_pool2d_output(&s, &oh, &ow, NULL) == AMP_OK);
            x = make(TYPES[t], (size_t)(s.n * s.channels * s.height * s.width)); dx = make(TYPES[t], x.n);
            dy = make(TYPES[t], (size_t)(s.n * s.channels * oh * ow)); y = make(TYPES[t], dy.n);
            fill_bits(&dy, 0);
            fill_few(&x, i);
            CHECK(amp_pool2d_forward(&s, amp_ref_of(x.p, TYPES[t]), amp_ref_of(y.p, TYPES[t]),
                NULL) == AMP_OK);
            CHECK(amp_pool2d_backward(&s, amp_ref_of(dy.p, TYPES[t]), amp_ref_of(x.p, TYPES[t]),
                amp_ref_of(dx.p, TYPES[t]), 0, NULL) == AMP_OK);
            fill_bits(&x, i % 2);
            finish(&dx); dx = make(TYPES[t], x.n);
            CHECK(amp_pool2d_backward(&s, amp_ref_of(dy.p, TYPES[t]), amp_ref_of(x.p, TYPES[t]),
                amp_ref_of(dx.p, TYPES[t]), 0, NULL) == AMP_OK);
            finish(&x); finish(&y); finish(&dx); finish(&dy);
        }
}
static void test_pool_bits(void) {
    int i, t;
    for (i = 0; i < 210; i++)
        for (t = 0; t < 3; t++) {
            amp_pool2d_shape max = usual_pool(AMP_POOL_MAX, i, 6 + i / 7);
            amp_pool2d_shape average = usual_pool(AMP_POOL_AVERAGE, i, 6 + i / 7);
            pool_bits(&max, TYPES[t], 1);
            pool_bits(&max, TYPES[t], 0);
            pool_bits(&average, TYPES[t], 0);
        }
    for (i = 0; i < 400; i++)
        for (t = 0; t < 3; t++) {
            amp_pool2d_shape max = any_pool(AMP_POOL_MAX, i), average = any_pool(AMP_POOL_AVERAGE, i);
            pool_bits(&max, TYPES[t], i % 2);
            pool_bits(&average, TYPES[t], 0);
        }
}

/* Averages in their orders of sums. Planes of at most 16 x 16 windows and 4096 pixels: windows and pixels in their order.
   Others: the columns of a window first; and first the windows of a row that share a pixel, from the last one to the first
   one, in blocks of 256 from the first window on each 4096 columns. */
static float window_sum(const amp_pool2d_shape* s, const float* x, int small, int a, int b) {
    const int h0 = a * s->stride_h - s->pad_h, w0 = b * s->stride_w - s->pad_w;
    float sum = 0.0f, column;
    int h, w;
    for (h = 0; small && h < s->kernel_h; h++)
        for (w = 0; w < s->kernel_w; w++)
            if (h0 + h >= 0 && h0 + h < s->height && w0 + w >= 0 && w0 + w < s->width) sum += x[(h0 + h) * s->width + w0 + w];
    for (w = 0; !small && w < s->kernel_w; w++) {
        if (w0 + w < 0 || w0 + w >= s->width) continue;
        for (column = 0.0f, h = 0; h < s->kernel_h; h++)
            if (h0 + h >= 0 && h0 + h < s->height) column += x[(h0 + h) * s->width + w0 + w];
        sum += column;
    }
    return sum;
}
/* Adds to `sum` what row g of windows gives to column w, and returns it. */
static float row_gradient(const amp_pool2d_shape* s, const float* g, int small, int windows, int w, float sum) {
    int first = 0, o, start, end;
    float line;
    while (first * s->stride_w - s->pad_w + s->kernel_w <= w / 4096 * 4096) first++;
    for (start = small ? 0 : first; start < windows; start = end) {
        end = small || windows - start < 256 ? windows : start + 256;
        for (line = 0.0f, o = start; o < end; o++) {
            const int at = small ? o : end - 1 - (o - start), left = at * s->stride_w - s->pad_w;
            if (w < left || w >= left + s->kernel_w) continue;
            if (small) sum += g[at];
            else line += g[at];
        }
        if (!small) sum += line;
    }
    return sum;
}
static void check_average_order(int channels, int height, int width, int kernel, int stride, int pad) {
    amp_pool2d_shape s = { AMP_POOL_AVERAGE, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0 };
    buffer x, y, dy, dx;
    int oh, ow, c, a, b, small;
    s.channels = channels; s.height = height; s.width = width;
    s.kernel_h = s.kernel_w = kernel; s.stride_h = s.stride_w = stride; s.pad_h = s.pad_w = pad;
    CHECK(amp_pool2d_output(&s, &oh, &ow, NULL) == AMP_OK);
    small = oh <= 16 && ow <= 16 && height * width <= 4096;
    x = random_buffer(AMP_F32, (size_t)(channels * height * width), 1); dx = make(AMP_F32, x.n);
    dy = random_buffer(AMP_F32, (size_t)(channels * oh * ow), 1); y = make(AMP_F32, dy.n);
    CHECK(amp_pool2d_forward(&s, amp_f32(x.p), amp_f32(y.p), NULL) == AMP_OK);
    CHECK(amp_pool2d_backward(&s, amp_f32(dy.p), AMP_NONE, amp_f32(dx.p), 0, NULL) == AMP_OK);
    for (c = 0; c < channels; c++) {
        float* g = (float*)dy.p + c * oh * ow;
        const float count = (float)(kernel * kernel);
        for (a = 0; a < oh * ow; a++) {
            const float want = window_sum(&s, (float*)x.p + c * height * width, small, a / ow, a % ow) / count;
            CHECK(memcmp((float*)y.p + c * oh * ow + a, &want, sizeof want) == 0);
            g[a] /= count;
        }
        for (a = 0; a < height * width; a++) {
            float want = 0.0f;
            for (b = 0; b < oh; b++)
                if (a / width >= b * stride - pad && a / width < b * stride - pad + kernel)
                    want = row_gradient(&s, g + b * ow, small, ow, a % width, want);
            CHECK(memcmp((float*)dx.p + c * height * width + a, &want, sizeof want) == 0);
        }
    }
    finish(&x); finish(&y); finish(&dy); finish(&dx);
}
static void test_pool_order(void) {
    check_average_order(19, 9, 9, 3, 1, 1);
    check_average_order(19, 8, 20, 3, 1, 1);
    check_average_order(3, 40, 37, 5, 2, 2);
    check_average_order(2, 40, 37, 10, 3, 1);
    check_average_order(2, 4, 600, 4, 1, 2);
    check_average_order(1, 3, 4300, 3, 1, 1);
    check_average_order(1, 300, 3, 3, 1, 1);
    check_average_order(19, 8, 20, 2, 2, 0);
    check_average_order(3, 40, 36, 2, 2, 0);
    check_average_order(2, 4, 600, 2, 2, 0);
}

/* Short and long rows take different ways through the code. */
static void check_pool_nan(int width) {
    static float x[640], y[160], dy[160], dx[640];
    unsigned nan_bits = 0x7fc00000u, minus_nan = 0xffc00000u, low = 0xff800000u;
    amp_pool2d_shape s;
    int i, ow = width / 2;
    memset(&s, 0, sizeof s);
    memset(dy, 0, sizeof dy);
    s.n = s.channels = 1; s.height = 4; s.width = width; s.kernel_h = s.kernel_w = 2;
    for (i = 0; i < 4 * width; i++) memcpy(&x[i], &low, 4);
    x[width] = 7; memcpy(&x[1], &minus_nan, 4); memcpy(&x[width + 1], &nan_bits, 4);                      /* -inf NaN 7 NaN */
    for (i = 2; i < 4; i++) x[2 * width + i] = x[3 * width + i] = 2;                       /* ties */
    dy[0] = 1; dy[1] = 2; dy[ow] = 3; dy[ow + 1] = 4;
    CHECK(amp_pool2d_forward(&s, amp_f32(x), amp_f32(y), NULL) == AMP_OK);
    CHECK(is_nan(y[0]) && memcmp(&y[1], &low, 4) == 0 && memcmp(&y[ow], &low, 4) == 0 && y[ow + 1] == 2);
    CHECK(amp_pool2d_backward(&s, amp_f32(dy), amp_f32(x), amp_f32(dx), 0, NULL) == AMP_OK);
    for (i = 0; i < 4 * width; i++)
        CHECK(dx[i] == (i == 1 ? 1.0f : i == 2 ? 2.0f : i == 2 * width ? 3.0f : i == 2 * width + 2 ? 4.0f : 0.0f));
}
/* Average of whole planes, 16 of which go side by side: the bits of the plain sums, pixel after pixel from +0. */
static void check_global_pool(int planes, int height, int width, int pad, int exclude, amp_dtype t, int special) {
    const size_t n = (size_t)(height * width), count = (size_t)planes;
    buffer x = special ? special_buffer(t, count * n, (size_t)(height + width)) : random_buffer(t, count * n + 1, 2);
    buffer dy = special_buffer(t, count, 2), dx = make(t, count * n + 1), want = make(t, count + 1);
    buffer slope = make(t, count * n + 1), y = make(t, count + 1);
    const float divisor = exclude ? (float)n : (float)(height + 2 * pad) * (float)(width + 2 * pad);
    amp_pool2d_shape s;
    size_t i, k;
    memset(&s, 0, sizeof s);
    s.kind = AMP_POOL_AVERAGE;
    s.n = 1; s.channels = planes; s.height = height; s.width = width;
    s.kernel_h = height + 2 * pad; s.kernel_w = width + 2 * pad; s.pad_h = s.pad_w = pad; s.exclude_pad = exclude;
    CHECK(amp_pool2d_forward(&s, amp_ref_of(x.p, t), amp_ref_of(y.p, t), NULL) == AMP_OK);
    CHECK(amp_pool2d_backward(&s, amp_ref_of(dy.p, t), AMP_NONE, amp_ref_of(dx.p, t), 0, NULL) == AMP_OK);
    for (i = 0; i < count; i++) {
        float sum = 0.0f, part = 0.0f + (float)get(&dy, i) / divisor;
        for (k = 0; k < n; k++) sum += (float)get(&x, i * n + k);
        sum /= divisor;
        amp_convert(amp_ref_of((char*)want.p + i * amp_dtype_size(t), t), amp_f32(&sum), 1);
        for (k = 0; k < n; k++) amp_convert(amp_ref_of((char*)slope.p + (i * n + k) * amp_dtype_size(t), t),
            amp_f32(&part), 1);
    }
    CHECK(same(&y, &want) && same(&dx, &slope));
    finish(&x); finish(&dy); finish(&y); finish(&dx); finish(&want); finish(&slope);
}
static void test_global_pool(void) {
    static const int shapes[][4] = { { 35, 7, 7, 0 }, { 16, 1, 1, 0 }, { 17, 12, 11, 1 }, { 48, 14, 14, 0 }, { 33, 1, 1000, 0 },
                                    { 31, 63, 65, 0 } };
    size_t i;
    int t, special;
    for (t = 0; t < 3; t++)
        for (i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
            for (special = 0; special < 2; special++)
                check_global_pool(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], t == 1, TYPES[t], special);
}
static void test_pool_nan(void) {
    check_pool_nan(4);
    check_pool_nan(80);
    check_pool_nan(160);
}

/* --- random numbers ----------------------------------------------------------------------------- */

/* The moments of n standard normals lie within five of their standard deviations sqrt(1/n), sqrt(2/n),
   sqrt(96/n). */
static void test_random_normal(void) {
    const double n = 200000;
    double m1 = 0, m2 = 0, m4 = 0, largest = 0;
    int i;
    for (i = 0; i < (int)n; i++) {
        double v = (double)amp_random_normal(3, (uint64_t)i);
        m1 += v / n; m2 += v * v / n; m4 += v * v * v * v / n;
        largest = fmax(largest, fabs(v));
        hash = (hash ^ (unsigned long long)(long long)(v * 16777216)) * 1099511628211ull;
    }
    CHECK_MSG(fabs(m1) < 5 * sqrt(1 / n) && fabs(m2 - 1) < 5 * sqrt(2 / n)
                  && fabs(m4 - 3) < 5 * sqrt(96 / n),
              "%g %g %g", m1, m2, m4);
    CHECK(largest > 4 && largest < 5.8);
    for (i = 0; i < 1000; i++) {     /* the definition, in double; 4 roundings */
        double u1 = 1 - (double)amp_random_uniform(9, 2u * (unsigned)i),
               u2 = (double)amp_random_uniform(9, 2u * (unsigned)i + 1);
        double r = sqrt(-2 * log(u1)), want = r * cos(6.28318530717958647692 * u2);
        CHECK(fabs((double)amp_random_normal(9, (uint64_t)i) - want) <= 8 * u * fabs(want) + 1e-30);
    }
}

/* --- refusals ------------------------------------------------------------------------------------- */

#define REFUSED(call, code, part)                                                                          \
    do {                                                                                                   \
        amp_result refused_ = (call);                                                                      \
        CHECK_MSG(refused_ == (code) && heard_code == (code) && strstr(heard, part), "%d: %s", (int)refused_, heard); \
        heard[0] = 0; heard_code = AMP_OK;                                                                 \
    } while (0)

/* No rows are a layer norm too, of any width, with and without a workspace: sums of nothing. */
static void test_layer_norm_of_nothing(void) {
    static const size_t widths[] = { 1, 3, 16, 1000, 1025, 5000, 20000 };
    static float dgamma[20001], dbeta[20001];
    static double room[65536];
    float y = 42, mean = 42, invstd = 42, dx = 42;
    amp_exec e;
    int k, accumulate, with_room;
    size_t i;
    memset(&e, 0, sizeof e);
    e.workspace = room; e.workspace_size = sizeof room;
    for (k = 0; k < 7; k++)
        for (accumulate = 0; accumulate < 2; accumulate++)
            for (with_room = 0; with_room < 2; with_room++) {
                const float want = accumulate ? -0.0f : 0.0f;
                size_t d = widths[k], wrong = 0;
                CHECK(amp_layer_norm_workspace(0, d) == 0);
                CHECK(amp_layer_norm_forward(AMP_NONE, AMP_NONE, AMP_NONE, 0, &mean, &invstd,
                    amp_f32(&y), 0, d, NULL) == AMP_OK);
                for (i = 0; i <= d; i++) dgamma[i] = dbeta[i] = i < d ? -0.0f : 42;
                CHECK(amp_layer_norm_backward(AMP_NONE, AMP_NONE, AMP_NONE, 0.0f, NULL, NULL,
                    amp_f32(&dx), amp_f32(dgamma), amp_f32(dbeta), accumulate, 0, d,
                    with_room ? &e : NULL) == AMP_OK);
                for (i = 0; i < d; i++)
                    wrong += memcmp(&dgamma[i], &want, sizeof want) != 0 || memcmp(&dbeta[i], &want, sizeof want) != 0;
                CHECK_MSG(wrong == 0 && dgamma[d] == 42 && dbeta[d] == 42, "%d of %d", (int)wrong, (int)d);
            }
    CHECK(amp_layer_norm_backward(AMP_NONE, AMP_NONE, AMP_NONE, 0.0f, NULL, NULL, amp_f32(&dx),
        AMP_NONE, AMP_NONE, 0, 0, 8, NULL) == AMP_OK);
    CHECK(amp_rms_norm_forward(AMP_NONE, AMP_NONE, 0, &invstd, amp_f32(&y), 0, 8, NULL) == AMP_OK);
    CHECK(amp_rms_norm_backward(AMP_NONE, AMP_NONE, AMP_NONE, 0.0f, NULL, amp_f32(&dx), amp_f32(dgamma), 0, 0, 8, NULL) == AMP_OK);
    CHECK(dgamma[0] == 0 && y == 42 && mean == 42 && invstd == 42 && dx == 42);
}

static void test_refusals(void) {
    const float weights[10] = { 1, 0, 1, 1, 1, 1, 1, 1, 1, -1 };
    amp_cross_entropy_desc maps = { 0, 0, NULL, NULL, 0 };
    amp_exec e;
    float x[64], y[64], loss = 42, inf;
    const unsigned inf_bits = 0x7f800000u;
    int32_t labels[6] = { 0, 1, 2, 3, 4, 12 };
    amp_pool2d_shape p;
    amp_batch_norm_shape bn;
    size_t huge = (size_t)-1 / 2;
    int i, oh, ow;
    memset(&e, 0, sizeof e);
    memset(&p, 0, sizeof p);
    memset(&bn, 0, sizeof bn);
    memcpy(&inf, &inf_bits, sizeof inf);
    e.logger = &LISTENER;
    for (i = 0; i < 64; i++) { x[i] = 1; y[i] = 42; }

    REFUSED(amp_activation_forward(AMP_TANH, AMP_NONE, amp_f32(y), 4, &e), AMP_ERR_ARGUMENT,
            "x is NULL");
    REFUSED(amp_activation_forward(AMP_TANH, amp_ref_of(x, AMP_F64), amp_f32(y), 4, &e), AMP_ERR_DTYPE, "f64");
    REFUSED(amp_activation_forward((amp_activation)9, amp_f32(x), amp_f32(y), 4, &e), AMP_ERR_DESC, "9");
    REFUSED(amp_activation_forward(AMP_TANH, amp_f32(x), amp_f32(y), huge, &e), AMP_ERR_ARGUMENT, "memory can hold, or a negative size");
    REFUSED(amp_softmax_forward(amp_f32(x), amp_f32(y), huge, huge, &e), AMP_ERR_ARGUMENT, "memory");
    REFUSED(amp_dropout_forward(amp_f32(x), amp_f32(y), 4, 1.0f, 0, 0, &e), AMP_ERR_DESC, "probability 1");
    REFUSED(amp_dropout_forward(amp_f32(x), amp_f32(y), 4, -0.5f, 0, 0, &e), AMP_ERR_DESC, "-0.5");
    REFUSED(amp_concat_forward(amp_f32(x), 4, amp_f32(y), 6, 3, 2, &e), AMP_ERR_SHAPE, "do not fit in 6");
    REFUSED(amp_transpose_forward(AMP_NONE, amp_f32(y), 1, 2, 3, &e), AMP_ERR_ARGUMENT, "transpose: x is NULL");
    REFUSED(amp_transpose_forward(amp_f32(x), amp_f32(y), huge, huge, 3, &e), AMP_ERR_ARGUMENT, "memory");
    REFUSED(amp_embedding_forward(labels, amp_f32(x), amp_f32(y), 6, 12, 2, &e), AMP_ERR_ARGUMENT, "embedding: token 12 at position 5 is outside 0..11");
    REFUSED(amp_embedding_backward(amp_f32(x), labels, amp_f32(y), 0, 6, 12, 2, &e), AMP_ERR_ARGUMENT,
            "embedding backward: token 12 at position 5 is outside 0..11");
    REFUSED(amp_embedding_forward(NULL, amp_f32(x), amp_f32(y), 6, 12, 2, &e), AMP_ERR_ARGUMENT, "embedding: tokens is NULL");
    REFUSED(amp_embedding_forward(labels, AMP_NONE, amp_f32(y), 5, 12, 2, &e), AMP_ERR_ARGUMENT, "embedding: w is NULL");
    REFUSED(amp_embedding_forward(labels, amp_f32(x), AMP_NONE, 5, 12, 2, &e), AMP_ERR_ARGUMENT, "embedding: y is NULL");
    REFUSED(amp_embedding_forward(labels, amp_ref_of(x, AMP_F64), amp_f32(y), 5, 12, 2, &e), AMP_ERR_DTYPE, "f64");
    REFUSED(amp_embedding_forward(labels, amp_f32(x), amp_f32(x + 4), 5, 12, 2, &e), AMP_ERR_ARGUMENT, "overlap");
    REFUSED(amp_embedding_forward(labels, amp_f32(x), amp_f32(y), huge, 12, huge, &e), AMP_ERR_ARGUMENT, "memory");
    REFUSED(amp_embedding_backward(AMP_NONE, labels, amp_f32(y), 0, 5, 12, 2, &e), AMP_ERR_ARGUMENT, "dy is NULL");
    REFUSED(amp_embedding_backward(amp_f32(x), NULL, amp_f32(y), 0, 5, 12, 2, &e), AMP_ERR_ARGUMENT, "tokens is NULL");
    REFUSED(amp_concat_forward(amp_f32(x), 4, amp_f32(y), 6, (size_t)-1, 2, &e), AMP_ERR_SHAPE, "columns -1..-1+4 do not fit in 6");
    REFUSED(amp_concat_backward(amp_f32(y), 6, 3, amp_f32(x), 4, 2, 0, &e), AMP_ERR_SHAPE, "concat backward: columns 3..3+4 do not fit in 6");
    REFUSED(amp_concat_backward(amp_f32(y), 6, 2, AMP_NONE, 4, 2, 0, &e), AMP_ERR_ARGUMENT, "concat backward: x is NULL");
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, NULL, &loss, 6, 10, &e), AMP_ERR_ARGUMENT,
            "label 12 at row 5 is outside 0..9");
    REFUSED(amp_softmax_cross_entropy_backward(amp_f32(x), labels, NULL, NULL, 1, amp_f32(y), 6,
        10, &e),
            AMP_ERR_ARGUMENT, "label 12 at row 5");
    labels[5] = -1;
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, NULL, &loss, 6, 10, &e), AMP_ERR_ARGUMENT,
            "label -1 at row 5");
    labels[5] = 10;
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, NULL, &loss, 6, 10, &e), AMP_ERR_ARGUMENT,
            "label 10 at row 5");
    labels[5] = 9;
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, smoothed(1), &loss, 6, 10, &e), AMP_ERR_DESC,
            "smoothing 1");
    maps.pixels = 4;
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, &maps, &loss, 6, 10, &e), AMP_ERR_SHAPE,
            "6 labels are not whole maps of 4 pixels");
    maps.pixels = 3; maps.ld = 11;
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, &maps, &loss, 6, 10, &e), AMP_ERR_ARGUMENT,
            "ld is 11, but maps are packed");
    maps.ld = 0; maps.class_weights = weights;
    REFUSED(amp_softmax_cross_entropy_backward(amp_f32(x), labels, &maps, NULL, 1, amp_f32(y), 6, 10, &e),
            AMP_ERR_ARGUMENT, "weight -1 of class 9");
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), NULL, NULL, &loss, 6, 10, &e), AMP_ERR_ARGUMENT,
            "labels is NULL");
    REFUSED(amp_softmax_cross_entropy_forward(amp_f32(x), labels, NULL, &loss, 0, 10, &e), AMP_ERR_SHAPE,
            "0 rows");
    REFUSED(amp_mse_forward(amp_f32(x), amp_f32(x), &loss, 0, &e), AMP_ERR_SHAPE, "no elements");
    REFUSED(amp_bce_with_logits_backward(amp_f32(x), AMP_NONE, NULL, 1, amp_f32(y), 3, &e),
            AMP_ERR_ARGUMENT, "target is NULL");
    REFUSED(amp_layer_norm_forward(amp_f32(x), AMP_NONE, AMP_NONE, 0, NULL, NULL, amp_f32(y), 4,
        0, &e),
            AMP_ERR_SHAPE, "layer norm: rows of no elements");
    REFUSED(amp_layer_norm_backward(amp_f32(x), amp_f32(x), AMP_NONE, 0.0f, x, x, amp_f32(y),
        AMP_NONE, AMP_NONE, 0, 4, 0, &e),
            AMP_ERR_SHAPE, "layer norm backward: rows of no elements");
    REFUSED(amp_layer_norm_forward(amp_f32(x), AMP_NONE, AMP_NONE, -2, NULL, NULL, amp_f32(y), 2,
        4, &e),
            AMP_ERR_DESC, "layer norm: eps -2 must be greater than 0 and finite");
    REFUSED(amp_layer_norm_forward(amp_f32(x), AMP_NONE, AMP_NONE, inf, NULL, NULL, amp_f32(y), 2,
        4, &e),
            AMP_ERR_DESC, "eps inf");
    REFUSED(amp_layer_norm_backward(amp_f32(x), amp_f32(x), AMP_NONE, -1.0f, NULL, NULL, amp_f32(y),
        AMP_NONE, AMP_NONE, 0, 2, 4, &e),
            AMP_ERR_DESC, "layer norm backward: eps -1 must be");
    {
        amp_group_norm_shape group = { 2, 4, 3, 3, 0.0f };
        REFUSED(amp_group_norm_forward(&group, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, amp_f32(y), &e), AMP_ERR_DESC,
            "group norm: 3 groups do not divide 4 channels");
        group.groups = -2;
        REFUSED(amp_group_norm_forward(&group, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, amp_f32(y), &e), AMP_ERR_DESC,
            "-2 groups do not divide");
        group.groups = 2; group.eps = -1;
        REFUSED(amp_group_norm_backward(&group, amp_f32(x), amp_f32(x), AMP_NONE, x, x, amp_f32(y), AMP_NONE, AMP_NONE, 0, &e),
            AMP_ERR_DESC, "group norm backward: eps -1 must be");
        group.eps = 0;
        REFUSED(amp_group_norm_backward(&group, amp_f32(x), amp_f32(x), AMP_NONE, NULL, x, amp_f32(y), AMP_NONE, AMP_NONE, 0, &e),
            AMP_ERR_ARGUMENT, "group norm backward: save_mean is NULL");
        group.spatial = 0;
        REFUSED(amp_group_norm_forward(&group, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, amp_f32(y), &e), AMP_ERR_SHAPE,
            "group norm: input 2x4x0 needs sizes >= 1");
        REFUSED(amp_group_norm_forward(NULL, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, amp_f32(y), &e), AMP_ERR_ARGUMENT,
            "group norm: the shape is NULL");
    }
    REFUSED(amp_rms_norm_forward(amp_f32(x), AMP_NONE, 0, NULL, amp_f32(y), 4, 0, &e), AMP_ERR_SHAPE,
        "rms norm: rows of no elements");
    REFUSED(amp_rms_norm_backward(amp_f32(x), amp_f32(x), AMP_NONE, -1.0f, NULL, amp_f32(y), AMP_NONE, 0, 2, 4, &e),
        AMP_ERR_DESC, "rms norm backward: eps -1 must be");
    REFUSED(amp_rms_norm_backward(amp_f32(x), AMP_NONE, AMP_NONE, 0, NULL, amp_f32(y), AMP_NONE, 0, 2, 4, &e),
        AMP_ERR_ARGUMENT, "rms norm backward: x is NULL");
    REFUSED(
        amp_batch_norm_forward(NULL, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, y, y,
            amp_f32(y), &e),
        AMP_ERR_ARGUMENT, "shape is NULL");
    REFUSED(
        amp_batch_norm_forward(&bn, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, y, y,
            amp_f32(y), &e),
        AMP_ERR_SHAPE, "0x0x0");
    bn.n = 1; bn.channels = 4; bn.spatial = 1;
    REFUSED(
        amp_batch_norm_forward(&bn, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, y, y,
            amp_f32(y), &e),
        AMP_ERR_SHAPE, "more than one value");
    bn.n = 4; bn.momentum = 1.5f;
    REFUSED(
        amp_batch_norm_forward(&bn, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, y, y,
            amp_f32(y), &e),
        AMP_ERR_DESC, "batch norm: momentum 1.5 must");
    bn.momentum = 0; bn.eps = -2;
    REFUSED(
        amp_batch_norm_forward(&bn, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, y, y,
            amp_f32(y), &e),
        AMP_ERR_DESC, "batch norm: eps -2 must");
    bn.eps = inf;
    REFUSED(
        amp_batch_norm_forward(&bn, 1, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, y, y,
            amp_f32(y), &e),
        AMP_ERR_DESC, "eps inf");
    bn.eps = 0;
    bn.momentum = 0;
    REFUSED(amp_batch_norm_forward(&bn, 0, amp_f32(x), AMP_NONE, AMP_NONE, NULL, NULL, NULL, NULL,
        amp_f32(y), &e),
            AMP_ERR_ARGUMENT, "running_mean");
    REFUSED(amp_pool2d_output(&p, &oh, &ow, &e), AMP_ERR_SHAPE, "0x0x0x0");
    p.n = p.channels = 1; p.height = 5; p.width = 5;
    REFUSED(amp_pool2d_forward(&p, amp_f32(x), amp_f32(y), &e), AMP_ERR_DESC, "kernel 0x0");
    p.kernel_h = p.kernel_w = 7;
    REFUSED(amp_pool2d_forward(&p, amp_f32(x), amp_f32(y), &e), AMP_ERR_SHAPE,
            "kernel 7x7 is larger than its 5x5 input");
    p.kernel_h = p.kernel_w = 2; p.pad_w = 2;
    REFUSED(amp_pool2d_forward(&p, amp_f32(x), amp_f32(y), &e), AMP_ERR_DESC, "padding 0x2");
    p.pad_w = 0;
    REFUSED(amp_pool2d_backward(&p, amp_f32(x), AMP_NONE, amp_f32(y), 0, &e), AMP_ERR_ARGUMENT,
            "x is NULL");
    p.height = 70000; p.width = 70000;
    REFUSED(amp_pool2d_forward(&p, amp_f32(x), amp_f32(y), &e), AMP_ERR_SHAPE, "2^31");
    for (i = 0; i < 64; i++) CHECK(y[i] == 42);
    CHECK(loss == 42);

    REFUSED(amp_mul_forward(amp_f32(x), amp_f32(x), amp_f32(y), 4, 3, &e), AMP_ERR_SHAPE, "4 elements are not whole runs of 3");
    REFUSED(amp_mul_backward(amp_f32(x), amp_f32(x), amp_f32(x), amp_f32(y), AMP_NONE, 0, 4, 0, &e), AMP_ERR_SHAPE, "runs of 0");
    /* Nothing to do is no error. */
    CHECK(amp_mul_forward(AMP_NONE, AMP_NONE, AMP_NONE, 0, 7, &e) == AMP_OK);
    CHECK(amp_activation_forward(AMP_TANH, AMP_NONE, AMP_NONE, 0, &e) == AMP_OK);
    CHECK(amp_add_forward(AMP_NONE, AMP_NONE, AMP_NONE, 0, &e) == AMP_OK);
    CHECK(amp_dropout_forward(AMP_NONE, AMP_NONE, 0, 0.5f, 0, 0, &e) == AMP_OK);
    CHECK(amp_softmax_forward(AMP_NONE, AMP_NONE, 0, 5, &e) == AMP_OK);
    CHECK(amp_concat_forward(AMP_NONE, 0, amp_f32(y), 6, 6, 2, &e) == AMP_OK);
    CHECK(amp_activation_backward(AMP_TANH, amp_f32(x), amp_f32(x), AMP_NONE, 0, 4, &e) == AMP_OK);
    CHECK(heard[0] == 0);
}

/* What memory held before is not computed with: zeros raise no exception of IEEE 754. */
static void test_pool_exceptions(void) {
    static const amp_half zeros[3 * 17 * 17], *const z = zeros;
    static amp_half y[3 * 17 * 17];
    int kind, side, kernel;
    for (kind = AMP_POOL_MAX; kind <= AMP_POOL_AVERAGE; kind++)
        for (side = 2; side <= 17; side += 3)
            for (kernel = 2; kernel <= 3 && kernel <= side; kernel++) {
                amp_pool2d_shape s;
                memset(&s, 0, sizeof s);
                s.kind = (amp_pool)kind; s.n = 1; s.channels = 3; s.height = s.width = side; s.kernel_h = s.kernel_w = kernel;
                s.stride_h = s.stride_w = 1 + side % 2;
                feclearexcept(FE_ALL_EXCEPT);
                soil_stack();
                CHECK(amp_pool2d_forward(&s, amp_f16(z), amp_f16(y), NULL) == AMP_OK);
                soil_stack();
                CHECK(amp_pool2d_backward(&s, amp_f16(z), amp_f16(z), amp_f16(y), 0, NULL) == AMP_OK);
                CHECK_MSG(!fetestexcept(FE_OVERFLOW | FE_INVALID), "kind %d, side %d, kernel %d", kind, side, kernel);
            }
}

/* Large values in windows of their own: no average of a window overflows, and none has infinities of both signs. */
static void test_average_exceptions(void) {
    static const float pairs[][2] = { { 3e38f, 3e38f }, { HUGE_VALF, -HUGE_VALF } };
    int width, first, second, k;
    for (width = 2; width <= 40; width += 2)
        for (first = 0; first < 4 * width; first++)
            for (second = first + 1; second < 4 * width && second < first + width + 3; second++)
                for (k = 0; k < 2; k++) {
                    static float x[4 * 40], y[40];
                    amp_pool2d_shape s;
                    const int same = first / (2 * width) == second / (2 * width) && first % width / 2 == second % width / 2;
                    if (same) continue;
                    memset(&s, 0, sizeof s);
                    memset(x, 0, sizeof x);
                    s.kind = AMP_POOL_AVERAGE; s.n = s.channels = 1; s.height = 4; s.width = width;
                    s.kernel_h = s.kernel_w = 2;
                    x[first] = pairs[k][0]; x[second] = pairs[k][1];
                    feclearexcept(FE_ALL_EXCEPT);
                    CHECK(amp_pool2d_forward(&s, amp_f32(x), amp_f32(y), NULL) == AMP_OK);
                    CHECK_MSG(!fetestexcept(FE_OVERFLOW | FE_INVALID), "width %d, %d, %d", width, first, second);
                }
}

/* A build that keeps the bits says so on each instruction set; check.sh has some that do not. */
static void test_self_test(void) {
    const int before = heard_count;
    for (int isa = 0; isa < COUNT(ISAS); isa++)
        if (amp_cpu_force_isa(ISAS[isa]) == AMP_OK)
            CHECK_MSG(amp_self_test(&LISTENER) == AMP_OK, "%s", heard);
    CHECK(amp_self_test(NULL) == AMP_OK && heard_count == before);
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Sums are averages times the pixels that those divide by; upsampling, their backward call, copies pixels. */
static void test_upsample(void) {
    static const int sides[][2] = { { 1, 1 }, { 4, 6 }, { 5, 3 }, { 2, 40 }, { 33, 17 } };
    const char* what = "upsample";
    int k, f, tx, ty;
    size_t i;
    for (k = 0; k < COUNT(sides); k++)
        for (f = 1; f < 6; f++)
            for (tx = 0; tx < 3; tx++)
                for (ty = 0; ty < 3; ty++) {
                    const size_t h = (size_t)sides[k][0], w = (size_t)sides[k][1], n = 6 * h * w, area = (size_t)(f * f);
                    buffer x = random_buffer(TYPES[tx], n, 2), y = make(TYPES[ty], n * area), back = random_buffer(TYPES[tx], n, 1);
                    double *sum = (double*)calloc(n, sizeof *sum), *size = (double*)calloc(n, sizeof *size);
                    amp_pool2d_shape s;
                    memset(&s, 0, sizeof s);
                    s.kind = AMP_POOL_SUM;
                    s.n = 2; s.channels = 3; s.height = (int)h * f; s.width = (int)w * f; s.kernel_h = s.kernel_w = f;
                    CHECK(amp_pool2d_backward(&s, amp_ref_of(x.p, x.t), AMP_NONE, amp_ref_of(y.p, y.t), 0, NULL) == AMP_OK);
                    for (i = 0; i < y.n; i++) {
                        const size_t plane = i / (h * w * area), row = i / (w * (size_t)f) % (h * (size_t)f);
                        const size_t from = (plane * h + row / (size_t)f) * w + i % (w * (size_t)f) / (size_t)f;
                        CLOSE(y, i, get(&x, from), 0.0);
                        sum[from] += get(&y, i);
                        size[from] += fabs(get(&y, i));
                    }
                    CHECK(amp_pool2d_forward(&s, amp_ref_of(y.p, y.t), amp_ref_of(back.p, back.t), NULL) == AMP_OK);
                    for (i = 0; i < n; i++) CLOSE(back, i, sum[i], (double)area * u * size[i]);
                    free(sum); free(size);
                    finish(&x); finish(&y); finish(&back);
                }
}

/* --- gradients that are added to --- */

/* A backward call that writes dx. */
typedef struct one_call { int kind; const void* shape; amp_ref dy, saved; size_t rows, d; } one_call;
static amp_result run_call(const one_call* c, amp_ref dx, int accumulate) {
    if (c->kind == AMP_ACTIVATION_COUNT)
        return amp_softmax_backward(c->dy, c->saved, dx, accumulate, c->rows, c->d, NULL);
    if (c->kind == AMP_ACTIVATION_COUNT + 1)
        return amp_leaky_relu_backward(c->dy, c->saved, dx, accumulate, c->rows * c->d, 0.2f, NULL);
    if (c->kind > AMP_ACTIVATION_COUNT)
        return amp_pool2d_backward((const amp_pool2d_shape*)c->shape, c->dy, c->saved, dx,
            accumulate, NULL);
    return amp_activation_backward((amp_activation)c->kind, c->dy, c->saved, dx, accumulate,
        c->rows * c->d, NULL);
}
static void check_accumulate(one_call c, size_t n, size_t out, amp_dtype t, amp_dtype dt) {
    buffer dy = random_buffer(t, out, 1), saved = random_buffer(t, n, 1), dx = random_buffer(dt, n, 1);
    buffer old = make(dt, n), wanted = make(AMP_F32, n);
    memcpy(old.p, dx.p, n * amp_dtype_size(dt));
    c.dy = amp_ref_of(dy.p, t);
    c.saved = amp_ref_of(saved.p, t);
    CHECK(run_call(&c, amp_ref_of(wanted.p, AMP_F32), AMP_ACCUMULATE_PARAMS) == AMP_OK);
    CHECK(run_call(&c, amp_ref_of(dx.p, dt), AMP_ACCUMULATE_INPUT) == AMP_OK);
    check_added("accumulated", &dx, &old, &wanted);
    finish(&dy); finish(&saved); finish(&dx); finish(&old); finish(&wanted);
}
/* Activations, softmax and pools add their dx to what is there in FP32, rounded once. */
static void test_accumulate_dx(void) {
    static const struct { amp_pool kind; int h, w, k, s, p; } pools[] = {
        { AMP_POOL_MAX, 8, 8, 2, 2, 0 }, { AMP_POOL_AVERAGE, 6, 40, 2, 2, 0 },
        { AMP_POOL_MAX, 9, 7, 3, 2, 1 }, { AMP_POOL_AVERAGE, 9, 33, 3, 1, 1 },
        { AMP_POOL_AVERAGE, 7, 7, 7, 7, 0 }, { AMP_POOL_SUM, 8, 12, 2, 2, 0 }, { AMP_POOL_SUM, 9, 6, 3, 3, 0 } };
    int t, dt, k;
    for (t = AMP_F32; t <= AMP_BF16; t++)
        for (dt = AMP_F32; dt <= AMP_BF16; dt++) {
            one_call c;
            memset(&c, 0, sizeof c);
            for (k = 0; k <= AMP_ACTIVATION_COUNT + 1; k++) {
                c.kind = k;
                c.rows = 5; c.d = 1023;
                check_accumulate(c, c.rows * c.d, c.rows * c.d, (amp_dtype)t, (amp_dtype)dt);
            }
            c.kind = AMP_ACTIVATION_COUNT + 2;
            for (k = 0; k < COUNT(pools); k++) {
                amp_pool2d_shape s;
                int oh, ow;
                memset(&s, 0, sizeof s);
                s.kind = pools[k].kind;
                s.n = 3; s.channels = 7; s.height = pools[k].h; s.width = pools[k].w;
                s.kernel_h = s.kernel_w = pools[k].k; s.stride_h = s.stride_w = pools[k].s;
                s.pad_h = s.pad_w = pools[k].p;
                c.shape = &s;
                CHECK(amp_pool2d_output(&s, &oh, &ow, NULL) == AMP_OK);
                check_accumulate(c, (size_t)(21 * s.height * s.width), (size_t)(21 * oh * ow),
                    (amp_dtype)t, (amp_dtype)dt);
            }
        }
}
/* Without saved statistics layer norm's backward pass computes those of the forward pass. */
static void test_layer_norm_without_statistics(void) {
    static const size_t rows[] = { 1, 70, 3, 130 }, lengths[] = { 5, 64, 4200, 2064 };
    size_t i, k, j;
    for (i = 0; i < 4; i++)
        for (k = 0; k < 3; k++) {
            const size_t n = rows[i], d = lengths[i], all = n * d, bytes = amp_layer_norm_workspace(n, d);
            buffer x = random_buffer(AMP_F16, all, 2), dy = random_buffer(AMP_BF16, all, 1);
            buffer gamma = random_buffer(AMP_F32, d, 1), y = make(AMP_F32, all);
            buffer mean = make(AMP_F32, n), invstd = make(AMP_F32, n), out[2][3];
            void* workspace = malloc(bytes + 1);
            amp_exec e;
            memset(&e, 0, sizeof e);
            if (k == 2) { e.workspace = workspace; e.workspace_size = bytes; }
            CHECK(amp_layer_norm_forward(amp_ref_of(x.p, x.t), amp_ref_of(gamma.p, AMP_F32), AMP_NONE,
                0.01f, (float*)mean.p, (float*)invstd.p, amp_ref_of(y.p, AMP_F32), n, d, &e) == AMP_OK);
            for (j = 0; j < 2; j++) {
                out[j][0] = make(AMP_F16, all);
                out[j][1] = make(AMP_F32, d);
                out[j][2] = make(AMP_BF16, d);
                CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, dy.t), amp_ref_of(x.p, x.t),
                    amp_ref_of(gamma.p, AMP_F32), 0.01f, j ? NULL : (float*)mean.p,
                    j && k ? NULL : (float*)invstd.p, amp_ref_of(out[j][0].p, AMP_F16),
                    k == 1 ? AMP_NONE : amp_ref_of(out[j][1].p, AMP_F32),
                    k == 1 ? AMP_NONE : amp_ref_of(out[j][2].p, AMP_BF16), 0, n, d, &e) == AMP_OK);
            }
            for (j = 0; j < 3; j++) {
                CHECK_MSG(same(&out[0][j], &out[1][j]), "%lu rows of %lu, result %lu", (unsigned long)n,
                    (unsigned long)d, (unsigned long)j);
                finish(&out[0][j]); finish(&out[1][j]);
            }
            finish(&x); finish(&dy); finish(&gamma); finish(&y); finish(&mean); finish(&invstd);
            free(workspace);
        }
}
/* Rows that lie apart, and rows whose label is ignored: the others' losses and gradients are those
   of a call on them alone; what lies between rows stays, and an ignored row's NaN is not looked at. */
static void test_cross_entropy_rows_apart(void) {
    static const size_t classes[] = { 3, 10, 16, 2100 };
    const int32_t ignored = 1;
    size_t i, r, c, used;
    int t, with;
    for (i = 0; i < 4; i++)
        for (t = AMP_F32; t <= AMP_BF16; t++)
            for (with = 0; with < 4; with++) {
                const size_t n = 70, k = classes[i], ld = with & 1 ? k + 5 : k;
                const amp_cross_entropy_desc packed = { 0.1f, 0, NULL, NULL, 0 };
                const amp_cross_entropy_desc desc = { 0.1f, with & 1 ? ld : 0, with & 2 ? &ignored : NULL, NULL, 0 };
                buffer x = random_buffer((amp_dtype)t, n * ld, 3), dx = make((amp_dtype)t, n * ld);
                buffer few = make((amp_dtype)t, n * k), dfew = make((amp_dtype)t, n * k);
                int32_t labels[70], left[70];
                float loss[2], scale = 1024;
                for (r = used = 0; r < n; r++) {
                    labels[r] = (int32_t)(r * 7 % k);
                    if ((with & 2) && labels[r] == ignored) { put(&x, r * ld + 2, (double)NAN); continue; }
                    for (c = 0; c < k; c++) put(&few, used * k + c, get(&x, r * ld + c));
                    left[used++] = labels[r];
                }
                CHECK(amp_softmax_cross_entropy_forward(amp_ref_of(x.p, x.t), labels, &desc, &loss[0], n, k, NULL) == AMP_OK);
                CHECK(amp_softmax_cross_entropy_backward(amp_ref_of(x.p, x.t), labels, &desc, &scale, 0.5f,
                    amp_ref_of(dx.p, dx.t), n, k, NULL) == AMP_OK);
                CHECK(amp_softmax_cross_entropy_forward(amp_ref_of(few.p, x.t), left, &packed, &loss[1], used, k, NULL) == AMP_OK);
                CHECK(amp_softmax_cross_entropy_backward(amp_ref_of(few.p, x.t), left, &packed, &scale, 0.5f,
                    amp_ref_of(dfew.p, x.t), used, k, NULL) == AMP_OK);
                CHECK_MSG(fabsf(loss[0] - loss[1]) <= 1e-6f * loss[1], "%g, %g", (double)loss[0], (double)loss[1]);
                for (r = used = 0; r < n; r++) {
                    size_t wrong = 0, size = amp_dtype_size(x.t);
                    const int gone = (with & 2) && labels[r] == ignored;
                    for (c = 0; c < ld; c++) {
                        const unsigned char* got = (const unsigned char*)element(&dx, r * ld + c);
                        if (c >= k) wrong += got[0] != 0xA5;
                        else if (gone) wrong += get(&dx, r * ld + c) != 0;
                        else wrong += memcmp(got, element(&dfew, used * k + c), size) != 0;
                    }
                    used += !gone;
                    CHECK_MSG(wrong == 0, "row %lu of %lu classes, %d: %lu", (unsigned long)r, (unsigned long)k, with,
                        (unsigned long)wrong);
                }
                finish(&x); finish(&dx); finish(&few); finish(&dfew);
            }
}
/* Maps of pixels with a label each, and weights of classes, with all of smoothing and an ignored label
   (bits of `with`: 1, 2, 4; 8 = rows apart in place of maps) against the formula in double. */
static void check_weighted_cross_entropy(amp_dtype t, amp_dtype dt, size_t images, size_t pixels, size_t k, int with) {
    const char* what = "cross-entropy of maps";
    const size_t n = images * pixels, ld = with & 8 ? k + 3 : k, all = n * ld;
    const int32_t ignored = -100;
    buffer x = random_buffer(t, all, 3), dx = make(dt, all), loss = make(AMP_F32, 1), row = make(AMP_F32, k);
    buffer weights = make(AMP_F32, k);
    int32_t* labels = (int32_t*)malloc(n * sizeof *labels);
    double* p = (double*)malloc(k * sizeof *p);
    double total = 0, used = 0, counted = 0, mean = 0, top = 0, s = with & 2 ? (double)0.1f : 0;
    float scale = 512;
    size_t r, c;
    amp_cross_entropy_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.smoothing = with & 2 ? 0.1f : 0.0f;
    desc.ld = with & 8 ? ld : 0;
    desc.ignored = with & 4 ? &ignored : NULL;
    desc.class_weights = with & 1 ? (const float*)weights.p : NULL;
    desc.pixels = with & 8 ? 0 : pixels;
    for (c = 0; c < k; c++) {
        put(&weights, c, with & 1 ? (c % 3 == 1 && c > 1 ? 0.0 : 0.25 + fabs((double)test_uniform())) : 1.0);
        mean += get(&weights, c) / (double)k;
    }
    for (r = 0; r < n; r++) labels[r] = with & 4 && r % 3 == 2 ? ignored : (int32_t)(test_random() % k);
    for (r = 0; r < n; r++) used += labels[r] == ignored ? 0 : get(&weights, (size_t)labels[r]);
    CHECK(amp_softmax_cross_entropy_forward(amp_ref_of(x.p, t), labels, &desc, (float*)loss.p, n, k, NULL) == AMP_OK);
    CHECK(amp_softmax_cross_entropy_backward(amp_ref_of(x.p, t), labels, &desc, &scale, 0.5f, amp_ref_of(dx.p, dt), n, k, NULL)
          == AMP_OK);
    for (r = 0; r < n; r++) {
        const size_t first = with & 8 ? r * ld : r / pixels * k * pixels + r % pixels, step = with & 8 ? 1 : pixels;
        const int gone = labels[r] == ignored;
        const double own = gone ? 0 : get(&weights, (size_t)labels[r]), sum = gone ? 0 : (1 - s) * own + s * mean;
        double log_sum, factor = used > 0 ? 256 / used : 0;
        for (c = 0; c < k; c++) put(&row, c, get(&x, first + c * step));
        softmax(&row, 0, k, p, &log_sum);
        counted += sum;
        for (c = 0; c < k; c++) {
            const double v = get(&row, c);
            const double target = gone ? 0 : get(&weights, c) * (s / (double)k + ((size_t)labels[r] == c ? 1 - s : 0));
            total += target * (log_sum - v);
            top = fmax(top, fabs(v));
            CLOSE(dx, first + c * step, factor * (sum * p[c] - target),
                  factor * (sum * p[c] * (softmax_error(p[c]) + 4 * u) + 6 * u * target));
        }
    }
    if (used > 0) CLOSE(loss, 0, total / used, u * (10 + 10 * top + 4 * log((double)k)) * counted / used);
    else CHECK(get(&loss, 0) == 0);
    free(labels); free(p); free(row.block);
    for (r = 0; with & 8 && r < all; r++)           /* what lies between rows stays */
        if (r % ld >= k) CHECK(*(const unsigned char*)element(&dx, r) == 0xA5);
    finish(&x); finish(&dx); finish(&loss); finish(&weights);
}
static void test_cross_entropy_of_maps(void) {
    static const size_t images[] = { 1, 3, 2, 2, 1 }, pixels[] = { 5, 1, 70, 300, 3 }, k[] = { 3, 10, 21, 1, 2500 };
    int a, b, s, with;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (s = 0; s < 5; s++)
                for (with = 0; with < 16; with++)
                    check_weighted_cross_entropy(TYPES[a], TYPES[b], images[s], pixels[s], k[s], with);
    check_weighted_cross_entropy(AMP_F16, AMP_F32, 4, 64 * 48, 11, 7);      /* enough for threads */
}
/* Where every label is ignored, the mean of no loss and all gradients are 0. */
static void test_all_labels_ignored(void) {
    const int32_t labels[2] = { -100, -100 }, ignored = -100;
    const amp_cross_entropy_desc desc = { 0, 0, &ignored, NULL, 0 };
    float x[6] = { 1, 2, 3, 4, 5, 6 }, dx[6], loss = 7;
    int i;
    CHECK(amp_softmax_cross_entropy_forward(amp_f32(x), labels, &desc, &loss, 2, 3, NULL) == AMP_OK && loss == 0);
    CHECK(amp_softmax_cross_entropy_backward(amp_f32(x), labels, &desc, NULL, 1, amp_f32(dx), 2, 3, NULL) == AMP_OK);
    for (i = 0; i < 6; i++) CHECK(dx[i] == 0);
    CHECK(amp_softmax_cross_entropy_forward(amp_f32(x), labels, NULL, &loss, 2, 3, NULL) == AMP_ERR_ARGUMENT);
}
/* gamma, beta and their gradients have a type each. */
static void test_types_of_norm_parameters(void) {
    enum { ROWS = 6, D = 24 };
    int which, k;
    for (which = 0; which < 2; which++) {
        buffer x = random_buffer(AMP_F32, ROWS * D, 1), dy = random_buffer(AMP_F32, ROWS * D, 1);
        buffer gamma = random_buffer(AMP_BF16, D, 1), beta = random_buffer(AMP_F16, D, 1);
        buffer wide[2], y[2], dg[2], db[2], mean = make(AMP_F32, D), invstd = make(AMP_F32, D);
        amp_batch_norm_shape s;
        memset(&s, 0, sizeof s);
        s.n = ROWS; s.channels = D; s.spatial = 1;
        wide[0] = make(AMP_F32, D); wide[1] = make(AMP_F32, D);
        amp_convert(amp_ref_of(wide[0].p, AMP_F32), amp_ref_of(gamma.p, AMP_BF16), D);
        amp_convert(amp_ref_of(wide[1].p, AMP_F32), amp_ref_of(beta.p, AMP_F16), D);
        for (k = 0; k < 2; k++) {
            const amp_ref g = k ? amp_ref_of(wide[0].p, AMP_F32) : amp_ref_of(gamma.p, AMP_BF16);
            const amp_ref b = k ? amp_ref_of(wide[1].p, AMP_F32) : amp_ref_of(beta.p, AMP_F16);
            y[k] = make(AMP_F32, ROWS * D);
            dg[k] = make(k ? AMP_F32 : AMP_F16, D);
            db[k] = make(k ? AMP_F32 : AMP_BF16, D);
            if (which) {
                CHECK(amp_batch_norm_forward(&s, 1, amp_ref_of(x.p, AMP_F32), g, b, NULL, NULL, (float*)mean.p,
                    (float*)invstd.p, amp_ref_of(y[k].p, AMP_F32), NULL) == AMP_OK);
                CHECK(amp_batch_norm_backward(&s, amp_ref_of(dy.p, AMP_F32), amp_ref_of(x.p, AMP_F32), g,
                    (float*)mean.p, (float*)invstd.p, AMP_NONE, amp_ref_of(dg[k].p, dg[k].t),
                    amp_ref_of(db[k].p, db[k].t), 0, NULL) == AMP_OK);
            } else {
                CHECK(amp_layer_norm_forward(amp_ref_of(x.p, AMP_F32), g, b, 0, NULL, NULL,
                    amp_ref_of(y[k].p, AMP_F32), ROWS, D, NULL) == AMP_OK);
                CHECK(amp_layer_norm_backward(amp_ref_of(dy.p, AMP_F32), amp_ref_of(x.p, AMP_F32), g, 0, NULL, NULL,
                    AMP_NONE, amp_ref_of(dg[k].p, dg[k].t), amp_ref_of(db[k].p, db[k].t), 0, ROWS, D, NULL) == AMP_OK);
            }
        }
        CHECK(same(&y[0], &y[1]));
        for (k = 0; k < D; k++) {
            buffer one = make(AMP_F16, 1), other = make(AMP_BF16, 1);
            put(&one, 0, get(&dg[1], (size_t)k)); put(&other, 0, get(&db[1], (size_t)k));
            CHECK(get(&dg[0], (size_t)k) == get(&one, 0) && get(&db[0], (size_t)k) == get(&other, 0));
            free(one.block); free(other.block);
        }
        for (k = 0; k < 2; k++) { finish(&wide[k]); finish(&y[k]); finish(&dg[k]); finish(&db[k]); }
        finish(&x); finish(&dy); finish(&gamma); finish(&beta);
        free(mean.block); free(invstd.block);
    }
}

static void run_all(void) {
    TEST(test_activation_forward);
    TEST(test_activation_backward);
    TEST(test_leaky_relu);
    TEST(test_map);
    TEST(test_relu_bits);
    TEST(test_slopes_of_reference);
    TEST(test_accuracy);
    TEST(test_specials);
    TEST(test_special_values);
    TEST(test_every_value);
    TEST(test_softmax);
    TEST(test_softmax_end);
    TEST(test_cross_entropy);
    TEST(test_short_rows);
    TEST(test_long_rows);
    TEST(test_log);
    TEST(test_log1p);
    TEST(test_loss_gradient);
    TEST(test_element_losses);
    TEST(test_dropout);
    TEST(test_add);
    TEST(test_upsample);
    TEST(test_mul);
    TEST(test_mul_gradients);
    TEST(test_away_from_a_line);
    TEST(test_concat);
    TEST(test_transpose);
    TEST(test_embedding);
    TEST(test_batch_norm);
    TEST(test_batch_norm_overflow);
    TEST(test_norm_rows);
    TEST(test_frozen_norm);
    TEST(test_norm_overflow);
    TEST(test_layer_norm);
    TEST(test_rms_norm_is_layer_norm);
    TEST(test_group_norm);
    TEST(test_added_norms);
    TEST(test_norm_pivot);
    TEST(test_sum_order);
    TEST(test_pool);
    TEST(test_pool_pad_end);
    TEST(test_usual_pools);
    TEST(test_pool_bits);
    TEST(test_pool_order);
    TEST(test_global_pool);
    TEST(test_pool_groups);
    TEST(test_pool_nan);
    TEST(test_pool_exceptions);
    TEST(test_average_exceptions);
    TEST(test_random_normal);
    TEST(test_layer_norm_of_nothing);
    TEST(test_accumulate_dx);
    TEST(test_layer_norm_without_statistics);
    TEST(test_cross_entropy_rows_apart);
    TEST(test_cross_entropy_of_maps);
    TEST(test_all_labels_ignored);
    TEST(test_types_of_norm_parameters);
    TEST(test_refusals);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    unsigned long long first = 0;
    int isa;
    for (isa = AMP_ISA_SCALAR; isa <= AMP_ISA_AVX512_BF16; isa++) {
        if (amp_cpu_force_isa((amp_isa)isa) != AMP_OK) continue;
        test_seed = 1;
        hash = 14695981039346656037ull;
        run_all();
        if (first == 0) first = hash;
        CHECK_MSG(hash == first, "%s gives other bits than scalar", amp_isa_name((amp_isa)isa));
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
    TEST(test_self_test);
    TEST_END();
}
