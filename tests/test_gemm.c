/* test_gemm.c - amp_gemm and the dense layer, bit for bit and against double precision.
   The exact reference is the documented order, written as a loop over fmaf (which libm rounds correctly). */
#include "pages.h"
#include "helpers.h"
#include "amx.h"
#include <float.h>
#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* --- a matrix with its values as stored and as floats ------------------------------------ */

typedef struct matrix { amp_dtype dtype; size_t rows, cols, ld; unsigned char *base, *data; float* value; } matrix;

/* The stored bytes start with a guard of 16 bytes and end with one; so does every row's gap (ld - cols). The first
   element begins a cache line if ld is a multiple of 4, but lies behind its beginning if ld is 32, 96, 160, ... */
enum { GUARD = 16, LINE = 64, FILL = 0xff };      /* a NaN in every type: what is read by mistake shows */

static matrix matrix_new(amp_dtype dtype, size_t rows, size_t cols, size_t ld) {
    matrix m;
    size_t bytes = rows * ld * amp_dtype_size(dtype), i, j;
    m.dtype = dtype; m.rows = rows; m.cols = cols; m.ld = ld;
    m.base = (unsigned char*)malloc(bytes + 2 * GUARD + 2 * LINE);
    m.data = m.base + (LINE - (uintptr_t)m.base % LINE) + (ld % 4 == 0 && ld % 64 != 32 ? LINE - GUARD : 0);
    m.value = (float*)malloc((rows * cols + 1) * sizeof(float));
    memset(m.data, FILL, bytes + 2 * GUARD);
    for (i = 0; i < rows; i++) {
        for (j = 0; j < cols; j++) m.value[i * cols + j] = test_uniform();
        amp_convert(amp_ref_of(m.data + GUARD + i * ld * amp_dtype_size(dtype), dtype),
            amp_f32(m.value + i * cols), cols);
        amp_convert(amp_f32(m.value + i * cols),
            amp_ref_of(m.data + GUARD + i * ld * amp_dtype_size(dtype), dtype), cols);
    }
    return m;
}
static void* matrix_at(const matrix* m) { return m->data + GUARD; }
static size_t matrix_bytes(const matrix* m) { return m->rows * m->ld * amp_dtype_size(m->dtype) + 2 * GUARD; }
static void matrix_free(matrix* m) { free(m->base); free(m->value); }
/* Writes a matrix's values, rounded to its type. */
static void matrix_write(matrix* m) {
    size_t i;
    for (i = 0; i < m->rows; i++) {
        unsigned char* row = (unsigned char*)matrix_at(m) + i * m->ld * amp_dtype_size(m->dtype);
        amp_convert(amp_ref_of(row, m->dtype), amp_f32(m->value + i * m->cols), m->cols);
        amp_convert(amp_f32(m->value + i * m->cols), amp_ref_of(row, m->dtype), m->cols);
    }
}
static float matrix_op(const matrix* m, int trans, size_t i, size_t j) {
    return trans ? m->value[j * m->cols + i] : m->value[i * m->cols + j];
}

