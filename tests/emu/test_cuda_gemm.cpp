/* test_cuda_gemm.cpp - cuda->gemm, its batched and fused forms and the dense layer.
   The references are those of product.h. */
#include "product.h"

/* --- tests: the plain product ------------------------------------------------------------------ */

static void test_types_and_transposes() {
    for (unsigned t = 0; t < 27; t++)
        for (unsigned i = 0; i < 4; i++) {
            unsigned aligned = (t + i) % 3 == 0;      /* 16-byte loads are possible */
            Spec s(17 + t % 5, 23 + t % 4, aligned ? 24 : 19, TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3]);
            if (aligned) s.m = 16, s.n = 24;
            check_bits(s.trans(i).place(aligned ? 8 : (t + i) % 3 * 2, 0));
        }
}

/* Sides around 8, 16, 32, 64 and 128, mixed so that each meets each kind of neighbour. */
static void test_tile_edges() {
    static const size_t SIDES[16] = { 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129 };
    for (size_t i = 0; i < 16; i++)
        for (size_t r = 0; r < 3; r++) {
            amp_dtype t = TYPES[(i + r) % 3];
            size_t m = SIDES[i], n = SIDES[(5 * i + 3 + 4 * r) % 16], k = SIDES[(7 * i + 1 + 9 * r) % 16];
            check_bits(Spec(m, n, k, t, t, TYPES[(i + 2 * r) % 3]).trans((unsigned)(i + r)));
        }
}

/* Enough products, or rows and columns, for every multiprocessor: larger tiles, more rows of tiles than one band. */
static void test_large_tiles() {
    int processors = 0;
    OK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    size_t many = (size_t)processors, wide = 128 * ((many + 1) / 2) - 60;
    for (unsigned t = 0; t < 6; t++) {
        amp_dtype type = TYPES[1 + t % 2];
        check_bits(
            Spec(40, 70, 45, type, type, TYPES[t / 2]).many(many, APART).trans(t).place(t == 3, t == 2));
        if (t < 4)
            check_bits(
                Spec(130, wide, 40, type, type, TYPES[(t + 1) % 3]).trans(t).place(t > 1 ? 3 : 0, 0));
    }
    check_bound(Spec(130, wide, 50, AMP_F16, AMP_F16, AMP_F32).of(ANY));
    check_bits(Spec(1100, 130, 8, AMP_F16, AMP_F16, AMP_F16).trans(1));
    check_bits(Spec(20, 1100, 9, AMP_F16, AMP_F16, AMP_F16).trans(2));
    check_bits(Spec(600, 70, 9, AMP_F32, AMP_F16, AMP_F32));
#if !defined(AMP_CUDA_EMU)
    check_bits(Spec(2, 3, 4, AMP_F16, AMP_F16, AMP_F16).many(70000, APART)); /* more than a grid's side */
#endif
}

/* Odd leading dimensions and pointers off by one element: no access wider than an element is allowed. */
static void test_unaligned() {
    for (unsigned t = 0; t < 9; t++)
        for (size_t offset : { 0, 1, 4 })      /* 4 halves: half of what a copy of 16 bytes needs */
            for (size_t gap = 0; gap < 9; gap += offset ? 4 : 1) {
                amp_dtype type = TYPES[t % 3];
                check_bits(
                    Spec(33, 40, 24, type, type, TYPES[t / 3]).trans(t + (unsigned)gap).place(gap, offset));
            }
}

static void test_random_shapes() {
    for (int i = 0; i < 60; i++) {
        unsigned r = test_random();
        size_t m = 1 + test_random() % 70, n = 1 + test_random() % 70, k = 1 + test_random() % 90;
        amp_dtype t = TYPES[(r >> 2) % 3];
        Spec s(m, n, k, t, r & 1024 ? t : TYPES[(r >> 4) % 3], TYPES[(r >> 6) % 3]);
        check_bits(s.trans(r).place(test_random() % 4, r >> 12 & 1).scale(1, r & 2048 ? 0.0f : 1.0f));
    }
}

/* alpha 0 does not read A and B (or what it reads has no effect), beta 0 does not read C, which is NaN here. */
static void test_alpha_beta() {
    static const float FACTORS[][2] = {
        { 1, 1 }, { -0.7f, 0 }, { 1, 0.3f }, { 1.7f, -2.1f }, { 0, 0.5f },
        { 0, 0 }, { 0, 1 },     { 4096, 0 }, { 3e38f, 1 },    { 1e-7f, 0 }
    };
    for (size_t f = 0; f < sizeof FACTORS / sizeof FACTORS[0]; f++)
        for (unsigned t = 0; t < 9; t++) {
            Spec s(19, 34, 21, TYPES[t / 3], TYPES[t / 3], TYPES[t % 3]);
            check_bits(
                s.trans(t).scale(FACTORS[f][0], FACTORS[f][1]).of(f >= 4 && f < 7 ? SPECIAL : WHOLE));
        }
}

/* Infinities and NaN go where they belong and nowhere else; inf * 0 and inf - inf are NaN; every NaN is the one
   quiet NaN. */
static void test_special_values() {
    for (unsigned t = 0; t < 27; t++)
        for (unsigned i = 0; i < 2; i++)
            check_bits(Spec(20, 33, 18, TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3])
                           .trans(t + 2 * i)
                           .scale(1, (float)i)
                           .of(SPECIAL)
                           .place(i, 0));
}

/* Mixed types and FP32: the order of the CPU, so its bits on any numbers. */
static void test_plain_kernels() {
    for (unsigned t = 0; t < 27; t++) {
        Spec s(21, 35, 36 + t % 3, TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3]);
        if (on_tensor_cores(s.at, s.bt)) continue;
        check_bits(s.trans(t).of(ANY).place(t % 2, 0));
        if (t % 3 == 1)
            check_bits(
                Spec(5, 66, 67, s.at, s.bt, s.ct).trans(t / 3).of(ANY).scale(-0.7f, t % 2 ? 1.3f : 0));
    }
}

