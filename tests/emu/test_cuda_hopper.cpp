/* test_cuda_hopper.cpp - products that the Hopper kernel takes, on a device of compute capability 9.0. Elsewhere they run
   too, through other kernels. The references are those of product.h. */
#include "product.h"

/* Is the device of compute capability 9.0, and does this kernel take the product of s there? The emulator counts the
   instruction that no other kernel has; on a GPU a captured call shows its blocks, of 384 threads in no other kernel. */
#if defined(AMP_CUDA_EMU)
static bool on_hopper() { return AMP_EMU_ARCH == 900; }
static bool takes(const Spec& s) {
    const long before = emu_wgmma_count();
    Problem p(s);
    amp_exec e = quiet_exec();
    run(p, &e);
    return emu_wgmma_count() > before;
}
#else
static bool on_hopper() {
    int major = 0, minor = 0;
    OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    return major == 9 && minor == 0;
}
static bool takes(const Spec& s) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphNode_t nodes[8];
    size_t count = 8;
    bool taken = false;
    Problem p(s);
    amp_exec e = quiet_exec();
    OK(cudaStreamCreate(&stream));
    e.stream = stream;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CHECK(multiply(p, &e) == AMP_OK);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphGetNodes(graph, nodes, &count));
    for (size_t i = 0; i < count; i++) {
        cudaKernelNodeParams params;
        OK(cudaGraphKernelNodeGetParams(nodes[i], &params));
        taken = taken || params.blockDim.x == 384;
    }
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamDestroy(stream));
    return taken;
}
#endif

static void check_taken(bool taken, const Spec& s) {
    if (on_hopper()) CHECK_MSG(takes(s) == taken, "%s: %s", describe(s), taken ? "not taken" : "taken");
}
/* The CPU's bits, by this kernel; or by another, where it must leave the product alone. */
static void bits(const Spec& s) {
    check_bits(s);
    check_taken(true, s);
}
static void bits_of_another(const Spec& s) {
    check_bits(s);
    check_taken(false, s);
}
/* Near the exact result, with the same bits in every order. */
static void bound(const Spec& s) {
    check_bound(s);
    check_taken(true, s);
}

static const amp_dtype HALVES[2] = { AMP_F16, AMP_BF16 };
/* Two halves of type i % 2; rows of A and B begin at multiples of 16 bytes, those of C too if c_unit is 8. */
static Spec halves(size_t m, size_t n, size_t k, unsigned i, amp_dtype c, size_t c_unit = 8) {
    return Spec(m, n, k, HALVES[i % 2], HALVES[i % 2], c).units(8, c_unit);
}

/* --- tests ---------------------------------------------------------------------------------- */

/* Every transposition and type of A, B and C, on whole tiles; the widths of a tile are 64, 128 and 256. */
static void test_types_and_transposes() {
    for (unsigned t = 0; t < 24; t++) {
        bits(halves(128, 64 + t % 2 * 128, 64 + t % 3 * 64, t / 12, TYPES[t / 4 % 3]).trans(t));
        bits(halves(256, 256, 64, t / 12, TYPES[t / 4 % 3]).trans(t));
        if (t % 5 == 0) bits(halves(256, 512, 128, t / 12, TYPES[t / 4 % 3]).trans(t));
    }
}

/* Sides around the tile's, the box's and the swizzle's; C in aligned rows, which the copy engine writes, and in others. */
static void test_tails() {
    static const size_t SIDES[] = { 64, 65, 71, 72, 73, 127, 128, 129, 136, 191, 192, 193, 200 };
    const size_t count = sizeof SIDES / sizeof *SIDES;
    for (size_t i = 0; i < count; i++)
        for (size_t r = 0; r < 3; r++) {
            size_t m = SIDES[i], n = SIDES[(3 * i + 5 * r + 1) % count], k = SIDES[(7 * i + r) % count];
            unsigned t = (unsigned)(i + r);
            bits(halves(m, n, k, t, TYPES[(i + 2 * r) % 3], r == 1 ? 1 : 8).trans(t).place(t % 4 == 0, 0));
        }
    for (unsigned t = 0; t < 8; t++) {
        bits(halves(129 + t, 257 + 9 * t, 65 + t, t, TYPES[1 + t / 4]).trans(t / 2));
        bits(halves(193, 511 - t, 70, t, TYPES[t % 3], t & 1 ? 1 : 8).trans(t));
    }
}

