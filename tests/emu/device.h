/* device.h - what the tests of amp_cuda.cuh share: numbers that lie on the host and on the device, the last
   sentence of the library, the emulator's thread orders. They use the CUDA runtime alone, so that they run on the
   emulator (g++) and on a GPU (nvcc). */
#ifndef AMP_TEST_DEVICE_H
#define AMP_TEST_DEVICE_H

#include <cuda_runtime.h>

#include "../../amp_cuda.cuh"
#include "../test.h"

#include <cmath>
#include <vector>

#define OK(call) CHECK_MSG((call) == cudaSuccess, "%s", cudaGetErrorName(cudaPeekAtLastError()))

/* The operators. */
static const amp_backend* const cuda = amp_cuda_backend();

static const amp_dtype TYPES[3] = { AMP_F32, AMP_F16, AMP_BF16 };

typedef std::vector<unsigned char> Bytes;

static char last_sentence[512];
static void remember(amp_result, const char* sentence, void*) {
    snprintf(last_sentence, sizeof last_sentence, "%s", sentence);
}
static const amp_logger LOGGER = { remember, nullptr };

/* An exec of the default stream that remembers what the library says. */
static inline amp_exec quiet_exec(amp_cuda* context = nullptr) {
    amp_exec e = amp_cuda_exec(context);
    e.logger = &LOGGER;
    return e;
}

/* --- the orders of threads and blocks that a result must not depend on ---------------------- */

#if defined(AMP_CUDA_EMU)
static const int SCHEDULES[] = { EMU_FORWARD, EMU_REVERSE, EMU_DEEP, 1 };
static inline void set_schedule(int i) { emu_set_schedule(SCHEDULES[i]); }
static inline long launches() { return emu_launch_count(); }
static inline bool launched(long before, long count) { return launches() == before + count; }
static inline bool launched_some(long before) { return launches() > before; }
#else
static inline void set_schedule(int) {}
static inline long launches() { return 0; }
static inline bool launched(long, long) { return true; }      /* a GPU does not count */
static inline bool launched_some(long) { return true; }
#endif
enum { ORDERS = 4 };

/* True where two operands of this type go through the Tensor Cores. */
static inline bool on_tensor_cores(amp_dtype a, amp_dtype b) {
    static int major = 0;
    if (major == 0) OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    return a == b && (a == AMP_F16 || (a == AMP_BF16 && major >= 8));
}

/* --- numbers ------------------------------------------------------------------------------ */

/* WHOLE numbers from -4 to 4: every sum of their products is exact in FP32, in any order, so the CPU's bits are
   the only right ones. ANY: uniform in [-1, 1). SPECIAL: as WHOLE, a few of them infinite, NaN or -0. */
enum Numbers { WHOLE, ANY, SPECIAL };

static inline float whole() { return (float)((int)(test_random() % 9) - 4); }
static inline float number(Numbers kind) {
    static const float rare[4] = { INFINITY, -INFINITY, -NAN, -0.0f };
    if (kind == ANY) return test_uniform();
    if (kind == SPECIAL && test_random() % 40 == 0) return rare[test_random() % 4];
    return whole();
}

static inline float get(const unsigned char* at, amp_dtype t) {
    float v;
    amp_convert(amp_f32(&v), amp_ref_of(at, t), 1);
    return v;
}

/* Elements that can be written beside an array before it is told: 16 bytes or more, so that alignment stays. */
enum { GUARD = 8, FILL = 0xff };      /* a NaN in every type: what is read by mistake shows */

/* `count` elements on the host and on the device, `lead` of them before the first that counts. An input ends
   where its memory ends, so that a read beyond it is found; an output has guards on both sides. */
struct Array {
    amp_dtype type;
    size_t size, lead;
    Bytes host;
    unsigned char* device;