/* The documented sum: fma over k ascending from +0. */
TEST_REFERENCE static float ordered_dot(const float* a, const float* b, size_t k) {
    float sum = 0.0f;
    size_t i;
    for (i = 0; i < k; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

static float finish(float sum, float alpha, float beta, float old) {
    volatile float v = alpha * sum;
    if (alpha == 0.0f) return beta != 0.0f ? beta * old : 0.0f;
    if (beta != 0.0f) v = fmaf(beta, old, v);
    return v;
}

/* Stores the expected value as the library must: one rounding, NaN as the one quiet NaN. */
static void expect_store(unsigned char* at, amp_dtype dtype, float v) {
    if (amp_is_nan(amp_f32(&v))) { uint32_t q = 0x7fc00000u; memcpy(&v, &q, sizeof v); }
    amp_convert(amp_ref_of(at, dtype), amp_f32(&v), 1);
}

typedef struct problem {
    int ta, tb;
    size_t m, n, k;
    float alpha, beta;
    amp_sums sums;
    matrix a, b, c;
} problem;

static problem problem_new(int ta, int tb, size_t m, size_t n, size_t k, size_t gap, float alpha, float beta,
                           amp_dtype at, amp_dtype bt, amp_dtype ct) {
    problem p;
    p.ta = ta; p.tb = tb; p.m = m; p.n = n; p.k = k; p.alpha = alpha; p.beta = beta;
    p.sums = AMP_SUMS_FIXED;
    p.a = matrix_new(at, ta ? k : m, ta ? m : k, (ta ? m : k) + gap);
    p.b = matrix_new(bt, tb ? n : k, tb ? k : n, (tb ? k : n) + gap);
    p.c = matrix_new(ct, m, n, n + gap);
    return p;
}
static void problem_free(problem* p) { matrix_free(&p->a); matrix_free(&p->b); matrix_free(&p->c); }

/* All of C's bytes, guards and gaps included, as they must be after the call. */
static unsigned char* problem_expected(const problem* p) {
    unsigned char* bytes = (unsigned char*)malloc(matrix_bytes(&p->c));
    float* a = (float*)malloc((p->k + 1) * sizeof(float));
    float* columns = (float*)malloc((p->k * p->n + 1) * sizeof(float));
    size_t i, j, q, size = amp_dtype_size(p->c.dtype);
    int fast = p->sums == AMP_SUMS_FAST && p->a.dtype == AMP_BF16 && p->b.dtype == AMP_BF16 && p->m >= 16 && p->n >= 16
               && p->k >= 32 && amp_cpu_has_fast_sums();
    memcpy(bytes, p->c.data, matrix_bytes(&p->c));
    for (j = 0; j < p->n; j++) for (q = 0; q < p->k; q++) columns[j * p->k + q] = matrix_op(&p->b, p->tb, q, j);
    for (i = 0; i < p->m; i++) {
        for (q = 0; q < p->k; q++) a[q] = matrix_op(&p->a, p->ta, i, q);
        for (j = 0; j < p->n; j++) {
            float sum = fast ? amx_dot(a, columns + j * p->k, p->k) : ordered_dot(a, columns + j * p->k, p->k);
            expect_store(bytes + GUARD + (i * p->c.ld + j) * size, p->c.dtype,
                         finish(sum, p->alpha, p->beta, p->c.value[i * p->n + j]));
        }
    }
    free(a); free(columns);
    return bytes;
}

/* Runs the problem on a copy of C and compares every byte. offset: misaligns the workspace. */
static void problem_check(const problem* p, const unsigned char* expected, size_t workspace, size_t offset) {
    unsigned char* c = (unsigned char*)malloc(matrix_bytes(&p->c));
    unsigned char* memory = (unsigned char*)malloc(workspace + offset + GUARD);
    amp_exec exec;
    size_t i, intact = 0;
    int same;
    memset(&exec, 0, sizeof exec);
    memset(memory, FILL, workspace + offset + GUARD);
    memcpy(c, p->c.data, matrix_bytes(&p->c));
    exec.workspace = memory + offset; exec.workspace_size = workspace;
    exec.sums = p->sums;
    CHECK(amp_gemm(PRODUCT(p->ta, p->tb, p->m, p->n, p->k, p->a.ld, p->b.ld, p->c.ld), p->alpha,
        amp_ref_of(matrix_at(&p->a), p->a.dtype), amp_ref_of(matrix_at(&p->b), p->b.dtype),
        p->beta, amp_ref_of(c + GUARD, p->c.dtype), workspace || p->sums ? &exec : NULL) == AMP_OK);
    same = memcmp(c, expected, matrix_bytes(&p->c)) == 0;
    CHECK_MSG(same, "%s %s%s m %lu n %lu k %lu %s x %s -> %s alpha %g beta %g workspace %lu",
              amp_isa_name(amp_cpu_isa()), p->ta ? "T" : "N", p->tb ? "T" : "N", (unsigned long)p->m,
              (unsigned long)p->n, (unsigned long)p->k, amp_dtype_name(p->a.dtype), amp_dtype_name(p->b.dtype),
              amp_dtype_name(p->c.dtype), (double)p->alpha, (double)p->beta, (unsigned long)workspace);
    for (i = 0; i < offset; i++) intact += memory[i] == FILL;
    for (i = 0; i < GUARD; i++) intact += memory[offset + workspace + i] == FILL;
    CHECK_MSG(intact == offset + GUARD, "bytes beside the workspace were written");
    free(c); free(memory);
}

/* With no workspace, one that is too small, the full one, misaligned; or, the scalar path being slow, one of these in turn. */
static void problem_check_workspaces(const problem* p, const unsigned char* expected, int one) {
    static int turn;
    size_t full = amp_gemm_workspace(p->m, p->n, p->k);
    turn += one;
    if (!one || turn % 3 == 0) problem_check(p, expected, 0, 0);
    if (!one || turn % 3 == 1) problem_check(p, expected, full / 2 + 1, 3);
    if (!one || turn % 3 == 2) problem_check(p, expected, full, 7);
}
/* The same on every instruction set. */
static void problem_check_all(const problem* p) {
    unsigned char* expected;
    const amp_isa best = amp_cpu_isa();
    int i;
    if (!test_due()) return;
    expected = problem_expected(p);
    for (i = 0; i < 5; i++) {
        if (amp_cpu_force_isa(ISAS[i]) == AMP_OK)
            problem_check_workspaces(p, expected, ISAS[i] == AMP_ISA_SCALAR && best != AMP_ISA_SCALAR);
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
    free(expected);
}

/* --- bit-exact tests --------------------------------------------------------------------- */

static void test_all_types_and_transposes(void) {
    static const size_t SIZES[][4] = { { 1, 1, 1, 0 }, { 3, 17, 5, 2 }, { 14, 32, 16, 0 }, { 15, 33, 31, 1 },
                                       { 31, 10, 67, 3 }, { 1, 50, 33, 0 }, { 29, 1, 40, 5 } };
    size_t t, s;
    for (t = 0; t < 27; t++)
        for (s = 0; s < 4 * sizeof SIZES / sizeof SIZES[0]; s++) {
            const size_t* z = SIZES[s / 4];
            problem p = problem_new((int)(s & 1u), (int)(s >> 1 & 1u), z[0], z[1], z[2], z[3], 1.0f, 0.0f,
                                    TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3]);
            problem_check_all(&p);
            problem_free(&p);
        }
}

static void test_alpha_beta(void) {
    static const float FACTORS[][2] = { { 1, 1 }, { -0.7f, 0 }, { 1, 0.3f }, { 1.7f, -2.1f }, { 0, 0.5f }, { 0, 0 }, { 0, 1 } };
    size_t f, t;
    for (f = 0; f < sizeof FACTORS / sizeof FACTORS[0]; f++)
        for (t = 0; t < 9; t++) {
            problem p = problem_new((int)(t & 1u), (int)(f & 1u), 17, 37, 21, 1, FACTORS[f][0], FACTORS[f][1],
                                    TYPES[t / 3], TYPES[t / 3], TYPES[t % 3]);
            problem_check_all(&p);
            problem_free(&p);
        }
}

/* Larger than a block in each direction, so that sums are carried from block to block. */
static void test_blocks(void) {
    static const size_t SIZES[][3] = { { 5, 33, 1111 }, { 300, 20, 130 }, { 9, 1100, 70 }, { 260, 520, 60 },
                                       { 60, 300, 70 }, { 100, 530, 200 }, { 90, 20, 900 }, { 270, 530, 150 },
                                       { 40, 540, 820 }, { 28, 1024, 40 }, { 75, 40, 1500 },
                                       { 62, 70, 2101 }, { 151, 595, 90 }, { 150, 592, 100 }, { 520, 42, 820 },
                                       { 157, 1024, 130 }, { 520, 36, 900 }, { 80, 604, 200 }, { 35, 620, 610 } };
    size_t s, t;
    for (s = 0; s < sizeof SIZES / sizeof SIZES[0]; s++)
        for (t = 0; t < 4; t++) {
            problem p = problem_new((int)(s & 1u) ^ (int)(t & 1u), (int)(t >> 1), SIZES[s][0], SIZES[s][1], SIZES[s][2],
                                    s == 3 ? 8 : 0, 1.0f, t == 3 ? 1.0f : 0.0f, TYPES[t % 3], TYPES[t % 3], TYPES[s % 3]);
            problem_check_all(&p);
            problem_free(&p);
        }
}

static void test_random_shapes(void) {
    int i;
    for (i = 0; i < 150; i++) {
        unsigned r = test_random();
        size_t m = 1 + test_random() % 60, n = 1 + test_random() % 90, k = 1 + test_random() % 140, gap = test_random() % 4;
        problem p = problem_new((int)(r & 1u), (int)(r >> 1 & 1u), m, n, k, gap, 1.0f, (r & 4u) ? 0.0f : 1.0f,
                                TYPES[(r >> 3) % 3], TYPES[(r >> 5) % 3], TYPES[(r >> 7) % 3]);
        problem_check_all(&p);
        problem_free(&p);
    }
}

/* Few rows read B as it lies, few columns A: from a cache, with its rows on the same cache sets or not, ... */
static void test_few_rows(void) {
    static const size_t SIZES[][3] = { { 1, 1, 1 }, { 1, 35, 4 }, { 2, 16, 33 }, { 2, 70, 17 }, { 3, 130, 513 }, { 4, 31, 48 },
                                       { 1, 129, 1027 }, { 2, 45, 530 }, { 1, 2100, 5 }, { 130, 1, 33 }, { 67, 2, 514 },
                                       { 300, 3, 20 }, { 25, 4, 31 }, { 3, 50, 1430 }, { 1, 70, 4140 }, { 8, 33, 90 },
                                       { 7, 100, 530 }, { 3, 70, 544 }, { 1, 40, 1056 }, { 2, 64, 63 } };
    size_t s, t;
    for (s = 0; s < sizeof SIZES / sizeof SIZES[0]; s++)
        for (t = 0; t < 36; t++) {
            const int ta = (int)(t & 1u), tb = (int)(t >> 1 & 1u);
            const size_t m = SIZES[s][0], n = SIZES[s][1], k = SIZES[s][2], row = n < m ? (ta ? m : k) : tb ? k : n;
            const size_t gap = t / 4 % 3 == 0 ? 0 : t / 4 % 3 == 1 ? 3 : (row + 2047) / 2048 * 2048 - row;
            problem p = problem_new(ta, tb, m, n, k, gap, t % 5 ? 1.0f : 0.7f, t % 7 ? 0.0f : 1.0f,
                                    TYPES[(s + t) % 4 % 3], TYPES[t / 12], TYPES[s % 3]);
            problem_check_all(&p);
            problem_free(&p);
        }
}
/* ... and from memory, where B is larger than that: the same bits as in a product of more rows, which packs B. */
static void check_few_far_rows(size_t m, int tb, amp_dtype t, size_t k) {
    const size_t n = ((size_t)25 << 20) / amp_dtype_size(t) / k, more = m + 9, size = amp_dtype_size(t), ldb = tb ? k : n;
    matrix a = matrix_new(t, more, k, k), c = matrix_new(AMP_F32, m, n, n), whole = matrix_new(AMP_F32, more, n, n);
    char* b = (char*)malloc(n * k * size);
    const amp_transpose trans = tb ? AMP_TRANS : AMP_NO_TRANS;
    amp_exec exec;
    float* row = (float*)malloc(n * sizeof(float));
    size_t i, q;
    memset(&exec, 0, sizeof exec);
    exec.workspace_size = amp_gemm_workspace(more, n, k);
    exec.workspace = malloc(exec.workspace_size);
    for (q = 0; q < k; q++) {
        for (i = 0; i < n; i++) row[i] = (float)((q * n + i) * 2654435761u >> 16 & 1023u) - 511.5f;
        amp_convert(amp_ref_of(b + q * n * size, t), amp_f32(row), n);
    }
    free(row);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, trans, m, n, k, k, ldb, n), 1.0f,
        amp_ref_of(matrix_at(&a), t), amp_ref_of(b, t), 0.0f, amp_f32(matrix_at(&c)), &exec) == AMP_OK);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, trans, more, n, k, k, ldb, n), 1.0f,
        amp_ref_of(matrix_at(&a), t), amp_ref_of(b, t), 0.0f, amp_f32(matrix_at(&whole)), &exec) == AMP_OK);
    CHECK_MSG(memcmp(matrix_at(&c), matrix_at(&whole), m * n * sizeof(float)) == 0, "%s m %d k %d %s %s",
              amp_isa_name(amp_cpu_isa()), (int)m, (int)k, tb ? "along" : "across", amp_dtype_name(t));
    free(b); free(exec.workspace);
    matrix_free(&a); matrix_free(&c); matrix_free(&whole);
}
static void test_few_far_rows(void) {
    int isa, tb, t;
    for (isa = 1; isa < 5; isa++)
        for (tb = 0; tb < 2 && amp_cpu_force_isa(ISAS[isa]) == AMP_OK; tb++)
            for (t = 0; t < 3; t++) {
                check_few_far_rows(1, tb, TYPES[t], 1031);
                check_few_far_rows(t == 2 ? 2 : 7, tb, TYPES[t], 1540);
                check_few_far_rows(4, tb, TYPES[t], 3072);
            }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Infinities, NaN, signed zeros, subnormals, products that overflow FP32 or underflow. */
static void test_special_values(void) {
    float values[16] = { 0.0f, -0.0f, 0, 0, 0, 1e-40f, -1e-40f, 3e-25f, -3e-25f, 2e38f, -2e38f, 6e-8f, 65504.0f, 1.0f, -1.0f,
                         3e19f };
    size_t t, i;
    values[2] = INFINITY; values[3] = -INFINITY; values[4] = NAN;
    for (t = 0; t < 81; t++) {                                 /* many rows; few of them, both ways */
        const size_t m = t < 27 ? 23 : 1 + t % 2, n = t < 27 || t >= 54 ? 35 : 2048;
        problem p = problem_new((int)(t & 1u), t >= 54, m, n, t % 2 ? 3 : 2, 0, 1.0f, t % 5 ? 0.0f : 1.0f,
                                TYPES[t / 9 % 3], TYPES[t / 3 % 3], TYPES[t % 3]);
        matrix* list[3];
        int q;
        list[0] = &p.a; list[1] = &p.b; list[2] = &p.c;
        for (q = 0; q < 3; q++) {
            size_t count = list[q]->rows * list[q]->cols;
            for (i = 0; i < count; i++) list[q]->value[i] = values[test_random() % (q == 2 ? 2 : 16)];
            matrix_write(list[q]);
        }
        problem_check_all(&p);
        problem_free(&p);
    }
}

/* Ascending k, for all types: a case where other orders give other results, and a product that rounds to -0. */
static void test_order(void) {
    const float x[4] = { 1.0f, 4096.0f, -4096.0f, 1.0f }, y[4] = { 1.0f, 4096.0f, 4096.0f, 1.0f };
    const float tiny = -1e-30f, small = 1e-30f;
    unsigned char a[16], b[16];
    size_t t;
    float c;
    for (t = 0; t < 9; t++) {
        const amp_dtype at = TYPES[t % 3], bt = TYPES[t / 3];
        amp_convert(amp_ref_of(a, at), amp_f32(x), 4);
        amp_convert(amp_ref_of(b, bt), amp_f32(y), 4);
        /* 1 + 16777216 = 16777216; - 16777216 = 0; + 1 = 1.  Pairs of neighbours the other way round give 0. */
        CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 4, 4, 1, 1), 1,
            amp_ref_of(a, at), amp_ref_of(b, bt), 0, amp_f32(&c), NULL) == AMP_OK);
        CHECK_MSG(c == 1.0f, "%s, %s: %g", amp_dtype_name(at), amp_dtype_name(bt), (double)c);
    }
    amp_convert(amp_ref_of(a, AMP_BF16), amp_f32(&tiny), 1);
    amp_convert(amp_ref_of(b, AMP_BF16), amp_f32(&small), 1);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, 1, 1), 1, amp_ref_of(a, AMP_BF16),
        amp_ref_of(b, AMP_BF16), 0, amp_f32(&c), NULL) == AMP_OK);
    CHECK_MSG(c == 0.0f && signbit(c), "-1e-60 rounds to -0: %g", (double)c);
}