/* More tiles than blocks, so that a block goes on to its next one; an odd number of rows of tiles, of which a cluster
   takes two; one row, which needs no cluster. */
static void test_many_tiles() {
    for (unsigned t = 0; t < 4; t++) {
        bits(halves(1030, 256, 64, t, AMP_F16).trans(t));
        bits(halves(1160, 520, 72, t, HALVES[t % 2]).trans(t));
        bits(halves(513, 1030, 64, t, TYPES[t % 3]).trans(t));
        bits(halves(300, 300, 100, t, HALVES[t % 2]).trans(t));
        bits(halves(100, 1100, 130, t, TYPES[(t + 1) % 3]).trans(t));
    }
    bits(halves(2200, 128, 64, 0, AMP_F16));
    bits(halves(64, 2200, 64, 1, AMP_BF16).trans(2));
}

static void test_alpha_beta() {
    static const float FACTORS[][2] = { { 1, 1 }, { -0.7f, 0 }, { 1, 0.3f }, { 1.7f, -2.1f }, { 4096, 0 }, { 3e38f, 1 },
                                        { 1e-7f, 0 } };
    for (size_t f = 0; f < sizeof FACTORS / sizeof FACTORS[0]; f++)
        for (unsigned t = 0; t < 3; t++)
            bits(halves(70, 90, 66, (unsigned)f, TYPES[t], t == 1 ? 1 : 8).trans(t).scale(FACTORS[f][0], FACTORS[f][1]));
}

/* Infinities and NaN go where they belong; what lies beyond a tail is zero and makes no NaN of an infinity. */
static void test_special_values() {
    for (unsigned t = 0; t < 12; t++)
        bits(halves(80, 140, 67, t, TYPES[t % 3])
                 .trans(t)
                 .scale(1, (float)(t / 6))
                 .of(SPECIAL)
                 .with(t & 2 ? PER_COLUMN : NO_BIAS, AMP_F32, t & 4 ? AMP_CUDA_EPILOGUE_RELU : AMP_CUDA_EPILOGUE_NONE));
    for (unsigned t = 0; t < 9; t++)      /* the same by the copy engine: the sums as they are, with a bias, with a ReLU */
        bits(halves(80, 144, 67, t, TYPES[t % 3])
                 .trans(t)
                 .of(SPECIAL)
                 .with(t / 3 == 1 ? PER_COLUMN : NO_BIAS, AMP_F32,
                       t / 3 == 2 ? AMP_CUDA_EPILOGUE_RELU : AMP_CUDA_EPILOGUE_NONE));
}

static void test_output_rounding() {
    static const float ALPHAS[] = { 1, 0.25f, 16, 700 * 16777216.0f, 4097 * 16777216.0f };
    for (size_t f = 0; f < sizeof ALPHAS / sizeof ALPHAS[0]; f++)
        for (unsigned t = 0; t < 2; t++)
            bits(halves(64, 72, 64, (unsigned)f, HALVES[t]).scale(std::ldexp(ALPHAS[f], -24), 0));
    bits(halves(64, 64, 64, 0, AMP_BF16).scale(std::ldexp(1.0f, 120), 0));
    bits(halves(64, 64, 64, 1, AMP_BF16).scale(std::ldexp(1.0f, -140), 0));
}

static void test_bias_and_epilogue() {
    for (unsigned t = 0; t < 24; t++) {
        Spec s = halves(70 + t, 130 + t % 3, 64 + t % 2 * 8, t, TYPES[t % 3], t % 4 == 3 ? 1 : 8);
        bits(s.trans(t / 3)
                 .with(t % 2 ? PER_ROW : PER_COLUMN, TYPES[t / 8], (amp_cuda_epilogue)(t / 2 % 4))
                 .scale(t % 5 == 2 ? 0.125f : 1, t % 7 == 3 ? 0.5f : 0));
    }
    for (unsigned t = 0; t < 4; t++)
        bits(halves(140, 264, 64, t, HALVES[t % 2]).with(t & 1 ? PER_ROW : PER_COLUMN, TYPES[t % 3],
                                                         (amp_cuda_epilogue)(t / 2)));
    /* The product by alpha is rounded before the bias is added, by the copy engine's way to C and by the other. */
    for (unsigned t = 0; t < 4; t++)
        bits(halves(70, 90, 64, t, AMP_F32, t & 1 ? 1 : 8).scale(-0.7f, 0).with(t & 2 ? PER_ROW : PER_COLUMN, AMP_F32,
                                                                              AMP_CUDA_EPILOGUE_NONE));
}

