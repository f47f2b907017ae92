/* Conversions on the device, against amp_convert: every half and bfloat16, every rounding boundary of a float, and
   all sizes, types and alignments around the ends of the kernels' tiles. */
#define AMP_IMPLEMENTATION      /* this test looks inside, at a copy of its own */
#define AMP_STATIC
#include "tensor.h"

/* Converts on both sides, and compares all bits. */
static void check_convert(Tensor& dst, Tensor& src, const amp_convert_desc* desc = nullptr) {
    amp_convert_desc host = {}, device = {};
    Tensor count(AMP_F32, 2);      /* a size_t of the device */
    size_t before = 7, expected = 7, got = 0;
    if (desc) {
        host = device = *desc;
        host.saturated = &expected;
        device.saturated = (size_t*)count.dev;
        OK(cudaMemcpy(count.dev, &before, sizeof before, cudaMemcpyHostToDevice));
    }
    const void* from = src.dev == dst.dev ? dst.host.data() : src.host.data();
    dst.poison();
    if (src.dev == dst.dev) src.send();
    CHECK(amp_convert_with(amp_ref_of(dst.at(), dst.type), amp_ref_of(from, src.type), src.n,
        desc ? &host : nullptr) == AMP_OK);
    CHECK(amp_cuda_convert_with(amp_ref_of(dst.dev, dst.type), amp_ref_of(src.dev, src.type),
        src.n, desc ? &device : nullptr, nullptr)
          == AMP_OK);
    CHECK_BITS(dst, 1);
    if (!desc) return;
    OK(cudaMemcpy(&got, count.dev, sizeof got, cudaMemcpyDeviceToHost));
    CHECK_MSG(got == expected, "%zu clamped, not %zu", got, expected);
}

/* All of a 16-bit type to all types, plain, saturating and stochastic. */
static void test_every_value() {
    for (amp_dtype from : { AMP_F16, AMP_BF16 })
        for (amp_dtype to : TYPES) {
            Tensor src(from, 65536), dst(to, 65536);
            amp_convert_desc d = {};
            fill_every_value(src);
            check_convert(dst, src);
            d.saturate = 1;
            check_convert(dst, src, &d);
            if (to == AMP_F32) continue;
            d.rounding = AMP_ROUND_STOCHASTIC;
            d.seed = 0x123456789abcdefull;
            check_convert(dst, src, &d);
        }
}

/* Each value of a 16-bit type as a float, the middle between it and the next, and their neighbours. */
static std::vector<uint32_t> boundaries(amp_dtype to) {
    std::vector<uint32_t> bits;
    for (uint32_t h = 0; h < 65536; h++) {
        const uint32_t u = to == AMP_F16 ? ampi_half_widen((uint16_t)h) : h << 16;
        const uint32_t next = to == AMP_F16 ? ampi_half_widen((uint16_t)(h + 1)) : (h + 1) << 16;
        const uint32_t middle = u + (next - u) / 2;
        for (uint32_t near : { u, middle }) for (uint32_t step : { ~0u, 0u, 1u }) bits.push_back(near + step);
    }
    return bits;
}

static void test_boundaries() {
    for (amp_dtype to : { AMP_F16, AMP_BF16 }) {
        std::vector<uint32_t> bits = boundaries(to), more = random_floats(30000);
        bits.insert(bits.end(), more.begin(), more.end());
        Tensor src(AMP_F32, bits.size()), dst(to, bits.size());
        fill_bits(src, bits);
        check_convert(dst, src);
    }
    std::vector<uint32_t> some = random_floats(20000);
    for (amp_dtype to : { AMP_F16, AMP_BF16 })
        for (int saturate : { 0, 1 })
            for (uint64_t offset : { (uint64_t)0, (uint64_t)3, ~(uint64_t)0 - 9000u }) {
                Tensor src(AMP_F32, some.size()), dst(to, some.size());
                amp_convert_desc d = {};
                fill_bits(src, some);
                d.saturate = saturate;
                d.rounding = AMP_ROUND_STOCHASTIC;
                d.seed = 77;
                d.offset = offset;
                check_convert(dst, src, &d);
            }
    Tensor src(AMP_F32, some.size()), copy(AMP_F32, some.size());
    fill_bits(src, some);
    check_convert(copy, src);      /* a copy keeps signalling NaNs as they are */
}

/* Every pair of types, sizes around eights and tiles, starts that are aligned to 16 bytes or not. */
static void test_sizes() {
    static const size_t sizes[] = { 0, 1, 2, 7, 8, 9, 15, 16, 17, 63, 2047, 2048, 2049, 4095, 4096, 4099, 8205 };
    for (amp_dtype from : TYPES)
        for (amp_dtype to : TYPES)
            for (size_t n : sizes)
                for (size_t shift : { 0, 1, 4, 7 }) {
                    Tensor src(from, n, shift), dst(to, n, (shift * 3) % 8);
                    src.fill(awkward);
                    check_convert(dst, src);
                    if (n > 64) continue;
                    for (int saturate : { 0, 1 })
                        for (uint64_t offset : { 0, 1, 2, 3, 4 }) {
                            amp_convert_desc d = {};
                            d.saturate = saturate;
                            d.rounding = amp_dtype_size(to) == 2 ? AMP_ROUND_STOCHASTIC : AMP_ROUND_NEAREST;
                            d.offset = offset;
                            check_convert(dst, src, &d);
                        }
                }
}

