/* The emulator's own test: what a kernel may do gives the right numbers in every order, what it may not do is told. */
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime.h>

#include "../test.h"

#include <functional>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

static const int SCHEDULES[] = { EMU_FORWARD, EMU_REVERSE, EMU_DEEP, 1, 2, 3 };
#define OK(call) CHECK_MSG((call) == cudaSuccess, "%s", cudaGetErrorName(cudaPeekAtLastError()))

template <typename... P, typename... A>
static cudaError_t launch(dim3 grid, dim3 block, size_t shared, cudaStream_t stream, void (*kernel)(P...), A... args) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

/* A device buffer with the test's bytes, and the way back. */
template <typename T> struct Buffer {
    T* p;
    size_t n;
    explicit Buffer(size_t count) : p(nullptr), n(count) { OK(cudaMalloc(&p, n * sizeof(T))); }
    explicit Buffer(const std::vector<T>& v) : Buffer(v.size()) {
        OK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Buffer() { cudaFree(p); }
    Buffer(const Buffer&) = delete;
    std::vector<T> get() const {
        std::vector<T> v(n);
        OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

/* Runs `f` in a child process; true if it ended with a report that has `words` in it. */
static bool reports(const char* words, std::function<void()> f) {
    int fd[2];
    if (pipe(fd)) return false;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        dup2(fd[1], 2);
        f();
        _Exit(0);
    }
    close(fd[1]);
    std::string text;
    char part[4096];
    for (ssize_t n; (n = read(fd[0], part, sizeof part)) > 0;) text.append(part, (size_t)n);
    close(fd[0]);
    int status = 0;
    waitpid(child, &status, 0);
    bool seen = WIFEXITED(status) && WEXITSTATUS(status) != 0 && text.find(words) != std::string::npos;
    if (!seen) printf("status %d, report: %s\n", status, text.substr(0, 2000).c_str());
    return seen;
}

/* ---- Threads --------------------------------------------------------------------------------------------- */

__global__ void index_kernel(unsigned* out) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] += block * 1000 + thread;
}

static void test_indices() {
    for (int schedule : SCHEDULES) {
        emu_set_schedule(schedule);
        Buffer<unsigned> out(std::vector<unsigned>(24 * 30));
        OK(launch(dim3(2, 3, 4), dim3(5, 3, 2), 0, 0, index_kernel, out.p));
        std::vector<unsigned> v = out.get();
        for (unsigned i = 0; i < v.size(); i++) CHECK(v[i] == i / 30 * 1000 + i % 30);
    }
}

/* The sum of a block by a tree in shared memory, with its barriers or without. */
__global__ void tree_kernel(const unsigned* in, unsigned* out, int barrier) {
    AMPI_SHARED(unsigned, s);
    unsigned t = threadIdx.x;
    s[t] = in[blockIdx.x * blockDim.x + t];
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        if (barrier) __syncthreads();
        if (t < half) s[t] += s[t + half];
    }
    if (t == 0) out[blockIdx.x] = s[0];
}

static std::vector<unsigned> run_tree(int schedule, int barrier, unsigned threads) {
    emu_set_schedule(schedule);
    std::vector<unsigned> in(4 * threads);
    for (size_t i = 0; i < in.size(); i++) in[i] = (unsigned)i * 7 % 101;
    Buffer<unsigned> from(in), to(4);
    OK(launch(4, threads, threads * sizeof(unsigned), 0, tree_kernel, from.p, to.p, barrier));
    return to.get();
}

static void test_barriers() {
    for (unsigned threads : { 2u, 64u, 1024u }) {
        std::vector<unsigned> expected(4);
        for (unsigned i = 0; i < 4 * threads; i++) expected[i / threads] += i * 7 % 101;
        for (int schedule : SCHEDULES) CHECK(run_tree(schedule, 1, threads) == expected);
    }
    CHECK(run_tree(EMU_FORWARD, 0, 64) != run_tree(EMU_FORWARD, 1, 64)); /* a missing barrier shows */
}

__global__ void votes_kernel(int* out) {
    int t = (int)threadIdx.x;
    if (t >= 90) return; /* later barriers do not wait for those that have gone */
    int any = __syncthreads_or(t == 17), none = __syncthreads_or(0), all = __syncthreads_and(t < 90);
    int some = __syncthreads_and(t != 17), count = __syncthreads_count(t % 3 == 0);
    unsigned odd = __ballot_sync(0xffffffffu, t & 1);
    out[t] = any == 1 && none == 0 && all == 1 && some == 0 && count == 30 && odd == (t < 64 ? 0xaaaaaaaau : 0x02aaaaaau)
             && __any_sync(0xffffffffu, t % 32 == 5) && !__all_sync(0xffffffffu, t % 32 == 5);
}

static void test_votes() {
    for (int schedule : SCHEDULES) {
        emu_set_schedule(schedule);
        Buffer<int> out(90);
        OK(launch(1, 100, 0, 0, votes_kernel, out.p));
        for (int good : out.get()) CHECK(good == 1);
    }
}

template <typename T> __global__ void shuffle_kernel(T* out) {
    unsigned lane = threadIdx.x;
    T mine = (T)(100 + lane);
    T* o = out + lane * 8;
    o[0] = __shfl_sync(0xffffffffu, mine, 3);
    o[1] = __shfl_sync(0xffffffffu, mine, 9, 8);
    o[2] = __shfl_up_sync(0xffffffffu, mine, 2);
    o[3] = __shfl_down_sync(0xffffffffu, mine, 5, 16);
    o[4] = __shfl_xor_sync(0xffffffffu, mine, 12);
    T sum = mine;
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    o[5] = sum;
    if (lane < 16) o[6] = __shfl_down_sync(0x0000ffffu, mine, 1); /* half a warp on its own */
    else o[6] = mine;
    __syncwarp();
    o[7] = __shfl_sync(0xffffffffu, mine, (int)lane + 1);
}