static void test_batched() {
    static const Layout LAYOUTS[] = { APART, SHARED_A, SHARED_B, SIDE_BY_SIDE };
    for (unsigned t = 0; t < 8; t++)
        for (unsigned l = 0; l < 4; l++)
            bits(halves(64 + 8 * t, 72 + l, 64 + t, t, TYPES[(t + l) % 3])
                     .trans(t + l)
                     .many(2 + t % 3, LAYOUTS[l])
                     .scale(1, t == 5 ? 1.0f : 0.0f));
    bits(halves(128, 256, 64, 0, AMP_F16).many(8, APART));
    bits(halves(256, 128, 64, 1, AMP_BF16).many(5, SHARED_B));
    bits(halves(70, 130, 64, 0, AMP_F16).many(3, APART).with(PER_COLUMN, AMP_F16, AMP_CUDA_EPILOGUE_RELU));
    bits(halves(70, 130, 64, 1, AMP_BF16).many(3, SIDE_BY_SIDE).with(PER_ROW, AMP_F32, AMP_CUDA_EPILOGUE_NONE));
}

/* --- tests: k cut into pieces ----------------------------------------------------------------- */

static void test_pieces() {
    for (unsigned t = 0; t < 8; t++) {
        size_t m = 64 + 9 * t, n = 128 - 7 * t, k = 4096 + 61 * t;
        Spec s = halves(m, n, k, t, TYPES[t % 3]).trans(t / 2).scale(t % 3 ? 1 : 0.5f, t & 1 ? 1.0f : 0.0f);
        bits(s);
        Problem p(s);
        amp_exec e = quiet_exec();
        long before = launches();
        run(p, &e);
        if (on_hopper()) CHECK(launched(before, 1));      /* the blocks of a cluster add their pieces up themselves */
        bits(s.with(t & 1 ? PER_COLUMN : PER_ROW, AMP_F32, (amp_cuda_epilogue)(t % 4)));
    }
    bits(halves(70, 64, 5000, 0, AMP_F16).many(2, APART));
    for (unsigned t = 0; t < 8; t++)      /* one piece a step, pieces of several; columns that end within a group */
        bits(halves(64 + t, 64 + 9 * t, 64 * (t + 1) + 40, t, TYPES[t % 3], t & 1 ? 8 : 1).trans(t));
}

/* Pieces are added in ascending order: 2^24 at the start, 1 in the middle, -2^24 at the end give 0, and 1 in an order that
   meets the 1 later or the first number last. */
static void test_order_of_pieces() {
    for (unsigned t = 0; t < 2; t++) {
        Spec s = halves(64, 64, 4096, t, AMP_F32);
        Problem p(s);
        amp_exec e = quiet_exec();
        for (size_t i = 0; i < s.m; i++)
            for (size_t q = 0; q < s.k; q++)
                p.a.data.set(p.a.at(0, i, q), q == 0 ? 4096.0f : q == 2048 ? 1.0f : q == 4095 ? -4096.0f : 0.0f);
        for (size_t q = 0; q < s.k; q++)
            for (size_t j = 0; j < s.n; j++) p.b.data.set(p.b.at(0, q, j), q == 2048 ? 1.0f : 4096.0f);
        p.a.data.upload();
        p.b.data.upload();
        check_same(p, run(p, &e), expected(p), "order of pieces");
    }
}

/* --- tests: any numbers ------------------------------------------------------------------------ */

static void test_error_bound() {
    for (unsigned t = 0; t < 4; t++) bound(halves(100, 130, 200, t, TYPES[t % 3]).trans(t).of(ANY));
    bound(halves(200, 300, 90, 0, AMP_F16).of(ANY).with(PER_COLUMN, AMP_F16, AMP_CUDA_EPILOGUE_NONE));
    bound(halves(1030, 140, 64, 1, AMP_BF16).of(ANY));
    bound(halves(130, 300, 150, 1, AMP_F32).of(ANY).scale(-1.3f, 0.6f));
    bound(halves(70, 70, 4200, 0, AMP_F16).of(ANY));
    bound(halves(80, 72, 130, 0, AMP_F16).of(ANY).many(3, SIDE_BY_SIDE));
}