/* BF16 products around FP32's smallest normal number, which BF16 instructions flush and the contract keeps: operands of
   the order 2^-e and 2^-f in the first half of k, around 1 in the other; single subnormal operands. */
static void test_bf16_subnormal_sums(void) {
    static const int E[10] = { 1, 50, 55, 58, 60, 63, 70, 100, 126, 133 }, F[5] = { 1, 56, 63, 66, 120 };
    static const size_t K[3] = { 6, 70, 1040 };
    size_t round, i, l;
    for (round = 0; round < 300; round++) {
        problem p = problem_new(round / 2 % 2 == 1, round % 2 == 1, round < 150 ? 17 : 3, 35, K[round / 50 % 3], 0, 1.0f, 0.0f,
                                AMP_BF16, AMP_BF16, AMP_F32);
        matrix* list[2];
        list[0] = &p.a; list[1] = &p.b;
        for (l = 0; l < 2; l++) {
            int along_k = l == 0 ? !p.ta : p.tb, small = -(l == 0 ? E[round % 10] : F[round / 10 % 5]);
            size_t count = list[l]->rows * list[l]->cols;
            for (i = 0; i < count; i++) {
                size_t k = along_k ? i % list[l]->cols : i / list[l]->cols;
                int first = round % 3 == 2 ? k >= p.k / 2 : k < p.k / 2;
                list[l]->value[i] = ldexpf(1.0f + test_uniform() * 0.9f, round % 3 == 0 || first ? small : 0);
                if (round % 7 == 3 && l == round % 2 && i == count / 3) list[l]->value[i] = 1e-39f;
                if (test_random() % 4 == 0) list[l]->value[i] *= -1.0f;
            }
            matrix_write(list[l]);
        }
        problem_check_all(&p);
        problem_free(&p);
    }
}

/* The smallest that such a sum can be: (129 * 129 - 128 * 130) * 2^e, alone, or with zeros for the rest of a k that
   takes two blocks; and a subnormal operand whose product is normal. Then for few rows, early and late along k. */
static void test_bf16_smallest_sums(void) {
    static const size_t K[2] = { 4, 2080 };
    int round, e;
    for (round = 0; round < 12; round++)
        for (e = -130; e <= -122; e++) {
            problem p = problem_new(0, 1, round < 4 ? 16 : 4, 33, K[round % 2], 0, 1.0f, 0.0f, AMP_BF16, AMP_BF16, AMP_F32);
            matrix *a = round % 4 < 2 ? &p.a : &p.b, *b = round % 4 < 2 ? &p.b : &p.a;
            const size_t at = round >= 8 && p.k > 4 ? 900 : 0;
            size_t i, l;
            for (l = 0; l < 2; l++) {
                matrix* m = l ? b : a;
                for (i = 0; i < m->rows; i++) {
                    float* v = m->value + i * m->cols;
                    memset(v, 0, m->cols * sizeof *v);
                    v[at] = ldexpf(129.0f, l ? -60 : e + 60);
                    v[at + 2] = ldexpf(l ? 130.0f : -128.0f, l ? -60 : e + 60);
                    if (e == -122) { v[at] = i == 3 && l == 0 ? 1e-39f : 1048576.0f; v[at + 2] = 0.0f; }
                }
                amp_convert(amp_bf16(matrix_at(m)), amp_f32(m->value), m->rows * m->cols);
                amp_convert(amp_f32(m->value), amp_bf16(matrix_at(m)), m->rows * m->cols);
            }
            problem_check_all(&p);
            problem_free(&p);
        }
}

/* One subnormal operand at the start, in the middle or at the end of an otherwise normal matrix, alone in its row of A or
   column of B. */
static void test_bf16_subnormal_corner(void) {
    static const size_t SIZES[8][4] = { { 75, 40, 300, 0 }, { 75, 40, 300, 3 }, { 20, 100, 260, 0 }, { 61, 37, 1040, 0 },
                                        { 40, 50, 131, 0 }, { 61, 37, 2100, 0 }, { 3, 70, 340, 0 }, { 2, 64, 4300, 0 } };
    size_t round, i;
    for (round = 0; round < 8 * 4 * 6; round++) {
        const size_t* z = SIZES[round / 24];
        const size_t at = round / 4 % 3, in_b = round / 12 % 2;
        problem p = problem_new(round % 2 == 1, round / 2 % 2 == 1, z[0], z[1], z[2], z[3], 1.0f, 0.0f, AMP_BF16, AMP_BF16,
                                AMP_F32);
        matrix *tiny = in_b ? &p.b : &p.a, *large = in_b ? &p.a : &p.b;
        const int along_k = in_b ? p.tb : !p.ta;
        const size_t lines = along_k ? tiny->rows : tiny->cols, line = at * (lines - 1) / 2, k = at * (p.k - 1) / 2;
        for (i = 0; i < tiny->rows * tiny->cols; i++) {
            const size_t row = i / tiny->cols, col = i % tiny->cols;
            if ((along_k ? row : col) == line) tiny->value[i] = (along_k ? col : row) == k ? 1e-39f : 0.0f;
        }
        for (i = 0; i < large->rows * large->cols; i++) large->value[i] = ldexpf(large->value[i], 100);
        matrix_write(&p.a);
        matrix_write(&p.b);
        problem_check_all(&p);
        problem_free(&p);
    }
}

