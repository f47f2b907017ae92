/* product.h - matrix products for the tests: described, laid out in memory, run, and checked against three references: the
   CPU's bits on whole numbers, whose sums are exact in every order; the CPU's bits on any numbers where the same
   order is promised; a plain product in double precision with a derived bound. */
#ifndef AMP_TEST_PRODUCT_H
#define AMP_TEST_PRODUCT_H

#include "device.h"

/* --- a product, described ------------------------------------------------------------------ */

/* Where the matrices of a batch lie: one behind the other; A or B shared by all; or side by side in longer rows, as
   the heads of attention. */
enum Layout { APART, SHARED_A, SHARED_B, SIDE_BY_SIDE };
enum Bias { NO_BIAS, PER_COLUMN, PER_ROW };

struct Spec {
    size_t m, n, k;
    amp_dtype at, bt, ct;
    int ta = 0, tb = 0;
    float alpha = 1, beta = 0;
    size_t gap = 0, offset = 0; /* elements behind each row; elements by which pointers are misaligned */
    size_t unit = 1, c_unit = 1; /* leading dimensions of A and B, and of C, are multiples of these */
    size_t batch = 1, space = 0; /* elements behind each matrix */
    Layout layout = APART;
    Bias bias = NO_BIAS;
    amp_dtype bias_type = AMP_F32;
    amp_cuda_epilogue epilogue = AMP_CUDA_EPILOGUE_NONE;
    Numbers kind = WHOLE;
    Spec(size_t m_, size_t n_, size_t k_, amp_dtype a, amp_dtype b, amp_dtype c)
        : m(m_), n(n_), k(k_), at(a), bt(b), ct(c) {}
    Spec& trans(unsigned i) { ta = (int)(i & 1u); tb = (int)(i >> 1 & 1u); return *this; }
    Spec& scale(float a, float b) { alpha = a; beta = b; return *this; }
    Spec& place(size_t g, size_t o) { gap = g; offset = o; return *this; }
    Spec& units(size_t ab, size_t c) { unit = ab; c_unit = c; return *this; }
    Spec& of(Numbers v) { kind = v; return *this; }
    Spec& many(size_t count, Layout l, size_t between = 0) {
        batch = count;
        layout = l;
        space = between;
        return *this;
    }
    Spec& with(Bias where, amp_dtype t, amp_cuda_epilogue f) {
        bias = where;
        bias_type = t;
        epilogue = f;
        return *this;
    }
};

static inline const char* describe(const Spec& s) {
    static char text[256];
    snprintf(text, sizeof text,
             "%s%s m %zu n %zu k %zu %s x %s -> %s alpha %g beta %g gap %zu offset %zu batch %zu/%d "
             "bias %d epilogue %d",
             s.ta ? "T" : "N", s.tb ? "T" : "N", s.m, s.n, s.k, amp_dtype_name(s.at), amp_dtype_name(s.bt),
             amp_dtype_name(s.ct), (double)s.alpha, (double)s.beta, s.gap, s.offset, s.batch, (int)s.layout,
             (int)s.bias, (int)s.epilogue);
    return text;
}

/* The matrices of one operand. */
struct Matrix {
    size_t rows, cols, ld, stride, count;
    Array data;
    Matrix(amp_dtype t, size_t r, size_t c, const Spec& s, bool shared, bool output)
        : rows(r), cols(c),
          ld(up((s.layout == SIDE_BY_SIDE ? s.batch * up(c, output, s) : c) + s.gap, output, s)),
          stride(shared ? 0 : s.layout == SIDE_BY_SIDE ? up(c, output, s) : up(r * ld + s.gap + s.space, output, s)),
          count(s.batch),
          data(t, r && c ? (count - 1) * stride + (r - 1) * ld + c : 0, output, s.offset) {}
    static size_t up(size_t n, bool output, const Spec& s) {
        size_t unit = output ? s.c_unit : s.unit;
        return (n + unit - 1) / unit * unit;
    }
    size_t at(size_t b, size_t i, size_t j) const { return b * stride + i * ld + j; }
    void fill(Numbers kind) {
        for (size_t b = 0; b < (stride ? count : 1); b++)
            for (size_t i = 0; i < rows; i++)
                for (size_t j = 0; j < cols; j++) data.set(at(b, i, j), number(kind));
    }
};