static void test_error_bound() {
    for (unsigned t = 0; t < 9; t++) {
        amp_dtype type = TYPES[t / 3];
        check_bound(Spec(40, 50, 75, type, type, TYPES[t % 3]).trans(t).of(ANY));
        if (t % 3 == 0)
            check_bound(Spec(33, 70, 64, type, type, TYPES[t / 3]).trans(t + 1).of(ANY).scale(-1.3f, 0.6f));
    }
}

/* Rounding of subnormal halves, halves beyond 65504 and the ties between: sums of whole numbers, scaled. */
static void test_output_rounding() {
    static const float ALPHAS[] = { 1, 0.25f, 16, 700 * 16777216.0f, 4097 * 16777216.0f };
    for (size_t f = 0; f < sizeof ALPHAS / sizeof ALPHAS[0]; f++)
        for (unsigned t = 0; t < 3; t++)
            check_bits(Spec(24, 32, 40, TYPES[1 + f % 2], TYPES[1 + f % 2], TYPES[t])
                           .scale(std::ldexp(ALPHAS[f], -24), 0));
    check_bits(Spec(24, 32, 40, AMP_F16, AMP_F16, AMP_F32).scale(std::ldexp(1.0f, 120), 0));
    check_bits(Spec(24, 32, 40, AMP_BF16, AMP_BF16, AMP_BF16).scale(std::ldexp(1.0f, -140), 0));
}

/* --- tests: nothing to do --------------------------------------------------------------------- */

static void test_empty() {
    static const size_t SIZES[][3] = { { 0, 5, 3 }, { 5, 0, 3 }, { 0, 0, 0 }, { 6, 9, 0 } };
    static const float FACTORS[][2] = { { 1, 0 }, { 1, 1 }, { INFINITY, 2 }, { -3, -0.5f }, { NAN, 0 } };
    for (const size_t* z : SIZES)
        for (const float* f : FACTORS)
            for (unsigned t = 0; t < 3; t++)
                check_bits(Spec(z[0], z[1], z[2], TYPES[t], TYPES[t], TYPES[2 - t]).scale(f[0], f[1]));
    check_bits(Spec(6, 9, 0, AMP_F16, AMP_F16, AMP_F16).with(PER_ROW, AMP_F32, AMP_CUDA_EPILOGUE_RELU));
    check_bits(Spec(6, 9, 0, AMP_F32, AMP_F16, AMP_F32)
                   .scale(1, 2)
                   .with(PER_COLUMN, AMP_BF16, AMP_CUDA_EPILOGUE_GELU));
    Problem p(Spec(4, 4, 4, AMP_F16, AMP_F16, AMP_F32));
    amp_exec e = quiet_exec();
    long before = launches();
    p.c.data.upload();
    const amp_gemm_shape empty = {};
    CHECK(cuda->gemm(&empty, 1, AMP_NONE, AMP_NONE, 0, AMP_NONE, &e) == AMP_OK);
    Call none(p);
    none.shape.m = 0;
    none.shape.batch = 5;
    CHECK(none.plain(&e) == AMP_OK);
    CHECK(launches() == before && p.c.data.download() == p.c.data.host);
}

/* --- tests: batches, biases, epilogues ---------------------------------------------------------- */

static void test_batched() {
    static const Layout LAYOUTS[] = { APART, SHARED_A, SHARED_B, SIDE_BY_SIDE };
    for (unsigned t = 0; t < 9; t++)
        for (unsigned l = 0; l < 4; l++) {
            amp_dtype type = TYPES[t % 3];
            check_bits(Spec(9 + 8 * l, 31, 12 + t, type, type, TYPES[t / 3])
                           .trans(t + l)
                           .many(2 + t % 3, LAYOUTS[l])
                           .scale(1, t & 1 ? 1.0f : 0.0f)
                           .place(l & 1, t == 4));
        }
    check_bits(Spec(16, 16, 16, AMP_F16, AMP_BF16, AMP_F32).many(7, SIDE_BY_SIDE));
    check_bits(Spec(3, 5, 7, AMP_F16, AMP_F16, AMP_F16).many(40, APART));
    check_bits(Spec(64, 64, 32, AMP_BF16, AMP_BF16, AMP_BF16).many(3, SHARED_B));
    check_bits(Spec(16, 24, 32, AMP_F16, AMP_F16, AMP_F32).many(3, APART, 4));      /* only the first is aligned */
    check_bound(Spec(20, 24, 48, AMP_F16, AMP_F16, AMP_F32).many(4, SIDE_BY_SIDE).trans(2).of(ANY));
}

static void test_bias_and_epilogue() {
    for (unsigned t = 0; t < 27; t++)
        for (unsigned f = 0; f < 4; f++) {
            amp_dtype type = TYPES[t / 9];
            Spec s(18 + t % 3, 27 + f, 20, type, t % 5 ? type : TYPES[t % 3], TYPES[t / 3 % 3]);
            s.with(f & 1   ? PER_ROW
                   : t % 4 ? PER_COLUMN
                           : NO_BIAS,
                   TYPES[t % 3], (amp_cuda_epilogue)((f + t) % 4));
            check_bits(s.trans(t).scale(f == 2 ? 0.125f : 1, f == 3 ? 0.5f : 0).place(f == 1, f == 1));
        }
    for (unsigned f = 0; f < 4; f++)
        check_bits(Spec(10, 17, 16, AMP_F16, AMP_F16, AMP_F16)
                       .many(3, APART)
                       .with(f & 1 ? PER_ROW : PER_COLUMN, AMP_F16, (amp_cuda_epilogue)f));
    check_bound(Spec(20, 40, 60, AMP_BF16, AMP_BF16, AMP_F32)
                    .of(ANY)
                    .scale(0.3f, 1.1f)
                    .with(PER_COLUMN, AMP_BF16, AMP_CUDA_EPILOGUE_NONE));
    check_bits(Spec(20, 40, 60, AMP_F32, AMP_F32, AMP_F16)
                   .of(ANY)
                   .with(PER_COLUMN, AMP_F32, AMP_CUDA_EPILOGUE_GELU));
}

