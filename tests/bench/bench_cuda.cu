/* bench_cuda.cu - amp_cuda.cuh on a GPU: products beside cuBLAS, unscale and Adam beside a copy on the device, steps of
   training as single launches and as a graph. Medians; what is compared runs in turns, on the same buffers, in one
   process. Arguments: the parts to run, of "gemm", "passes" and "steps"; none = all. Buffers hold random numbers, and
   products go through several sets of them, together larger than the L2 cache. bench_cuda.py puts PyTorch beside the
   passes and the steps. */
#define AMP_IMPLEMENTATION
#include "../../amp_cuda.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

enum { TURNS = 15 };
static const size_t BEYOND_L2 = (size_t)256 << 20;

#define NEED(call)                                                                                  \
    do {                                                                                            \
        if ((call) != 0) {                                                                          \
            printf("%s:%d: %s failed: %s\n", __FILE__, __LINE__, #call,                             \
                   cudaGetErrorString(cudaPeekAtLastError()));                                      \
            exit(1);                                                                                \
        }                                                                                           \
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
    for (int turn = -2; turn < TURNS; turn++)      /* the first two warm up */
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
static size_t repeats(double microseconds) { return 1 + (size_t)(2000.0 / (microseconds + 1.0)); }

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
        NEED(amp_cuda_convert((char*)p + i * amp_dtype_size(t), t, part.p, AMP_F32, std::min(host.size(), n - i), &e));
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
    NEED(amp_convert(a.data(), AMP_F32, bytes.data(), t, n));
    NEED(cudaMemcpy(bytes.data(), y, bytes.size(), cudaMemcpyDeviceToHost));
    NEED(amp_convert(b.data(), AMP_F32, bytes.data(), t, n));
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
    const size_t sets = std::max((size_t)1, std::min((size_t)64, BEYOND_L2 / set + 1));
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
        NEED(amp_cuda_gemm(&shape, 1.0f, (char*)left.p + i * a * in, s.in, (char*)right.p + i * b * in, s.in, 0.0f, to,
                           s.out, &e));
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
    const size_t bytes = (size_t)1 << 30;
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
    const size_t whole = (size_t)1000 * 16384;
    printf("\n### Passes over parameters, GB/s (bytes read and written) beside a copy on the device\n\n"
           "|                                                |       us |    own |   copy | ratio |\n"
           "|---|---|---|---|---|\n");
    bench_unscale("unscale and check, one tensor of 1 GB, f32", 1, (size_t)1 << 28, AMP_F32, 2.0f);
    bench_unscale("the same, scale 1.001", 1, (size_t)1 << 28, AMP_F32, 1.001f);
    bench_unscale("unscale and check, one tensor of 512 MB, bf16", 1, (size_t)1 << 28, AMP_BF16, 2.0f);
    bench_unscale("unscale and check, one tensor of 64 MB, f32", 1, whole, AMP_F32, 2.0f);
    bench_unscale("unscale and check, 1000 tensors of 64 KB, f32", 1000, 16384, AMP_F32, 2.0f);
    bench_adam("AdamW, one tensor of 100 M parameters", 1, 100000000);
    bench_adam("AdamW, 400 tensors of 256 K parameters", 400, 262144);
}

/* --- training ------------------------------------------------------------------------------------- */

/* A dense network with ReLU between its layers, or LeNet-5 where no widths are given; O1 with Adam. */
struct Net { const char* name; std::vector<int> widths; int batch; amp_dtype low; };