template <typename T> static void check_shuffles() {
    for (int schedule : SCHEDULES) {
        emu_set_schedule(schedule);
        Buffer<T> out(32 * 8);
        OK(launch(1, 32, 0, 0, shuffle_kernel<T>, out.p));
        std::vector<T> v = out.get();
        for (unsigned lane = 0; lane < 32; lane++) {
            const T* o = &v[lane * 8];
            CHECK(o[0] == (T)103 && o[1] == (T)(100 + lane / 8 * 8 + 1));
            CHECK(o[2] == (T)(100 + (lane < 2 ? lane : lane - 2)));
            CHECK(o[3] == (T)(100 + (lane % 16 + 5 < 16 ? lane + 5 : lane)));
            CHECK(o[4] == (T)(100 + (lane ^ 12)) && o[5] == (T)(32 * 100 + 31 * 16));
            if (lane != 15) CHECK(o[6] == (T)(100 + (lane < 15 ? lane + 1 : lane)));
            CHECK(o[7] == (T)(100 + (lane + 1) % 32));
        }
    }
}
static void test_shuffles() {
    check_shuffles<int>();
    check_shuffles<unsigned>();
    check_shuffles<float>();
    check_shuffles<double>();
    check_shuffles<unsigned long long>();
}

__global__ void atomics_kernel(unsigned* u, unsigned long long* w, float* f, int* i) {
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&u[0], id);
    atomicMax(&u[1], id);
    atomicMin(&u[2], id + 5);
    atomicOr(&u[3], 1u << id % 32);
    unsigned seen = u[4], before;
    do before = seen; while ((seen = atomicCAS(&u[4], before, before + 2)) != before);
    atomicAdd(w, (unsigned long long)id << 32);
    atomicAdd(f, 0.5f);
    atomicMin(&i[0], -(int)id);
    atomicMax(&i[1], (int)id - 50);
    __threadfence();
    if (atomicAdd(&u[5], 1u) == gridDim.x * blockDim.x - 1) atomicExch(&u[6], u[0]); /* the last one */
}

static void test_atomics() {
    for (int schedule : SCHEDULES) {
        emu_set_schedule(schedule);
        Buffer<unsigned> u({ 0, 0, 1000, 0, 0, 0, 0 });
        Buffer<unsigned long long> w(std::vector<unsigned long long>(1));
        Buffer<float> f(std::vector<float>(1));
        Buffer<int> i({ 0, -99 });
        OK(launch(3, 70, 0, 0, atomics_kernel, u.p, w.p, f.p, i.p));
        const unsigned sum = 210 * 209 / 2;
        CHECK(u.get() == std::vector<unsigned>({ sum, 209, 5, 0xffffffffu, 420, 210, sum }));
        CHECK(w.get()[0] == (unsigned long long)sum << 32 && f.get()[0] == 105.0f);
        CHECK(i.get() == std::vector<int>({ -209, 159 }));
    }
}

/* What depends on the order of blocks changes with it. */
__global__ void order_kernel(int* out, int* next) { out[(*next)++] = (int)blockIdx.x; }
static std::vector<int> block_order(int schedule) {
    emu_set_schedule(schedule);
    Buffer<int> out(10), next(std::vector<int>(1));
    OK(launch(10, 1, 0, 0, order_kernel, out.p, next.p));
    return out.get();
}
static void test_block_order() {
    std::vector<int> forward = block_order(EMU_FORWARD), reverse = block_order(EMU_REVERSE), random = block_order(7);
    CHECK(forward[0] == 0 && forward[9] == 9 && reverse[0] == 9 && reverse[9] == 0);
    CHECK(random != forward && random != reverse && random == block_order(7) && random != block_order(8));
}

/* ---- Intrinsics ------------------------------------------------------------------------------------------ */

static void test_intrinsics() {
    CHECK(__popc(0xf0f0u) == 8 && __popcll(~0ull) == 64 && __ffs(0) == 0 && __ffs(8) == 4 && __clz(0) == 32 && __clz(1) == 31);
    CHECK(__brev(1) == 0x80000000u && __brev(0x12345678) == 0x1e6a2c48 && __umul64hi(1ull << 63, 6) == 3);
    CHECK(__float_as_uint(1.0f) == 0x3f800000 && __int_as_float(0x40000000) == 2.0f && __double_as_longlong(1.0) == 0x3ffll << 52);
    CHECK(min(-1, 2) == -1 && min(3u, 2u) == 2 && max(1.0f, NAN) == 1.0f && __fmaf_rn(2, 3, 1) == 7 && __dmul_rn(0.5, 3) == 1.5);
}

static void test_conversions() {
    for (unsigned h = 0; h < 65536; h++) {
        unsigned e = h >> 10 & 31, m = h & 1023;
        float f = ampi_ptx_f32_from_f16((uint16_t)h);
        if (e == 31 && m) {
            CHECK(f != f && ampi_ptx_f16_from_f32(f) == 0x7fff);
            continue;
        }
        double expected = e == 31 ? (double)INFINITY : e ? std::ldexp(1024.0 + m, (int)e - 25) : std::ldexp((double)m, -24);
        CHECK((double)f == (h & 0x8000 ? -expected : expected) && std::signbit(f) == (h >= 0x8000));
        CHECK(ampi_ptx_f16_from_f32(f) == h);
        if (e == 31) continue;
        /* Halfway to the next: to even; a little less and a little more: down and up. */
        double next = e == 30 && m == 1023 ? 65536.0 : std::fabs((double)ampi_ptx_f32_from_f16((uint16_t)(h + 1)));
        float half = (float)(h & 0x8000 ? -(expected + next) / 2 : (expected + next) / 2);
        CHECK(ampi_ptx_f16_from_f32(half) == (h & 1 ? h + 1 : h));
        CHECK(ampi_ptx_f16_from_f32(std::nextafter(half, 0.0f)) == h);
        CHECK(ampi_ptx_f16_from_f32(std::nextafter(half, half * 2)) == h + 1);
    }
    CHECK(ampi_ptx_f16_from_f32(1e30f) == 0x7c00 && ampi_ptx_f16_from_f32(-1e-30f) == 0x8000);
    CHECK(ampi_ptx_f16x2_from_f32(1.0f, -2.0f) == 0xc0003c00u);
#if AMP_EMU_ARCH >= 800
    CHECK(ampi_ptx_bf16_from_f32(1.0f) == 0x3f80 && ampi_ptx_bf16_from_f32(-NAN) == 0x7fff);
    CHECK(ampi_ptx_bf16_from_f32(__uint_as_float(0x3f808000)) == 0x3f80);
    CHECK(ampi_ptx_bf16_from_f32(__uint_as_float(0x3f818000)) == 0x3f82);
    CHECK(ampi_ptx_bf16_from_f32(__uint_as_float(0x3f808001)) == 0x3f81);
    CHECK(ampi_ptx_bf16_from_f32(__uint_as_float(0x7f7fffff)) == 0x7f80);
#endif
}