/* c = x*y + z by way of C = beta*C + a*b, against libm's fmaf. */
static void check_fma(float x, float y, float z) {
    float one = 1, c = y, want = fmaf(x, y, z);
    if (x == 0.0f) return;                       /* beta 0 does not read C */
    amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, 1, 1), 1, amp_f32(&z), amp_f32(&one),
        x, amp_f32(&c), NULL);
    CHECK_MSG(memcmp(&c, &want, sizeof c) == 0, "%a * %a + %a is %a, not %a", (double)x, (double)y, (double)z, (double)c, (double)want);
}
/* Where a processor without fma would be wrong: the double sum lies between two floats, and the product has a last bit
   far below that decides; also with results below the normal floats. (1 + u)(1 - u) = 1 - u^2. */
static void test_fma_rounds_once(void) {
    size_t i;
    int e, k;
    for (i = 0; i < 5; i++) {
        if (amp_cpu_force_isa(ISAS[i]) != AMP_OK) continue;
        for (k = 0; k < 2000; k++) {
            float z = (float)ldexp((double)(8388608u + (test_random() & 0x7fffffu)), -23);
            float u = (float)ldexp((double)(1 + test_random() % 64), -23), half = (float)ldexp(1.0, -24 - (k & 1));
            float sign = k & 2 ? -1.0f : 1.0f;
            check_fma(sign * half * (1.0f + u), k & 4 ? 1.0f + u : 1.0f - u, k & 8 ? -z : z);
            check_fma(sign * test_uniform(), test_uniform(), test_uniform());
            e = (int)(test_random() % 40) - 150;
            check_fma((float)ldexp((double)test_uniform(), e / 2), (float)ldexp((double)test_uniform(), e - e / 2),
                      (float)ldexp((double)test_uniform(), e + (int)(test_random() % 20)));
        }
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Zeros of a shape: packed rows, one product; the strides of A and B, one matrix for all. */
static void test_shape_defaults(void) {
    float a[2 * 15], b[2 * 21], c[2 * 35], full[2 * 35];
    size_t i;
    int form;
    for (i = 0; i < 30; i++) a[i] = test_uniform();
    for (i = 0; i < 42; i++) b[i] = test_uniform();
    for (form = 0; form < 4; form++) {
        const int ta = form & 1, tb = form >> 1;
        CHECK(amp_gemm(PRODUCT(ta, tb, 5, 7, 3, ta ? 5 : 3, tb ? 3 : 7, 7), 1, amp_f32(a),
            amp_f32(b), 0, amp_f32(full), NULL) == AMP_OK);
        memcpy(full + 35, full, sizeof full / 2);
        memset(c, FILL, sizeof c);
        CHECK(amp_gemm(PRODUCT(ta, tb, 5, 7, 3, 0, 0, 0), 1, amp_ref_of(a, AMP_DTYPE_DEFAULT),
            amp_ref_of(b, AMP_DTYPE_DEFAULT), 0, amp_ref_of(c, AMP_DTYPE_DEFAULT), NULL) == AMP_OK);
        CHECK(memcmp(c, full, sizeof c / 2) == 0);
        for (i = 0; i < sizeof c / 2; i++) CHECK(((unsigned char*)(c + 35))[i] == FILL);
        CHECK(amp_gemm(PRODUCTS(ta, tb, 5, 7, 3, 0, 0, 0, 2, 0, 0, 35), 1, amp_f32(a), amp_f32(b),
            0, amp_f32(c), NULL) == AMP_OK);
        CHECK(memcmp(c, full, sizeof c) == 0);
    }
    memset(c, 0, sizeof c);
    CHECK(amp_gemm(PRODUCTS(0, 0, 5, 7, 0, 0, 0, 0, 2, 15, 21, 35), 1, AMP_NONE, AMP_NONE, 0,
        amp_f32(full), NULL) == AMP_OK);
    CHECK(memcmp(c, full, sizeof c) == 0);
}

static void test_nothing_to_do(void) {
    float c[6] = { 0, 0, 0, 1, 2, 3 }, one = 1;
    c[0] = c[1] = c[2] = NAN;
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 0, 1, 1, 1, 1, 1), 1, AMP_NONE,
        amp_f32(&one), 0, AMP_NONE, NULL) == AMP_OK);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 0, 0, 0, 0, 0, 0), 1, AMP_NONE, AMP_NONE,
        0, AMP_NONE, NULL) == AMP_OK);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 3, 0, 0, 3, 3), 1, AMP_NONE, AMP_NONE,
        0, amp_f32(c), NULL) == AMP_OK);
    CHECK(c[0] == 0 && c[1] == 0 && c[2] == 0);
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 3, 0, 0, 3, 3), 1, AMP_NONE, AMP_NONE,
        2, amp_f32(c + 3), NULL) == AMP_OK);
    CHECK(c[3] == 2 && c[4] == 4 && c[5] == 6);
    c[0] = -0.0f;
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 1, 1, 1, 1), 0, amp_f32(&one),
        amp_f32(&one), 2, amp_f32(c), NULL) == AMP_OK);
    CHECK(c[0] == 0 && signbit(c[0]));
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 0, 0, 1, 1), -3, AMP_NONE, AMP_NONE,
        1, amp_f32(c), NULL) == AMP_OK);
    CHECK(c[0] == 0 && signbit(c[0]));          /* alpha has nothing to multiply: the sign stays */
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 1, 1, 0, 0, 1, 1), INFINITY, AMP_NONE,
        AMP_NONE, 1, amp_f32(c), NULL) == AMP_OK);
    CHECK(c[0] == 0 && signbit(c[0]));
}

/* --- against double precision ------------------------------------------------------------ */

/* A sum of k products, each step rounded to 24 bits: |error| <= k*u/(1 - k*u) * sum|a*b| with u = 2^-24 (Higham, 3.1),
   then half a unit in the last place of C's type (relative 2^-24, 2^-11, 2^-8; absolute 2^-25 below half's normals). */
static void test_error_bound(void) {
    size_t t, i, j, q;
    for (t = 0; t < 9; t++) {
        problem p = problem_new(0, 1, 40, 50, 300, 0, 1.0f, 0.0f, TYPES[t % 3], TYPES[t % 3], TYPES[t / 3]);
        double unit = TYPES[t / 3] == AMP_F32 ? 0x1p-24 : TYPES[t / 3] == AMP_F16 ? 0x1p-11 : 0x1p-8;
        float got;
        CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_TRANS, 40, 50, 300, 300, 300, 50), 1,
            amp_ref_of(matrix_at(&p.a), p.a.dtype), amp_ref_of(matrix_at(&p.b), p.b.dtype), 0,
            amp_ref_of(matrix_at(&p.c), p.c.dtype), NULL) == AMP_OK);
        for (i = 0; i < 40; i++)
            for (j = 0; j < 50; j++) {
                double sum = 0, size = 0, limit;
                for (q = 0; q < 300; q++) {
                    double x = (double)p.a.value[i * 300 + q] * (double)p.b.value[j * 300 + q];
                    sum += x; size += fabs(x);
                }
                amp_convert(amp_f32(&got),
                    amp_ref_of(p.c.data + GUARD + (i * 50 + j) * amp_dtype_size(p.c.dtype), p.c.dtype),
                    1);
                limit = 300 * 0x1p-24 / (1 - 300 * 0x1p-24) * size;
                limit += (fabs(sum) + limit) * unit + 0x1p-25 * (p.c.dtype == AMP_F16);
                CHECK_MSG(fabs((double)got - sum) <= limit, "%g %g %g", (double)got, sum, limit);
            }
        problem_free(&p);
    }
}

/* --- AMP_SUMS_FAST ----------------------------------------------------------------------- */

/* BF16 has the bits of the matrix unit's order where there is one, F16 those of the fixed order: all types of C, both
   transposes, tails of tiles and blocks, gaps between rows. */
static void test_fast_sums(void) {
    static const size_t M[6] = { 16, 33, 47, 64, 81, 128 }, N[6] = { 16, 256, 45, 63, 64, 97 };
    static const size_t K[7] = { 32, 33, 64, 100, 255, 640, 1100 };
    size_t round;
    for (round = 0; round < 84; round++) {
        size_t k = K[round % 7], gap = round % 3 == 0 ? 0 : round % 3 == 1 ? k % 2 + 1 : 32 - k % 32;
        amp_dtype t = round % 4 == 3 ? AMP_F16 : AMP_BF16;
        problem p = problem_new(round / 2 % 2 == 1, round / 5 % 2 == 1, M[round % 6], N[round / 5 % 6], k, gap,
                                round % 5 == 0 ? 0.5f : 1.0f, round % 7 == 0 ? -1.5f : 0.0f, t, t, TYPES[round / 3 % 3]);
        unsigned char* expected;
        p.sums = AMP_SUMS_FAST;
        expected = problem_expected(&p);
        problem_check_workspaces(&p, expected, 0);
        free(expected);
        problem_free(&p);
    }
}

