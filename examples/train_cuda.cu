/* train_cuda.cu - the demo on a GPU. The program is demo.c, word for word; here is what differs: the backend of
   the model, and a clear sentence where there is no GPU.

     make demo-cuda                     the same table and picture as `make demo`, in build/demo_cuda.svg
     make demo-cuda DATA=directory      MNIST files in that directory

   By hand:  nvcc -O2 -std=c++20 -arch=native -o demo_cuda examples/train_cuda.cu -lcublas && ./demo_cuda --svg demo.svg */
#include "../amp_cuda.cuh"

static const amp_backend* demo_backend(void) { return amp_cuda_backend(); }
static const char* demo_processor(void);

#define DEMO_CUDA
#define main demo_main
#include "demo.c"
#undef main

static const char* demo_processor(void) {
    static cudaDeviceProp device;
    return cudaGetDeviceProperties(&device, 0) == cudaSuccess ? device.name : "an unknown GPU";
}

int main(int argc, char** argv) {
    amp_logger logger = { amp_log_stderr, NULL };
    amp_cuda_desc desc = {};
    amp_cuda* probe;
    desc.logger = &logger;
    if (amp_cuda_create(&probe, &desc) != AMP_OK) {
        printf("skipped: no GPU that amp_cuda.cuh can use (the sentence above says why); `make demo` runs on the CPU\n");
        return 0;
    }
    amp_cuda_destroy(probe);
    return demo_main(argc, argv);
}