/* ---- Matrix instructions --------------------------------------------------------------------------------- */

/* One warp's product of a 16 x K and a K x 8 matrix, both row-major in global memory. A goes through ldmatrix, B (its
   rows are k) through ldmatrix.trans, the result to where the documentation says each element is. */
template <int K, bool BF16> __global__ void product_kernel(const uint16_t* ga, const uint16_t* gb, float* gd) {
    AMPI_SHARED(uint16_t, s);
    uint16_t *sa = s, *sb = s + 16 * K;
    unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 16 * K; i += 32) sa[i] = ga[i];
    for (unsigned i = lane; i < K * 8; i += 32) sb[i] = gb[i];
    __syncthreads();
    float d[4];
    for (unsigned i = 0; i < 4; i++) d[i] = gd[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2];
#if AMP_EMU_ARCH >= 800
    if (K == 16) {
        uint32_t a[4], b2[2];
        ampi_ptx_ldmatrix_x4(a, sa + (lane % 16) * K + lane / 16 * 8);
        ampi_ptx_ldmatrix_x2_trans(b2, sb + lane % 16 * 8);
        if (BF16) ampi_ptx_mma_bf16(d, a, b2);
        else ampi_ptx_mma_f16(d, a, b2);
    }
#endif
    if (K == 8) {
        uint32_t a[2], b1;
        ampi_ptx_ldmatrix_x2(a, sa + (lane % 16) * K);
        b1 = sb[lane % 4 * 2 * 8 + lane / 4] | (uint32_t)sb[(lane % 4 * 2 + 1) * 8 + lane / 4] << 16;
        ampi_ptx_mma_f16_k8(d, a, b1);
    }
    for (unsigned i = 0; i < 4; i++) gd[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <int K, bool BF16> static void check_product() {
    std::vector<uint16_t> a(16 * K), bb(K * 8);
    std::vector<float> d(16 * 8), expected;
    auto value = [](uint16_t h) { return (double)(BF16 ? __uint_as_float((unsigned)h << 16) : ampi_ptx_f32_from_f16(h)); };
    auto half = [](float f) { return BF16 ? (uint16_t)(__float_as_uint(f) >> 16) : ampi_ptx_f16_from_f32(f); };
    for (uint16_t& h : a) h = half(test_uniform() * 4);
    for (uint16_t& h : bb) h = half(test_uniform() * 4);
    for (float& f : d) f = test_uniform();
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double sum = (double)d[(size_t)(i * 8 + j)];
            for (int k = 0; k < K; k++) sum += value(a[(size_t)(i * K + k)]) * value(bb[(size_t)(k * 8 + j)]);
            expected.push_back((float)sum);
        }
    for (int schedule : SCHEDULES) {
        emu_set_schedule(schedule);
        Buffer<uint16_t> da(a), db(bb);
        Buffer<float> dd(d);
        OK(launch(1, 32, (16 * K + K * 8) * 2, 0, product_kernel<K, BF16>, da.p, db.p, dd.p));
        std::vector<float> got = dd.get();
        for (size_t i = 0; i < got.size(); i++) CHECK_MSG(got[i] == expected[i], "%zu: %g %g", i, (double)got[i], (double)expected[i]);
    }
}

__global__ void ldmatrix_kernel(uint32_t* out) {
    AMPI_SHARED(uint16_t, s);
    unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) s[i] = (uint16_t)i;
    __syncwarp();
    uint32_t r[4], t[4], r2[2], t2[2];
    ampi_ptx_ldmatrix_x4(r, s + 8 * lane);
    ampi_ptx_ldmatrix_x4_trans(t, s + 8 * lane);
    ampi_ptx_ldmatrix_x2(r2, s + 8 * (31 - lane));
    ampi_ptx_ldmatrix_x2_trans(t2, s + 8 * (31 - lane));
    for (int j = 0; j < 4; j++) out[lane * 12 + j] = r[j], out[lane * 12 + 4 + j] = t[j];
    for (int j = 0; j < 2; j++) out[lane * 12 + 8 + j] = r2[j], out[lane * 12 + 10 + j] = t2[j];
}

static void test_matrix() {
    check_product<8, false>();
#if AMP_EMU_ARCH >= 800
    check_product<16, false>();
    check_product<16, true>();
#endif
    Buffer<uint32_t> out(32 * 12);
    OK(launch(1, 32, 512, 0, ldmatrix_kernel, out.p));
    std::vector<uint32_t> v = out.get();
    for (unsigned lane = 0; lane < 32; lane++) {
        unsigned row = lane / 4, column = lane % 4 * 2; /* element (row, column) of matrix j is 64 j + 8 row + column */
        for (unsigned j = 0; j < 4; j++) {
            unsigned e = 64 * j + 8 * row + column, t = 64 * j + 8 * column + row;
            CHECK(v[lane * 12 + j] == (e | (e + 1) << 16) && v[lane * 12 + 4 + j] == (t | (t + 8) << 16));
            if (j >= 2) continue;
            unsigned r = 8 * (31 - 8 * j - row) + column, c = 8 * (31 - 8 * j - column) + row;
            CHECK(v[lane * 12 + 8 + j] == (r | (r + 1) << 16) && v[lane * 12 + 10 + j] == (c | (c - 8) << 16));
        }
    }
}

/* ---- Asynchronous copies in a kernel --------------------------------------------------------------------- */

#if AMP_EMU_ARCH >= 800
/* Three groups of 16 bytes; the sum of the first is read after waiting until `left` groups are on their way. */
__global__ void async_kernel(const float* in, float* out, int left, int bytes) {
    AMPI_SHARED(float, s);
    for (int g = 0; g < 3; g++) {
        ampi_ptx_cp_async16(s + 4 * g, bytes ? in + 4 * g : nullptr, bytes);
        ampi_ptx_cp_async_commit();
    }
    if (left == 0) ampi_ptx_cp_async_wait<0>();
    if (left == 2) ampi_ptx_cp_async_wait<2>();
    for (int i = 0; i < 12; i++) out[i] = s[i];
}