/* Zeroed fields of a shape: packed rows, one product; a zeroed or no description: neither bias nor activation. */
static void test_desc_defaults() {
    for (unsigned form = 0; form < 4; form++) {
        Problem p(Spec(11, 13, 17, AMP_F16, AMP_F16, AMP_F32).trans(form));
        Call call(p);
        amp_exec e = quiet_exec();
        call.shape.lda = call.shape.ldb = call.shape.ldc = call.shape.batch = 0;
        call.ct = AMP_DTYPE_DEFAULT;
        p.c.data.upload();
        CHECK(call.plain(&e) == AMP_OK);
        check_same(p, p.c.data.download(), expected(p), "defaults");
        p.c.data.upload();
        CHECK(call.with_desc(&e) == AMP_OK);
        check_same(p, p.c.data.download(), expected(p), "a zeroed desc");
        p.c.data.upload();
        CHECK(call.with_desc(nullptr) == AMP_OK);
        check_same(p, p.c.data.download(), expected(p), "no exec");
    }
}

#if !defined(AMP_CUDA_EMU)
/* More products than a grid's second side has blocks. A minute on the emulator. */
static void test_huge_batch() {
    for (unsigned t = 0; t < 3; t++) check_bits(Spec(1, 1, 2, TYPES[t], TYPES[t], AMP_F32).many(70000, APART));
}
#endif

/* --- tests: k cut into pieces -------------------------------------------------------------------- */

/* Few rows, columns or places of k, and one more than few; in every form, from odd addresses, in batches. */
static void test_narrow() {
    static const size_t SIDES[] = { 1, 10, 16, 17 }, DEPTHS[] = { 1, 7, 16, 17, 33, 64, 65, 300, 700 };
    static const Layout LAYOUTS[] = { APART, SHARED_A, SHARED_B, SIDE_BY_SIDE };
    unsigned i = 0;
    for (size_t side : SIDES)
        for (size_t k : DEPTHS)
            for (unsigned t = 1; t < 3; t++, i++) {
                if (t == 2 && !on_tensor_cores(AMP_BF16, AMP_BF16)) continue;
                const size_t other = 20 + 13 * (i % 5);
                Spec s(i % 2 ? side : other, i % 2 ? other : side, k, TYPES[t], TYPES[t], TYPES[i % 3]);
                check_bits(s.trans(i).scale(i % 3 ? 1 : 0.5f, i % 4 == 1 ? 1.0f : 0.0f));
                check_bits(s.trans(2).place(i % 2, i % 3));
                check_bits(s.with(i % 2 ? PER_COLUMN : PER_ROW, AMP_F32, (amp_cuda_epilogue)(i % 4)));
                check_bits(Spec(s.m, s.n, k, TYPES[t], TYPES[t], AMP_F32).trans(2).many(3, LAYOUTS[i % 4]));
                check_bits(Spec(s.m, s.n, k, TYPES[t], TYPES[t], TYPES[i % 3]).trans(2).of(SPECIAL));
                check_bound(Spec(s.m, s.n, k, TYPES[t], TYPES[t], AMP_F32).trans(2).of(ANY));
            }
}

/* No workspace, one that is too small, exactly enough, enough but misaligned, more: legal, nothing beside it is
   written (its memory ends there), and exactly enough gives the same bits in every order. */
static void test_long_k() {
    static const size_t SIZES[][3] = {
        { 17, 18, 4096 }, { 20, 84, 1031 }, { 17, 17, 1600 }, { 33, 21, 520 }, { 60, 64, 513 }
    };
    for (unsigned i = 0; i < 5; i++)
        for (unsigned t = 1; t < 3; t++) {
            const size_t* z = SIZES[i];
            size_t w = cuda->gemm_workspace(z[0], z[1], z[2]);
            Spec s(z[0], z[1], z[2], TYPES[t], TYPES[t], TYPES[(t + i) % 3]);
            s.trans(i + t).scale(i % 3 ? 1 : 0.5f, i & 1 ? 1.0f : 0.0f);
            if (t == 2 && !on_tensor_cores(AMP_BF16, AMP_BF16)) continue;
            long before = launches();
            check_bits(s, w, 1);
            CHECK(launches() == before || launches() == before + 2);      /* the pieces, and their sum */
            if (t == i % 2 + 1) continue;
            check_bits(s.with(i & 1 ? PER_COLUMN : PER_ROW, AMP_F32, (amp_cuda_epilogue)(i % 4)), w + 3, 5);
            check_bits(s, w / 2 + 1);
            check_bits(s, w - 1);
        }
    for (size_t k : { 8 * 32 * 16, 8 * 32 * 16 + 1, 8 * 32 * 17, 8 * 32 * 33 })      /* 16 pieces, and more */
        check_bits(Spec(3, 11, k, AMP_F16, AMP_F16, AMP_F32), cuda->gemm_workspace(3, 11, k));
    size_t w = cuda->gemm_workspace(20, 30, 700);
    CHECK(w > 0);
    check_bits(Spec(20, 30, 700, AMP_F32, AMP_BF16, AMP_F32), w);
    check_bound(Spec(20, 30, 700, AMP_F16, AMP_F16, AMP_F32).of(ANY), w);
    check_bound(Spec(20, 30, 700, AMP_F16, AMP_F16, AMP_F32).of(ANY).trans(3), w / 3);
    for (unsigned l = 0; l < 4; l++) {      /* the pieces of a batch */
        long before = launches();
        check_bits(Spec(20, 30, 700 + l, AMP_F16, AMP_F16, AMP_F32).many(2 + l % 2, (Layout)l), 4 * w, 1);
        CHECK(launches() == before || launches() == before + 2);
    }
    CHECK(cuda->gemm_workspace(SIZE_MAX / 2, 3, 1) == 0);
    CHECK(cuda->gemm_workspace(3, SIZE_MAX / 2, 1) == 0);
    CHECK(cuda->gemm_workspace(1, 3, SIZE_MAX / 2) == 0);
    CHECK(cuda->gemm_workspace(0, 0, 0) == 0);
}

/* Pieces are added in ascending order: 2^24 at the start, 1 in the middle, -2^24 at the end give 0, and 1 in any order
   that meets the 1 later or the first number last. */
