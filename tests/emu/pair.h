/* pair.h - tensors that exist twice, for the CPU's scaler and optimizers and for those of the device, which must
   agree. */
#ifndef AMP_TEST_PAIR_H
#define AMP_TEST_PAIR_H

#include "device.h"

#include <deque>
#include <string>

#if defined(AMP_CUDA_EMU)
static inline long waits() { return emu_sync_count(); }
enum { BEHIND = 0 };     /* memory ends with the last element: the sanitizer sees a read beyond it */
#else
static inline long waits() { return 0; }
enum { BEHIND = 64 };
#endif
enum { POISON = 0xa5 };

/* What either side said last. */
static std::string cpu_said, gpu_said;
static void listen(amp_result, const char* sentence, void* to) { *static_cast<std::string*>(to) = sentence; }
static const amp_logger CPU_EAR = { listen, &cpu_said }, GPU_EAR = { listen, &gpu_said };

static inline amp_exec exec_on(cudaStream_t stream) {
    amp_exec e = {};
    e.stream = stream;
    e.logger = &GPU_EAR;
    return e;
}

/* A sentence without the name of the call. */
static inline std::string rest(const std::string& s) {
    size_t at = s.find(": ");
    return at == std::string::npos ? s : s.substr(at);
}
/* Both calls end alike, and refuse with the same words. */
#define SAME(cpu, gpu)                                                                                    \
    do {                                                                                                  \
        cpu_said.clear();                                                                                 \
        gpu_said.clear();                                                                                 \
        amp_result c_ = (cpu), g_ = (gpu);                                                                \
        CHECK_MSG(c_ == g_ && (c_ == AMP_OK || (!gpu_said.empty() && rest(cpu_said) == rest(gpu_said))),  \
                  "%d \"%s\" and %d \"%s\"", (int)c_, cpu_said.c_str(), (int)g_, gpu_said.c_str());       \
    } while (0)
/* The call is refused with a sentence that holds `words`. */
#define REFUSED(call, code, words)                                                                        \
    do {                                                                                                  \
        gpu_said.clear();                                                                                 \
        long before_ = launches();                                                                        \
        amp_result g_ = (call);                                                                           \
        CHECK_MSG(g_ == (code) && gpu_said.find(words) != std::string::npos && launches() == before_,     \
                  "%d \"%s\"", (int)g_, gpu_said.c_str());                                                \
    } while (0)

static inline bool one_in(unsigned n) { return test_random() % n == 0; }

/* n elements on the host and on the device, there `skew` elements behind an aligned address. */
struct Pair {
    amp_dtype type;
    size_t n, size, lead;
    Bytes host;
    unsigned char* memory;

    Pair(amp_dtype t, size_t count, size_t skew = 0)
        : type(t), n(count), size(amp_dtype_size(t)), lead(skew * size), host(n * size + 1), memory(nullptr) {
        Bytes poison(lead + n * size + BEHIND + 1, POISON);
        OK(cudaMalloc(&memory, lead + n * size + BEHIND));
        OK(cudaMemcpy(memory, poison.data(), lead + n * size + BEHIND, cudaMemcpyHostToDevice));
    }
    ~Pair() { OK(cudaFree(memory)); }
    Pair(const Pair&) = delete;
    Pair& operator=(const Pair&) = delete;

    void* here() { return host.data(); }
    void* there() const { return memory + lead; }
    void send() const { OK(cudaMemcpy(there(), host.data(), n * size, cudaMemcpyHostToDevice)); }
    void set(size_t i, float v) { amp_convert(amp_ref_of(&host[i * size], type), amp_f32(&v), 1); }
    void set_bits(size_t i, uint32_t u) {
        uint16_t h = (uint16_t)u;
        if (size == 4) memcpy(&host[i * size], &u, 4);
        else memcpy(&host[i * size], &h, 2);
    }
    bool is_nan(const unsigned char* at) const { return std::isnan(get(at, type)); }
    void fill(float scale) {
        for (size_t i = 0; i < n; i++) set(i, scale * test_uniform());
        send();
    }
    /* Multiples of 2^-9 below one half: their squares add up exactly, in any order. */
    void fill_exact(float scale) {
        for (size_t i = 0; i < n; i++) set(i, scale * (float)((int)(test_random() % 511) - 255) / 512.0f);
        send();
    }
    /* Do both hold the same bits, and is what lies around untouched? `any_nan`: one NaN is as good as another. */
    bool agree(bool any_nan = false) const {
        Bytes all(lead + n * size + BEHIND + 1, POISON);
        OK(cudaMemcpy(all.data(), memory, all.size() - 1, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < all.size(); i++)
            if ((i < lead || i >= lead + n * size) && all[i] != POISON) return false;
        for (size_t i = 0; i < n; i++) {
            const unsigned char *a = &host[i * size], *b = &all[lead + i * size];
            if (memcmp(a, b, size) != 0 && !(any_nan && is_nan(a) && is_nan(b))) return false;
        }
        return true;
    }
};

/* inf, -inf, a quiet and a signalling NaN. */
static inline uint32_t bad_bits(amp_dtype t, unsigned kind) {
    static const uint32_t bits[3][4] = { { 0x7f800000u, 0xff800000u, 0x7fc00123u, 0xff800001u },
                                         { 0x7c00u, 0xfc00u, 0x7e07u, 0xfc01u },
                                         { 0x7f80u, 0xff80u, 0x7fc3u, 0xff81u } };
    return bits[t - 1][kind % 4];
}

/* A list of tensors, twice. */
struct Pairs {
    std::deque<Pair> all;
    std::deque<std::string> names;
    std::vector<amp_tensor> here, there;
    amp_cuda_tensors* list;