struct Problem {
    Spec s;
    Matrix a, b, c;
    Array bias;
    explicit Problem(const Spec& z)
        : s(z), a(z.at, z.ta ? z.k : z.m, z.ta ? z.m : z.k, z, z.layout == SHARED_A, false),
          b(z.bt, z.tb ? z.n : z.k, z.tb ? z.k : z.n, z, z.layout == SHARED_B, false),
          c(z.ct, z.m, z.n, z, false, true), bias(z.bias_type, bias_length() * z.batch, false, z.offset) {
        a.fill(z.kind);
        b.fill(z.kind);
        if (z.beta != 0)
            c.fill(z.kind); /* else C is NaN, and must not be read */
        bias.fill(bias_length() * z.batch, z.kind == SPECIAL ? WHOLE : z.kind);
        a.data.upload();
        b.data.upload();
        bias.upload();
    }
    size_t bias_length() const { return s.bias == NO_BIAS ? 0 : s.bias == PER_ROW ? s.m : s.n; }
    size_t bias_at(size_t batch, size_t i, size_t j) const {
        return batch * bias_length() + (s.bias == PER_ROW ? i : j);
    }
};

static inline amp_transpose transpose(int t) { return t ? AMP_TRANS : AMP_NO_TRANS; }

static inline amp_gemm_shape product(int ta, int tb, size_t m, size_t n, size_t k, size_t lda, size_t ldb, size_t ldc) {
    amp_gemm_shape s = {};
    s.trans_a = transpose(ta); s.trans_b = transpose(tb);
    s.m = m; s.n = n; s.k = k;
    s.lda = lda; s.ldb = ldb; s.ldc = ldc;
    return s;
}
static inline amp_gemm_shape shape_of(const Problem& p) {
    amp_gemm_shape s = product(p.s.ta, p.s.tb, p.s.m, p.s.n, p.s.k, p.a.ld, p.b.ld, p.c.ld);
    s.batch = p.s.batch;
    s.a_stride = p.a.stride; s.b_stride = p.b.stride; s.c_stride = p.c.stride;
    return s;
}
static inline amp_cuda_gemm_desc desc_of(const Problem& p) {
    amp_cuda_gemm_desc d = {};
    d.bias = p.s.bias ? p.bias.there() : nullptr;
    d.bias_dtype = p.s.bias_type; d.bias_per_row = p.s.bias == PER_ROW; d.bias_stride = p.bias_length();
    d.epilogue = p.s.epilogue;
    return d;
}

/* The arguments of a call. */
struct Call {
    amp_gemm_shape shape;
    amp_cuda_gemm_desc desc;
    const void *a, *b;
    void* c;
    amp_dtype at, bt, ct;
    float alpha, beta;
    explicit Call(const Problem& p)
        : shape(shape_of(p)), desc(desc_of(p)), a(p.a.data.there()), b(p.b.data.there()), c(p.c.data.there()),
          at(p.s.at), bt(p.s.bt), ct(p.s.ct), alpha(p.s.alpha), beta(p.s.beta) {}
    amp_result plain(const amp_exec* e) const { return cuda->gemm(&shape, alpha,
        amp_ref_of(a, at), amp_ref_of(b, bt), beta, amp_ref_of(c, ct), e); }
    amp_result with_desc(const amp_exec* e) const {
        return amp_cuda_gemm_with(&shape, alpha, amp_ref_of(a, at), amp_ref_of(b, bt), beta,
            amp_ref_of(c, ct), &desc, e);
    }
};

/* The product by the call that is made for it. */
static inline amp_result multiply(const Problem& p, const amp_exec* e) {
    const Call call(p);
    return p.s.bias || p.s.epilogue ? call.with_desc(e) : call.plain(e);
}

/* All bytes of C after the call, guards and gaps included. */
static inline Bytes run(const Problem& p, const amp_exec* e) {
    p.c.data.upload();
    last_sentence[0] = 0;
    amp_result r = multiply(p, e);
    CHECK_MSG(r == AMP_OK, "%d \"%s\" %s", (int)r, last_sentence, describe(p.s));
    CHECK(amp_cuda_synchronize(e) == AMP_OK);
    return p.c.data.download();
}

/* --- the CPU's answer ------------------------------------------------------------------------ */

/* A switch over an enumeration of the interface, as a user writes it: with a case for each value, and no default. */
static inline amp_activation activation_of(amp_cuda_epilogue f) {
    switch (f) {
        case AMP_CUDA_EPILOGUE_GELU: return AMP_GELU;
        case AMP_CUDA_EPILOGUE_GELU_TANH: return AMP_GELU_TANH;
        case AMP_CUDA_EPILOGUE_NONE:
        case AMP_CUDA_EPILOGUE_RELU: break;
    }
    return AMP_RELU;
}