static std::vector<float> run_async(int left, int bytes) {
    std::vector<float> in;
    for (int i = 0; i < 12; i++) in.push_back((float)(1 + i));
    Buffer<float> from(in), to(12);
    OK(launch(1, 1, 48, 0, async_kernel, from.p, to.p, left, bytes));
    return to.get();
}

static void test_async() {
    std::vector<float> all = run_async(0, 16), first = run_async(2, 16), none = run_async(3, 16), part = run_async(0, 8);
    for (int i = 0; i < 12; i++) {
        CHECK(all[(size_t)i] == (float)(1 + i));
        CHECK(part[(size_t)i] == (i % 4 < 2 ? (float)(1 + i) : 0.0f));
        CHECK(i < 4 ? first[(size_t)i] == (float)(1 + i) : std::isnan(first[(size_t)i]));
        CHECK(std::isnan(none[(size_t)i])); /* a forgotten wait shows */
        CHECK(run_async(0, 0)[(size_t)i] == 0.0f);
    }
}
#else
static void test_async() { TEST_SKIP("cp.async needs sm_80"); }
#endif

/* ---- Hopper ---------------------------------------------------------------------------------------------- */

#if AMP_EMU_ARCH >= 900
enum Fault {
    NO_FAULT, NOT_PUBLISHED, NO_BARRIER, TOO_MANY_BYTES, TOO_FEW_BYTES, ARRIVES_TWICE, WRONG_RANK, NO_WAIT, NO_STORE_WAIT,
    NO_ASYNC_FENCE, NO_MMA_FENCE, NO_MMA_WAIT, LANES_DISAGREE, BAD_DESCRIPTOR, ODD_REGISTERS
};
struct HopperTask {
    CUtensorMap in, out;
    uint16_t* raw;
    float* sums;
    int fault, trans;
};

/* Two blocks of a warpgroup each. Each fetches the box at (-8, 60, 1), copies its shared memory to raw and stores the
   box, block 1 with other numbers in its first eight rows. Then each multiplies the box by itself: 64 x 64 with 16 of
   k, and looks at what the other one has behind those rows. */
__global__ void hopper_kernel(const __grid_constant__ HopperTask t) {
    AMPI_SHARED(unsigned char, memory);
    unsigned char* box = memory + ((0u - ampi_ptx_shared(memory)) & 1023u);
    uint64_t* full = (uint64_t*)(box + 8192);
    const unsigned rank = blockIdx.x % 2, thread = threadIdx.x;
    if (thread == 0) {
        if (t.fault != NO_BARRIER) ampi_ptx_mbarrier_init(full, 1);
        if (t.fault != NOT_PUBLISHED) ampi_ptx_mbarrier_publish();
    }
    ampi_ptx_cluster_sync();
    if (thread == 0) {
        ampi_ptx_mbarrier_expect(full, t.fault == TOO_MANY_BYTES ? 9000 : t.fault == TOO_FEW_BYTES ? 100 : 8192);
        for (int i = 0; t.fault == ARRIVES_TWICE && i < 3; i++) ampi_ptx_mbarrier_arrive(full);
        ampi_ptx_tma_load(box, &t.in, full, -8, 60, 1);
    }
    if (t.fault != NO_WAIT) ampi_ptx_mbarrier_wait(full, 0);
    for (unsigned i = thread; i < 4096; i += 128) t.raw[rank * 4096 + i] = ((const uint16_t*)box)[i];
    __syncthreads();
    if (rank == 1 && thread < 32) {
        const uint32_t r[4] = { thread, thread + 100, thread + 200, thread + 300 };
        ampi_ptx_stmatrix_x4(box + thread % 8 * 128 + ((thread / 8) ^ (thread % 8)) * 16, r);
        if (t.fault != NO_ASYNC_FENCE) ampi_ptx_fence_async();
    }
    __syncthreads();
    if (thread == 0) {
        ampi_ptx_tma_store(&t.out, box, 0, 0, (int)rank);
        ampi_ptx_bulk_commit();
        if (t.fault != NO_STORE_WAIT) ampi_ptx_bulk_wait_read<0>();
    }
    float d[32];
    CHECK(ampi_ptx_shared(memory) >> 24 == rank); /* no part of a descriptor */
    uint64_t descriptor = (ampi_ptx_shared(box) & 0x3ffff) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
    if (t.fault == LANES_DISAGREE && thread == 7) descriptor++;
    if (t.fault == BAD_DESCRIPTOR) descriptor |= 1 << 14;
    if (t.fault == ODD_REGISTERS) ampi_ptx_take_registers<250>();
    if (t.fault != NO_MMA_FENCE) ampi_ptx_wgmma_fence();
    if (t.trans) ampi_ptx_wgmma<1, 1, 0>(d, descriptor, descriptor, 0);
    else ampi_ptx_wgmma<0, 0, 0>(d, descriptor, descriptor, 0);
    ampi_ptx_wgmma_commit();
    if (t.fault != NO_MMA_WAIT) ampi_ptx_wgmma_wait_all(d);
    for (unsigned i = 0; i < 32; i++) t.sums[(rank * 128 + thread) * 32 + i] = d[i];
    if (t.fault == NO_MMA_WAIT) ampi_ptx_wgmma_wait_all(d);
    ampi_ptx_cluster_sync();
    const float4 other = ampi_ptx_load_there(box + 1024 + 16 * thread, t.fault == WRONG_RANK ? 7 : 1 - rank);
    CHECK(memcmp(&other, box + 1024 + 16 * thread, sizeof other) == 0);
    ampi_ptx_cluster_sync();
}

/* Halves 0 to 15, exact in every sum; out of 100 rows of 70, two matrices. */
static float hopper_value(int x, int y, int z) { return (float)((x * 3 + y * 5 + z) % 16); }
static uint16_t hopper_half(int x, int y, int z) {
    bool inside = x >= 0 && x < 70 && y >= 0 && y < 100 && z >= 0 && z < 2;
    return ampi_ptx_f16_from_f32(inside ? hopper_value(x, y, z) : 0.0f);
}