static void test_order_of_pieces() {
    for (unsigned t = 1; t < 3; t++) {
        Spec s(9, 17, 2048, TYPES[t], TYPES[t], AMP_F32);
        Problem p(s);
        amp_exec e = quiet_exec();
        Workspace w(&e, cuda->gemm_workspace(s.m, s.n, s.k));
        for (size_t i = 0; i < s.m; i++)
            for (size_t q = 0; q < s.k; q++)
                p.a.data.set(p.a.at(0, i, q), q == 0      ? 4096.0f
                                              : q == 1024 ? 1.0f
                                              : q == 2047 ? -4096.0f
                                                          : 0.0f);
        for (size_t q = 0; q < s.k; q++)
            for (size_t j = 0; j < s.n; j++) p.b.data.set(p.b.at(0, q, j), q == 1024 ? 1.0f : 4096.0f);
        p.a.data.upload();
        p.b.data.upload();
        check_same(p, run(p, &e), expected(p), "order of pieces");
    }
}

/* --- tests: engines, graphs ----------------------------------------------------------------------- */

/* Bits that differ in nothing but which NaN it is are the same. */
static void check_values(const Problem& p, const Bytes& got, const Bytes& want, const char* what) {
    size_t bad = 0, size = p.c.data.size;
    for (size_t i = 0; i < got.size(); i += size) {
        float x = get(&got[i], p.s.ct), y = get(&want[i], p.s.ct);
        if (memcmp(&got[i], &want[i], size) != 0 && !(std::isnan(x) && std::isnan(y))) bad++;
    }
    CHECK_MSG(bad == 0, "%s: %s: %zu differ", what, describe(p.s), bad);
}

static void check_engine(amp_cuda* c, const Spec& s, const char* name) {
    Problem p(s);
    amp_exec e = quiet_exec(c);
    check_values(p, run(p, &e), expected(p), name);
}

/* As activation_of, the engines' enumeration in a switch. */
static const char* engine_name(amp_cuda_gemm_engine engine) {
    switch (engine) {
        case AMP_CUDA_GEMM_AUTO: return "automatic";
        case AMP_CUDA_GEMM_OWN: return "own";
        case AMP_CUDA_GEMM_CUBLAS: return "cuBLAS";
    }
    return "?";
}
static void test_engines() {
    for (int engine = 0; engine < 3; engine++) {
        amp_cuda_desc d = {};
        amp_cuda* c = nullptr;
        d.gemm = (amp_cuda_gemm_engine)engine;
        d.logger = &LOGGER;
        CHECK(amp_cuda_create(&c, &d) == AMP_OK);
        if (!c) continue;
        for (unsigned t = 0; t < 27; t++)
            check_engine(c,
                         Spec(21, 30, 17 + t, TYPES[t / 9], TYPES[t / 3 % 3], TYPES[t % 3])
                             .trans(t + (unsigned)engine)
                             .scale(t % 4 ? 1 : -0.5f, t % 2 ? 0.25f : 0)
                             .place(t % 3, t % 2)
                             .of(t % 5 == 1 ? SPECIAL : WHOLE),
                         engine_name(d.gemm));
        for (unsigned t = 0; t < 9; t++)
            check_engine(c,
                         Spec(12, 20, 24, TYPES[t % 3], TYPES[t % 3], TYPES[t / 3])
                             .many(3, (Layout)(t % 4))
                             .trans(t),
                         "batch");
        for (unsigned t = 0; t < 6; t++)
            check_engine(c,
                         Spec(12, 20, 24, TYPES[t % 3], TYPES[t % 3], TYPES[t % 3])
                             .with(t & 1 ? PER_ROW : PER_COLUMN, TYPES[t % 3], (amp_cuda_epilogue)(t % 4)),
                         "epilogue");
        check_engine(c, Spec(4, 6, 0, AMP_F16, AMP_F16, AMP_F32).scale(1, 2), "k 0");
        check_engine(c, Spec(4, 6, 5, AMP_F16, AMP_F16, AMP_F32).scale(0, 2).of(SPECIAL), "alpha 0");
        check_engine(c, Spec(0, 6, 5, AMP_F16, AMP_F16, AMP_F32), "m 0");
        amp_cuda_destroy(c);
    }
}

/* An exec of the context may get another stream: whoever multiplies, the product is done when that stream is. */
static void test_another_stream() {
    for (int engine = 0; engine < 3; engine++) {
        amp_cuda_desc d = {};
        amp_cuda* c = nullptr;
        cudaStream_t streams[2];
        for (cudaStream_t& s : streams) OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        d.stream = streams[0];
        d.gemm = (amp_cuda_gemm_engine)engine;
        CHECK(amp_cuda_create(&c, &d) == AMP_OK);
        for (cudaStream_t s : streams) {
            Problem p(Spec(21, 30, 40, AMP_F16, AMP_F16, AMP_F32));
            amp_exec e = quiet_exec(c);
            e.stream = s;
            p.c.data.upload();
            OK(cudaDeviceSynchronize());      /* neither stream waits for the default one */
            CHECK(multiply(p, &e) == AMP_OK);
            CHECK(amp_cuda_synchronize(&e) == AMP_OK);
            check_values(p, p.c.data.download(), expected(p), "another stream");
        }
        amp_cuda_destroy(c);
        for (cudaStream_t s : streams) OK(cudaStreamDestroy(s));
    }
}

/* A context with own kernels changes nothing. */
static void test_context_same_bits() {
    amp_cuda_desc d = {};
    amp_cuda* c = nullptr;
    d.gemm = AMP_CUDA_GEMM_OWN;
    CHECK(amp_cuda_create(&c, &d) == AMP_OK);
    for (unsigned t = 0; t < 3; t++) {
        Problem p(Spec(40, 30, 100, TYPES[t], TYPES[t], AMP_F32).trans(t).of(ANY));
        amp_exec plain = quiet_exec(), own = quiet_exec(c);
        check_same(p, run(p, &own), run(p, &plain), "with a context");
    }
    amp_cuda_destroy(c);
}