    Pairs() : list(nullptr) {}
    ~Pairs() { amp_cuda_tensors_destroy(list); }
    Pairs(const Pairs&) = delete;
    Pairs& operator=(const Pairs&) = delete;

    void add(amp_dtype t, size_t n, size_t skew, const char* name = nullptr) {
        all.emplace_back(t, n, skew);
        names.emplace_back(name ? name : "");
        amp_tensor a = { n ? all.back().here() : nullptr, t, n, name ? names.back().c_str() : nullptr };
        here.push_back(a);
        a.data = n ? all.back().there() : nullptr;
        there.push_back(a);
    }
    void make(const amp_exec* exec) {
        CHECK(amp_cuda_tensors_create(&list, there.data(), (int)there.size(), exec) == AMP_OK && list);
    }
    int count() const { return (int)here.size(); }
    size_t elements() const {
        size_t n = 0;
        for (const Pair& t : all) n += t.n;
        return n;
    }
    void fill(float scale) { for (Pair& t : all) t.fill(scale); }
    void spoil(size_t tensor, size_t i, uint32_t bits) {
        all[tensor].set_bits(i, bits);
        all[tensor].send();
    }
    bool agree(bool any_nan = false) const {
        bool same = true;
        for (const Pair& t : all) same = t.agree(any_nan) && same;
        return same;
    }
};

/* Sums of n squares, formed in two orders: each is exact in double, each addition rounds once. Then a root and a
   product. */
static inline bool close_norm(double a, double b, size_t n) {
    if (std::isinf(a) || std::isinf(b)) return a == b;
    return std::fabs(a - b) <= ((double)n + 4) * std::ldexp(1, -53) * a;
}

/* What a window has found is the same; the norm of n elements within its bound. */
static inline bool same_info(const amp_overflow_info& a, const amp_overflow_info& b, size_t n) {
    return a.found_inf == b.found_inf && a.unsound == b.unsound && a.inf_count == b.inf_count && a.nan_count == b.nan_count
           && a.first_tensor == b.first_tensor && a.first_index == b.first_index
           && strcmp(a.first_name, b.first_name) == 0 && a.last_tensor == b.last_tensor
           && strcmp(a.last_name, b.last_name) == 0 && close_norm(a.norm, b.norm, n);
}
#define INFO_FORMAT "found %d inf %lu nan %lu first %d[%lu] \"%s\" last %d \"%s\" norm %.17g"
#define INFO_ARGS(i) (i).found_inf, (unsigned long)(i).inf_count, (unsigned long)(i).nan_count, (i).first_tensor, \
                     (unsigned long)(i).first_index, (i).first_name, (i).last_tensor, (i).last_name, (i).norm

/* The same scaler twice. */
struct Scalers {
    amp_scaler cpu;
    amp_cuda_scaler* gpu;
    amp_exec exec;
    amp_result limit;                   /* what the CPU's updates have returned since the last read */

    explicit Scalers(const amp_scaler_desc* desc, cudaStream_t stream = 0)
        : gpu(nullptr), exec(exec_on(stream)), limit(AMP_OK) {
        amp_scaler_desc d = {};
        if (desc) d = *desc;
        d.logger = &CPU_EAR;
        CHECK(amp_scaler_init(&cpu, &d) == AMP_OK);
        d.logger = &GPU_EAR;
        CHECK(amp_cuda_scaler_create(&gpu, &d, &exec) == AMP_OK && gpu);
    }
    ~Scalers() { amp_cuda_scaler_destroy(gpu); }
    Scalers(const Scalers&) = delete;
    Scalers& operator=(const Scalers&) = delete;