struct HopperRun {
    Buffer<uint16_t> in, out, raw;
    Buffer<float> sums;
    cudaError_t error;
    HopperRun(int fault, int trans) : in(2 * 100 * 72), out(2 * 64 * 64), raw(2 * 4096), sums(2 * 128 * 32) {
        const cuuint64_t sides[3] = { 70, 100, 2 }, bytes[2] = { 144, 14400 }, out_sides[3] = { 64, 60, 2 };
        const cuuint64_t out_bytes[2] = { 128, 8192 };
        const cuuint32_t box[3] = { 64, 64, 1 }, every[3] = { 1, 1, 1 };
        std::vector<uint16_t> numbers;
        HopperTask t = {};
        for (int i = 0; i < 2 * 100 * 72; i++) numbers.push_back(hopper_half(i % 72, i / 72 % 100, i / 7200));
        OK(cudaMemcpy(in.p, numbers.data(), numbers.size() * 2, cudaMemcpyHostToDevice));
        CHECK(cuTensorMapEncodeTiled(&t.in, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, in.p, sides, bytes, box, every,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
        CHECK(cuTensorMapEncodeTiled(&t.out, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, out.p, out_sides, out_bytes, box, every,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                     CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
        t.raw = raw.p;
        t.sums = sums.p;
        t.fault = fault;
        t.trans = trans;
        cudaLaunchAttribute clusters = {};
        clusters.id = cudaLaunchAttributeClusterDimension;
        clusters.val.clusterDim.x = 2;
        clusters.val.clusterDim.y = clusters.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = { 2, 128, 1024 + 8192 + 8, nullptr, &clusters, 1 };
        error = cudaLaunchKernelEx(&config, hopper_kernel, t);
        if (error == cudaSuccess) error = cudaDeviceSynchronize();
    }
};

/* The box as it must be: row r holds chunk c at c ^ r % 8, zeros outside; in the output, rows below 60. */
static void check_box(const std::vector<uint16_t>& raw, const std::vector<uint16_t>& out) {
    for (int rank = 0; rank < 2; rank++)
        for (int y = 0; y < 64; y++)
            for (int x = 0; x < 64; x++) {
                uint16_t want = hopper_half(x - 8, y + 60, 1), stored = out[(size_t)((rank * 64 + y) * 64 + x)];
                CHECK(raw[(size_t)(rank * 4096 + y * 64 + ((x / 8) ^ (y % 8)) * 8 + x % 8)] == want);
                if (y >= 60) CHECK(stored == 0xffff); /* outside of the tensor: not written */
                else if (rank == 0 || y >= 8 || x >= 32) CHECK(stored == want);
                else CHECK(stored == (x % 2 ? 0 : y * 4 + x % 8 / 2 + x / 8 * 100)); /* stmatrix: a register's low half */
            }
}
/* Along k, row r of the box is row r of both operands; across k, column r. */
static void check_hopper_sums(const std::vector<float>& sums, int trans) {
    for (int thread = 0; thread < 128; thread++)
        for (int e = 0; e < 32; e++) {
            int i = thread / 32 * 16 + thread % 32 / 4 + e / 2 % 2 * 8, j = e / 4 * 8 + thread % 4 * 2 + e % 2;
            float sum = 0;
            for (int k = 0; k < 16; k++) {
                uint16_t a = trans ? hopper_half(i - 8, k + 60, 1) : hopper_half(k - 8, i + 60, 1);
                uint16_t b = trans ? hopper_half(j - 8, k + 60, 1) : hopper_half(k - 8, j + 60, 1);
                sum += ampi_ptx_f32_from_f16(a) * ampi_ptx_f32_from_f16(b);
            }
            CHECK_MSG(sums[(size_t)(thread * 32 + e)] == sum, "row %d column %d", i, j);
        }
}

static void test_hopper() {
    for (int schedule : SCHEDULES)
        for (int trans = 0; trans < 2; trans++) {
            emu_set_schedule(schedule);
            HopperRun r(NO_FAULT, trans);
            CHECK(r.error == cudaSuccess);
            check_box(r.raw.get(), r.out.get());
            check_hopper_sums(r.sums.get(), trans); /* of block 0, whose box is as it came */
        }
    emu_set_schedule(EMU_FORWARD);
    CHECK(std::isnan(HopperRun(NO_MMA_WAIT, 0).sums.get()[5]));
}

static void test_hopper_misuse() {
    static const struct { Fault fault; const char* words; } LIST[] = {
        { NOT_PUBLISHED, "without fence.mbarrier_init" }, { NO_BARRIER, "there is no barrier" },
        { TOO_MANY_BYTES, "wait at a barrier's phase of parity 0" }, { TOO_FEW_BYTES, "more bytes come" },
        { ARRIVES_TWICE, "more arrivals than the 1" }, { WRONG_RANK, "mapa" },
        { NO_STORE_WAIT, "before its bulk store has been read" }, { NO_ASYNC_FENCE, "not executed fence.proxy.async" },
        { NO_MMA_FENCE, "without wgmma.fence" }, { LANES_DISAGREE, "the lanes of a warp disagree" },
        { BAD_DESCRIPTOR, "bits of the descriptor" }, { ODD_REGISTERS, "250 registers" }
    };
    emu_set_schedule(EMU_FORWARD);
    for (const auto& l : LIST) CHECK_MSG(reports(l.words, [&] { HopperRun(l.fault, 0); }), "%s", l.words);
    CHECK(reports("", [] { /* a load nobody waits for brings poison, and is told at the end */
        HopperRun r(NO_WAIT, 0);
        _Exit(r.raw.get()[0] == 0x7ff4 ? 1 : 0);
    }));
}
#else
static void test_hopper() { TEST_SKIP("clusters need sm_90"); }
static void test_hopper_misuse() { TEST_SKIP("clusters need sm_90"); }
#endif

/* ---- The host -------------------------------------------------------------------------------------------- */

__global__ void add_kernel(float* p, int n, float value) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] += value;
}
static cudaError_t add(float* p, int n, float value, cudaStream_t stream) {
    return launch((unsigned)(n + 31) / 32, 32, 0, stream, add_kernel, p, n, value);
}

static void test_lazy() {
    cudaStream_t s;
    float* pinned;
    const int n = 40;
    OK(cudaStreamCreate(&s));
    OK(cudaMallocHost(&pinned, n * sizeof(float)));
    {
        Buffer<float> d(std::vector<float>(n, 1.0f));
        for (int i = 0; i < n; i++) pinned[i] = 3.0f;
        long syncs = emu_sync_count(), kernels = emu_kernel_count(), launches = emu_launch_count();
        OK(add(d.p, n, 2.0f, s));
        OK(cudaMemcpyAsync(pinned, d.p, n * sizeof(float), cudaMemcpyDeviceToHost, s));
        CHECK(pinned[0] == 3.0f && emu_sync_count() == syncs && emu_kernel_count() == kernels);
        CHECK(emu_launch_count() == launches + 1 && cudaStreamQuery(s) == cudaErrorNotReady);
        CHECK(cudaGetLastError() == cudaErrorNotReady && cudaGetLastError() == cudaSuccess);
        pinned[0] = 99.0f;
        OK(cudaStreamSynchronize(s));
        CHECK(pinned[0] == 3.0f && emu_sync_count() == syncs + 1 && cudaStreamQuery(s) == cudaSuccess);
        /* A pinned source is read when the copy runs, a pageable one at the call. */
        OK(cudaMemcpyAsync(d.p, pinned, n * sizeof(float), cudaMemcpyHostToDevice, s));
        for (int i = 0; i < n; i++) pinned[i] = 5.0f;
        OK(cudaStreamSynchronize(s));
        CHECK(d.get()[7] == 5.0f);
        std::vector<float> pageable(n, 6.0f);
        OK(cudaMemcpyAsync(d.p, pageable.data(), n * sizeof(float), cudaMemcpyHostToDevice, s));
        pageable.assign(n, 7.0f);
        CHECK(d.get()[7] == 6.0f); /* the legacy stream's copy comes after the blocking stream's */
    }
    OK(cudaFreeHost(pinned));
    OK(cudaStreamDestroy(s));
    CHECK(cudaStreamSynchronize(s) == cudaErrorInvalidResourceHandle && cudaGetLastError());
}

static void test_events() {
    cudaStream_t s, t;
    cudaEvent_t e;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    {
        Buffer<float> d(std::vector<float>(1, 1.0f)), copied(1);
        OK(cudaDeviceSynchronize());
        OK(add(d.p, 1, 2.0f, s));
        OK(cudaMemcpyAsync(copied.p, d.p, 4, cudaMemcpyDeviceToDevice, t)); /* no event: it may come first */
        OK(cudaStreamSynchronize(t));
        CHECK(copied.get()[0] == 1.0f);
        OK(cudaEventRecord(e, s));
        OK(cudaStreamWaitEvent(t, e));
        OK(cudaMemcpyAsync(copied.p, d.p, 4, cudaMemcpyDeviceToDevice, t));
        CHECK(cudaEventQuery(e) == cudaErrorNotReady && cudaGetLastError());
        OK(cudaStreamSynchronize(t));
        CHECK(cudaEventQuery(e) == cudaSuccess && copied.get()[0] == 3.0f);
    }
    OK(cudaEventDestroy(e));
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
}

/* A fork and a join, an argument's value, a memset and a copy: replayed, in any order that its edges allow. */
static void test_graph() {
    for (int schedule : SCHEDULES) {
        emu_set_schedule(schedule);
        cudaStream_t s, t;
        cudaEvent_t fork_event, join_event;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
        OK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
        OK(cudaEventCreate(&fork_event));
        OK(cudaEventCreate(&join_event));
        Buffer<float> a(std::vector<float>(8, 1.0f)), c(8), total(std::vector<float>(8));
        cudaStreamCaptureStatus status;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        OK(add(a.p, 8, 1.0f, s));
        OK(cudaEventRecord(fork_event, s));
        OK(cudaStreamWaitEvent(t, fork_event, 0));
        OK(cudaMemsetAsync(c.p, 0, 32, t));
        OK(add(c.p, 8, 10.0f, t));
        OK(cudaStreamIsCapturing(t, &status));
        CHECK(status == cudaStreamCaptureStatusActive);
        OK(cudaEventRecord(join_event, t));
        OK(add(a.p, 8, 1.0f, s));
        OK(cudaStreamWaitEvent(s, join_event, 0));
        OK(cudaMemcpyAsync(total.p, c.p, 16, cudaMemcpyDeviceToDevice, s));
        OK(cudaMemcpyAsync(total.p + 4, a.p, 16, cudaMemcpyDeviceToDevice, s));
        OK(cudaStreamEndCapture(s, &graph));
        size_t nodes;
        OK(cudaGraphGetNodes(graph, nullptr, &nodes));
        CHECK(nodes == 6);
        OK(cudaGraphInstantiate(&exec, graph, 0));
        OK(cudaGraphDestroy(graph));
        CHECK(a.get()[0] == 1.0f);
        for (int i = 1; i <= 3; i++) {
            OK(cudaGraphLaunch(exec, s));
            OK(cudaStreamSynchronize(s));
            CHECK(total.get()[0] == 10.0f && total.get()[4] == 1.0f + 2.0f * (float)i);
        }
        OK(cudaGraphExecDestroy(exec));
        OK(cudaEventDestroy(fork_event));
        OK(cudaEventDestroy(join_event));
        OK(cudaStreamDestroy(s));
        OK(cudaStreamDestroy(t));
    }
}

/* Each of these calls fails during a capture, with this error, and spoils it. */
static void test_illegal_in_capture() {
    cudaStream_t s, other;
    cudaEvent_t captured, outside;
    OK(cudaStreamCreate(&s));
    OK(cudaStreamCreate(&other));
    OK(cudaEventCreate(&captured));
    OK(cudaEventCreate(&outside));
    OK(cudaEventRecord(outside, other));
    Buffer<float> d(std::vector<float>(8));
    float host[8] = { 0 };
    void* p;
    struct { std::function<cudaError_t()> call; cudaError_t error; } cases[] = {
        { [&] { return cudaStreamSynchronize(s); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaDeviceSynchronize(); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaStreamQuery(s); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaMalloc(&p, 4); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaMallocAsync(&p, 4, s); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaFree(d.p); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaMemcpyAsync(d.p, host, 32, cudaMemcpyHostToDevice, s); }, cudaErrorStreamCaptureUnsupported },
        { [&] { return cudaMemset(d.p, 0, 32); }, cudaErrorStreamCaptureImplicit },
        { [&] { return add(d.p, 8, 1.0f, 0); }, cudaErrorStreamCaptureImplicit },
        { [&] { return cudaMemcpy(host, d.p, 32, cudaMemcpyDeviceToHost); }, cudaErrorStreamCaptureImplicit },
        { [&] { return cudaEventRecord(captured, s) ? cudaSuccess : cudaEventQuery(captured); }, cudaErrorCapturedEvent },
        { [&] { return cudaStreamWaitEvent(s, outside, 0); }, cudaErrorStreamCaptureIsolation },
    };
    for (auto& c : cases) {
        cudaGraph_t graph;
        OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
        OK(add(d.p, 8, 1.0f, s));
        cudaError_t error = c.call();
        CHECK_MSG(error == c.error, "%d: %s, not %s", (int)(&c - cases), cudaGetErrorName(error), cudaGetErrorName(c.error));
        CHECK(add(d.p, 8, 1.0f, s) == cudaErrorStreamCaptureInvalidated);
        CHECK(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureInvalidated && !graph);
        CHECK(cudaGetLastError() == cudaErrorStreamCaptureInvalidated);
    }
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    OK(cudaMalloc(&p, 4));
    OK(cudaEventRecord(captured, s));
    OK(cudaStreamWaitEvent(other, captured, 0));
    OK(add(d.p, 8, 1.0f, other));
    CHECK(cudaStreamEndCapture(s, &graph) == cudaErrorStreamCaptureUnjoined && cudaGetLastError());
    CHECK(cudaStreamEndCapture(s, &graph) == cudaErrorIllegalState && cudaGetLastError());
    OK(cudaFree(p));
    CHECK(d.get()[0] == 0.0f);
    OK(cudaEventDestroy(captured));
    OK(cudaEventDestroy(outside));
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(other));
}

static void test_limits() {
    Buffer<float> d(std::vector<float>(1));
    int most = 0, blocks = 0;
    OK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    CHECK(launch(1, 1025, 0, 0, add_kernel, d.p, 1, 1.0f) == cudaErrorInvalidConfiguration);
    CHECK(launch(0, 32, 0, 0, add_kernel, d.p, 1, 1.0f) == cudaErrorInvalidConfiguration);
    CHECK(launch(dim3(1, 65536), 32, 0, 0, add_kernel, d.p, 1, 1.0f) == cudaErrorInvalidConfiguration);
    CHECK(launch(1, 32, 49153, 0, add_kernel, d.p, 1, 1.0f) == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(add_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 1) == cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(add_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    OK(launch(1, 32, (size_t)most, 0, add_kernel, d.p, 1, 1.0f));
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add_kernel, 256, (size_t)most));
    CHECK(blocks == 1 && d.get()[0] == 1.0f);
    CHECK(cudaMemcpy(d.p, &most, 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);   /* past its end */
    CHECK(cudaMemcpy(d.p, &most, 4, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue); /* not from the device */
    CHECK(cudaFree(&most) == cudaErrorInvalidValue && cudaGetLastError() == cudaErrorInvalidValue);
    cudaPointerAttributes attributes;
    OK(cudaPointerGetAttributes(&attributes, d.p));
    CHECK(attributes.type == cudaMemoryTypeDevice && attributes.devicePointer == d.p);
    OK(cudaPointerGetAttributes(&attributes, &most));
    CHECK(attributes.type == cudaMemoryTypeUnregistered);
    emu_move_to_device(d.p, 1);
    OK(cudaPointerGetAttributes(&attributes, d.p));
    CHECK(attributes.type == cudaMemoryTypeDevice && attributes.device == 1 && !attributes.devicePointer);
}

static void test_counts_and_failures() {
    size_t live = emu_live_bytes();
    long allocs = emu_alloc_count(), failures = emu_failures();
    float *p = nullptr, *q = nullptr;
    emu_fail_alloc_at(2);
    OK(cudaMalloc(&p, 100));
    CHECK(cudaMalloc(&q, 100) == cudaErrorMemoryAllocation && !q && cudaGetLastError());
    CHECK(emu_live_bytes() == live + 100 && emu_alloc_count() == allocs + 1);
    OK(cudaFreeAsync(p, 0));
    CHECK(cudaFreeAsync(p, 0) == cudaErrorInvalidValue && cudaGetLastError());
    OK(cudaDeviceSynchronize());
    CHECK(emu_live_bytes() == live && emu_failures() == failures + 1);
    Buffer<float> d(std::vector<float>(1));
    emu_fail_launch_at(1);
    CHECK(add(d.p, 1, 1.0f, 0) == cudaErrorLaunchOutOfResources && cudaGetLastError());
    OK(add(d.p, 1, 1.0f, 0));
    emu_fail_any_call_at(2);
    OK(cudaDeviceSynchronize());
    CHECK(cudaDeviceSynchronize() == cudaErrorUnknown && cudaGetLastError() == cudaErrorUnknown);
    CHECK(d.get()[0] == 1.0f && emu_failures() == failures + 3);
    int count = -1;
    emu_set_device_count(0);
    CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0 && cudaGetLastError());
    emu_set_device_count(1);
    emu_set_memory_limit(emu_live_bytes() + 50);
    CHECK(cudaMalloc(&q, 51) == cudaErrorMemoryAllocation && cudaGetLastError());
    emu_set_memory_limit((size_t)4 << 30);
    emu_set_eager(1);
    long kernels = emu_kernel_count();
    OK(add(d.p, 1, 1.0f, 0));
    CHECK(emu_kernel_count() == kernels + 1);
    emu_set_eager(0);
}

static void test_cublas() {
    const int m = 5, n = 7, k = 9, batches = 2;
    cublasHandle_t handle;
    CHECK(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    std::vector<uint16_t> a(m * k * batches), bb(k * n * batches);
    std::vector<float> c(m * n * batches);
    for (uint16_t& h : a) h = ampi_ptx_f16_from_f32(test_uniform());
    for (uint16_t& h : bb) h = ampi_ptx_f16_from_f32(test_uniform());
    for (float& f : c) f = test_uniform();
    float alpha = 2, beta = 0.5f;
    for (int transposed = 0; transposed < 4; transposed++) {
        bool ta = transposed & 1, tb = transposed & 2;
        Buffer<uint16_t> da(a), db(bb);
        Buffer<float> dc(c);
        CHECK(cublasGemmStridedBatchedEx(handle, ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k,
                                         &alpha, da.p, CUDA_R_16F, ta ? k : m, m * k, db.p, CUDA_R_16F, tb ? n : k,
                                         k * n, &beta, dc.p, CUDA_R_32F, m, m * n, batches, CUBLAS_COMPUTE_32F,
                                         CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
        std::vector<float> got = dc.get();
        for (int batch = 0; batch < batches; batch++)
            for (int i = 0; i < m; i++)
                for (int j = 0; j < n; j++) {
                    double sum = 0;
                    for (int l = 0; l < k; l++)
                        sum += (double)ampi_ptx_f32_from_f16(a[(size_t)(batch * m * k + (ta ? i * k + l : l * m + i))])
                               * (double)ampi_ptx_f32_from_f16(bb[(size_t)(batch * k * n + (tb ? l * n + j : j * k + l))]);
                    size_t at = (size_t)(batch * m * n + j * m + i);
                    CHECK(got[at] == (float)(2 * sum + 0.5 * (double)c[at]));
                }
    }
    CHECK(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &alpha, nullptr, CUDA_R_16F, m - 1, nullptr,
                       CUDA_R_16F, k, &beta, nullptr, CUDA_R_32F, m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT)
          == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(cublasDestroy(handle) == CUBLAS_STATUS_SUCCESS && cublasDestroy(handle) == CUBLAS_STATUS_NOT_INITIALIZED);
}

/* ---- Misuse ---------------------------------------------------------------------------------------------- */

__global__ void divergent_kernel() {
    if (threadIdx.x < 20) __syncthreads();
    else
        __syncthreads();
}
__global__ void absent_lane_kernel(int* p) {
    if (threadIdx.x) *p = __shfl_sync(0xffffffffu, 1, 0);
    else __syncthreads();
}
__global__ void foreign_mask_kernel(int* p) { *p = __shfl_sync(0xeu, 1, 1); }
__global__ void overrun_kernel() { AMPI_SHARED(char, s); s[threadIdx.x] = 0; }
__global__ void read_kernel(const float* p, float* out) { *out = p[threadIdx.x]; }
__global__ void rows_kernel(uint32_t* out, unsigned stride) {
    AMPI_SHARED(char, s);
    uint32_t r[4];
    ampi_ptx_ldmatrix_x4(r, s + stride * threadIdx.x);
    out[0] = r[0];
}
__global__ void partial_warp_kernel(float* out) {
    float d[4] = { 0 };
    uint32_t a[2] = { 0 };
    if (threadIdx.x == 31) return;
    ampi_ptx_mma_f16_k8(d, a, 0);
    out[0] = d[0];
}
__global__ void deep_kernel(int* p) {
    volatile char big[300000];
    big[threadIdx.x] = 1;
    *p = big[0];
}

static void test_misuse() {
    Buffer<float> d(std::vector<float>(32));
    float* p = d.p;
    auto run = [](cudaError_t launched) { if (!launched) cudaDeviceSynchronize(); };
    emu_set_schedule(EMU_FORWARD);
    CHECK(reports("a barrier that not all threads reach", [&] { run(launch(1, 32, 0, 0, divergent_kernel)); }));
    CHECK(reports("1 of 32 threads (first: 0) wait at __syncthreads", [&] { run(launch(1, 32, 0, 0, absent_lane_kernel, (int*)p)); }));
    CHECK(reports("does not name the calling lane", [&] { run(launch(1, 32, 0, 0, foreign_mask_kernel, (int*)p)); }));
    CHECK(reports("is not 16-byte aligned", [&] { run(launch(1, 32, 512, 0, rows_kernel, (uint32_t*)p, 8u)); }));
    CHECK(reports("is not in the block's 496 bytes of shared memory", [&] {
        run(launch(1, 32, 496, 0, rows_kernel, (uint32_t*)p, 16u));
    }));
    CHECK(reports("needs all 32 lanes", [&] { run(launch(1, 32, 0, 0, partial_warp_kernel, p)); }));
    CHECK(reports("outside of a kernel", [&] { __syncthreads(); }));
#ifdef __SANITIZE_ADDRESS__
    CHECK(reports("heap-buffer-overflow", [&] { run(launch(1, 33, 32, 0, overrun_kernel)); }));
    CHECK(reports("heap-buffer-overflow", [&] { run(launch(1, 33, 0, 0, read_kernel, (const float*)p, p)); }));
    CHECK(reports("stack-overflow", [&] { run(launch(1, 1, 0, 0, deep_kernel, (int*)p)); }));
    CHECK(reports("use-after-poison", [&] { *p = 1.0f; }));
    CHECK(reports("use-after-poison", [&] { memset(p, 0, 4); }));
    CHECK(reports("heap-use-after-free", [&] {
        cudaFree(p);
        run(launch(1, 1, 0, 0, read_kernel, (const float*)p, p));
    }));
#endif
}

static void test_all_is_freed() { CHECK(emu_live_bytes() == 0 && emu_live_objects() == 0); }

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_indices);
    TEST(test_barriers);
    TEST(test_votes);
    TEST(test_shuffles);
    TEST(test_atomics);
    TEST(test_block_order);
    TEST(test_intrinsics);
    TEST(test_conversions);
    TEST(test_matrix);
    TEST(test_async);
    TEST(test_hopper);
    TEST(test_hopper_misuse);
    TEST(test_lazy);
    TEST(test_events);
    TEST(test_graph);
    TEST(test_illegal_in_capture);
    TEST(test_limits);
    TEST(test_counts_and_failures);
    TEST(test_cublas);
    TEST(test_misuse);
    TEST(test_all_is_freed);
    TEST_END();
}
