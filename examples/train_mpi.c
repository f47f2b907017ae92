/* train_mpi.c - the same training in several processes, over MPI: each rank sees its own batches, the gradients are
   summed, and the weights stay equal, bit for bit. k ranks give the bits of one process with k micro-batches.

     make demo-mpi                      builds it, and runs it with 1 to 4 ranks
     mpirun -np 4 build/train_mpi [--level O0|O2] [--grads f32|f16|bf16] [--micro K] [--steps N] [--width N]
                                  [--layers N] [--bucket BYTES] [--trace] [--save PATH] [--overflow] [--die STEP]
                                  [--patience SECONDS]

   Option --overflow spoils two steps: all skip them alike. --die ends the last rank by a signal. --trace shows when
   sums ran. --bucket 0 begins them all behind the backward pass.
   By hand:  mpicc -O2 -pthread -o train_mpi examples/train_mpi.c -lm

   A sum of MPI_Allreduce has any order. Here each rank owns a chunk of the array: all send it their numbers
   (all-to-all), it adds them in FP32 in the order of the ranks, all get the sums (all-gather). A rank sends and
   receives 2 (k - 1) / k of the array, as in the best all-reduce.

   Gradients of 16 bits are rounded once more than those of micro-batches: then the ranks are equal to each other only.

   Sums begin while the backward pass still runs: a second thread makes them, bucket by bucket, as MPI makes little
   progress outside of its own calls. The two threads take turns in calling MPI.

   When a process dies, OpenMPI 4.1 ends all others: mpirun sees it before them. Under `mpirun --enable-recovery` they
   live, but a collective call returns no error; it hangs. So calls are polled here, and fail after some seconds:
   amp_train_step returns AMP_ERR_COMM, and the logger of each rank says so. */
#define _POSIX_C_SOURCE 200809L
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 32, MAX_RANKS = 1024, MAX_BUCKETS = 256 };

/* A sum of gradients: what, and when it was started, was begun, and ended. */
typedef struct bucket {
    void* data;
    amp_dtype dtype;
    size_t count;
    double started, begun, ended;
} bucket;

typedef struct ranks_state {
    int rank, size;
    double patience;    /* seconds until a call has failed */
    int sent[MAX_RANKS], sent_at[MAX_RANKS], got[MAX_RANKS], got_at[MAX_RANKS];  /* in bytes */
    char* parts;    /* the own chunk, of each rank */
    float* sum;     /* of them */
    size_t room;    /* bytes of each */
    pthread_t thread;           /* it sums the buckets */
    pthread_mutex_t lock;       /* of what follows */
    pthread_cond_t changed;
    bucket buckets[MAX_BUCKETS];
    int count, summed, leaves;
    amp_result result;
    int trace;
    double zero;                /* where a step begins */
} ranks_state;

/* Waits for a collective call that returned `code`; 0 if it failed, or is not through in time. */
static int finished(const ranks_state* s, int code, MPI_Request* request) {
    const double end = MPI_Wtime() + s->patience;
    int done = 0;
    const struct timespec pause = { 0, 20000 };     /* without it there would be a processor less to compute */
    while (code == MPI_SUCCESS && !done && MPI_Wtime() < end) {
        code = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (!done) nanosleep(&pause, NULL);
    }
    return code == MPI_SUCCESS && done;
}

/* Makes room for `count` numbers, of each rank a chunk. */
static int reserve(ranks_state* s, size_t count) {
    const size_t room = 4 * (count + (size_t)s->size);
    if (room <= s->room) return 1;
    free(s->parts);
    free(s->sum);
    s->parts = (char*)malloc(room);
    s->sum = (float*)malloc(room);
    s->room = s->parts && s->sum ? room : 0;
    return s->room > 0;
}

/* The hook: sums over the ranks, in place, in their order. */
static amp_result all_reduce_sum(void* data, amp_dtype dtype, size_t count, void* stream, void* user_data) {
    ranks_state* s = (ranks_state*)user_data;
    const size_t each = amp_dtype_size(dtype), first = count * (size_t)s->rank / (size_t)s->size,
        own = count * (size_t)(s->rank + 1) / (size_t)s->size - first;
    char* chunk = (char*)data + each * first;
    MPI_Request request;
    (void)stream;
    if (!reserve(s, count)) return AMP_ERR_MEMORY;
    for (int r = 0; r < s->size; r++) {
        s->sent_at[r] = (int)(each * (count * (size_t)r / (size_t)s->size));
        s->sent[r] = (int)(each * (count * (size_t)(r + 1) / (size_t)s->size)) - s->sent_at[r];
        s->got[r] = (int)(each * own);
        s->got_at[r] = r * s->got[r];
    }
    int code = MPI_Ialltoallv(data, s->sent, s->sent_at, MPI_BYTE, s->parts, s->got, s->got_at, MPI_BYTE,
                              MPI_COMM_WORLD, &request);
    if (!finished(s, code, &request)) return AMP_ERR_COMM;

    for (int r = 0; r < s->size; r++) {
        const amp_ref part = { s->parts + s->got_at[r], dtype };
        if (r == 0) amp_convert(amp_f32(s->sum), part, own);
        else amp_add_forward(amp_f32(s->sum), part, amp_f32(s->sum), own, NULL);
    }
    amp_convert((amp_ref){ chunk, dtype }, amp_f32(s->sum), own);  /* rounded once */

    code = MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_BYTE, data, s->sent, s->sent_at, MPI_BYTE, MPI_COMM_WORLD, &request);
    return finished(s, code, &request) ? AMP_OK : AMP_ERR_COMM;
}