    void scale_loss() {
        amp_scaler_scale_loss(&cpu, 1.0f);
        CHECK(amp_cuda_scaler_loss_scale(gpu) == &amp_cuda_scaler_device_state(gpu)->scale_in_use);
    }
    void check_losses(const std::vector<float>& losses) {
        float* there = nullptr;
        for (float loss : losses) amp_scaler_scale_loss(&cpu, loss);
        OK(cudaMalloc(&there, losses.size() * sizeof(float)));
        OK(cudaMemcpy(there, losses.data(), losses.size() * sizeof(float), cudaMemcpyHostToDevice));
        CHECK(amp_cuda_scaler_check_loss(gpu, there, (int)losses.size(), &exec) == AMP_OK);
        OK(cudaStreamSynchronize((cudaStream_t)exec.stream));
        OK(cudaFree(there));
    }
    void check(Pairs& t) {
        SAME(amp_scaler_check(&cpu, t.here.data(), t.count(), nullptr), amp_cuda_scaler_check(gpu, t.list, &exec));
    }
    void unscale(Pairs& t) {
        SAME(amp_scaler_unscale(&cpu, t.here.data(), t.count(), nullptr),
             amp_cuda_scaler_unscale(gpu, t.list, &exec));
    }
    void into(Pairs& dst, Pairs& src, int accumulate) {
        SAME(amp_scaler_unscale_into(&cpu, dst.here.data(), src.here.data(), src.count(), accumulate, nullptr),
             amp_cuda_scaler_unscale_into(gpu, dst.list, src.list, accumulate, &exec));
    }
    void report() { SAME(amp_scaler_report_overflow(&cpu), amp_cuda_scaler_report_overflow(gpu, &exec)); }
    void update() {
        if (cpu.recorded) {
            amp_result r = amp_scaler_update(&cpu);
            if (limit == AMP_OK) limit = r;
            CHECK(amp_cuda_scaler_update(gpu, &exec) == AMP_OK);
        } else {
            SAME(amp_scaler_update(&cpu), amp_cuda_scaler_update(gpu, &exec));
        }
    }
    /* All of both is the same. n: elements of the largest list. */
    void agree(size_t n) {
        amp_scaler s;
        amp_result r = amp_cuda_scaler_read(gpu, &s, &exec);
        amp_scaler_state a = cpu.state, b = s.state;
        if (!cpu.recorded) {                    /* on the device the next window has begun */
            amp_scaler next = cpu;
            next.scaled = 0;
            amp_scaler_scale_loss(&next, 1.0f);
            a = next.state;
        }
        CHECK_MSG(r == limit, "%d, the CPU %d", (int)r, (int)limit);
        limit = AMP_OK;
        CHECK_MSG(memcmp(&a, &b, sizeof a) == 0,
                  "scale %g %g inverse %g %g in use %g %g tracker %d %d left %d %d found %d %d in a row %d %d "
                  "applied %ld %ld skipped %ld %ld",
                  (double)a.scale, (double)b.scale, (double)a.inverse, (double)b.inverse, (double)a.scale_in_use,
                  (double)b.scale_in_use, a.tracker, b.tracker, a.hysteresis_left, b.hysteresis_left, a.found_inf,
                  b.found_inf, a.consecutive_skips, b.consecutive_skips, (long)a.applied, (long)b.applied,
                  (long)a.skipped, (long)b.skipped);
        CHECK_MSG(same_info(cpu.info, s.info, n), INFO_FORMAT "; " INFO_FORMAT, INFO_ARGS(cpu.info), INFO_ARGS(s.info));
        CHECK(memcmp(&cpu.rule, &s.rule, sizeof s.rule) == 0 && s.recorded == cpu.recorded
              && s.list_count == cpu.list_count);
        for (int i = 0; i < s.list_count; i++)
            CHECK(s.lists[i].done == cpu.lists[i].done && close_norm(cpu.lists[i].norm, s.lists[i].norm, n));
    }
};

#if defined(AMP_CUDA_EMU)
/* Each call of the runtime fails once: an error with a sentence, nothing is left behind. `frees` of the calls may
   fail unnoticed. */
template <typename F> static void each_failure(F call, long frees) {
    size_t live = emu_live_bytes();
    long k = 0, unnoticed = 0, failures;
    do {
        failures = emu_failures();
        gpu_said.clear();
        emu_fail_any_call_at(++k);
        amp_result r = call();
        emu_fail_any_call_at(0);
        unnoticed += r == AMP_OK && emu_failures() != failures;
        CHECK_MSG((r == AMP_OK || emu_failures() != failures) && gpu_said.empty() == (r == AMP_OK),
                  "call %ld: %d \"%s\"", k, (int)r, gpu_said.c_str());
        CHECK(emu_live_bytes() == live && cudaPeekAtLastError() == cudaSuccess);
    } while (emu_failures() != failures && k < 100);
    CHECK_MSG(k > 3 && unnoticed == frees, "%ld calls, %ld failures went unnoticed", k, unnoticed);
}
#endif

#endif
