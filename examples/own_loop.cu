/* own_loop.cu - a CUDA training loop of its own gets a loss scaler. Kernels, memory, optimizer and stream are the
   program's; the lines marked `amp` are all that dynamic loss scaling takes. Nothing in the loop waits for the GPU.

     nvcc -O2 -arch=native -DAMP_NO_CUBLAS -o own_loop examples/own_loop.cu && ./own_loop

   A dense network 2-64-2 learns which points lie inside a circle. Weights, activations and gradients are half. */
#define AMP_IMPLEMENTATION
#include "../amp_cuda.cuh"   /* amp */
#include <cuda_fp16.h>

enum { N = 256, IN = 2, HIDDEN = 64, OUT = 2, WEIGHTS = HIDDEN * IN + HIDDEN + OUT * HIDDEN + OUT, STEPS = 1000 };

/* All weights lie in one array: w1[HIDDEN][IN], b1[HIDDEN], w2[OUT][HIDDEN], b2[OUT]; gradients likewise. */
struct views { __half *w1, *b1, *w2, *b2; };
static __device__ views split(__half* all) {
    views v = { all, all + HIDDEN * IN, all + HIDDEN * IN + HIDDEN, all + HIDDEN * IN + HIDDEN + OUT * HIDDEN };
    return v;
}

__global__ void forward(const float* x, __half* all, __half* hidden, float* logits) {
    views w = split(all);
    int n = blockIdx.x, j = threadIdx.x;
    float sum = __half2float(w.b1[j]);
    for (int i = 0; i < IN; i++) sum += x[n * IN + i] * __half2float(w.w1[j * IN + i]);
    hidden[n * HIDDEN + j] = __float2half(sum > 0.0f ? sum : 0.0f);
    __syncthreads();
    if (j >= OUT) return;
    sum = __half2float(w.b2[j]);
    for (int i = 0; i < HIDDEN; i++) sum += __half2float(hidden[n * HIDDEN + i]) * __half2float(w.w2[j * HIDDEN + i]);
    logits[n * OUT + j] = sum;
}

/* Gradients of the logits, multiplied by the loss scale before they become half. */
__global__ void loss_backward(const float* logits, const int* labels, __half* dlogits, float* loss,
                              const float* scale) {                                                   /* amp */
    int n = threadIdx.x;
    float a = logits[n * OUT], b = logits[n * OUT + 1], p = 1.0f / (1.0f + expf(a - b));
    loss[n] = -logf(labels[n] ? p : 1.0f - p);
    p = (p - (float)labels[n]) / N * *scale;                                                         /* amp */
    dlogits[n * OUT] = __float2half(-p);
    dlogits[n * OUT + 1] = __float2half(p);
}

__global__ void backward(const float* x, __half* all, const __half* hidden, const __half* dlogits, __half* grads) {
    views w = split(all), g = split(grads);
    int j = threadIdx.x;
    float dw2[OUT] = {}, db2[OUT] = {}, dw1[IN] = {}, db1 = 0.0f;
    for (int n = 0; n < N; n++) {
        float h = __half2float(hidden[n * HIDDEN + j]), dh = 0.0f;
        for (int k = 0; k < OUT; k++) {
            float d = __half2float(dlogits[n * OUT + k]);
            dw2[k] += d * h;
            db2[k] += d;
            dh += d * __half2float(w.w2[k * HIDDEN + j]);
        }
        if (h <= 0.0f) continue;
        for (int i = 0; i < IN; i++) dw1[i] += dh * x[n * IN + i];
        db1 += dh;
    }
    for (int k = 0; k < OUT; k++) g.w2[k * HIDDEN + j] = __float2half(dw2[k]);
    for (int i = 0; i < IN; i++) g.w1[j * IN + i] = __float2half(dw1[i]);
    g.b1[j] = __float2half(db1);
    if (j < OUT) g.b2[j] = __float2half(j == 0 ? db2[0] : db2[1]);
}