/* Types that have no unit, and products too small for one, keep the fixed order. */
static void test_fast_sums_elsewhere(void) {
    static const amp_dtype A[7] = { AMP_F32, AMP_F16, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16, AMP_BF16 };
    static const amp_dtype B[7] = { AMP_F32, AMP_F16, AMP_F16, AMP_F32, AMP_BF16, AMP_BF16, AMP_BF16 };
    size_t i;
    for (i = 0; i < 7; i++) {
        problem p = problem_new(0, 1, i == 4 ? 15 : 40, i == 5 ? 15 : 40, i == 6 ? 31 : 40, 0, 1.0f, 0.0f, A[i], B[i], AMP_F32);
        unsigned char* expected = problem_expected(&p);
        p.sums = AMP_SUMS_FAST;
        problem_check_workspaces(&p, expected, 0);
        free(expected);
        problem_free(&p);
    }
}

#if defined(__linux__)
/* Matrices that end with a page, behind which nothing may be read. */
static void test_reads_nothing_else(void) {
    static float c[80 * 300];
    static char memory[1 << 22];
    size_t round, length_a, length_b;
    for (round = 0; round < 192; round++) {
        size_t m = round >= 96 ? 1 + round % 2 : round % 2 == 0 ? 7 : round % 3 ? 40 : 160, k = round % 4 < 2 ? 64 : 37;
        size_t n = round % 3 ? 256 : round >= 96 ? 53 : 45;
        amp_dtype t = TYPES[round / 12 % 3];
        void *base_a, *base_b;
        void* a = at_page_end(m * k * amp_dtype_size(t), &base_a, &length_a);
        void* b = at_page_end(n * k * amp_dtype_size(t), &base_b, &length_b);
        int ta = round / 2 % 2 == 1, tb = round / 4 % 2 == 1;
        amp_exec exec;
        memset(&exec, 0, sizeof exec);
        exec.workspace = memory;
        exec.workspace_size = round / 8 % 2 ? sizeof memory : 0;
        exec.sums = round / 36 % 2 ? AMP_SUMS_FIXED : AMP_SUMS_FAST;
        CHECK(amp_gemm(PRODUCT(ta, tb, m, n, k, ta ? m : k, tb ? k : n, n), 1.0f,
            amp_ref_of(a, t), amp_ref_of(b, t), 0.0f, amp_f32(c), &exec) == AMP_OK);
        munmap(base_a, length_a);
        munmap(base_b, length_b);
    }
}
#else
static void test_reads_nothing_else(void) { TEST_SKIP("no guard pages here"); }
#endif

/* What is not finite stays so, in its own row or column only; a sum that leaves FP32's range does too. */
static void test_fast_sums_not_finite(void) {
    enum { SIZE = 48 };
    static float a[SIZE * SIZE], b[SIZE * SIZE], c[SIZE * SIZE];
    static amp_bfloat16 low_a[SIZE * SIZE], low_b[SIZE * SIZE];
    static amp_half half_a[SIZE * SIZE], half_b[SIZE * SIZE];
    amp_exec exec;
    size_t i, j, wrong, round;
    memset(&exec, 0, sizeof exec);
    exec.sums = AMP_SUMS_FAST;
    for (i = 0; i < SIZE * SIZE; i++) { a[i] = 2.0f + test_uniform(); b[i] = 2.0f + test_uniform(); }
    a[7 * SIZE + 40] = INFINITY;
    b[2 * SIZE + 33] = NAN;
    amp_convert(amp_f16(half_a), amp_f32(a), SIZE * SIZE);
    amp_convert(amp_f16(half_b), amp_f32(b), SIZE * SIZE);
    a[20 * SIZE + 1] = 3e38f; a[20 * SIZE + 2] = 3e38f;       /* beyond F16 */
    amp_convert(amp_bf16(low_a), amp_f32(a), SIZE * SIZE);
    amp_convert(amp_bf16(low_b), amp_f32(b), SIZE * SIZE);
    for (round = 0; round < 2; round++) {
        CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE),
            1.0f, amp_ref_of(round ? (void*)half_a : (void*)low_a, round ? AMP_F16 : AMP_BF16),
            amp_ref_of(round ? (void*)half_b : (void*)low_b, round ? AMP_F16 : AMP_BF16), 0.0f,
            amp_f32(c), &exec) == AMP_OK);
        for (i = wrong = 0; i < SIZE; i++)
            for (j = 0; j < SIZE; j++) {
                uint32_t bits, want = 0x7f800000u;             /* a NaN is 0x7fc00000 here too */
                memcpy(&bits, &c[i * SIZE + j], sizeof bits);
                if (j == 33) wrong += bits != 0x7fc00000u;
                else if (i == 7 || (round == 0 && i == 20)) wrong += bits != want;
                else wrong += bits >= want;
            }
        CHECK_MSG(wrong == 0, "%lu elements are finite where they should not be, or not where they should, or another NaN",
                  (unsigned long)wrong);
    }
}

/* --- dense layer ------------------------------------------------------------------------- */

typedef struct dense { size_t n, in, out; matrix x, w, b, y, dy, dx, dw, db; } dense;

static dense dense_new(size_t n, size_t in, size_t out, amp_dtype act, amp_dtype weight, amp_dtype grad) {
    dense d;
    d.n = n; d.in = in; d.out = out;
    d.x = matrix_new(act, n, in, in);      d.w = matrix_new(weight, out, in, in);
    d.b = matrix_new(weight, 1, out, out); d.y = matrix_new(act, n, out, out);
    d.dy = matrix_new(act, n, out, out);   d.dx = matrix_new(act, n, in, in);
    d.dw = matrix_new(grad, out, in, in);  d.db = matrix_new(grad, 1, out, out);
    return d;
}
static void dense_free(dense* d) {
    matrix_free(&d->x); matrix_free(&d->w); matrix_free(&d->b); matrix_free(&d->y);
    matrix_free(&d->dy); matrix_free(&d->dx); matrix_free(&d->dw); matrix_free(&d->db);
}

/* Element i of m, as it is now, must be v rounded to m's type. */
static void check_element(const matrix* m, size_t i, float v, const char* what) {
    unsigned char bytes[4];
    size_t size = amp_dtype_size(m->dtype);
    float got;
    expect_store(bytes, m->dtype, v);
    amp_convert(amp_f32(&got), amp_ref_of(m->data + GUARD + i * size, m->dtype), 1);
    CHECK_MSG(memcmp(bytes, m->data + GUARD + i * size, size) == 0, "%s %s[%lu] is %.9g, expected %.9g",
              amp_isa_name(amp_cpu_isa()), what, (unsigned long)i, (double)got, (double)v);
}
static void restore(matrix* m) {
    amp_convert(amp_ref_of(matrix_at(m), m->dtype), amp_f32(m->value), m->rows * m->cols);
}

static void dense_check(dense* d, int accumulate, const amp_exec* exec) {
    float* u = (float*)malloc((d->n + d->in + d->out) * sizeof(float));
    float* v = (float*)malloc((d->n + d->in + d->out) * sizeof(float));
    size_t i, j, q;
    const int input = (accumulate & AMP_ACCUMULATE_INPUT) != 0;
    restore(&d->dw); restore(&d->db); restore(&d->dx);
    CHECK(amp_linear_forward(amp_ref_of(matrix_at(&d->x), d->x.dtype),
        amp_ref_of(matrix_at(&d->w), d->w.dtype), amp_ref_of(matrix_at(&d->b), d->b.dtype),
        amp_ref_of(matrix_at(&d->y), d->y.dtype), d->n, d->in, d->out, exec) == AMP_OK);
    CHECK(amp_linear_backward(amp_ref_of(matrix_at(&d->dy), d->dy.dtype),
        amp_ref_of(matrix_at(&d->x), d->x.dtype), amp_ref_of(matrix_at(&d->w), d->w.dtype),
        amp_ref_of(matrix_at(&d->dx), d->dx.dtype), amp_ref_of(matrix_at(&d->dw), d->dw.dtype),
        amp_ref_of(matrix_at(&d->db), d->db.dtype), accumulate, d->n, d->in, d->out, exec) == AMP_OK);
    for (i = 0; i < d->n; i++)
        for (j = 0; j < d->out; j++) {
            volatile float y = ordered_dot(d->x.value + i * d->in, d->w.value + j * d->in, d->in);
            y += d->b.value[j];
            check_element(&d->y, i * d->out + j, y, "y");
        }
    for (i = 0; i < d->n; i++)
        for (j = 0; j < d->in; j++) {
            for (q = 0; q < d->out; q++) { u[q] = d->dy.value[i * d->out + q]; v[q] = d->w.value[q * d->in + j]; }
            check_element(&d->dx, i * d->in + j, finish(ordered_dot(u, v, d->out), 1, input ? 1.0f : 0.0f,
                                                        d->dx.value[i * d->in + j]), "dx");
        }
    accumulate &= AMP_ACCUMULATE_PARAMS;
    for (i = 0; i < d->out; i++) {
        volatile float sum = 0;
        for (q = 0; q < d->n; q++) { u[q] = d->dy.value[q * d->out + i]; sum += u[q]; }
        if (accumulate) sum += d->db.value[i];
        check_element(&d->db, i, sum, "db");
        for (j = 0; j < d->in; j++) {
            for (q = 0; q < d->n; q++) v[q] = d->x.value[q * d->in + j];
            check_element(&d->dw, i * d->in + j,
                          finish(ordered_dot(u, v, d->n), 1, accumulate ? 1.0f : 0.0f, d->dw.value[i * d->in + j]), "dw");
        }
    }
    free(u); free(v);
}

