/* tensor.h - the same elements on the host and on the device, for operators that the CPU's calls mirror: filled with
   awkward or ordinary values, compared bit by bit. And calls that are refused, that fail, that run in any order. */
#ifndef AMP_TEST_TENSOR_H
#define AMP_TEST_TENSOR_H

#include "device.h"

#include <string>

enum { POISON = 0x5b, TEST_GUARD = 256 };

/* n elements of a type on the host and on the device, where they begin `shift` elements off a multiple of 256 bytes.
   Both sides are poison at first. Before and behind the device's elements lies poison that must stay; under the
   emulator they end with their allocation, so that it sees every access behind them. */
struct Tensor {
    amp_dtype type;
    size_t n, bytes, before, behind;
    Bytes host;
    unsigned char* base;
    void* dev;

    Tensor(amp_dtype t, size_t count, size_t shift = 0)
        : type(t), n(count), bytes(count * amp_dtype_size(t)), before(TEST_GUARD + shift * amp_dtype_size(t)),
          behind(TEST_GUARD), host(bytes, (unsigned char)POISON), base(nullptr), dev(nullptr) {
#ifdef AMP_CUDA_EMU
        behind = 0;
#endif
        OK(cudaMalloc((void**)&base, before + bytes + behind));
        OK(cudaMemset(base, POISON, before + bytes + behind));
        dev = base + before;
    }
    ~Tensor() { cudaFree(base); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    void* at() { return host.data(); }
    float* floats() { return (float*)dev; }
    float value(const Bytes& b, size_t i) const { return ::get(b.data() + i * amp_dtype_size(type), type); }
    float operator[](size_t i) const { return value(host, i); }
    void set(size_t i, float v) { amp_convert(amp_ref_of(host.data() + i * amp_dtype_size(type), type),
        amp_f32(&v), 1); }
    /* The device receives the host's elements, or poison. */
    void send() {
        if (bytes) OK(cudaMemcpy(dev, host.data(), bytes, cudaMemcpyHostToDevice));
    }
    void poison() {
        if (bytes) OK(cudaMemset(dev, POISON, bytes));
        OK(cudaDeviceSynchronize());      /* a stream of its own need not wait for it */
    }
    /* The device's elements, when all work is done. */
    Bytes get() const {
        Bytes all(before + bytes + behind);
        OK(cudaDeviceSynchronize());
        OK(cudaMemcpy(all.data(), base, all.size(), cudaMemcpyDeviceToHost));
        size_t kept = 0;
        for (size_t i = 0; i < all.size(); i++)
            kept += (i < before || i >= before + bytes) && all[i] == (unsigned char)POISON;
        CHECK_MSG(kept == before + behind, "%zu bytes around a tensor were written to", before + behind - kept);
        return Bytes(all.begin() + (long)before, all.begin() + (long)(before + bytes));
    }
    std::vector<double> values() const {
        Bytes b = get();
        std::vector<double> v(n);
        for (size_t i = 0; i < n; i++) v[i] = (double)value(b, i);
        return v;
    }
    /* Calls f(i) for each element and sends the values. */
    template <typename F> Tensor& fill(F f) {
        for (size_t i = 0; i < n; i++) set(i, f(i));
        send();
        return *this;
    }
};

/* The first element in which the device differs from the host, or n. A NaN that arithmetic made has the bits of its
   processor: with nans = 0 any two are the same. */
static inline size_t first_difference(const Tensor& t, int nans) {
    const Bytes b = t.get();
    const size_t size = amp_dtype_size(t.type);
    for (size_t i = 0; i < t.n; i++) {
        if (memcmp(&b[i * size], &t.host[i * size], size) == 0) continue;
        const float v = t.value(b, i), w = t[i];
        if (nans || !std::isnan(v) || !std::isnan(w)) return i;
    }
    return t.n;
}
/* The device holds the host's bits. */
#define CHECK_BITS(t, nans)                                                                                      \
    do {                                                                                                         \
        const size_t at_ = first_difference(t, nans);                                                            \
        CHECK_MSG(at_ == (t).n, "%s element %zu of %zu: host %.9g, device %.9g", amp_dtype_name((t).type), at_,   \
                  (t).n, (double)(t)[at_], (t).values()[at_]);                                                   \
    } while (0)

/* Values that a conversion or a kernel may take amiss, then ordinary ones. */
static inline float awkward(size_t i) {
    static const float list[] = { 0.0f, -0.0f, INFINITY, -INFINITY, NAN, 65504.0f, 65519.0f, 65520.0f, -65536.0f,
                                  5.9604645e-8f, -2.9802322e-8f, 6.1035156e-5f, 1e-40f, -1e-45f, 3.4028235e38f,
                                  -3.3961776e38f, 1.17549435e-38f, 88.8f, -88.8f, 104.0f, 12.9f, -12.95f, 16.5f,
                                  -20.25f, 0.62499f, 1.0f, -1.0f };
    const size_t count = sizeof list / sizeof *list;
    return i % 64 < count ? list[i % 64] : 4.0f * test_uniform();
}
static inline float ordinary(size_t) { return test_uniform(); }

/* All values of a 16-bit type; float after float of any bits, many of them NaNs or near 1. */
static inline void fill_every_value(Tensor& t) {
    for (size_t i = 0; i < t.n; i++) {
        const uint16_t h = (uint16_t)i;
        memcpy(&t.host[2 * i], &h, sizeof h);
    }
    t.send();
}
static inline void fill_bits(Tensor& t, const std::vector<uint32_t>& bits) {
    memcpy(t.at(), bits.data(), t.bytes);
    t.send();
}
static inline std::vector<uint32_t> random_floats(size_t n) {
    std::vector<uint32_t> bits(n);
    for (uint32_t& u : bits) u = test_random() ^ test_random() << 8;
    for (size_t i = 0; i < n; i += 4) bits[i] = (bits[i] & 0x807fffffu) | 0x7f800000u;
    for (size_t i = 1; i < n; i += 4) bits[i] = (bits[i] & 0x87ffffffu) | 0x38000000u;
    return bits;
}

/* A logger that keeps its last sentence, and an exec with it. */
struct Log {
    amp_logger logger;
    amp_exec exec;
    amp_result code;
    long count;
    std::string text;