/* Momentum SGD on FP32 master weights. */
__global__ void update(float* master, __half* weights, float* momentum, const __half* grads,
                       const amp_scaler_state* scaler) {                                              /* amp */
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= WEIGHTS || scaler->found_inf) return;                                                   /* amp */
    momentum[i] = 0.9f * momentum[i] + __half2float(grads[i]) * scaler->inverse;                      /* amp */
    master[i] -= 0.05f * momentum[i];
    weights[i] = __float2half(master[i]);
}

static void fill(float* x, int* labels, float* master) {
    for (int n = 0; n < N; n++) {
        for (int i = 0; i < IN; i++) x[n * IN + i] = 2.0f * amp_random_uniform(1, (uint64_t)(n * IN + i)) - 1.0f;
        labels[n] = x[n * IN] * x[n * IN] + x[n * IN + 1] * x[n * IN + 1] < 0.6f;
    }
    for (int i = 0; i < WEIGHTS; i++) master[i] = amp_random_uniform(2, (uint64_t)i) - 0.5f;
}

template <typename T>
static T* shared_memory(size_t n) {
    T* p = NULL;
    if (cudaMallocManaged(&p, n * sizeof(T)) != cudaSuccess) { printf("skipped: no GPU\n"); exit(0); }
    memset((void*)p, 0, n * sizeof(T));
    return p;
}

int main(void) {
    float *x = shared_memory<float>(N * IN), *logits = shared_memory<float>(N * OUT), *loss = shared_memory<float>(N);
    float *master = shared_memory<float>(WEIGHTS), *momentum = shared_memory<float>(WEIGHTS);
    __half *weights = shared_memory<__half>(WEIGHTS), *grads = shared_memory<__half>(WEIGHTS);
    __half *hidden = shared_memory<__half>(N * HIDDEN), *dlogits = shared_memory<__half>(N * OUT);
    int* labels = shared_memory<int>(N);
    amp_logger logger = { amp_log_stderr, NULL };                                                     /* amp */
    amp_exec exec = {};                                                                               /* amp */
    amp_tensor list = { grads, AMP_F16, WEIGHTS, "grads" };                                           /* amp */
    amp_cuda_scaler* scaler;                                                                          /* amp */
    amp_cuda_tensors* tensors;                                                                        /* amp */
    amp_scaler seen;                                                                                  /* amp */
    exec.logger = &logger;                                                                            /* amp */
    if (amp_cuda_scaler_create(&scaler, NULL, &exec) != AMP_OK) return 1;                             /* amp */
    if (amp_cuda_tensors_create(&tensors, &list, 1, &exec) != AMP_OK) return 1;                       /* amp */
    fill(x, labels, master);
    for (int i = 0; i < WEIGHTS; i++) weights[i] = __float2half(master[i]);
    for (int step = 1; step <= STEPS; step++) {
        const float* scale = amp_cuda_scaler_loss_scale(scaler);                                      /* amp */
        forward<<<N, HIDDEN>>>(x, weights, hidden, logits);
        loss_backward<<<1, N>>>(logits, labels, dlogits, loss, scale);
        backward<<<1, HIDDEN>>>(x, weights, hidden, dlogits, grads);
        amp_cuda_scaler_check(scaler, tensors, &exec);                                                /* amp */
        update<<<(WEIGHTS + 255) / 256, 256>>>(master, weights, momentum, grads, amp_cuda_scaler_device_state(scaler));
        amp_cuda_scaler_update(scaler, &exec);                                                        /* amp */
        if (step % 200 != 0) continue;
        if (amp_cuda_scaler_read(scaler, &seen, &exec) != AMP_OK) return 1;                           /* amp: waits */
        float sum = 0.0f;
        for (int n = 0; n < N; n++) sum += loss[n];
        printf("step %4d  loss %.4f  loss scale %g  skipped %ld\n", step, (double)sum / (double)N, (double)seen.state.scale,
               (long)seen.state.skipped);
    }
    amp_cuda_tensors_destroy(tensors);                                                                /* amp */
    amp_cuda_scaler_destroy(scaler);                                                                  /* amp */
    return 0;
}