    Array(amp_dtype t, size_t count, bool output, size_t offset = 0)
        : type(t), size(amp_dtype_size(t)), lead(offset + (output ? GUARD : 0)),
          host((lead + count + (output ? GUARD : 0)) * size, FILL), device(nullptr) {
        OK(cudaMalloc(&device, host.empty() ? 1 : host.size()));
    }
    ~Array() { OK(cudaFree(device)); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    unsigned char* here(size_t i = 0) { return host.data() + (lead + i) * size; }
    unsigned char* there() const { return device + lead * size; }
    void set(size_t i, float v) { amp_convert(amp_ref_of(here(i), type), amp_f32(&v), 1); }
    float value(size_t i) { return get(here(i), type); }
    std::vector<double> doubles() const {
        std::vector<float> v(host.size() / size - lead);
        amp_convert(amp_f32(v.data()), amp_ref_of(host.data() + lead * size, type), v.size());
        return std::vector<double>(v.begin(), v.end());
    }
    void fill(size_t count, Numbers kind) { for (size_t i = 0; i < count; i++) set(i, number(kind)); }
    void upload() const { OK(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice)); }
    Bytes download() const {
        Bytes b(host.size());
        OK(cudaMemcpy(b.data(), device, b.size(), cudaMemcpyDeviceToHost));
        return b;
    }
};

/* Device memory of exactly this many bytes, from an address that is `skip` bytes behind an aligned one. */
struct Workspace {
    unsigned char* memory;
    Workspace(amp_exec* e, size_t bytes, size_t skip = 0) : memory(nullptr) {
        if (bytes == 0) return;
        OK(cudaMalloc(&memory, bytes + skip));
        OK(cudaMemset(memory, FILL, bytes + skip));
        e->workspace = memory + skip;
        e->workspace_size = bytes;
    }
    ~Workspace() { OK(cudaFree(memory)); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
};

/* How many elements of two images differ, guards and gaps included; *first is where. */
static inline size_t differences(const Bytes& a, const Bytes& b, size_t size, size_t* first) {
    size_t bad = 0;
    for (size_t i = a.size() / size; i-- > 0;)
        if (memcmp(&a[i * size], &b[i * size], size) != 0) bad++, *first = i;
    return bad;
}

/* The rounding unit of a type, and half the distance of its smallest numbers. */
static inline double unit_of(amp_dtype t) {
    return std::ldexp(1, t == AMP_F16 ? -11 : t == AMP_BF16 ? -8 : -24);
}
static inline double tiny_of(amp_dtype t) { return t == AMP_F16 ? std::ldexp(1, -25) : 0; }

/* A sum of k products in FP32, of which `total` is the sum of the magnitudes. One rounding for each product and
   each partial sum that comes in between, of a unit of 2^-23 each: Tensor Cores cut instead of rounding, and cut
   the products to the largest one of a group of four or more; so 3/2 k cuts at most (Fasi et al., Numerical
   behavior of NVIDIA tensor cores, 2021). A plain FP32 sum stays far within. */
static inline double sum_error(double k, double total) {
    double e = 1.5 * (k + 8) * std::ldexp(1, -23);
    return e / (1 - e) * total;
}

/* The library refused: the result, a sentence that holds `words`, and nothing was launched since `before`. */
static inline void check_refused(amp_result got, amp_result code, const char* words, long before) {
    CHECK_MSG(got == code, "%d instead of %d: \"%s\"", (int)got, (int)code, last_sentence);
    CHECK_MSG(strstr(last_sentence, words), "\"%s\" instead of \"%s\"", last_sentence, words);
    CHECK(launches() == before);
    last_sentence[0] = 0;
}

/* Each launch of a call fails once, on the emulator: the call says so, and works again after it. */
template <typename F> static void check_failures(F call) {
#if defined(AMP_CUDA_EMU)
    long k = 1;
    for (; k < 30; k++) {
        long before = emu_failures();
        last_sentence[0] = 0;
        emu_fail_launch_at(k);
        amp_result r = call();
        emu_fail_launch_at(0);
        if (emu_failures() == before) break;
        CHECK_MSG(r == AMP_ERR_DEVICE && strstr(last_sentence, "CUDA error"), "launch %ld: %d \"%s\"", k,
                  (int)r, last_sentence);
    }
    CHECK(k > 1 && k < 30);
#endif
    CHECK(call() == AMP_OK && cudaGetLastError() == cudaSuccess);
    OK(cudaDeviceSynchronize());
}

#endif