static void test_dense(void) {
    static const size_t SIZES[5][3] = { { 7, 25, 10 }, { 33, 18, 47 }, { 1, 40, 1 }, { 19, 5, 300 }, { 130, 3, 70 } };
    static unsigned char workspace[1 << 22];
    size_t s, t;
    int isa;
    for (s = 0; s < 5; s++)
        for (t = 0; t < 9; t++) {
            dense d = dense_new(SIZES[s][0], SIZES[s][1], SIZES[s][2], TYPES[t % 3], TYPES[t / 3], TYPES[(t + s) % 3]);
            for (isa = 0; isa < 5; isa++) {
                amp_exec exec;
                memset(&exec, 0, sizeof exec);
                exec.workspace = workspace; exec.workspace_size = sizeof workspace;
                if (amp_cpu_force_isa(ISAS[isa]) != AMP_OK) continue;
                dense_check(&d, 0, &exec);
                dense_check(&d, 1, NULL);
                dense_check(&d, AMP_ACCUMULATE_INPUT, NULL);
                dense_check(&d, AMP_ACCUMULATE_PARAMS | AMP_ACCUMULATE_INPUT, &exec);
            }
            amp_cpu_force_isa(AMP_ISA_AUTO);
            dense_free(&d);
        }
}

/* --- batches ----------------------------------------------------------------------------- */

/* Where matrix after matrix of a batch lies: behind each other with a gap, all in one place, or side by side in the
   same rows, as the heads of attention do. */
enum { APART, SHARED_A, SHARED_B, SIDE_BY_SIDE };
typedef struct series { matrix all; size_t stride; } series;
static series series_new(amp_dtype dtype, size_t rows, size_t cols, size_t batch, int side_by_side, int shared) {
    series s;
    if (side_by_side) s.all = matrix_new(dtype, rows, cols * batch, cols * batch + 3);
    else s.all = matrix_new(dtype, rows * (shared ? 1 : batch) + 1, cols, cols + 1);
    s.stride = shared ? 0 : side_by_side ? cols : rows * s.all.ld;
    return s;
}
static unsigned char* series_at(const series* s, size_t i) {
    return (unsigned char*)matrix_at(&s->all) + i * s->stride * amp_dtype_size(s->all.dtype);
}

/* A batch leaves the bytes that its products leave one by one, between its matrices too. */
static void check_batch(size_t m, size_t n, size_t k, size_t batch, int layout, int trans, int types, size_t room) {
    const amp_dtype at = TYPES[types % 3], bt = TYPES[types / 3 % 3], ct = TYPES[types / 9];
    const amp_transpose ta = trans & 1 ? AMP_TRANS : AMP_NO_TRANS, tb = trans & 2 ? AMP_TRANS : AMP_NO_TRANS;
    const int side = layout == SIDE_BY_SIDE;
    series a = series_new(at, ta ? k : m, ta ? m : k, batch, side, layout == SHARED_A);
    series b = series_new(bt, tb ? n : k, tb ? k : n, batch, side, layout == SHARED_B);
    series c = series_new(ct, m, n, batch, side, 0);
    const size_t bytes = matrix_bytes(&c.all);
    unsigned char* before = (unsigned char*)malloc(bytes);
    unsigned char* expected = (unsigned char*)malloc(bytes);
    amp_exec exec;
    size_t i;
    memset(&exec, 0, sizeof exec);
    exec.workspace = room ? malloc(room) : NULL; exec.workspace_size = room;
    memcpy(before, c.all.data, bytes);
    for (i = 0; i < batch; i++)
        CHECK(amp_gemm(PRODUCT(ta, tb, m, n, k, a.all.ld, b.all.ld, c.all.ld), 0.5f,
            amp_ref_of(series_at(&a, i), at), amp_ref_of(series_at(&b, i), bt), 0.25f,
            amp_ref_of(series_at(&c, i), ct), NULL) == AMP_OK);
    memcpy(expected, c.all.data, bytes);
    memcpy(c.all.data, before, bytes);
    CHECK(amp_gemm(PRODUCTS(ta, tb, m, n, k, a.all.ld, b.all.ld, c.all.ld, batch, a.stride, b.stride, c.stride),
        0.5f, amp_ref_of(matrix_at(&a.all), at), amp_ref_of(matrix_at(&b.all), bt), 0.25f,
        amp_ref_of(matrix_at(&c.all), ct), &exec) == AMP_OK);
    CHECK_MSG(memcmp(expected, c.all.data, bytes) == 0, "%lu of %lux%lux%lu, layout %d, trans %d, types %d, room %lu",
              (unsigned long)batch, (unsigned long)m, (unsigned long)n, (unsigned long)k, layout, trans, types,
              (unsigned long)room);
    free(exec.workspace); free(before); free(expected);
    matrix_free(&a.all); matrix_free(&b.all); matrix_free(&c.all);
}
static void test_batched(void) {
    int types, layout;
    for (types = 0; types < 27; types++)
        for (layout = APART; layout <= SIDE_BY_SIDE; layout++) {
            check_batch(9, 7, 12, 5, layout, types % 4, types, 0);
            check_batch(20, 33, 31, 1 + (size_t)types % 3, layout, types / 2 % 4, types, (size_t)types % 2 * 100000);
        }
    check_batch(64, 64, 64, 12, SIDE_BY_SIDE, 2, 4, 100);                  /* a workspace too small to be cut */
    check_batch(64, 64, 64, 12, SIDE_BY_SIDE, 2, 4, 8 * amp_gemm_workspace(64, 64, 64));
    check_batch(170, 170, 170, 3, APART, 0, 9, amp_gemm_workspace(170, 170, 170));    /* 3 large ones: each by all threads */
    check_batch(1, 40, 300, 17, SHARED_A, 2, 8, 0);
}

/* --- refusals ---------------------------------------------------------------------------- */

static void test_refusals(void) {
    float a[64] = { 0 }, c[64];
    size_t i;
    amp_exec e;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    for (i = 0; i < 64; i++) c[i] = 7;
    check_refused(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, 3, 5, 3, 3, 3), 1, amp_f32(a),
        amp_f32(a), 0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: lda is 3, but a row of a has 5 elements");
    check_refused(amp_gemm(PRODUCT(AMP_TRANS, AMP_TRANS, 2, 3, 5, 2, 4, 3), 1, amp_f32(a),
        amp_f32(a), 0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: ldb is 4, but a row of b has 5 elements");
    check_refused(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, 3, 5, 5, 3, 2), 1, amp_f32(a),
        amp_f32(a), 0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: ldc is 2, but a row of c has 3 elements");
    check_refused(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, 3, 5, 5, 3, 3), 1, AMP_NONE,
        amp_f32(a), 0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: a is NULL, but it has 2 x 5 elements");
    check_refused(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, 3, 5, 5, 3, 3), 1, amp_f32(a),
        amp_ref_of(a, AMP_F64), 0, amp_f32(c), &e),
                  AMP_ERR_DTYPE, "amp_gemm: b has type f64 (4); it must be f32, f16 or bf16");
    check_refused(amp_gemm(PRODUCT(2, AMP_NO_TRANS, 2, 3, 5, 5, 3, 3), 1, amp_f32(a), amp_f32(a),
        0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: trans_a is 2, trans_b is 0; they must be 0 or 1");
    CHECK(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, SIZE_MAX / 4, 3, 5, 5, 3, 3), 1,
        amp_f32(a), amp_f32(a), 0, amp_f32(c), &e)
          == AMP_ERR_ARGUMENT);
    CHECK(strncmp(heard, "amp_gemm: a is too large: ", 26) == 0);
    check_refused(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, (size_t)-1, 3, 5, 5, 3, 3), 1,
        amp_f32(a), amp_f32(a), 0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: a is too large: -1 rows of 5 elements");
    check_refused(amp_gemm(PRODUCT(AMP_NO_TRANS, AMP_NO_TRANS, 2, (size_t)-3, 5, 5, 3, 3), 1,
        amp_f32(a), amp_f32(a), 0, amp_f32(c), &e),
                  AMP_ERR_ARGUMENT, "amp_gemm: ldb is 3, but a row of b has -3 elements");
    check_refused(amp_gemm(NULL, 1, amp_f32(a), amp_f32(a), 0, amp_f32(c), &e), AMP_ERR_ARGUMENT,
                  "amp_gemm: the shape is NULL");
    check_refused(amp_linear_forward(amp_f32(a), AMP_NONE, AMP_NONE, amp_f32(c), 2, 3, 4, &e),
                  AMP_ERR_ARGUMENT, "linear: w is NULL, but it has 4 x 3 elements");
    check_refused(amp_linear_forward(amp_f32(a), amp_f32(a), amp_ref_of(a, AMP_F64), amp_f32(c),
        2, 3, 4, &e),
                  AMP_ERR_DTYPE, "linear: b has type f64 (4); it must be f32, f16 or bf16");
    check_refused(amp_linear_backward(amp_f32(a), AMP_NONE, amp_f32(a), amp_f32(c),
        amp_f32(c + 9), AMP_NONE, 0, 2, 3, 4, &e),
                  AMP_ERR_ARGUMENT, "linear backward: x is NULL, but it has 2 x 3 elements");
    for (i = 0; i < 64; i++) CHECK(c[i] == 7);
}