/* The second thread: sums buckets as they come. */
static void* sum_buckets(void* user_data) {
    ranks_state* s = (ranks_state*)user_data;
    pthread_mutex_lock(&s->lock);
    while (!s->leaves) {
        bucket* b = &s->buckets[s->summed];
        if (s->summed == s->count) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        b->begun = MPI_Wtime();
        const amp_result r = s->result == AMP_OK ? all_reduce_sum(b->data, b->dtype, b->count, NULL, s) : s->result;
        b->ended = MPI_Wtime();
        pthread_mutex_lock(&s->lock);
        s->result = r;
        s->summed++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* The hook that begins a sum: hands a bucket to the second thread. */
static amp_result start(void* data, amp_dtype dtype, size_t count, void* stream, void* user_data) {
    ranks_state* s = (ranks_state*)user_data;
    (void)stream;
    if (s->count == MAX_BUCKETS) return AMP_ERR_COMM;
    pthread_mutex_lock(&s->lock);
    s->buckets[s->count++] = (bucket){ data, dtype, count, MPI_Wtime(), 0, 0 };
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    return AMP_OK;
}

/* Prints the buckets of a step, in ms from its beginning, and how much of their time lay before the wait. */
static void print_trace(const ranks_state* s, double waits) {
    double all = 0, hidden = 0;
    for (const bucket* b = s->buckets; b < s->buckets + s->count; b++) {
        printf("bucket %2d  %7.1f KB  started %6.1f  summed %6.1f to %6.1f ms\n", (int)(b - s->buckets),
               (double)(b->count * amp_dtype_size(b->dtype)) / 1e3, 1e3 * (b->started - s->zero),
               1e3 * (b->begun - s->zero), 1e3 * (b->ended - s->zero));
        all += b->ended - b->begun;
        hidden += fmax(0, fmin(b->ended, waits) - b->begun);
    }
    printf("waits at %.1f ms: %.0f %% of the time of sums lay in the backward pass\n", 1e3 * (waits - s->zero),
           100 * hidden / all);
}

/* The hook that waits for all sums that began. */
static amp_result wait_for_sums(void* stream, void* user_data) {
    ranks_state* s = (ranks_state*)user_data;
    const double waits = MPI_Wtime();
    (void)stream;
    pthread_mutex_lock(&s->lock);
    while (s->summed < s->count) pthread_cond_wait(&s->changed, &s->lock);
    if (s->trace && s->rank == 0) print_trace(s, waits);
    s->count = s->summed = 0;
    pthread_mutex_unlock(&s->lock);
    return s->result;
}

/* Batch number i of all: points, and whether they lie inside a circle. */
static void make_batch(int i, float points[BATCH][2], int32_t inside[BATCH]) {
    for (int n = 0; n < BATCH; n++) {
        const uint64_t at = (uint64_t)(i * BATCH + n) * 2;
        for (int k = 0; k < 2; k++) points[n][k] = 2.0f * amp_random_uniform(1, at + (uint64_t)k) - 1.0f;
        inside[n] = points[n][0] * points[n][0] + points[n][1] * points[n][1] < 0.6f;
    }
}

/* FNV-1a of all master weights. */
static uint64_t hash_weights(amp_model* m) {
    uint64_t h = 14695981039346656037u;
    int count;
    const amp_param* p = amp_model_params(m, &count);
    for (int i = 0; i < count; i++)
        for (size_t k = 0; k < p[i].count * sizeof(float); k++)
            h = (h ^ ((const unsigned char*)p[i].master)[k]) * 1099511628211u;
    return h;
}

int main(int argc, char** argv) {
    static float points[BATCH][2];
    static int32_t inside[BATCH];
    static ranks_state s = { .patience = 30, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };
    int threads;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &threads);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &s.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &s.size);
    if (s.size > MAX_RANKS)
        return fprintf(stderr, "train_mpi: more than %d ranks\n", MAX_RANKS), MPI_Abort(MPI_COMM_WORLD, 2);
    amp_level level = AMP_O2;
    amp_dtype grads = AMP_F32;
    int micro = 1, steps = 200, width = 64, layers = 1, spoil = 0, die = -1, least = 1 << 20;
    const char* path = NULL;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(word, "--overflow") == 0) { spoil = 1; continue; }
        if (strcmp(word, "--trace") == 0) { s.trace = 1; continue; }
        if (strcmp(word, "--level") == 0) level = strcmp(value, "O0") ? AMP_O2 : AMP_O0;
        else if (strcmp(word, "--grads") == 0)
            grads = *value == 'b' ? AMP_BF16 : strcmp(value, "f16") ? AMP_F32 : AMP_F16;
        else if (strcmp(word, "--micro") == 0) micro = atoi(value);
        else if (strcmp(word, "--steps") == 0) steps = atoi(value);
        else if (strcmp(word, "--width") == 0) width = atoi(value);
        else if (strcmp(word, "--layers") == 0) layers = atoi(value);
        else if (strcmp(word, "--bucket") == 0) least = atoi(value);
        else if (strcmp(word, "--patience") == 0) s.patience = atof(value);
        else if (strcmp(word, "--die") == 0) die = atoi(value);
        else if (strcmp(word, "--save") == 0) path = value;
        else return fprintf(stderr, "train_mpi: what is '%s'?\n", word), MPI_Abort(MPI_COMM_WORLD, 2);
        i++;
    }

    amp_comm comm = { .all_reduce_sum = all_reduce_sum, .rank = s.rank, .size = s.size, .user_data = &s };
    if (least > 0 && threads >= MPI_THREAD_SERIALIZED && pthread_create(&s.thread, NULL, sum_buckets, &s) == 0) {
        comm.start = start;
        comm.wait = wait_for_sums;
        comm.start_bytes = (size_t)least;
    }
    amp_model* m = NULL;
    amp_step_info info = { 0 };
    amp_result r = amp_model_create(&m, &(amp_model_desc){ .batch = BATCH, .accumulate = micro, .comm = &comm,
        .precision = { .level = level }, .grad_dtype = grads, .logger = { .log = amp_log_stderr },
        .optimizer = { .kind = AMP_ADAM, .lr = 0.01f } });
    if (r != AMP_OK) return MPI_Abort(MPI_COMM_WORLD, 1);
    amp_value x = amp_relu(m, amp_linear(m, amp_input(m, 2, 1, 1), width));
    for (int i = 0; i < layers; i++) x = amp_relu(m, amp_linear(m, x, width));
    x = amp_dropout(m, x, 0.1f);
    amp_softmax_cross_entropy(m, amp_linear(m, x, 2));
    r = amp_model_finalize(m);

    /* A step has micro * size batches, whoever computes them. */
    for (int step = 0; r == AMP_OK && step < steps; step++) {
        if (step == die && s.rank == s.size - 1) raise(SIGKILL);
        if (spoil && step == 3 && level != AMP_O0) amp_scaler_set_scale(amp_model_scaler(m), 67108864.0f);
        for (int i = 0; r == AMP_OK && i < micro; i++) {
            const int number = (step * s.size + s.rank) * micro + i, last = (step + 1) * s.size * micro - 1;
            make_batch(number, points, inside);
            if (spoil && step == 15 && number == last) points[0][0] = INFINITY;  /* one batch of one rank */
            s.zero = MPI_Wtime();
            r = amp_train_step(m, &(amp_batch){ .n = BATCH, .inputs = { points }, .targets = { inside } }, &info);
        }
        if (r == AMP_OK && s.rank == 0 && (step + 1) % 50 == 0)
            printf("step %3d  loss %.4f  loss scale %g  skipped %d\n", step + 1, (double)info.loss,
                   (double)info.scale_after, (int)info.skipped);
    }

    if (r == AMP_OK && s.rank == 0 && path) r = amp_checkpoint_save(m, path);  /* one for all: they are equal */
    if (r == AMP_OK)
        printf("weights %016llx  steps %d  skipped %d  rank %d of %d\n", (unsigned long long)hash_weights(m),
               (int)info.step, (int)info.skipped, s.rank, s.size);
    amp_model_destroy(m);
    if (comm.start) {
        pthread_mutex_lock(&s.lock);
        s.leaves = 1;
        pthread_cond_broadcast(&s.changed);
        pthread_mutex_unlock(&s.lock);
        pthread_join(s.thread, NULL);
    }
    free(s.parts);
    free(s.sum);
    if (r != AMP_OK) {
        fprintf(stderr, "rank %d of %d stops: %s\n", s.rank, s.size, amp_result_string(r));
        return MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return MPI_Finalize();
}