/* One of the batch, in FP32, not yet rounded to the type of C. */
static inline std::vector<float> cpu_sums(Problem& p, size_t batch) {
    const Spec& s = p.s;
    std::vector<float> v(s.m * s.n + 1, NAN);
    for (size_t i = 0; i < s.m && s.beta != 0; i++)
        for (size_t j = 0; j < s.n; j++) v[i * s.n + j] = p.c.data.value(p.c.at(batch, i, j));
    const amp_gemm_shape one = product(s.ta, s.tb, s.m, s.n, s.k, p.a.ld, p.b.ld, s.n);
    CHECK(amp_gemm(&one, s.alpha, amp_ref_of(p.a.data.here(batch * p.a.stride), s.at),
        amp_ref_of(p.b.data.here(batch * p.b.stride), s.bt), s.beta, amp_f32(v.data()), nullptr)
          == AMP_OK);
    for (size_t i = 0; i < s.m && s.bias; i++)
        for (size_t j = 0; j < s.n; j++) v[i * s.n + j] += p.bias.value(p.bias_at(batch, i, j));
    if (s.epilogue) {
        std::vector<float> x = v;
        CHECK(amp_activation_forward(activation_of(s.epilogue), amp_f32(x.data()),
            amp_f32(v.data()), s.m * s.n, nullptr)
              == AMP_OK);
    }
    return v;
}

/* All bytes of C as they must be. */
static inline Bytes expected(Problem& p) {
    Bytes image = p.c.data.host;
    for (size_t b = 0; b < p.s.batch; b++) {
        std::vector<float> v = cpu_sums(p, b);
        for (size_t i = 0; i < p.s.m; i++)
            for (size_t j = 0; j < p.s.n; j++)
                amp_convert(amp_ref_of(&image[(p.c.data.lead + p.c.at(b, i, j)) * p.c.data.size], p.s.ct),
                    amp_f32(&v[i * p.s.n + j]), 1);
    }
    return image;
}

static inline void check_same(const Problem& p, const Bytes& got, const Bytes& want, const char* what) {
    size_t first = 0, bad = differences(got, want, p.c.data.size, &first), at = first - p.c.data.lead;
    CHECK_MSG(bad == 0, "%s: %s: %zu differ, the first at row %zu column %zu: %.9g, not %.9g", what,
              describe(p.s), bad, at / p.c.ld, at % p.c.ld,
              (double)get(&got[first * p.c.data.size], p.s.ct),
              (double)get(&want[first * p.c.data.size], p.s.ct));
}

/* The CPU's bits. */
static inline void check_bits(const Spec& s, size_t workspace = 0, size_t skip = 0) {
    Problem p(s);
    amp_exec e = quiet_exec();
    Workspace w(&e, workspace, skip);
    check_same(p, run(p, &e), expected(p), "bits");
}

/* --- double precision -------------------------------------------------------------------------- */

/* alpha * sum + beta * c + bias: the sum's error, three roundings on the way, one to the type of C. */
static inline void check_near(Problem& p, const Bytes& got) {
    const Spec& s = p.s;
    const std::vector<double> left = p.a.data.doubles(), right = p.b.data.doubles();
    size_t bad = 0;
    double worst = 0;
    for (size_t b = 0; b < s.batch; b++)
        for (size_t i = 0; i < s.m; i++)
            for (size_t j = 0; j < s.n; j++) {
                double sum = 0, size = 0,
                       old = s.beta != 0 ? (double)s.beta * (double)p.c.data.value(p.c.at(b, i, j)) : 0;
                double bias = s.bias ? (double)p.bias.value(p.bias_at(b, i, j)) : 0, want, limit, error;
                for (size_t q = 0; q < s.k; q++) {
                    double x = left[p.a.at(b, s.ta ? q : i, s.ta ? i : q)]
                               * right[p.b.at(b, s.tb ? j : q, s.tb ? q : j)];
                    sum += x;
                    size += std::fabs(x);
                }
                want = (double)s.alpha * sum + old + bias;
                limit = std::fabs((double)s.alpha) * sum_error((double)s.k, size);
                limit += 3 * std::ldexp(1, -24)
                         * (std::fabs((double)s.alpha) * size + std::fabs(old) + std::fabs(bias) + limit);
                limit += (std::fabs(want) + limit) * unit_of(s.ct) + tiny_of(s.ct);
                error = std::fabs((double)get(&got[(p.c.data.lead + p.c.at(b, i, j)) * p.c.data.size], s.ct)
                                  - want);
                if (!(error <= limit)) bad++;
                if (error > worst * limit) worst = error / limit;
            }
    CHECK_MSG(bad == 0, "%s: %zu of %zu beyond the bound, by up to %g", describe(s), bad,
              s.batch * s.m * s.n, worst);
}

/* Near the exact result, and the same bits in every order of threads, with a context and without. Returns them. */
static inline Bytes check_bound(const Spec& s, size_t workspace = 0) {
    Problem p(s);
    amp_exec e = quiet_exec();
    Workspace w(&e, workspace);
    Bytes first = run(p, &e);
    check_near(p, first);
    for (int i = 1; i < ORDERS; i++) {
        set_schedule(i);
        check_same(p, run(p, &e), first, "another order of threads");
    }
    set_schedule(0);
    return first;
}

#endif