/* Captured once, replayed twice, on the context's stream: own kernels with pieces of k, and cuBLAS. */
static void test_capture() {
    for (int engine = 0; engine < 3; engine++) {
        amp_cuda_desc d = {};
        amp_cuda* c = nullptr;
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        d.gemm = (amp_cuda_gemm_engine)engine;
        CHECK(amp_cuda_create(&c, &d) == AMP_OK);
        Problem p(Spec(20, 30, 600, AMP_F16, AMP_F16, AMP_F32));
        amp_exec e = quiet_exec(c);
        cudaStream_t stream = (cudaStream_t)e.stream;
        Workspace w(&e, cuda->gemm_workspace(20, 30, 600));
        Bytes want = run(p, &e);      /* a first run loads the kernels */
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(multiply(p, &e) == AMP_OK);
        OK(cudaStreamEndCapture(stream, &graph));
        OK(cudaGraphInstantiateWithFlags(&ready, graph, 0));
        for (int i = 0; i < 2; i++) {
            p.c.data.upload();
            OK(cudaGraphLaunch(ready, stream));
            CHECK(amp_cuda_synchronize(&e) == AMP_OK);
            check_same(p, p.c.data.download(), want, "replayed");
        }
        OK(cudaGraphExecDestroy(ready));
        OK(cudaGraphDestroy(graph));
        amp_cuda_destroy(c);
    }
}

/* --- tests: the dense layer ------------------------------------------------------------------------- */

struct Dense {
    size_t n, in, out;
    Array x, w, b, y, dy, dx, dw, db;
    Dense(size_t n_, size_t i, size_t o, amp_dtype act, amp_dtype weight, amp_dtype grad, Numbers kind,
          size_t offset)
        : n(n_), in(i), out(o), x(act, n * in, false, offset), w(weight, out * in, false, offset),
          b(weight, out, false, offset), y(act, n * out, true, offset), dy(act, n * out, false, offset),
          dx(act, n * in, true, offset), dw(grad, out * in, true, offset), db(grad, out, true, offset) {
        x.fill(n * in, kind);
        w.fill(out * in, kind);
        b.fill(out, kind);
        dy.fill(n * out, kind);
        for (Array* a : { &x, &w, &b, &dy }) a->upload();
    }
    amp_result forward(bool bias, const amp_exec* e) const {
        return cuda->linear_forward(amp_ref_of(x.there(), x.type), amp_ref_of(w.there(), w.type),
            amp_ref_of(bias ? b.there() : nullptr, b.type), amp_ref_of(y.there(), y.type), n, in,
            out, e);
    }
    /* wanted: 1 dx, 2 dw, 4 db; what none of them needs is NULL. */
    amp_result backward(int wanted, int accumulate, const amp_exec* e) const {
        return cuda->linear_backward(amp_ref_of(dy.there(), dy.type),
            amp_ref_of(wanted & 2 ? x.there() : nullptr, x.type),
            amp_ref_of(wanted & 1 ? w.there() : nullptr, w.type),
            amp_ref_of(wanted & 1 ? dx.there() : nullptr, dx.type),
            amp_ref_of(wanted & 2 ? dw.there() : nullptr, dw.type),
            amp_ref_of(wanted & 4 ? db.there() : nullptr, db.type), accumulate, n, in, out, e);
    }
};