/* More elements than the blocks of a launch take at once: the same kernels with fewer blocks. */
static void test_grid_stride() {
    const size_t n = 3 * AMPI_CUDA_TILE + 1234;
    Tensor src(AMP_F32, n), dst(AMP_F16, n), count(AMP_F32, 2);
    amp_convert_desc d = {};
    size_t hits = 0, got = 0;
    src.fill(awkward);
    d.saturate = 1;
    d.rounding = AMP_ROUND_STOCHASTIC;
    d.saturated = &hits;
    const ampi_cuda_map m = ampi_cuda_map_of(amp_ref_of(src.dev, src.type), AMP_NONE,
        amp_ref_of(dst.dev, dst.type), n);
    const ampi_cuda_rounding how = { 1, 1, 0, 0, (size_t*)count.dev };
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_convert, dim3(2), dim3(AMPI_CUDA_BLOCK), 0, m) == AMP_OK);
    CHECK(amp_convert(amp_ref_of(dst.at(), dst.type), amp_ref_of(src.at(), src.type), n) == AMP_OK);
    CHECK_BITS(dst, 1);
    OK(cudaMemset(count.dev, 0, sizeof hits));
    CHECK(ampi_cuda_launch(nullptr, "test", ampi_k_convert_with, dim3(2), dim3(AMPI_CUDA_BLOCK), 0, m, how) == AMP_OK);
    CHECK(amp_convert_with(amp_ref_of(dst.at(), dst.type), amp_ref_of(src.at(), src.type), n, &d) == AMP_OK);
    CHECK_BITS(dst, 1);
    OK(cudaMemcpy(&got, count.dev, sizeof got, cudaMemcpyDeviceToHost));
    CHECK(got == hits && hits > 0);
}

/* dst == src where the sizes are the same. */
static void test_in_place() {
    for (amp_dtype from : TYPES)
        for (amp_dtype to : TYPES) {
            if (amp_dtype_size(from) != amp_dtype_size(to)) continue;
            for (size_t shift : { 0, 3 }) {
                Tensor t(from, 4500, shift);
                t.fill(awkward);
                CHECK(amp_convert(amp_ref_of(t.at(), to), amp_ref_of(t.at(), from), t.n) == AMP_OK);
                CHECK(amp_cuda_convert(amp_ref_of(t.dev, to), amp_ref_of(t.dev, from), t.n,
                    nullptr) == AMP_OK);
                t.type = to;
                CHECK_BITS(t, 1);
            }
        }
}

/* The counter and the bits do not depend on the order of threads. */
static void test_orders() {
    Tensor src(AMP_F32, 9000), dst(AMP_F16, 9000), count(AMP_F32, 2);
    src.fill(awkward);
    check_repeatable([&]() {
        amp_convert_desc d = {};
        d.saturate = 1;
        d.saturated = (size_t*)count.dev;
        dst.poison();
        OK(cudaMemset(count.dev, 0, sizeof(size_t)));
        CHECK(amp_cuda_convert_with(amp_ref_of(dst.dev, AMP_F16), amp_ref_of(src.dev, AMP_F32), src.n, &d, nullptr) == AMP_OK);
        Bytes all = dst.get(), c = count.get();
        all.insert(all.end(), c.begin(), c.end());
        return all;
    });
}

/* On a stream of the caller's; type 0 is F32; pinned memory is fine. */
static void test_streams() {
    Tensor src(AMP_F32, 1000), dst(AMP_F16, 1000);
    cudaStream_t stream;
    Log log;
    float* pinned;
    src.fill(awkward);
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMallocHost((void**)&pinned, 1000 * sizeof *pinned));
    memcpy(pinned, src.at(), 1000 * sizeof *pinned);
    log.exec.stream = stream;
    CHECK(amp_convert(amp_ref_of(dst.at(), AMP_F16), amp_ref_of(src.at(), AMP_F32), 1000) == AMP_OK);
    CHECK(amp_cuda_convert(amp_ref_of(dst.dev, AMP_F16), amp_ref_of(src.dev, AMP_DTYPE_DEFAULT), 1000,
        &log.exec) == AMP_OK);
    CHECK(amp_cuda_synchronize(&log.exec) == AMP_OK);
    CHECK_BITS(dst, 1);
    dst.poison();
    CHECK(amp_cuda_convert(amp_ref_of(dst.dev, AMP_F16), amp_f32(pinned), 1000, &log.exec) == AMP_OK);
    CHECK(amp_cuda_synchronize(&log.exec) == AMP_OK);
    CHECK_BITS(dst, 1);
    CHECK(log.count == 0);
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(stream));
}