    Log() : logger(), exec(), code(AMP_OK), count(0) {
        logger.log = keep;
        logger.user_data = this;
        exec.logger = &logger;
    }
    static void keep(amp_result r, const char* sentence, void* self) {
        Log* log = (Log*)self;
        log->code = r;
        log->text = sentence;
        log->count++;
    }
};
/* The call is refused with this code and one sentence that has `words` in it, and launches nothing. */
#define CHECK_REFUSED(log, result, words, call)                                                                  \
    do {                                                                                                         \
        const long launched_ = launches(), said_ = (log).count;                                                  \
        const amp_result r_ = (call);                                                                            \
        CHECK_MSG(r_ == (result) && (log).code == (result), "%s", amp_result_string(r_));                        \
        CHECK_MSG((log).count == said_ + 1 && (log).text.find(words) != std::string::npos, "%s",                 \
                  (log).text.c_str());                                                                           \
        CHECK(launches() == launched_);                                                                          \
    } while (0)

/* Runs f under several orders of threads and blocks (on a GPU: again), and compares the bytes it returns. */
template <typename F> static void check_repeatable(F f) {
    const Bytes first = f();
    for (int order = 1; order < ORDERS; order++) {
        set_schedule(order);
        CHECK_MSG(f() == first, "order %d", order);
    }
    set_schedule(0);
}

#ifdef AMP_CUDA_EMU
/* The launch fails: the call says so. */
#define CHECK_LAUNCH_FAILS(log, words, k, call)                                                                  \
    do {                                                                                                         \
        emu_fail_launch_at(k);                                                                                   \
        const amp_result r_ = (call);                                                                            \
        CHECK_MSG(r_ == AMP_ERR_DEVICE && (log).code == AMP_ERR_DEVICE, "%s", amp_result_string(r_));            \
        CHECK_MSG((log).text.find(words) != std::string::npos, "%s", (log).text.c_str());                        \
        emu_fail_launch_at(0);                                                                                   \
        cudaGetLastError();                                                                                      \
    } while (0)
#else
#define CHECK_LAUNCH_FAILS(log, words, k, call) ((void)(log))
#endif

#endif