static void check_array(const Array& a, const Bytes& want, const char* what, const Dense& d) {
    size_t first = 0;
    Bytes got = a.download();
    size_t bad = differences(got, want, a.size, &first);
    CHECK_MSG(bad == 0, "%s of %zu x %zu -> %zu, %s, %s, %s: %zu differ, the first at %zu: %.9g, not %.9g",
              what, d.n, d.in, d.out, amp_dtype_name(d.x.type), amp_dtype_name(d.w.type),
              amp_dtype_name(d.dw.type), bad, first - a.lead, (double)get(&got[first * a.size], a.type),
              (double)get(&want[first * a.size], a.type));
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t linear_workspace(size_t n, size_t in, size_t out) {
    return larger(cuda->gemm_workspace(n, out, in),
                  larger(cuda->gemm_workspace(n, in, out), cuda->gemm_workspace(out, in, n)));
}

/* Forward and backward with the CPU's bits; gradients that are not wanted stay as they are. */
static void check_dense(Dense& d, int wanted, int accumulate, bool bias, size_t workspace) {
    static int calls;
    amp_exec e = quiet_exec();
    Workspace w(&e, workspace);
    if (accumulate) {
        d.dw.fill(d.out * d.in, WHOLE);
        d.db.fill(d.out, WHOLE);
        d.dx.fill(d.n * d.in, WHOLE);
        if (calls++ % 2) accumulate |= AMP_ACCUMULATE_INPUT;
    }
    Array* outputs[] = { &d.y, &d.dx, &d.dw, &d.db };
    Bytes before[4];
    for (int i = 0; i < 4; i++) outputs[i]->upload(), before[i] = outputs[i]->host;
    CHECK(d.forward(bias, &e) == AMP_OK && d.backward(wanted, accumulate, &e) == AMP_OK);
    CHECK(amp_linear_forward(amp_ref_of(d.x.here(), d.x.type), amp_ref_of(d.w.here(), d.w.type),
        amp_ref_of(bias ? d.b.here() : nullptr, d.b.type), amp_ref_of(d.y.here(), d.y.type), d.n,
        d.in, d.out, nullptr)
          == AMP_OK);
    CHECK(amp_linear_backward(amp_ref_of(d.dy.here(), d.dy.type),
        amp_ref_of(d.x.here(), d.x.type), amp_ref_of(d.w.here(), d.w.type),
        amp_ref_of(wanted & 1 ? d.dx.here() : nullptr, d.dx.type),
        amp_ref_of(wanted & 2 ? d.dw.here() : nullptr, d.dw.type),
        amp_ref_of(wanted & 4 ? d.db.here() : nullptr, d.db.type), accumulate, d.n, d.in, d.out,
        nullptr)
          == AMP_OK);
    check_array(d.y, d.y.host, "y", d);
    check_array(d.dx, d.dx.host, "dx", d);
    check_array(d.dw, d.dw.host, "dw", d);
    check_array(d.db, d.db.host, "db", d);
    for (int i = 0; i < 4; i++) outputs[i]->host = before[i];
}

static void test_dense() {
    static const size_t SIZES[][3] = {
        { 7, 25, 10 }, { 32, 18, 47 }, { 1, 40, 1 }, { 19, 5, 130 }, { 8, 300, 70 }
    };
    for (unsigned i = 0; i < 5; i++)
        for (unsigned t = 0; t < (i < 2 ? 9u : 3u); t++) {
            const size_t* z = SIZES[i];
            Dense d(z[0], z[1], z[2], TYPES[t % 3], TYPES[i < 2 ? t / 3 : t], TYPES[(t + i) % 3], WHOLE,
                    i == 1 ? t & 1 : 0);
            check_dense(d, 7, (int)(t & 1u), t % 4 != 3, i & 1 ? linear_workspace(z[0], z[1], z[2]) : 0);
        }
}
static void test_dense_single_gradients() {
    for (int wanted = 0; wanted < 7; wanted++) {
        Dense d(9, 14, 21, AMP_F16, AMP_F16, AMP_F32, WHOLE, 0);
        check_dense(d, wanted, wanted & 1, true, 0);
    }
}
/* The sums of a bias' gradient over many rows. */
static void test_dense_many_rows() {
    for (unsigned t = 0; t < 3; t++) {
        Dense d(600, 3, 5 + t, TYPES[t], TYPES[t], AMP_F32, WHOLE, t == 1);
        check_dense(d, 7, (int)(t & 1u), true, linear_workspace(600, 3, 5 + t));
    }
}

/* On any numbers: y against double precision, db too; dx and dw are products as the others. */
static void test_dense_bound() {
    for (unsigned t = 0; t < 3; t++) {
        Dense d(33, 50, 20, TYPES[t], TYPES[t], AMP_F32, ANY, 0);
        amp_exec e = quiet_exec();
        d.y.upload();
        CHECK(d.forward(true, &e) == AMP_OK && d.backward(7, 0, &e) == AMP_OK);
        Bytes y = d.y.download(), db = d.db.download();
        for (size_t j = 0; j < d.out; j++) {
            double sum = 0, size = 0;
            for (size_t i = 0; i < d.n; i++) {
                double dot = (double)d.b.value(j), all = std::fabs(dot),
                       got = (double)get(&y[(d.y.lead + i * d.out + j) * d.y.size], d.y.type);
                for (size_t q = 0; q < d.in; q++) {
                    double x = (double)d.x.value(i * d.in + q) * (double)d.w.value(j * d.in + q);
                    dot += x;
                    all += std::fabs(x);
                }
                double limit = sum_error((double)d.in, all);
                limit += (std::fabs(dot) + limit) * unit_of(d.y.type) + tiny_of(d.y.type);
                CHECK_MSG(std::fabs(got - dot) <= limit, "y %g, not %g", got, dot);
                sum += (double)d.dy.value(i * d.out + j);
                size += std::fabs((double)d.dy.value(i * d.out + j));
            }
            double got = (double)get(&db[(d.db.lead + j) * d.db.size], d.db.type);
            CHECK_MSG(std::fabs(got - sum) <= 33 * std::ldexp(1, -24) * size * 1.001, "db %g, not %g", got,
                      sum);
        }
        for (int i = 1; i < ORDERS; i++) {
            set_schedule(i);
            CHECK(d.forward(true, &e) == AMP_OK && d.backward(7, 0, &e) == AMP_OK);
            CHECK(d.y.download() == y && d.db.download() == db);
        }
        set_schedule(0);
    }
}

/* --- tests: refusals ----------------------------------------------------------------------------------- */

static void refuse_gemm(amp_transpose ta, size_t m, size_t n, size_t k, const void* a, amp_dtype at,
                        size_t lda, const void* b, size_t ldb, void* c, size_t ldc, amp_result code,
                        const char* words) {
    amp_exec e = quiet_exec();
    long before = launches();
    amp_gemm_shape s = product(0, 0, m, n, k, lda, ldb, ldc);
    s.trans_a = ta;
    check_refused(cuda->gemm(&s, 1, amp_ref_of(a, at), amp_ref_of(b, AMP_F32), 0, amp_ref_of(c, AMP_F32), &e), code, words, before);
}

static void test_refused_products() {
    Array d(AMP_F32, 192, true);
    float host[64] = { 0 };
    float *p = (float*)d.there(), *q = p + 64, *r = p + 128;
    d.upload();
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 3, q, 3, r, 3, AMP_ERR_ARGUMENT,
                "amp_cuda_gemm: lda is 3, but a row of a has 5 elements");
    refuse_gemm(AMP_TRANS, 2, 3, 5, p, AMP_F32, 1, q, 3, r, 3, AMP_ERR_ARGUMENT,
                "amp_cuda_gemm: lda is 1, but a row of a has 2 elements");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, q, 2, r, 3, AMP_ERR_ARGUMENT,
                "ldb is 2, but a row of b has 3 elements");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, q, 3, r, 2, AMP_ERR_ARGUMENT,
                "ldc is 2, but a row of c has 3 elements");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, nullptr, AMP_F32, 5, q, 3, r, 3, AMP_ERR_ARGUMENT,
                "a is NULL, but it has 2 x 5 elements");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, nullptr, 3, r, 3, AMP_ERR_ARGUMENT,
                "b is NULL, but it has 5 x 3 elements");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, q, 3, nullptr, 3, AMP_ERR_ARGUMENT,
                "c is NULL, but it has 2 x 3 elements");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F64, 5, q, 3, r, 3, AMP_ERR_DTYPE,
                "a has type f64 (4); it must be f32, f16 or bf16");
    refuse_gemm((amp_transpose)2, 2, 3, 5, p, AMP_F32, 5, q, 3, r, 3, AMP_ERR_ARGUMENT,
                "trans_a is 2, trans_b is 0");
    refuse_gemm(AMP_NO_TRANS, SIZE_MAX / 4, 3, 5, p, AMP_F32, 5, q, 3, r, 3, AMP_ERR_ARGUMENT,
                "a is too large: ");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, q, SIZE_MAX / 4, r, 3, AMP_ERR_ARGUMENT,
                "b is too large: ");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, host, AMP_F32, 5, q, 3, r, 3, AMP_ERR_ARGUMENT,
                "amp_cuda_gemm: a is host memory");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, host, 3, r, 3, AMP_ERR_ARGUMENT,
                "amp_cuda_gemm: b is host memory");
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, q, 3, host, 3, AMP_ERR_ARGUMENT,
                "amp_cuda_gemm: c is host memory");
    const amp_gemm_shape s = product(0, 0, 2, 3, 5, 5, 3, 3);
    CHECK(cuda->gemm(&s, 1, amp_f32(p), amp_f32(q), 0, AMP_NONE, nullptr) == AMP_ERR_ARGUMENT);
    amp_exec e = quiet_exec();
    check_refused(cuda->gemm(nullptr, 1, amp_f32(p), amp_f32(q), 0, amp_f32(r), &e), AMP_ERR_ARGUMENT,
                  "amp_cuda_gemm: the shape is NULL", launches());
    refuse_gemm(AMP_NO_TRANS, 2, 3, 5, p, AMP_F32, 5, q, 3, p + 9, 3, AMP_ERR_ARGUMENT,
                "amp_cuda_gemm: c would be written over a");
    e.operands = AMP_F16;
    check_refused(cuda->gemm(&s, 1, amp_f32(p), amp_f32(q), 0, amp_f32(r), &e), AMP_ERR_UNSUPPORTED,
                  "amp_cuda_gemm: operands of the exec must be 0 on a GPU", launches());
    check_refused(cuda->linear_forward(amp_f32(p), amp_f32(q), AMP_NONE, amp_f32(r), 2, 3, 4, &e), AMP_ERR_UNSUPPORTED,
                  "amp_cuda_linear_forward: operands of the exec must be 0 on a GPU", launches());
    CHECK(d.download() == d.host);
}

