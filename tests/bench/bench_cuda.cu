/* bench_cuda.cu - amp_cuda.cuh on a GPU. `sh tests/cuda.sh bench` runs it part by part; bench_cuda.py puts PyTorch beside.

     bench_cuda [--tiny] PART [ROW...]     rows of training: those that begin so; none = all
       gemm     products beside cuBLAS
       passes   unscale and Adam beside a copy on the device
       steps    training: a step as single launches and as a graph, its memory, its share of the largest product's speed
       shares   where the time of a step goes: an event before and one behind each operator
       attention   forward and backward, causal, by sizes and types
       bits     weights and moments after some steps: single launches, once more, and a graph; equal to the byte

   Medians; what is compared runs in turns, on the same buffers, in one process. Buffers hold random numbers, and products
   go through several sets of them, together larger than the L2 cache. A row that fails is said, and the next one comes.
   --tiny is for trying the program where a GPU is emulated: small sizes, one turn. */
#include "../../amp_cuda.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

static bool tiny;
static size_t sized(size_t n) { return tiny ? n / 65536 + 64 : n; }
static size_t beyond_l2() { return sized((size_t)256 << 20); }
static int turns() { return tiny ? 1 : 15; }

#define NEED(call)                                                                                                  \
    do {                                                                                                            \
        if ((call) != 0)                                                                                            \
            throw std::runtime_error(std::string(#call) + " in line " + std::to_string(__LINE__) + " failed: " +    \
                                     cudaGetErrorString(cudaPeekAtLastError()));                                    \
    } while (0)

typedef std::function<void(size_t)> Call;      /* works on that set of buffers */

/* Microseconds of one call, the median of several turns of `repeat` calls each on `stream`; the candidates take turns. */
static std::vector<double> measure(const std::vector<Call>& calls, size_t sets, size_t repeat, cudaStream_t stream = 0) {
    std::vector<std::vector<double>> times(calls.size());
    std::vector<double> medians;
    cudaEvent_t start, end;
    size_t set = 0;
    NEED(cudaEventCreate(&start));
    NEED(cudaEventCreate(&end));
    for (int turn = tiny ? 0 : -2; turn < turns(); turn++)      /* the first two warm up */
        for (size_t c = 0; c < calls.size(); c++) {
            float ms;
            NEED(cudaEventRecord(start, stream));
            for (size_t i = 0; i < repeat; i++) calls[c](set++ % sets);
            NEED(cudaEventRecord(end, stream));
            NEED(cudaEventSynchronize(end));
            NEED(cudaEventElapsedTime(&ms, start, end));
            if (turn >= 0) times[c].push_back(1e3 * (double)ms / (double)repeat);
        }
    for (std::vector<double>& t : times) {
        std::sort(t.begin(), t.end());
        medians.push_back(t[t.size() / 2]);
    }
    NEED(cudaEventDestroy(start));
    NEED(cudaEventDestroy(end));
    return medians;
}
/* `count` calls on sets 0, 1, ..., recorded as a graph: what the GPU takes, without the time of launches. */
struct Recorded {
    cudaGraphExec_t ready;
    Recorded(const Call& call, size_t sets, size_t count, cudaStream_t stream) : ready(nullptr) {
        cudaGraph_t graph;
        NEED(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (size_t i = 0; i < count; i++) call(i % sets);
        NEED(cudaStreamEndCapture(stream, &graph));
        NEED(cudaGraphInstantiateWithFlags(&ready, graph, 0));
        NEED(cudaGraphDestroy(graph));
    }
    ~Recorded() { cudaGraphExecDestroy(ready); }
    Recorded(const Recorded&) = delete;
    Recorded& operator=(const Recorded&) = delete;
};

/* As many calls in a turn as take some 2 ms together. */
static size_t repeats(double microseconds) { return tiny ? 1 : 1 + (size_t)(2000.0 / (microseconds + 1.0)); }

/* --- memory ---------------------------------------------------------------------------------- */

struct Memory {
    void* p;
    explicit Memory(size_t bytes) : p(nullptr) { NEED(cudaMalloc(&p, bytes ? bytes : 1)); }
    ~Memory() { cudaFree(p); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
};
/* Uniform in [-1, 1), as the library's own kernel makes them. */
static void randomize(void* p, amp_dtype t, size_t n, uint64_t seed) {
    std::vector<float> host(std::min(n, (size_t)1 << 20));
    amp_exec e = {};
    uint64_t state = seed * 2654435761u + 88172645463325252u;
    for (float& v : host) {
        state ^= state << 13; state ^= state >> 7; state ^= state << 17;
        v = (float)(state >> 40) * (1.0f / 8388608.0f) - 1.0f;
    }
    Memory part(host.size() * sizeof(float));
    NEED(cudaMemcpy(part.p, host.data(), host.size() * sizeof(float), cudaMemcpyHostToDevice));
    for (size_t i = 0; i < n; i += host.size())
        NEED(amp_cuda_convert(amp_ref_of((char*)p + i * amp_dtype_size(t), t), amp_ref_of(part.p, AMP_F32),
            std::min(host.size(), n - i), &e));
    NEED(cudaDeviceSynchronize());
}

/* --- products -------------------------------------------------------------------------------- */

struct Shape { size_t m, n, k; int ta, tb; amp_dtype in, out; };

/* |x - y| / |y| over all elements. */
static double distance(const void* x, const void* y, amp_dtype t, size_t n) {
    std::vector<char> bytes(n * amp_dtype_size(t));
    std::vector<float> a(n), b(n);
    double error = 0, size = 0;
    NEED(cudaMemcpy(bytes.data(), x, bytes.size(), cudaMemcpyDeviceToHost));
    NEED(amp_convert(amp_f32(a.data()), amp_ref_of(bytes.data(), t), n));
    NEED(cudaMemcpy(bytes.data(), y, bytes.size(), cudaMemcpyDeviceToHost));
    NEED(amp_convert(amp_f32(b.data()), amp_ref_of(bytes.data(), t), n));
    for (size_t i = 0; i < n; i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return std::sqrt(error / (size + 1e-300));
}

static void bench_gemm(const Shape& s, amp_cuda* own, amp_cuda* blas, const Memory& workspace, size_t workspace_bytes,
                       cudaStream_t stream) {
    const size_t in = amp_dtype_size(s.in), out = amp_dtype_size(s.out);
    const size_t a = s.m * s.k, b = s.k * s.n, c = s.m * s.n, set = (a + b) * in + c * out;
    const size_t sets = std::max((size_t)1, std::min((size_t)64, beyond_l2() / set + 1));
    const double flops = 2.0 * (double)s.m * (double)s.n * (double)s.k;
    Memory left(sets * a * in), right(sets * b * in), result(sets * c * out), check(c * out);
    amp_exec eo = amp_cuda_exec(own), eb = amp_cuda_exec(blas);
    eo.workspace = workspace.p;
    eo.workspace_size = workspace_bytes;
    randomize(left.p, s.in, sets * a, 1);
    randomize(right.p, s.in, sets * b, 2);
    amp_gemm_shape shape = {};
    shape.trans_a = s.ta ? AMP_TRANS : AMP_NO_TRANS; shape.trans_b = s.tb ? AMP_TRANS : AMP_NO_TRANS;
    shape.m = s.m; shape.n = s.n; shape.k = s.k;
    auto by = [&](const amp_exec& e, size_t i, void* to) {
        NEED(amp_cuda_backend()->gemm(&shape, 1.0f, amp_ref_of((char*)left.p + i * a * in, s.in),
            amp_ref_of((char*)right.p + i * b * in, s.in), 0.0f, amp_ref_of(to, s.out), &e));
    };
    NEED(cudaMemset(result.p, 0xff, c * out));
    by(eo, 0, result.p);
    by(eb, 0, check.p);
    NEED(cudaDeviceSynchronize());
    const double error = distance(result.p, check.p, s.out, c);
    auto place = [&](size_t i) { return (char*)result.p + i * c * out; };
    const size_t count = std::max(sets, repeats(flops / 4e8));
    const Recorded ours([&](size_t i) { by(eo, i, place(i)); }, sets, count, stream);
    const Recorded theirs([&](size_t i) { by(eb, i, place(i)); }, sets, count, stream);
    std::vector<double> t = measure({ [&](size_t) { NEED(cudaGraphLaunch(ours.ready, stream)); },
                                      [&](size_t) { NEED(cudaGraphLaunch(theirs.ready, stream)); } }, 1, 1, stream);
    for (double& graph : t) graph /= (double)count;
    printf("| %5zu | %5zu | %5zu | %c%c | %4s -> %4s | %8.1f | %6.0f | %6.0f | %5.2f | %.0e%s |\n", s.m, s.n, s.k,
           s.ta ? 'T' : 'N', s.tb ? 'T' : 'N', amp_dtype_name(s.in), amp_dtype_name(s.out), t[0], flops / t[0] * 1e-6,
           flops / t[1] * 1e-6, t[1] / t[0], error, error <= 1e-2 ? "" : " WRONG");
    fflush(stdout);
}

static std::vector<Shape> gemm_shapes() {
    std::vector<Shape> list;
    if (tiny) return { { 64, 64, 64, 0, 1, AMP_BF16, AMP_BF16 }, { 80, 72, 64, 1, 0, AMP_F16, AMP_F32 } };
    for (size_t n = 512; n <= 8192; n *= 2) {
        list.push_back({ n, n, n, 0, 0, AMP_BF16, AMP_BF16 });
        list.push_back({ n, n, n, 0, 1, AMP_F16, AMP_F16 });
        list.push_back({ n, n, n, 0, 0, AMP_BF16, AMP_F32 });
    }
    /* A dense layer with `batch` rows: forward, gradient of the input, gradient of the weights. */
    for (size_t batch : { 256, 1024, 8192 })
        for (size_t width : { 768, 2048, 4096 }) {
            size_t wide = width == 768 ? 3072 : width;
            list.push_back({ batch, wide, width, 0, 1, AMP_BF16, AMP_BF16 });
            list.push_back({ batch, width, wide, 0, 0, AMP_BF16, AMP_BF16 });
            list.push_back({ wide, width, batch, 1, 0, AMP_BF16, AMP_F32 });
        }
    return list;
}
static void bench_gemms() {
    const size_t bytes = sized((size_t)1 << 30);
    amp_cuda_desc d = {};
    amp_cuda *own, *blas;
    Memory workspace(bytes);
    cudaStream_t stream;
    NEED(cudaStreamCreate(&stream));
    d.stream = stream;
    d.gemm = AMP_CUDA_GEMM_OWN;
    NEED(amp_cuda_create(&own, &d));
    d.gemm = AMP_CUDA_GEMM_CUBLAS;
    NEED(amp_cuda_create(&blas, &d));
    printf("\n### Products, TFLOP/s, launched as graphs; inputs come from memory, not from the L2 cache\n\n"
           "|     m |     n |     k |    | types        |       us |    own | cuBLAS | ratio | distance |\n"
           "|---|---|---|---|---|---|---|---|---|---|\n");
    for (const Shape& s : gemm_shapes()) bench_gemm(s, own, blas, workspace, bytes, stream);
    amp_cuda_destroy(own);
    amp_cuda_destroy(blas);
    NEED(cudaStreamDestroy(stream));
}

/* --- passes over many tensors -------------------------------------------------------------------- */

/* One row of the table: gigabytes a second, and beside a copy that moves as many bytes. */
static void report(const char* what, double bytes, const Call& call) {
    const size_t one_way = (size_t)(bytes / 2) / 16 * 16;
    Memory from(one_way), to(one_way);
    randomize(from.p, AMP_F32, one_way / 4, 3);
    const Call copy = [&](size_t) { NEED(cudaMemcpyAsync(to.p, from.p, one_way, cudaMemcpyDeviceToDevice)); };
    std::vector<double> t = measure({ call, copy }, 1, repeats(bytes / 2e6));
    printf("| %-46s | %8.1f | %6.0f | %6.0f | %5.2f |\n", what, t[0], bytes / t[0] * 1e-3, bytes / t[1] * 1e-3,
           t[1] / t[0]);
    fflush(stdout);
}

static void bench_unscale(const char* what, size_t tensors, size_t each, amp_dtype t, float scale) {
    each = sized(each);
    const size_t n = tensors * each;
    Memory grads(n * amp_dtype_size(t));
    std::vector<amp_tensor> list(tensors);
    amp_cuda_tensors* table;
    amp_cuda_scaler* scalers[2];
    amp_exec e = {};
    randomize(grads.p, t, n, 4);
    for (size_t i = 0; i < tensors; i++) list[i] = { (char*)grads.p + i * each * amp_dtype_size(t), t, each, nullptr };
    NEED(amp_cuda_tensors_create(&table, list.data(), (int)tensors, &e));
    amp_scaler_desc desc = {};
    desc.preset = AMP_SCALER_STATIC;
    for (int i = 0; i < 2; i++) {         /* in turns, so that the gradients stay what they are */
        desc.init_scale = i ? 1 / scale : scale;
        NEED(amp_cuda_scaler_create(&scalers[i], &desc, &e));
    }
    size_t calls = 0;
    report(what, 2.0 * (double)n * (double)amp_dtype_size(t), [&](size_t) {
        amp_cuda_scaler* scaler = scalers[calls++ % 2];
        amp_cuda_scaler_loss_scale(scaler);
        NEED(amp_cuda_scaler_unscale(scaler, table, &e));
        NEED(amp_cuda_scaler_update(scaler, &e));
    });
    for (amp_cuda_scaler* scaler : scalers) amp_cuda_scaler_destroy(scaler);
    amp_cuda_tensors_destroy(table);
}

/* Masters, moments, a 16-bit copy and 16-bit gradients: 28 bytes a parameter, and 2 of the check before. */
static void bench_adam(const char* what, size_t tensors, size_t each) {
    each = sized(each);
    const size_t n = tensors * each;
    Memory master(4 * n), m(4 * n), v(4 * n), low(2 * n), grad(2 * n);
    std::vector<amp_param> list(tensors);
    amp_cuda_optimizer* o;
    amp_exec e = {};
    randomize(master.p, AMP_F32, n, 5);
    randomize(grad.p, AMP_BF16, n, 6);
    NEED(cudaMemset(m.p, 0, 4 * n));
    NEED(cudaMemset(v.p, 0, 4 * n));
    for (size_t i = 0; i < tensors; i++) {
        amp_param p = {};
        p.master = (float*)master.p + i * each; p.m = (float*)m.p + i * each; p.v = (float*)v.p + i * each;
        p.low = (uint16_t*)low.p + i * each; p.low_dtype = AMP_BF16;
        p.grad = (uint16_t*)grad.p + i * each; p.grad_dtype = AMP_BF16;
        p.count = each;
        list[i] = p;
    }
    amp_optimizer_desc desc = {};
    desc.kind = AMP_ADAMW;
    desc.weight_decay = 0.01f;
    desc.unchecked = 1;
    NEED(amp_cuda_optimizer_create(&o, &desc, list.data(), (int)tensors, &e));
    report(what, 28.0 * (double)n, [&](size_t) { NEED(amp_cuda_optimizer_step(o, nullptr, &e)); });
    amp_cuda_optimizer_destroy(o);
}

static void bench_passes() {
    const size_t whole = (size_t)1000 * 16384, many = tiny ? 10 : 1000;
    printf("\n### Passes over parameters, GB/s (bytes read and written) beside a copy on the device\n\n"
           "|                                                |       us |    own |   copy | ratio |\n"
           "|---|---|---|---|---|\n");
    bench_unscale("unscale and check, one tensor of 1 GB, f32", 1, (size_t)1 << 28, AMP_F32, 2.0f);
    bench_unscale("the same, scale 1.001", 1, (size_t)1 << 28, AMP_F32, 1.001f);
    bench_unscale("unscale and check, one tensor of 512 MB, bf16", 1, (size_t)1 << 28, AMP_BF16, 2.0f);
    bench_unscale("unscale and check, one tensor of 64 MB, f32", 1, whole, AMP_F32, 2.0f);
    bench_unscale("unscale and check, 1000 tensors of 64 KB, f32", many, 16384, AMP_F32, 2.0f);
    bench_adam("AdamW, one tensor of 100 M parameters", 1, 100000000);
    bench_adam("AdamW, 400 tensors of 256 K parameters", tiny ? 4 : 400, 262144);
}

/* --- where the time of a step goes ------------------------------------------------------------------ */

/* While `on`, each Timing leaves an event where it begins and one where it ends. */
struct Span { std::string what; double flops; };
static struct Profile {
    bool on;
    cudaStream_t stream;
    std::vector<cudaEvent_t> events;
    std::vector<Span> spans;            /* the i-th lies between events 2i and 2i + 1 */
} profile;
struct Timing {
    Timing(const std::string& what, const std::string& sizes, double flops) {
        if (!profile.on) return;
        profile.spans.push_back({ what + sizes, flops });
        record(2 * profile.spans.size() - 2);
    }
    ~Timing() { if (profile.on) cudaEventRecord(profile.events[2 * profile.spans.size() - 1], profile.stream); }
    Timing(const Timing&) = delete;
    Timing& operator=(const Timing&) = delete;
private:
    static void record(size_t i) {
        while (profile.events.size() < i + 2) {
            cudaEvent_t e;
            NEED(cudaEventCreate(&e));
            profile.events.push_back(e);
        }
        NEED(cudaEventRecord(profile.events[i], profile.stream));
    }
};

/* The sizes among a call's arguments, in words and multiplied. */
struct Sizes { std::string words; double product; };
template <class T> static void read_size(Sizes*, const T&) {}
static void read_size(Sizes* s, const size_t& n) { s->words += " " + std::to_string(n); s->product *= (double)n; }
static std::string image(int n, int c, int h, int w) {
    return " " + std::to_string(n) + "x" + std::to_string(c) + "x" + std::to_string(h) + "x" + std::to_string(w);
}
static void read_size(Sizes* s, const amp_conv2d_shape* const& c) {
    const int groups = std::max(c->groups, 1);
    int h = 0, w = 0;
    amp_conv2d_output(c, &h, &w, nullptr);
    s->words += image(c->n, c->channels, c->height, c->width) + ":" + std::to_string(c->out_channels) + "x" +
                std::to_string(c->kernel_h) + "x" + std::to_string(c->kernel_w) + ":s" +
                std::to_string(std::max(c->stride_h, 1)) + "p" + std::to_string(c->pad_h) + "g" + std::to_string(groups);
    s->product *= (double)c->n * c->out_channels * h * w * (c->channels / groups) * c->kernel_h * c->kernel_w;
}
static void read_size(Sizes* s, const amp_attention_shape* const& a) {
    for (size_t n : { a->batch, a->queries, a->heads, a->head_size }) read_size(s, n);
}
static void read_size(Sizes* s, const amp_pool2d_shape* const& p) {
    s->words += image(p->n, p->channels, p->height, p->width);
}
static void read_size(Sizes* s, const amp_batch_norm_shape* const& b) { s->words += image(b->n, b->channels, b->spatial, 1); }
static void read_size(Sizes* s, const amp_gemm_shape* const& g) {
    for (size_t n : { g->m, g->n, g->k, std::max(g->batch, (size_t)1) }) read_size(s, n);
}

/* A call whose time is taken. Work is counted of products alone, twice that of the forward call for a backward call. */
template <class... P> struct Timed {
    const char* what;
    amp_result (*call)(P...);
    amp_result operator()(P... p) const {
        if (!profile.on) return call(p...);
        Sizes s = { "", 2.0 };
        (void)std::initializer_list<int>{ (read_size(&s, p), 0)... };
        const bool product = !strncmp(what, "linear", 6) || !strncmp(what, "conv2d", 6) || !strncmp(what, "gemm", 4);
        const Timing timing(what, s.words, product ? s.product * (strstr(what, "backward") ? 2.0 : 1.0) : 0.0);
        return call(p...);
    }
};
template <class... P> static Timed<P...> timed(const char* what, amp_result (*call)(P...)) { return { what, call }; }

/* The table of the GPU with each entry timed. */
template <auto entry> struct Entry;
template <class... P, amp_result (*amp_backend::*entry)(P...)> struct Entry<entry> {
    static const char* name;
    static amp_result call(P... p) { return timed(name, amp_cuda_backend()->*entry)(p...); }
};
template <class... P, amp_result (*amp_backend::*entry)(P...)> const char* Entry<entry>::name;
static const amp_backend* timed_backend() {
    static amp_backend b = *amp_cuda_backend();
#define TIME(entry) Entry<&amp_backend::entry>::name = #entry, b.entry = Entry<&amp_backend::entry>::call
    TIME(zero); TIME(copy); TIME(convert); TIME(load); TIME(add_forward); TIME(gemm);
    TIME(linear_forward); TIME(linear_backward); TIME(linear_relu_forward);
    TIME(conv2d_forward); TIME(conv2d_backward); TIME(conv2d_relu_forward);
    TIME(pool2d_forward); TIME(pool2d_backward); TIME(batch_norm_forward); TIME(batch_norm_backward);
    TIME(layer_norm_forward); TIME(layer_norm_backward); TIME(attention_forward); TIME(attention_backward);
    TIME(embedding_forward); TIME(embedding_backward); TIME(softmax_forward); TIME(softmax_backward);
    TIME(activation_forward); TIME(activation_backward);
    TIME(softmax_cross_entropy_forward); TIME(softmax_cross_entropy_backward);
    TIME(training_pass); TIME(training_losses); TIME(training_check); TIME(training_step);
#undef TIME
    return &b;
}

/* --- training ------------------------------------------------------------------------------------- */

#include "gpt_cuda.h"
#include "networks.h"

struct Stream {
    cudaStream_t s;
    Stream() { NEED(cudaStreamCreate(&s)); }
    ~Stream() { cudaStreamDestroy(s); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
};
/* A network in training. */
struct Training {
    Stream stream;
    double flops = 0.0;                 /* of a step */
    size_t samples = 0, bytes = 0;
    amp_param* params = nullptr;
    int count = 0;
    virtual void step() = 0;
    virtual ~Training() {}
};
/* Numbers below `classes` on the device. */
static void label(void* p, size_t n, size_t classes) {
    std::vector<int32_t> all(n);
    for (size_t i = 0; i < n; i++) all[i] = (int32_t)(i * 7 % classes);
    NEED(cudaMemcpy(p, all.data(), 4 * n, cudaMemcpyHostToDevice));
}

/* What is trained: NAME:BATCH TYPE, of GPT-2 BATCHxTOKENS, by raw calls or as model_gpt2 in the graph; numbers are the widths of a dense network. bench_cuda.py reads
   the list. */
static const char* const training_rows[] = {
    "gpt2:8x1024 bf16", "model_gpt2:8x1024 bf16", "resnet34:128 f16", "resnet34_32:512 f16", "mobilenet:128 f16", "vgg16:512 f16", "stack:512 f16",
    "separable:512 f16", "lenet5:64 f16", "lenet5:1024 f16", "784x512x512x10:256 f16",
    "784x2048x2048x2048x2048x2048x10:1024 bf16", "784x4096x4096x4096x4096x4096x10:8192 bf16"
};
struct Row { std::string name; int batch, length; amp_dtype low; };
static Row row_of(const char* text) {
    char name[64], type[8];
    Row r = { "", 0, 0, AMP_F16 };
    if (sscanf(text, "%63[^:]:%dx%d %7s", name, &r.batch, &r.length, type) != 4 &&
        sscanf(text, "%63[^:]:%d %7s", name, &r.batch, type) != 3) throw std::runtime_error("not a row");
    r.name = name;
    r.low = strcmp(type, "bf16") ? AMP_F16 : AMP_BF16;
    if (tiny) { r.batch = 2; r.length = 16; }
    return r;
}

static gpt_shape gpt_of(const Row& r) {
    gpt_shape s = gpt2_shape((size_t)r.batch, (size_t)r.length, r.low);
    if (tiny) { s.channels = 32; s.heads = 2; s.blocks = 2; s.vocabulary = 24; }
    return s;
}

/* At O1 with Adam, GPT-2 with AdamW. */
struct Model : Training {
    amp_model* m = nullptr;
    amp_batch batch = {};
    std::unique_ptr<Memory> images, labels;
    Model(const Row& r, int graph, const amp_backend* backend) {
        const network* n = network_named(r.name.c_str());
        const int divide = tiny ? 16 : 1, side = r.name == "lenet5" ? 28 : !n ? 1 : tiny ? 32 : n->side;
        std::vector<int> widths;
        for (const char* at = r.name.c_str(); !n && *at >= '0' && *at <= '9'; at += *at == 'x')
            widths.push_back((int)strtol(at, const_cast<char**>(&at), 10));
        for (size_t i = 0; i + 1 < widths.size(); i++) widths[i] /= divide;
        amp_cuda_desc cuda = {};
        amp_model_desc d = {};
        cuda.stream = stream.s;
        cuda.graph = graph;
        d.batch = r.batch;
        d.precision.level = AMP_O1;
        d.precision.low_dtype = r.low;
        const bool transformer = r.name == "model_gpt2";
        d.optimizer.kind = transformer ? AMP_ADAMW : AMP_ADAM;
        d.logger.log = amp_log_stderr;
        d.backend = backend;
        d.backend_desc = &cuda;
        NEED(amp_model_create(&m, &d));
        size_t features, classes;
        amp_value logits;
        if (transformer) {
            const gpt_shape s = gpt_of(r);
            logits = building_gpt2(m, &s);
            flops = gpt_flops(&s); samples = features = s.batch * s.length; classes = s.vocabulary;
        } else {
            building b = building_begin(m, r.batch, n ? 3 : widths.empty() ? 1 : widths[0], side);
            features = (size_t)b.channels * side * side * r.batch;
            logits = n ? building_network(&b, n, divide) : widths.empty() ? building_lenet(&b)
                       : building_dense(&b, widths.data(), (int)widths.size());
            flops = b.flops; samples = (size_t)r.batch; classes = (size_t)b.channels;
        }
        amp_softmax_cross_entropy(m, logits);
        NEED(amp_model_finalize(m));
        amp_memory memory;
        NEED(amp_model_memory(m, &memory));
        bytes = memory.total_bytes + 4 * features;
        params = amp_model_params(m, &count);
        images.reset(new Memory(4 * features));
        labels.reset(new Memory(4 * samples));
        if (transformer) label(images->p, features, classes);      /* tokens */
        else randomize(images->p, AMP_F32, features, 7);
        label(labels->p, samples, classes);
        batch.n = r.batch;
        batch.inputs[0] = images->p;
        batch.targets[0] = labels->p;
        batch.on_device = 1;
    }
    ~Model() override { amp_model_destroy(m); }
    void step() override { NEED(amp_train_step(m, &batch, NULL)); }
};

/* GPT-2 with AdamW, by raw calls. */
struct Gpt : Training {
    gpt_cuda g = {};
    void* arrays = nullptr;
    amp_cuda* context = nullptr;
    amp_cuda_optimizer* optimizer = nullptr;
    std::unique_ptr<Memory> workspace, tokens, targets, rows, first, loss;
    std::unique_ptr<Recorded> graph;
    bool as_graph;
    int steps = 0;
    Gpt(const Row& r, int want_graph) : as_graph(want_graph) {
        const gpt_shape s = gpt_of(r);
        const size_t R = s.batch * s.length;
        std::map<int32_t, std::vector<int32_t>> of_token;
        std::vector<int32_t> order, starts;
        for (size_t i = 0; i < R; i++) of_token[(int32_t)(i * 7 % s.vocabulary)].push_back((int32_t)i);
        for (auto& t : of_token) {
            starts.push_back((int32_t)order.size());
            order.insert(order.end(), t.second.begin(), t.second.end());
        }
        starts.push_back((int32_t)R);
        auto fresh = [](std::unique_ptr<Memory>& m, size_t size) { m.reset(new Memory(size)); return (int32_t*)m->p; };
        label(fresh(tokens, 4 * R), R, s.vocabulary);
        label(fresh(targets, 4 * R), R, s.vocabulary);
        if (!gpt_create(&g, &s)) throw std::runtime_error("gpt_create: no memory");
        g.backend = timed_backend();
        arrays = gpt_to_device(&g);
        g.rows = R;
        g.of_token = fresh(rows, 4 * R);
        g.first = fresh(first, 4 * starts.size());
        g.distinct = of_token.size();
        NEED(cudaMemcpy(g.of_token, order.data(), 4 * R, cudaMemcpyHostToDevice));
        NEED(cudaMemcpy(g.first, starts.data(), 4 * starts.size(), cudaMemcpyHostToDevice));
        fresh(loss, 4);
        amp_cuda_desc d = {};
        d.stream = stream.s;
        d.logger = &g.logger;
        NEED(amp_cuda_create(&context, &d));
        g.exec = amp_cuda_exec(context);
        g.exec.workspace_size = gpt_workspace(&g);
        g.exec.workspace = fresh(workspace, g.exec.workspace_size);
        amp_optimizer_desc o = {};
        o.kind = AMP_ADAMW; o.weight_decay = 0.01f; o.unchecked = 1; o.groups = gpt_groups; o.group_count = 2;
        NEED(amp_cuda_optimizer_create(&optimizer, &o, g.params, g.count, &g.exec));
        flops = gpt_flops(&s); samples = R; bytes = g.used + g.exec.workspace_size;
        params = g.params;
        count = g.count;
    }
    ~Gpt() override {
        cudaStreamSynchronize(stream.s);
        amp_cuda_optimizer_destroy(optimizer);
        amp_cuda_destroy(context);
        cudaFree(arrays);
        gpt_free(&g);
    }
    void launches() {
        gpt_forward(&g, (const int32_t*)tokens->p, g.s.batch);
        NEED(g.backend->softmax_cross_entropy_forward(amp_f32(g.logits),
            (const int32_t*)targets->p, NULL, (float*)loss->p, g.rows, g.s.vocabulary, &g.exec));
        gpt_backward(&g, (const int32_t*)tokens->p, (const int32_t*)targets->p, nullptr);
        NEED(timed("optimizer_step", amp_cuda_optimizer_step)(optimizer, nullptr, &g.exec));
    }
    void step() override {
        if (!as_graph || steps++ == 0) return launches();
        if (!graph) graph.reset(new Recorded([&](size_t) { launches(); }, 1, 1, stream.s));
        NEED(cudaGraphLaunch(graph->ready, stream.s));
    }
};

static std::unique_ptr<Training> train(const char* row, int graph, bool profiled = false) {
    const Row r = row_of(row);
    if (r.name == "gpt2") return std::unique_ptr<Training>(new Gpt(r, graph));
    return std::unique_ptr<Training>(new Model(r, graph, profiled ? timed_backend() : amp_cuda_backend()));
}

/* FLOP/s of a large product: what a share is a share of. */
static double largest_product() {
    const size_t n = tiny ? 64 : 8192;
    Memory a(2 * n * n), b(2 * n * n), c(2 * n * n);
    Stream stream;
    amp_cuda_desc d = {};
    amp_cuda* context;
    amp_gemm_shape s = {};
    d.stream = stream.s;
    NEED(amp_cuda_create(&context, &d));
    const amp_exec e = amp_cuda_exec(context);
    s.m = s.n = s.k = n;
    randomize(a.p, AMP_BF16, n * n, 1);
    randomize(b.p, AMP_BF16, n * n, 2);
    const double t = measure({ [&](size_t) {
        NEED(amp_cuda_backend()->gemm(&s, 1.0f, amp_ref_of(a.p, AMP_BF16), amp_ref_of(b.p, AMP_BF16), 0.0f, amp_ref_of(c.p, AMP_BF16),
            &e));
    } }, 1, 2, stream.s)[0];
    amp_cuda_destroy(context);
    return 2e6 * (double)n * (double)n * (double)n / t;
}

static void bench_step(const char* row, double peak) {
    std::unique_ptr<Training> eager = train(row, 0), graph = train(row, 1);
    for (int i = 0; i < 3; i++) { eager->step(); graph->step(); }
    NEED(cudaDeviceSynchronize());
    auto on = [](Training* t) {
        const size_t few = tiny ? 1 : 20;
        const Call step = [t](size_t) { t->step(); };
        return measure({ step }, 1, std::min(few, repeats(measure({ step }, 1, 1, t->stream.s)[0] / 20)), t->stream.s)[0];
    };
    const double launches = on(eager.get()), replay = on(graph.get()), best = std::min(launches, replay);
    printf("| %-44s | %9.1f | %9.1f | %9.0f | %7.0f | %6.1f | %5.2f |\n", row, launches, replay,
           1e6 * (double)eager->samples / best, 1e-6 * (double)eager->bytes, eager->flops / best * 1e-6,
           1e6 * eager->flops / best / peak);
}

/* Every operator and shape, those that take longest first. */
static void bench_share(const char* row) {
    struct Sum { double us, flops; size_t calls; };
    const int steps = tiny ? 1 : 5;
    std::unique_ptr<Training> t = train(row, 0, true);
    std::map<std::string, Sum> sums;
    double total = 0.0;
    for (int i = 0; i < 3; i++) t->step();
    NEED(cudaStreamSynchronize(t->stream.s));
    profile.stream = t->stream.s;
    for (int i = 0; i < steps; i++) {
        profile.spans.clear();
        profile.on = true;
        t->step();
        profile.on = false;
        NEED(cudaStreamSynchronize(t->stream.s));
        for (size_t k = 0; k < profile.spans.size(); k++) {
            float ms;
            Sum& s = sums[profile.spans[k].what];
            NEED(cudaEventElapsedTime(&ms, profile.events[2 * k], profile.events[2 * k + 1]));
            s.us += 1e3 * (double)ms / steps; s.flops += profile.spans[k].flops / steps; s.calls++;
            total += 1e3 * (double)ms / steps;
        }
    }
    for (cudaEvent_t e : profile.events) cudaEventDestroy(e);
    profile.events.clear();
    std::vector<std::pair<std::string, Sum>> list(sums.begin(), sums.end());
    std::sort(list.begin(), list.end(), [](auto& a, auto& b) { return a.second.us > b.second.us; });
    printf("\n### Operators of %s, us of a step: %.1f together\n\n| operator | calls | us | share | TFLOP/s |\n"
           "|---|---|---|---|---|\n", row, total);
    for (auto& s : list) {
        printf("| %-58s | %3zu | %8.1f | %4.1f %% |", s.first.c_str(), s.second.calls / (size_t)steps, s.second.us,
               100.0 * s.second.us / (total + 1e-9));
        if (s.second.flops > 0.0) printf(" %6.1f |\n", s.second.flops / (s.second.us + 1e-9) * 1e-6);
        else printf(" |\n");
    }
}

/* Weights and moments after five steps, as one number. */
static uint64_t bits_of(const char* row, int graph) {
    std::unique_ptr<Training> t = train(row, graph);
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < 5; i++) t->step();
    NEED(cudaDeviceSynchronize());
    for (int i = 0; i < t->count; i++)
        for (const float* p : { (const float*)t->params[i].master, (const float*)t->params[i].m,
                                (const float*)t->params[i].v }) {
            std::vector<uint32_t> host(t->params[i].count);
            NEED(cudaMemcpy(host.data(), p, 4 * host.size(), cudaMemcpyDeviceToHost));
            for (uint32_t bits : host) hash = (hash ^ bits) * 1099511628211u;
        }
    return hash;
}
static void bench_bits(const char* row) {
    const uint64_t eager = bits_of(row, 0), again = bits_of(row, 0), graph = bits_of(row, 1);
    printf("| %-44s | %016llx | %s | %s |\n", row, (unsigned long long)eager, again == eager ? "same" : "DIFFER",
           graph == eager ? "same" : "DIFFER");
    if (again != eager || graph != eager) throw std::runtime_error("bits differ");
}

/* --- attention ------------------------------------------------------------------------------------ */

/* Causal, heads of 64 elements. A second row without Tensor Cores: its operands begin two bytes further on. */
static void bench_attention_row(size_t batch, size_t length, amp_dtype t, bool plain, amp_cuda* context, cudaStream_t stream) {
    amp_attention_shape s = {};
    s.batch = batch; s.queries = length; s.heads = tiny ? 2 : 12; s.head_size = 64; s.causal = 1;
    const size_t n = batch * length * s.heads * s.head_size, size = amp_dtype_size(t), shift = plain ? size : 0;
    std::unique_ptr<Memory> all[8];
    amp_ref x[8];
    for (int i = 0; i < 8; i++) {
        all[i].reset(new Memory(n * size + 16));
        randomize(all[i]->p, t, n + shift / size, (uint64_t)i + 1);
        x[i] = amp_ref_of((char*)all[i]->p + shift, t);
    }
    Memory lse(4 * batch * s.heads * length), workspace(amp_cuda_backend()->attention_workspace(&s));
    amp_exec e = amp_cuda_exec(context);
    e.workspace = workspace.p;
    e.workspace_size = amp_cuda_backend()->attention_workspace(&s);
    const Call forward = [&](size_t) {
        NEED(amp_cuda_backend()->attention_forward(&s, x[0], x[1], x[2], x[3], (float*)lse.p, &e));
    };
    const Call backward = [&](size_t) {
        NEED(amp_cuda_backend()->attention_backward(&s, x[4], x[0], x[1], x[2], x[3], (const float*)lse.p, x[5], x[6], x[7], 0, &e));
    };
    forward(0);
    const size_t count = tiny ? 1 : plain || t == AMP_F32 ? 1 : 10;
    const Recorded one(forward, 1, count, stream), other(backward, 1, count, stream);
    std::vector<double> us = measure({ [&](size_t) { NEED(cudaGraphLaunch(one.ready, stream)); },
                                       [&](size_t) { NEED(cudaGraphLaunch(other.ready, stream)); } }, 1, 1, stream);
    const double flops = 2.0 * (double)n * (double)(length + 1);      /* two products, for the keys that are seen */
    for (int i = 0; i < 2; i++)
        printf("| attention_%s %zux%zu %s%s | %9.1f | %6.1f |\n", i ? "backward" : "forward", batch, length, amp_dtype_name(t),
               plain ? ", plain" : "", us[(size_t)i] / (double)count, flops * (i ? 2.5 : 1.0) * (double)count / us[(size_t)i] * 1e-6);
    fflush(stdout);
}
static void bench_attention() {
    static const size_t sizes[][2] = { { 64, 64 }, { 32, 256 }, { 8, 1024 }, { 2, 4096 } };
    Stream stream;
    amp_cuda_desc d = {};
    amp_cuda* context;
    d.stream = stream.s;
    NEED(amp_cuda_create(&context, &d));
    printf("\n### Attention, causal, 12 heads of 64 elements, batch x positions, launched as graphs\n\n"
           "|  | us | TFLOP/s |\n|---|---|---|\n");
    for (const size_t (&of)[2] : sizes)
        for (amp_dtype t : { AMP_BF16, AMP_F16, AMP_F32 })
            for (int plain = 0; plain <= (t == AMP_BF16); plain++) {
                if (of[1] > 1024 && (plain || t == AMP_F32)) continue;      /* some 100 ms */
                bench_attention_row(tiny ? 1 : of[0], tiny ? of[1] / 32 : of[1], t, plain != 0, context, stream.s);
            }
    amp_cuda_destroy(context);
}

/* --- the program ---------------------------------------------------------------------------------- */

/* The rows that are wanted; how many of them failed. */
static int each_row(char** wanted, int count, const std::function<void(const char*)>& run) {
    int failed = 0;
    for (const char* row : training_rows) {
        bool here = count == 0;
        for (int i = 0; i < count; i++) here = here || !strncmp(row, wanted[i], strlen(wanted[i]));
        if (!here) continue;
        try { run(row); } catch (const std::exception& e) { printf("| %-44s | failed: %s |\n", row, e.what()); failed++; }
        fflush(stdout);
    }
    return failed;
}
static int run(const std::string& part, char** rows, int count) {
    if (part == "gemm") bench_gemms();
    else if (part == "passes") bench_passes();
    else if (part == "attention") bench_attention();
    else if (part == "shares") return each_row(rows, count, bench_share);
    else if (part == "bits") {
        printf("\n### Weights and moments after five steps: their bits, a second training, a graph\n\n"
               "|                                              | bits | again | graph |\n|---|---|---|---|\n");
        return each_row(rows, count, bench_bits);
    } else if (part == "steps") {
        const double peak = largest_product();
        printf("\n### A step of training at O1 with Adam, us\n\nShare: of the %.0f TFLOP/s of a product of %s.\n\n"
               "|                                              |  launches |     graph |  samples/s |      MB | TFLOP/s | "
               "share |\n|---|---|---|---|---|---|---|\n", 1e-12 * peak, tiny ? "64^3" : "8192^3");
        return each_row(rows, count, [&](const char* row) { bench_step(row, peak); });
    } else throw std::runtime_error("no such part: " + part);
    return 0;
}

int main(int argc, char** argv) {
    cudaDeviceProp device;
    int count = 0, at = 1;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped: no GPU\n");
        return 0;
    }
    if (at < argc && !strcmp(argv[at], "--tiny")) { tiny = true; at++; }
    if (at == argc) {
        if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) return 1;
        printf("%s, CUDA %d\n", device.name, CUDART_VERSION);
        return 0;
    }
    try {
        return run(argv[at], argv + at + 1, argc - at - 1) > 0;
    } catch (const std::exception& e) {
        printf("failed: %s\n", e.what());
        return 1;
    }
}