/* Batches of 2x3x4 in F32, of matrices in one array of 100. */
static amp_result batch_in(float* x, size_t a, size_t a_stride, size_t c, size_t ldc, size_t c_stride, size_t batch) {
    amp_exec e;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    return amp_gemm(PRODUCTS(AMP_NO_TRANS, AMP_NO_TRANS, 2, 3, 4, 4, 3, ldc, batch, a_stride, 0, c_stride),
        1, amp_f32(x + a), amp_f32(x + 88), 0, amp_f32(x + c), &e);
}
static void test_batch_refusals(void) {
    static const char OVER[] = "amp_gemm: a matrix of c would be written over one of a or b";
    float x[100];
    size_t i;
    for (i = 0; i < 100; i++) x[i] = 7;
    check_refused(batch_in(x, 0, 8, 40, 3, 0, 2), AMP_ERR_ARGUMENT, "amp_gemm: c_stride is 0, matrices of c overlap");
    check_refused(batch_in(x, 0, 8, 40, 3, 5, 3), AMP_ERR_ARGUMENT, "amp_gemm: c_stride is 5, matrices of c overlap");
    check_refused(batch_in(x, 0, 8, 40, 8, 2, 2), AMP_ERR_ARGUMENT, "amp_gemm: c_stride is 2, matrices of c overlap");
    check_refused(batch_in(x, 0, 8, 40, 8, 3, 4), AMP_ERR_ARGUMENT, "amp_gemm: c_stride is 3, matrices of c overlap");
    check_refused(batch_in(x, 0, 8, 26, 3, 6, 4), AMP_ERR_ARGUMENT, OVER);        /* the last a over the first c */
    check_refused(batch_in(x, 20, 8, 0, 3, 7, 4), AMP_ERR_ARGUMENT, OVER);        /* the last c over the first a */
    check_refused(batch_in(x, 0, 8, 50, 3, 11, 4), AMP_ERR_ARGUMENT, OVER);       /* the last c over b */
    check_refused(batch_in(x, 0, SIZE_MAX / 8, 40, 3, 6, 4), AMP_ERR_ARGUMENT,
                  sizeof(size_t) == 8 ? "amp_gemm: a is too large: a batch of 4, 2305843009213693951 elements apart"
                                      : "amp_gemm: a is too large: a batch of 4, 536870911 elements apart");
    check_refused(batch_in(x, 0, 8, 40, 2, 6, 4), AMP_ERR_ARGUMENT, "amp_gemm: ldc is 2, but a row of c has 3 elements");
    for (i = 0; i < 100; i++) CHECK(x[i] == 7);
    CHECK(batch_in(x, 0, 16, 8, 3, 16, 4) == AMP_OK);         /* a and c by turns */
    CHECK(batch_in(x, 0, 8, 40, 9, 3, 3) == AMP_OK);          /* three side by side */
}

static size_t threads(void) {
#ifdef _OPENMP
    return (size_t)omp_get_max_threads();
#else
    return 1;
#endif
}
/* The workspace is what amp.h tells, whatever the size; 0 where the size is none. */
static void test_workspace(void) {
    size_t m, k, most = 0;
    CHECK(amp_gemm_workspace(64, 64, 64) > 3 * 64 * 64 * sizeof(float) && amp_gemm_workspace(64, 64, 64) < 1u << 18);
    for (m = 64; m <= 1 << 14; m *= 4)
        for (k = 16; k <= 1 << 14; k += k < 1024 ? 16 : k)
            if (amp_gemm_workspace(m, m, k) > most) most = amp_gemm_workspace(m, m, k);
    CHECK_MSG(most <= 8000000 * threads(), "%lu bytes for %lu threads", (unsigned long)most, (unsigned long)threads());
    CHECK(amp_gemm_workspace(SIZE_MAX / 2, 3, 1) == 0);
    CHECK(amp_gemm_workspace(3, SIZE_MAX / 2, 1) == 0);
    CHECK(amp_gemm_workspace(1, 3, SIZE_MAX / 2) == 0);
}

/* A workspace of that size is used: with less, a product runs in small blocks on the stack. A is in 16 bits, so that
   something is packed. */