/* Pinned memory is memory of the device too. */
static void test_pinned_memory() {
    Problem p(Spec(9, 10, 11, AMP_F16, AMP_F16, AMP_F32));
    amp_exec e = quiet_exec();
    void* pinned = nullptr;
    OK(cudaHostAlloc(&pinned, 9 * 11 * 2, cudaHostAllocMapped));
    memcpy(pinned, p.a.data.here(), 9 * 11 * 2);
    p.c.data.upload();
    Call call(p);
    call.a = pinned;
    CHECK(call.plain(&e) == AMP_OK);
    CHECK(amp_cuda_synchronize(&e) == AMP_OK);
    check_same(p, p.c.data.download(), expected(p), "pinned");
    OK(cudaFreeHost(pinned));
}

/* Memory that calls on device 0 cannot reach; NULL where there is no other device. */
static void* memory_of_device_1(size_t bytes) {
    void* p = nullptr;
#if defined(AMP_CUDA_EMU)
    OK(cudaMalloc(&p, bytes));
    emu_move_to_device(p, 1);
#else
    int devices = 0;
    OK(cudaGetDeviceCount(&devices));
    if (devices < 2) return nullptr;
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&p, bytes));
    OK(cudaSetDevice(0));
#endif
    return p;
}

static void test_other_device() {
    Problem p(Spec(6, 7, 8, AMP_F16, AMP_F16, AMP_F16));
    void* far = memory_of_device_1(4096);
    if (!far) { TEST_SKIP("one GPU"); return; }
    long before = launches();
    amp_exec e = quiet_exec();
    Call call(p);
    p.c.data.upload();
    call.a = far;
    check_refused(call.plain(&e), AMP_ERR_ARGUMENT,
                  "amp_cuda_gemm: a is memory of device 1, which the current device cannot reach", before);
    call.a = p.a.data.there();
    e.workspace = far;
    e.workspace_size = 4096;
    check_refused(call.plain(&e), AMP_ERR_ARGUMENT, "the workspace is memory of device 1", before);
    CHECK(p.c.data.download() == p.c.data.host);
    OK(cudaFree(far));
}

static void refuse_desc(const Call& call, amp_result code, const char* words) {
    amp_exec e = quiet_exec();
    long before = launches();
    check_refused(call.with_desc(&e), code, words, before);
}

static void test_refused_descs() {
    Problem p(Spec(6, 7, 8, AMP_F16, AMP_F16, AMP_F16)
                  .many(2, APART)
                  .with(PER_COLUMN, AMP_F16, AMP_CUDA_EPILOGUE_RELU));
    const Call good(p);
    Call d = good;
    float host[16] = { 0 };
    amp_exec e = quiet_exec();
    p.c.data.upload();
    d.desc.bias = host; refuse_desc(d, AMP_ERR_ARGUMENT, "bias is host memory"); d = good;
    d.desc.bias_dtype = AMP_F64; refuse_desc(d, AMP_ERR_DTYPE, "bias has type f64 (4)"); d = good;
    d.ct = (amp_dtype)9; refuse_desc(d, AMP_ERR_DTYPE, "c has type"); d = good;
    d.desc.epilogue = (amp_cuda_epilogue)4; refuse_desc(d, AMP_ERR_DESC, "epilogue"); d = good;
    d.desc.bias_per_row = 2; refuse_desc(d, AMP_ERR_DESC, "bias_per_row is 2"); d = good;
    d.shape.c_stride = 0; refuse_desc(d, AMP_ERR_ARGUMENT, "c_stride is 0, matrices of c overlap"); d = good;
    d.shape.c_stride = 1; refuse_desc(d, AMP_ERR_ARGUMENT, "c_stride is 1, matrices of c overlap"); d = good;
    d.shape.ldb = 6; refuse_desc(d, AMP_ERR_ARGUMENT, "ldb is 6, but a row of b has 7 elements"); d = good;
    d.a = nullptr; refuse_desc(d, AMP_ERR_ARGUMENT, "a is NULL"); d = good;
    d.shape.a_stride = SIZE_MAX / 2; refuse_desc(d, AMP_ERR_ARGUMENT, "a is too large"); d = good;
    d.shape.b_stride = SIZE_MAX; refuse_desc(d, AMP_ERR_ARGUMENT, "b is too large"); d = good;
    d.shape.batch = SIZE_MAX / 4; refuse_desc(d, AMP_ERR_ARGUMENT, "too large"); d = good;
    d.desc.bias_stride = SIZE_MAX / 2; refuse_desc(d, AMP_ERR_ARGUMENT, "bias is too large"); d = good;
    CHECK(p.c.data.download() == p.c.data.host);
    CHECK(good.with_desc(&e) == AMP_OK);
}