/* --- tests: what is left to others --------------------------------------------------------------- */

static void test_left_alone() {
    bits_of_another(halves(63, 64, 64, 0, AMP_F16));
    bits_of_another(halves(64, 63, 64, 0, AMP_F16));
    bits_of_another(halves(64, 64, 63, 0, AMP_F16));
    bits_of_another(halves(64, 64, 64, 0, AMP_F16).place(0, 1));
    bits_of_another(Spec(64, 64, 68, AMP_F16, AMP_F16, AMP_F16));
    bits_of_another(Spec(64, 66, 64, AMP_F16, AMP_F16, AMP_F16));
    bits_of_another(Spec(64, 64, 64, AMP_F16, AMP_BF16, AMP_F16));
    bits_of_another(Spec(64, 64, 64, AMP_F32, AMP_F32, AMP_F16));
#if defined(AMP_CUDA_EMU)
    for (int registers : { 32, 160 }) { /* as of a kernel that was compiled without a body, or for fewer registers */
        emu_set_registers(registers);
        bits_of_another(halves(128, 128, 128, 0, AMP_F16));
    }
    emu_set_registers(168);
#endif
}

/* Where no cluster fits, as in a slice of a GPU, a block for each tile sums all of k. */
static void test_refused_clusters() {
#if defined(AMP_CUDA_EMU)
    amp_exec e = quiet_exec();
    Problem cut(halves(64, 72, 4096, 0, AMP_F16));
    emu_set_cluster_limit(1);
    for (unsigned t = 0; t < 3; t++) bits(halves(70, 136, 4100, t, TYPES[t], t & 1 ? 1 : 8).trans(t));
    bits(halves(70, 64, 5000, 1, AMP_BF16).many(2, APART));
    check_failures([&] { return multiply(cut, &e); });
    emu_set_cluster_limit(8);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
#else
    TEST_SKIP("whether clusters fit is not ours to choose");
#endif
}

static void test_failing_launches() {
    amp_exec e = quiet_exec();
    Problem one(halves(128, 64, 64, 0, AMP_F16));
    check_failures([&] { return multiply(one, &e); });
}

/* Captured once, replayed twice. */
static void test_capture() {
    amp_cuda_desc d = {};
    amp_cuda* c = nullptr;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    d.gemm = AMP_CUDA_GEMM_OWN;
    CHECK(amp_cuda_create(&c, &d) == AMP_OK);
    Problem p(halves(130, 140, 70, 0, AMP_F16));
    amp_exec e = quiet_exec(c);
    Bytes want = run(p, &e);
    OK(cudaStreamBeginCapture((cudaStream_t)e.stream, cudaStreamCaptureModeThreadLocal));
    CHECK(multiply(p, &e) == AMP_OK);
    OK(cudaStreamEndCapture((cudaStream_t)e.stream, &graph));
    OK(cudaGraphInstantiateWithFlags(&ready, graph, 0));
    for (int i = 0; i < 2; i++) {
        p.c.data.upload();
        OK(cudaGraphLaunch(ready, (cudaStream_t)e.stream));
        CHECK(amp_cuda_synchronize(&e) == AMP_OK);
        check_same(p, p.c.data.download(), want, "replayed");
    }
    OK(cudaGraphExecDestroy(ready));
    OK(cudaGraphDestroy(graph));
    amp_cuda_destroy(c);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_types_and_transposes);
    TEST(test_tails);
    TEST(test_many_tiles);
    TEST(test_alpha_beta);
    TEST(test_special_values);
    TEST(test_output_rounding);
    TEST(test_bias_and_epilogue);
    TEST(test_batched);
    TEST(test_pieces);
    TEST(test_order_of_pieces);
    TEST(test_error_bound);
    TEST(test_left_alone);
    TEST(test_refused_clusters);
    TEST(test_failing_launches);
    TEST(test_capture);
    TEST_END();
}