static amp_value lenet_block(amp_model* m, amp_value x, int out, int padding) {
    amp_conv2d_desc d = {};
    d.out_channels = out; d.kernel = 5; d.padding = padding;
    return amp_maxpool2d(m, amp_relu(m, amp_conv2d(m, x, &d)), 2);
}
static amp_value lenet(amp_model* m) {
    amp_value x = lenet_block(m, lenet_block(m, amp_input(m, 1, 28, 28), 6, 2), 16, 0);
    x = amp_relu(m, amp_linear(m, amp_relu(m, amp_linear(m, x, 120)), 84));
    return amp_linear(m, x, 10);
}
static amp_value dense(amp_model* m, const std::vector<int>& widths) {
    amp_value x = amp_input(m, widths[0], 1, 1);
    for (size_t i = 1; i < widths.size(); i++) {
        x = amp_linear(m, x, widths[i]);
        if (i + 1 < widths.size()) x = amp_relu(m, x);
    }
    return x;
}
static amp_model* model_of(const Net& net, cudaStream_t stream, int graph) {
    const amp_logger logger = { amp_log_stderr, NULL };
    amp_cuda_desc cuda = {};
    amp_model_desc d = {};
    amp_model* m;
    cuda.stream = stream;
    cuda.graph = graph;
    d.batch = net.batch;
    d.precision.level = AMP_O1;
    d.precision.low_dtype = net.low;
    d.optimizer.kind = AMP_ADAM;
    d.logger = logger;
    d.backend = amp_cuda_backend();
    d.backend_desc = &cuda;
    NEED(amp_model_create(&m, &d));
    amp_softmax_cross_entropy(m, net.widths.empty() ? lenet(m) : dense(m, net.widths), NULL);
    NEED(amp_model_finalize(m));
    return m;
}
static void bench_step(const Net& net) {
    const size_t features = net.widths.empty() ? 28 * 28 : (size_t)net.widths[0], n = (size_t)net.batch * features;
    std::vector<int32_t> classes((size_t)net.batch);
    Memory pictures(4 * n), labels(4 * classes.size());
    amp_batch batch = {};
    cudaStream_t stream;
    NEED(cudaStreamCreate(&stream));
    for (size_t i = 0; i < classes.size(); i++) classes[i] = (int32_t)(i * 7 % 10);
    NEED(cudaMemcpy(labels.p, classes.data(), 4 * classes.size(), cudaMemcpyHostToDevice));
    randomize(pictures.p, AMP_F32, n, 7);
    amp_model *eager = model_of(net, stream, 0), *graph = model_of(net, stream, 1);
    batch.n = net.batch;
    batch.inputs[0] = pictures.p;
    batch.targets[0] = labels.p;
    batch.on_device = 1;
    std::vector<double> t = measure({ [&](size_t) { NEED(amp_train_step(eager, &batch, NULL)); },
                                      [&](size_t) { NEED(amp_train_step(graph, &batch, NULL)); } }, 1, 20, stream);
    printf("| %-46s | %8.1f | %8.1f |\n", net.name, t[0], t[1]);
    fflush(stdout);
    amp_model_destroy(eager);
    amp_model_destroy(graph);
    NEED(cudaStreamDestroy(stream));
}
static void bench_steps() {
    printf("\n### A step of training at O1 with Adam, us: launches one by one, and as a graph\n\n"
           "|                                                | launches |    graph |\n"
           "|---|---|---|\n");
    bench_step({ "LeNet-5, batch 64, f16", {}, 64, AMP_F16 });
    bench_step({ "LeNet-5, batch 1024, f16", {}, 1024, AMP_F16 });
    bench_step({ "MLP 784-512-512-10, batch 256, f16", { 784, 512, 512, 10 }, 256, AMP_F16 });
    bench_step({ "MLP 784-2048 (5x)-10, batch 1024, bf16", { 784, 2048, 2048, 2048, 2048, 2048, 10 }, 1024, AMP_BF16 });
    bench_step({ "MLP 784-4096 (5x)-10, batch 8192, bf16", { 784, 4096, 4096, 4096, 4096, 4096, 10 }, 8192, AMP_BF16 });
}

static bool wanted(int argc, char** argv, const char* part) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], part) == 0) return true;
    return argc < 2;
}

int main(int argc, char** argv) {
    cudaDeviceProp device;
    int driver = 0, count = 0, hopper;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped: no GPU\n");
        return 0;
    }
    NEED(cudaGetDeviceProperties(&device, 0));
    NEED(cudaDriverGetVersion(&driver));
    hopper = ampi_cuda_hopper_here();
    printf("%s, driver %d, CUDA %d; own products: the %s kernel\n", device.name, driver, CUDART_VERSION,
           hopper ? "Hopper" : "portable");
    if (wanted(argc, argv, "gemm")) bench_gemms();
    if (wanted(argc, argv, "passes")) bench_passes();
    if (wanted(argc, argv, "steps")) bench_steps();
    return 0;
}
