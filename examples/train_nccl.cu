/* train_nccl.cu - the same training on several GPUs: a thread for each, gradients summed by NCCL. Each rank sees
   its own part of every batch; the weights stay equal, bit for bit, and an overflow on one rank skips the step on
   all. Sums of gradients begin during the backward pass, on a stream of their own.

     build/train_nccl [--half]          all GPUs of this machine; --half sums gradients as 16-bit numbers

   By hand:  nvcc -O2 -std=c++20 -arch=native -o train_nccl examples/train_nccl.cu -lcublas -lnccl */
#define AMP_IMPLEMENTATION
#include "../amp_cuda.cuh"
#include "data.h"
#include <nccl.h>
#include <thread>
#include <vector>

enum { BATCH = 64, SIDE = 28, STEPS = 200 };

/* A rank's communicator, the stream of its sums, and what tells both streams how far the other is. */
struct Rank {
    ncclComm_t nccl;
    cudaStream_t sums;
    cudaEvent_t ready, summed;
};

/* The hook: sums over the ranks, in place, in the order of the stream. The host waits in none of the three. */
static amp_result all_reduce_sum(void* data, amp_dtype dtype, size_t count, void* stream, void* user_data) {
    ncclDataType_t type = dtype == AMP_F16 ? ncclHalf : dtype == AMP_BF16 ? ncclBfloat16 : ncclFloat;
    ncclResult_t r = ncclAllReduce(data, data, count, type, ncclSum, ((Rank*)user_data)->nccl, (cudaStream_t)stream);
    return r == ncclSuccess ? AMP_OK : AMP_ERR_COMM;
}
/* `to` goes on when `from` has come to here. A graph that records `from` then records `to`, too. */
static amp_result follow(cudaStream_t to, cudaStream_t from, cudaEvent_t event) {
    cudaError_t e = cudaEventRecord(event, from);
    if (e == cudaSuccess) e = cudaStreamWaitEvent(to, event, 0);
    return e == cudaSuccess ? AMP_OK : AMP_ERR_DEVICE;
}
/* The hook that begins a sum: the gradients are ready, and the backward pass goes on beside it. */
static amp_result start(void* data, amp_dtype dtype, size_t count, void* stream, void* user_data) {
    Rank* rank = (Rank*)user_data;
    amp_result r = follow(rank->sums, (cudaStream_t)stream, rank->ready);
    return r == AMP_OK ? all_reduce_sum(data, dtype, count, rank->sums, rank) : r;
}
/* The hook behind the backward pass: the update waits for all sums. */
static amp_result wait_for_sums(void* stream, void* user_data) {
    Rank* rank = (Rank*)user_data;
    return follow((cudaStream_t)stream, rank->sums, rank->summed);
}

static amp_result build(amp_model** m, const amp_comm* comm, int narrow) {
    amp_model_desc desc = {};
    amp_cuda_desc cuda = {};
    amp_value x;
    amp_result r;
    cuda.graph = 1;
    desc.batch = BATCH;
    desc.precision.level = AMP_O2;
    desc.optimizer.kind = AMP_ADAM;
    desc.grad_dtype = narrow ? AMP_F16 : AMP_F32;
    desc.backend = amp_cuda_backend();
    desc.backend_desc = &cuda;
    desc.comm = comm;
    desc.logger.log = amp_log_stderr;
    r = amp_model_create(m, &desc);
    if (r != AMP_OK) return r;
    x = amp_relu(*m, amp_conv2d(*m, amp_input(*m, 1, SIDE, SIDE), 16, 5, 1, 0));
    x = amp_relu(*m, amp_linear(*m, amp_max_pool2d(*m, x, 2), 128));
    amp_softmax_cross_entropy(*m, amp_linear(*m, x, 10));
    return amp_model_finalize(*m);
}

/* The life of one rank. */
static void run_rank(int rank, int ranks, ncclComm_t nccl, const data_set* digits, int narrow) {
    Rank own = { nccl, NULL, NULL, NULL };
    amp_comm comm = { all_reduce_sum, rank, ranks, &own, start, wait_for_sums, 256 << 10 };
    std::vector<float> x((size_t)BATCH * SIDE * SIDE);
    std::vector<int32_t> labels(BATCH);
    amp_model* m = NULL;
    amp_batch batch = {};
    amp_step_info info;
    amp_result r;
    bool made = cudaSetDevice(rank) == cudaSuccess
        && cudaStreamCreateWithFlags(&own.sums, cudaStreamNonBlocking) == cudaSuccess
        && cudaEventCreateWithFlags(&own.ready, cudaEventDisableTiming) == cudaSuccess
        && cudaEventCreateWithFlags(&own.summed, cudaEventDisableTiming) == cudaSuccess;
    r = made ? build(&m, &comm, narrow) : AMP_ERR_DEVICE;
    batch.n = BATCH;
    batch.inputs[0] = x.data();
    batch.targets[0] = labels.data();
    for (int step = 0; step < STEPS && r == AMP_OK; step++) {
        data_batch(digits, NULL, (step * ranks + rank) * BATCH % digits->count, BATCH, SIDE, x.data(), labels.data());
        r = amp_train_step(m, &batch, NULL);
        if (r == AMP_OK && (step + 1) % 50 == 0 && (r = amp_train_read(m, &info)) == AMP_OK && rank == 0)
            printf("step %3d  loss %.4f  loss scale %g  skipped %ld\n", step + 1, (double)info.loss,
                   (double)info.scale_after, (long)info.skipped);
    }
    if (r != AMP_OK) fprintf(stderr, "rank %d: %s\n", rank, m ? amp_model_error(m) : amp_result_string(r));
    amp_model_destroy(m);
    cudaEventDestroy(own.ready);
    cudaEventDestroy(own.summed);
    cudaStreamDestroy(own.sums);
}

int main(int argc, char** argv) {
    int narrow = argc > 1 && strcmp(argv[1], "--half") == 0, ranks = 0;
    char error[DATA_ERROR];
    data_set digits;
    if (cudaGetDeviceCount(&ranks) != cudaSuccess || ranks == 0) return printf("skipped: no GPU\n"), 0;
    std::vector<ncclComm_t> comms((size_t)ranks);
    std::vector<std::thread> threads;
    if (ncclCommInitAll(comms.data(), ranks, NULL) != ncclSuccess) return fprintf(stderr, "NCCL does not start\n"), 1;
    if (!data_digits(&digits, 8192, 1, error)) return fprintf(stderr, "%s\n", error), 1;
    for (int rank = 0; rank < ranks; rank++)
        threads.emplace_back(run_rank, rank, ranks, comms[(size_t)rank], &digits, narrow);
    for (std::thread& t : threads) t.join();
    for (ncclComm_t c : comms) ncclCommDestroy(c);
    data_free(&digits);
    return 0;
}