static void test_refused_layers() {
    Array d(AMP_F32, 384, true);
    float host[64] = { 0 };
    void* p = d.there();
    amp_exec e = quiet_exec();
    long before = launches();
    auto at = [&](const void* q, int i) { return q == p ? (float*)p + 64 * i : (float*)(uintptr_t)q; };
    d.upload();
    auto forward = [&](const void* x, const void* w, const void* b, amp_dtype bt, void* y, size_t n) {
        return cuda->linear_forward(amp_ref_of(x, AMP_F32), amp_f32(at(w, 1)), amp_ref_of(at(b, 2), bt),
            amp_f32(at(y, 3)), n, 3, 4, &e);
    };
    auto backward = [&](const void* dy, const void* x, const void* w, void* dx, void* dw, void* db,
                        amp_dtype dbt) {
        return cuda->linear_backward(amp_ref_of(dy, AMP_F32), amp_f32(at(x, 1)), amp_f32(at(w, 2)),
            amp_f32(at(dx, 3)), amp_f32(at(dw, 4)), amp_ref_of(at(db, 5), dbt), 0, 2, 3, 4, &e);
    };
    check_refused(forward(p, nullptr, nullptr, AMP_F32, p, 2), AMP_ERR_ARGUMENT,
                  "w is NULL, but it has 4 x 3 elements", before);
    check_refused(forward(p, p, p, AMP_F64, p, 2), AMP_ERR_DTYPE, "b has type f64 (4)", before);
    check_refused(forward(p, p, nullptr, AMP_F32, p, SIZE_MAX / 8), AMP_ERR_ARGUMENT, "y is too large",
                  before);
    check_refused(forward(host, p, nullptr, AMP_F32, p, 2), AMP_ERR_ARGUMENT, "x is host memory", before);
    check_refused(forward(p, host, nullptr, AMP_F32, p, 2), AMP_ERR_ARGUMENT, "w is host memory", before);
    check_refused(forward(p, p, host, AMP_F32, p, 2), AMP_ERR_ARGUMENT, "b is host memory", before);
    check_refused(forward(p, p, p, AMP_F32, host, 2), AMP_ERR_ARGUMENT, "y is host memory", before);
    check_refused(backward(p, nullptr, p, p, p, nullptr, AMP_F32), AMP_ERR_ARGUMENT,
                  "x is NULL, but it has 2 x 3", before);
    check_refused(backward(p, p, nullptr, p, p, nullptr, AMP_F32), AMP_ERR_ARGUMENT,
                  "w is NULL, but it has 4 x 3", before);
    check_refused(backward(p, p, p, p, p, p, AMP_F64), AMP_ERR_DTYPE, "db has type f64 (4)", before);
    check_refused(backward(host, p, p, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "dy is host memory", before);
    check_refused(backward(p, host, p, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "x is host memory", before);
    check_refused(backward(p, p, host, p, p, p, AMP_F32), AMP_ERR_ARGUMENT, "w is host memory", before);
    check_refused(backward(p, p, p, host, p, p, AMP_F32), AMP_ERR_ARGUMENT, "dx is host memory", before);
    check_refused(backward(p, p, p, p, host, p, AMP_F32), AMP_ERR_ARGUMENT, "dw is host memory", before);
    check_refused(backward(p, p, p, p, p, host, AMP_F32), AMP_ERR_ARGUMENT, "db is host memory", before);
    CHECK(d.download() == d.host);
}

static void test_failing_launches() {
    amp_exec e = quiet_exec();
    Workspace w(&e, linear_workspace(40, 600, 12));
    Problem f32(Spec(9, 9, 9, AMP_F32, AMP_F32, AMP_F32)),
        cut(Spec(12, 40, 600, AMP_F16, AMP_F16, AMP_F16));
    Problem fused(Spec(9, 9, 9, AMP_F16, AMP_F16, AMP_F16)
                      .many(3, APART)
                      .with(PER_ROW, AMP_F16, AMP_CUDA_EPILOGUE_GELU));
    Problem none(Spec(9, 9, 0, AMP_F16, AMP_F16, AMP_F16));
    for (Problem* p : { &f32, &cut, &fused, &none }) check_failures([&] { return multiply(*p, &e); });
    Dense d(40, 600, 12, AMP_F16, AMP_F16, AMP_F32, WHOLE, 0);
    check_failures([&] { return d.forward(true, &e); });
    check_failures([&] { return d.backward(7, 0, &e); });
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_types_and_transposes);
    TEST(test_tile_edges);
    TEST(test_large_tiles);
    TEST(test_unaligned);
    TEST(test_random_shapes);
    TEST(test_alpha_beta);
    TEST(test_special_values);
    TEST(test_plain_kernels);
    TEST(test_error_bound);
    TEST(test_output_rounding);
    TEST(test_empty);
    TEST(test_batched);
    TEST(test_bias_and_epilogue);
    TEST(test_desc_defaults);
#if !defined(AMP_CUDA_EMU)
    TEST(test_huge_batch);
#endif
    TEST(test_narrow);
    TEST(test_long_k);
    TEST(test_order_of_pieces);
    TEST(test_engines);
    TEST(test_another_stream);
    TEST(test_context_same_bits);
    TEST(test_capture);
    TEST(test_dense);
    TEST(test_dense_single_gradients);
    TEST(test_dense_many_rows);
    TEST(test_dense_bound);
    TEST(test_refused_products);
    TEST(test_pinned_memory);
    TEST(test_other_device);
    TEST(test_refused_descs);
    TEST(test_refused_layers);
    TEST(test_failing_launches);
    TEST_END();
}