/* Pinned memory that the device may see at another address: only where it is the same one can a kernel read there. */
static void test_write_combined() {
    Tensor y(AMP_F16, 64);
    Log log;
    float* x;
    cudaPointerAttributes a;
    OK(cudaHostAlloc((void**)&x, 64 * sizeof *x, cudaHostAllocWriteCombined));
    memset(x, 0, 64 * sizeof *x);
    OK(cudaPointerGetAttributes(&a, x));
    if (a.devicePointer == x) CHECK(amp_cuda_convert(amp_ref_of(y.dev, AMP_F16), amp_f32(x), 64, &log.exec) == AMP_OK);
    else CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "src is host memory",
                       amp_cuda_convert(amp_ref_of(y.dev, AMP_F16), amp_f32(x), 64, &log.exec));
    CHECK(amp_cuda_synchronize(&log.exec) == AMP_OK);
    OK(cudaFreeHost(x));
}

static void test_errors() {
    Tensor x(AMP_F32, 64), y(AMP_F16, 64);
    Log log;
    amp_convert_desc d = {};
    const amp_exec* e = &log.exec;
    float host[64] = { 0 };
    const amp_dtype unknown = (amp_dtype)9;
    x.fill(ordinary);
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "dst is NULL", amp_cuda_convert(AMP_NONE, amp_ref_of(x.dev, AMP_F32),
        64, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "src is NULL", amp_cuda_convert(amp_ref_of(y.dev, AMP_F16), AMP_NONE,
        64, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "src is host memory", amp_cuda_convert(amp_ref_of(y.dev, AMP_F16),
        amp_f32(host), 64, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "dst is host memory", amp_cuda_convert(amp_f32(host),
        amp_ref_of(y.dev, AMP_F16), 64, e));
    CHECK_REFUSED(log, AMP_ERR_DTYPE, "f64", amp_cuda_convert(amp_ref_of(y.dev, AMP_F16),
        amp_ref_of(x.dev, AMP_F64), 32, e));
    CHECK_REFUSED(log, AMP_ERR_DTYPE, "f64", amp_cuda_convert(amp_ref_of(x.dev, AMP_F64),
        amp_ref_of(y.dev, AMP_F16), 32, e));
    CHECK_REFUSED(log, AMP_ERR_DTYPE, "9", amp_cuda_convert(amp_ref_of(y.dev, unknown),
        amp_ref_of(x.dev, AMP_F32), 64, e));
    CHECK_REFUSED(log, AMP_ERR_DTYPE, "9", amp_cuda_convert(amp_ref_of(y.dev, AMP_F16),
        amp_ref_of(x.dev, unknown), 64, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "elements",
                  amp_cuda_convert(amp_ref_of(y.dev, AMP_F16), amp_ref_of(x.dev, AMP_F32), SIZE_MAX / 2, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "overlap",
                  amp_cuda_convert(amp_ref_of((char*)x.dev + 16, AMP_F16), amp_ref_of(x.dev, AMP_F32), 32, e));
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "sizes differ", amp_cuda_convert(amp_ref_of(x.dev, AMP_F16),
        amp_ref_of(x.dev, AMP_F32), 64, e));
    d.rounding = (amp_rounding)2;
    CHECK_REFUSED(log, AMP_ERR_DESC, "rounding 2", amp_cuda_convert_with(amp_ref_of(y.dev, AMP_F16),
        amp_ref_of(x.dev, AMP_F32), 64, &d, e));
    d.rounding = AMP_ROUND_STOCHASTIC;
    CHECK_REFUSED(log, AMP_ERR_DESC, "stochastic", amp_cuda_convert_with(amp_ref_of(x.dev, AMP_F32),
        amp_ref_of(y.dev, AMP_F16), 64, &d, e));
    size_t counter = 0;
    d.saturated = &counter;
    CHECK_REFUSED(log, AMP_ERR_ARGUMENT, "desc.saturated is host memory",
                  amp_cuda_convert_with(amp_ref_of(y.dev, AMP_F16), amp_ref_of(x.dev, AMP_F32), 64, &d, e));
    CHECK_LAUNCH_FAILS(log, "amp_cuda_convert: CUDA error", 1,
                       amp_cuda_convert(amp_ref_of(y.dev, AMP_F16), amp_ref_of(x.dev, AMP_F32), 64, e));
    d.saturated = nullptr;
    CHECK_LAUNCH_FAILS(log, "amp_cuda_convert: CUDA error", 1,
                       amp_cuda_convert_with(amp_ref_of(y.dev, AMP_F16), amp_ref_of(x.dev, AMP_F32), 64, &d, e));
    for (unsigned char b : y.get()) CHECK(b == POISON);
    const long said = log.count, launched = launches();
    CHECK(amp_cuda_convert(AMP_NONE, AMP_NONE, 0, e) == AMP_OK);
    CHECK(log.count == said && launches() == launched);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_every_value);
    TEST(test_boundaries);
    TEST(test_sizes);
    TEST(test_grid_stride);
    TEST(test_in_place);
    TEST(test_orders);
    TEST(test_streams);
    TEST(test_write_combined);
    TEST(test_errors);
    TEST_END();
}