static void check_workspace_used(const size_t size[3], int trans, amp_dtype a, amp_dtype b) {
    const size_t m = size[0], n = size[1], k = size[2];
    if (!test_due()) return;
    problem p = problem_new(trans & 1, trans >> 1, m, n, k, m == 250 ? 500 : 0, 1.0f, 0.0f, a, b, AMP_F32);
    amp_exec exec;
    size_t i, used = 0;
    memset(&exec, 0, sizeof exec);
    exec.workspace_size = amp_gemm_workspace(m, n, k);
    exec.workspace = malloc(exec.workspace_size);
    memset(exec.workspace, FILL, exec.workspace_size);
    CHECK(amp_gemm(PRODUCT(p.ta, p.tb, m, n, k, p.a.ld, p.b.ld, n), 1.0f,
        amp_ref_of(matrix_at(&p.a), a), amp_ref_of(matrix_at(&p.b), b), 0.0f,
        amp_f32(matrix_at(&p.c)), &exec) == AMP_OK);
    for (i = 0; i < exec.workspace_size; i++) used += ((unsigned char*)exec.workspace)[i] != FILL;
    CHECK_MSG(used > 0, "%s %s%s m %lu n %lu k %lu %s x %s", amp_isa_name(amp_cpu_isa()), p.ta ? "T" : "N",
              p.tb ? "T" : "N", (unsigned long)m, (unsigned long)n, (unsigned long)k, amp_dtype_name(a),
              amp_dtype_name(b));
    free(exec.workspace);
    problem_free(&p);
}
/* On every instruction set, however the operands lie: narrow products, few rows, deep ones, several tiles, long rows. */
static void test_workspace_is_enough(void) {
    static const size_t SIZES[15][3] = {
        { 30, 50, 17 }, { 30, 50, 48 }, { 30, 50, 784 }, { 30, 50, 816 }, { 30, 50, 1000 }, { 30, 50, 1300 },
        { 30, 9, 150 }, { 70, 20, 150 }, { 30, 9, 784 }, { 70, 20, 784 }, { 60, 600, 100 }, { 140, 520, 130 },
        { 300, 300, 90 }, { 530, 40, 40 }, { 250, 20, 200 } };
    int i, size, trans, a, b;
    for (i = 0; i < 5; i++)
        for (size = 0; size < 15 && amp_cpu_force_isa(ISAS[i]) == AMP_OK; size++)
            for (trans = 0; trans < 4; trans++)
                for (a = 1; a < 3; a++)
                    for (b = 0; b < 3; b++) check_workspace_used(SIZES[size], trans, TYPES[a], TYPES[b]);
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* --- operands of FP32 that products round ------------------------------------------------- */

/* Products of FP32 arrays rounded while they are read have the bits of products of 16-bit arrays. */
static void check_rounded(const size_t size[3], int trans, amp_dtype type, int sides, const amp_exec* plain) {
    const size_t m = size[0], n = size[1], k = size[2];
    const amp_transpose ta = trans & 1 ? AMP_TRANS : AMP_NO_TRANS, tb = trans & 2 ? AMP_TRANS : AMP_NO_TRANS;
    float* a = (float*)malloc((m * k + k * n + 2 * m * n) * sizeof(float));
    float *b = a + m * k, *c = b + k * n, *expected = c + m * n;
    uint16_t *low_a = (uint16_t*)malloc((m * k + k * n) * sizeof *low_a), *low_b = low_a + m * k;
    const amp_ref of_a = amp_ref_of(sides & 1 ? (void*)a : low_a, sides & 1 ? AMP_F32 : type);
    const amp_ref of_b = amp_ref_of(sides & 2 ? (void*)b : low_b, sides & 2 ? AMP_F32 : type);
    amp_exec exec = *plain;
    size_t i;
    for (i = 0; i < m * k + k * n; i++) a[i] = test_uniform() * (i % 7 == 0 ? 1e-4f : i % 11 == 0 ? 7e4f : 1.0f);
    amp_convert(amp_ref_of(low_a, type), amp_f32(a), m * k + k * n);
    exec.operands = type;
    CHECK(amp_gemm(PRODUCT(ta, tb, m, n, k, 0, 0, 0), 0.5f, amp_ref_of(low_a, type), amp_ref_of(low_b, type), 0.0f,
        amp_f32(expected), plain) == AMP_OK);
    CHECK(amp_gemm(PRODUCT(ta, tb, m, n, k, 0, 0, 0), 0.5f, of_a, of_b, 0.0f, amp_f32(c), &exec) == AMP_OK);
    CHECK_MSG(memcmp(c, expected, m * n * sizeof *c) == 0, "%s %s %lux%lux%lu trans %d sides %d",
              amp_isa_name(amp_cpu_isa()), amp_dtype_name(type), (unsigned long)m, (unsigned long)n, (unsigned long)k, trans,
              sides);
    free(a); free(low_a);
}
static void test_rounded_operands(void) {
    static const size_t SIZES[7][3] = {
        { 1, 40, 30 }, { 3, 50, 500 }, { 5, 7, 9 }, { 30, 50, 48 }, { 16, 33, 20 }, { 140, 520, 130 }, { 60, 40, 900 } };
    static unsigned char workspace[1 << 22];
    int i, size, trans, room;
    for (i = 0; i < 5; i++)
        for (size = 0; size < 7 && amp_cpu_force_isa(ISAS[i]) == AMP_OK; size++)
            for (trans = 0; trans < 4 && test_due(); trans++)
                for (room = 0; room < 2; room++) {
                    amp_exec exec;
                    memset(&exec, 0, sizeof exec);
                    if (room) { exec.workspace = workspace; exec.workspace_size = sizeof workspace; }
                    check_rounded(SIZES[size], trans, AMP_F16, 3, &exec);
                    check_rounded(SIZES[size], trans, AMP_BF16, 1 + (trans + size) % 3, &exec);
                }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}
/* What is not finite stays so, and a number beyond half becomes infinity. */
static void test_rounded_special_values(void) {
    static const uint32_t bits[4] = { 0x7fffffffu, 0xff800000u, 0x7f7fffffu, 0x47800000u };   /* NaN, -inf, the largest, 65536 */
    static const amp_dtype types[2] = { AMP_F16, AMP_BF16 };
    const float one = 1.0f;
    int i, t, q;
    for (q = 0; q < 5; q++)
        for (t = 0; t < 2 && amp_cpu_force_isa(ISAS[q]) == AMP_OK; t++)
            for (i = 0; i < 4; i++) {
                amp_exec exec;
                uint16_t low;
                float x = from_bits(bits[i]), got = 0.0f, expected;
                memset(&exec, 0, sizeof exec);
                exec.operands = types[t];
                amp_convert(amp_ref_of(&low, types[t]), amp_f32(&x), 1);
                amp_convert(amp_f32(&expected), amp_ref_of(&low, types[t]), 1);
                CHECK(amp_gemm(PRODUCT(0, 0, 1, 1, 1, 0, 0, 0), 1.0f, amp_f32(&x), amp_f32(&one), 0.0f, amp_f32(&got),
                    &exec) == AMP_OK);
                CHECK_MSG(to_bits(got) == (i == 0 ? 0x7fc00000u : to_bits(expected)), "%s %d: %08x",
                          amp_dtype_name(types[t]), i, (unsigned)to_bits(got));
            }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}
/* A dense layer rounds x, w and dy; db is the sum of dy as it is. */
static void test_rounded_dense(void) {
    enum { N = 9, IN = 20, OUT = 17 };
    float x[N * IN], w[OUT * IN], dy[N * OUT], y[2][N * OUT], dx[2][N * IN], dw[2][OUT * IN], db[2][OUT];
    amp_half lx[N * IN], lw[OUT * IN], ldy[N * OUT];
    amp_exec exec;
    int i;
    memset(&exec, 0, sizeof exec);
    exec.operands = AMP_F16;
    for (i = 0; i < N * IN; i++) x[i] = test_uniform();
    for (i = 0; i < OUT * IN; i++) w[i] = test_uniform();
    for (i = 0; i < N * OUT; i++) dy[i] = test_uniform();
    amp_convert(amp_f16(lx), amp_f32(x), N * IN);
    amp_convert(amp_f16(lw), amp_f32(w), OUT * IN);
    amp_convert(amp_f16(ldy), amp_f32(dy), N * OUT);
    CHECK(amp_linear_forward(amp_f16(lx), amp_f16(lw), AMP_NONE, amp_f32(y[0]), N, IN, OUT, NULL) == AMP_OK);
    CHECK(amp_linear_forward(amp_f32(x), amp_f32(w), AMP_NONE, amp_f32(y[1]), N, IN, OUT, &exec) == AMP_OK);
    CHECK(amp_linear_backward(amp_f16(ldy), amp_f16(lx), amp_f16(lw), amp_f32(dx[0]), amp_f32(dw[0]), AMP_NONE, 0, N, IN,
        OUT, NULL) == AMP_OK);
    CHECK(amp_linear_backward(amp_f32(dy), amp_f32(x), amp_f32(w), AMP_NONE, AMP_NONE, amp_f32(db[0]), 0, N, IN, OUT,
        NULL) == AMP_OK);
    CHECK(amp_linear_backward(amp_f32(dy), amp_f32(x), amp_f32(w), amp_f32(dx[1]), amp_f32(dw[1]), amp_f32(db[1]), 0, N, IN,
        OUT, &exec) == AMP_OK);
    CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
    CHECK(memcmp(dx[0], dx[1], sizeof dx[0]) == 0);
    CHECK(memcmp(dw[0], dw[1], sizeof dw[0]) == 0);
    CHECK(memcmp(db[0], db[1], sizeof db[0]) == 0);
    exec.logger = &LISTENER;
    exec.operands = AMP_F64;
    check_refused(amp_linear_forward(amp_f32(x), amp_f32(w), AMP_NONE, amp_f32(y[1]), N, IN, OUT, &exec), AMP_ERR_DTYPE,
                  "linear: the exec's operands are f64 (4); they must be f16, bf16 or 0");
    check_refused(amp_gemm(PRODUCT(0, 0, 1, 1, 1, 0, 0, 0), 1.0f, amp_f32(x), amp_f32(w), 0.0f, amp_f32(y[1]), &exec),
                  AMP_ERR_DTYPE, "amp_gemm: the exec's operands are f64 (4); they must be f16, bf16 or 0");
    exec.operands = AMP_F16;
    exec.sums = (amp_sums)9;
    check_refused(amp_gemm(PRODUCT(0, 0, 1, 1, 1, 0, 0, 0), 1.0f, amp_f32(x), amp_f32(w), 0.0f, amp_f32(y[1]), &exec),
                  AMP_ERR_DESC, "amp_gemm: the exec's sums are 9, not AMP_SUMS_FIXED or AMP_SUMS_FAST");
    CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_rounded_operands);
    TEST(test_rounded_special_values);
    TEST(test_rounded_dense);
    TEST(test_all_types_and_transposes);
    TEST(test_alpha_beta);
    TEST(test_blocks);
    TEST(test_random_shapes);
    TEST(test_few_rows);
    TEST(test_few_far_rows);
    TEST(test_special_values);
    TEST(test_order);
    TEST(test_bf16_subnormal_sums);
    TEST(test_bf16_smallest_sums);
    TEST(test_bf16_subnormal_corner);
    TEST(test_fma_rounds_once);
    TEST(test_nothing_to_do);
    TEST(test_shape_defaults);
    TEST(test_error_bound);
    TEST(test_fast_sums);
    TEST(test_fast_sums_elsewhere);
    TEST(test_fast_sums_not_finite);
    TEST(test_reads_nothing_else);
    TEST(test_dense);
    TEST(test_batched);
    TEST(test_refusals);
    TEST(test_batch_refusals);
    TEST(test_workspace);
    TEST(test_workspace_is_enough);
    TEST_END();
}
