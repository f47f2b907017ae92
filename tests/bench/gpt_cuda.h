/* gpt_cuda.h - the GPT of tests/bench/gpt.h on a GPU: another backend for its operators, products in batches and kernels
   for its loops. */
#ifndef GPT_CUDA_H
#define GPT_CUDA_H

/* The arrays of the network are in device memory, as the tokens are. */
#define GPT_DEVICE
#include "gpt.h"

/* The batch's rows in the order of their tokens: those of one token are of_token[first[i]] up to [first[i + 1] - 1]. */
struct gpt_cuda : gpt { int32_t *of_token, *first; size_t distinct; };

/* --- kernels: one thread for each element --- */

#define GPT_ELEMENT(count)                                            \
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;   \
    if (i >= count) return
static __global__ void gpt_k_embed(const float* token, const float* position, const int32_t* tokens, float* x, size_t R,
                                   size_t T, size_t C) {
    GPT_ELEMENT(R * C);
    x[i] = token[(size_t)tokens[i / C] * C + i % C] + position[i / C % T * C + i % C];
}
static __global__ void gpt_k_embed_tokens(const float* dx, const int32_t* tokens, const int32_t* rows, const int32_t* first,
                                          size_t distinct, float* dtoken, size_t C) {
    GPT_ELEMENT(distinct * C);
    float* d = &dtoken[(size_t)tokens[rows[first[i / C]]] * C + i % C];
    for (int32_t r = first[i / C]; r < first[i / C + 1]; r++) *d += dx[(size_t)rows[r] * C + i % C];
}
static __global__ void gpt_k_embed_positions(const float* dx, float* dposition, size_t R, size_t T, size_t C) {
    GPT_ELEMENT(T * C);
    float sum = 0.0f;
    for (size_t r = i / C; r < R; r += T) sum += dx[r * C + i % C];
    dposition[i] = sum;
}
static __global__ void gpt_k_hide_future(float* scores, size_t count, size_t T) {
    GPT_ELEMENT(count);
    if (i % T > i / T % T) scores[i] = -INFINITY;
}
template <class... P, class... A>
static void gpt_launch(const char* what, void (*kernel)(P...), size_t threads, const gpt* g, A... arguments) {
    const Timing timing(what, "", 0.0);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)((threads + 255) / 256));
    config.blockDim = dim3(256);
    config.stream = (cudaStream_t)g->exec.stream;
    NEED(cudaLaunchKernelEx(&config, kernel, arguments...));
}

/* --- what gpt.h leaves to the device --- */

static void gpt_embed(const gpt* g, const int32_t* tokens) {
    const size_t C = g->s.channels;
    gpt_launch("embed", gpt_k_embed, g->rows * C, g, g->params[GPT_TOKENS].master, g->params[GPT_POSITIONS].master, tokens,
               g->norms[0].x, g->rows, g->s.length, C);
}
static void gpt_embed_backward(const gpt* g, const int32_t* tokens) {
    const gpt_cuda* d = static_cast<const gpt_cuda*>(g);
    const size_t C = g->s.channels;
    gpt_launch("embed_backward", gpt_k_embed_tokens, d->distinct * C, g, g->dstream, tokens, d->of_token, d->first,
               d->distinct, (float*)g->params[GPT_TOKENS].grad, C);
    gpt_launch("embed_backward", gpt_k_embed_positions, g->s.length * C, g, g->dstream,
               (float*)g->params[GPT_POSITIONS].grad, g->rows, g->s.length, C);
}

/* The heads of each sequence are a batch. Of an operand: elements from row to row, from head to head, from sequence to
   sequence. */
struct gpt_heads { void* p; amp_dtype type; size_t row, head, sequence; };
static void gpt_products(const gpt* g, amp_transpose ta, amp_transpose tb, size_t m, size_t n, size_t k, float alpha,
                         const gpt_heads& a, const gpt_heads& b, const gpt_heads& c) {
    amp_gemm_shape s = {};
    s.trans_a = ta; s.trans_b = tb; s.m = m; s.n = n; s.k = k; s.batch = g->s.heads;
    s.lda = a.row; s.ldb = b.row; s.ldc = c.row;
    s.a_stride = a.head; s.b_stride = b.head; s.c_stride = c.head;
    auto at = [](const gpt_heads& h, size_t i) { return (char*)h.p + i * h.sequence * amp_dtype_size(h.type); };
    for (size_t i = 0; i < g->rows / g->s.length; i++)
        g->backend->gemm(&s, alpha, amp_ref_of(at(a, i), a.type), amp_ref_of(at(b, i), b.type),
            0.0f, amp_ref_of(at(c, i), c.type), &g->exec);
}
/* The operands: queries, keys and values of qkv (or of its gradient), a narrow one, the scores. */
static gpt_heads gpt_part(const gpt* g, void* qkv, size_t part) {
    const size_t C = g->s.channels;
    return gpt_heads{ gpt_at(g, qkv, part * C), g->s.low, 3 * C, C / g->s.heads, g->s.length * 3 * C };
}
static gpt_heads gpt_narrow(const gpt* g, void* p) {
    const size_t C = g->s.channels;
    return gpt_heads{ p, g->s.low, C, C / g->s.heads, g->s.length * C };
}
static gpt_heads gpt_square(const gpt* g, void* p, amp_dtype type) {
    const size_t T = g->s.length;
    return gpt_heads{ p, type, T, T * T, g->s.heads * T * T };
}

static void gpt_head_forward(const gpt* g, const gpt_block* b, size_t) {
    const size_t T = g->s.length, D = g->s.channels / g->s.heads, all = g->rows * g->s.heads;
    gpt_products(g, AMP_NO_TRANS, AMP_TRANS, T, T, D, 1.0f / sqrtf((float)D), gpt_part(g, b->qkv, 0),
                 gpt_part(g, b->qkv, 1), gpt_square(g, g->scores, AMP_F32));
    gpt_launch("hide_future", gpt_k_hide_future, all * T, g, g->scores, all * T, T);
    g->backend->softmax_forward(amp_f32(g->scores), amp_ref_of(b->weights, g->s.low), all, T,
        &g->exec);
    gpt_products(g, AMP_NO_TRANS, AMP_NO_TRANS, T, D, T, 1.0f, gpt_square(g, b->weights, g->s.low),
                 gpt_part(g, b->qkv, 2), gpt_narrow(g, b->mixed));
}
static void gpt_head_backward(const gpt* g, const gpt_block* b, size_t) {
    const size_t T = g->s.length, D = g->s.channels / g->s.heads, all = g->rows * g->s.heads;
    const amp_dtype low = g->s.low;
    const float alpha = 1.0f / sqrtf((float)D);
    const gpt_heads weights = gpt_square(g, b->weights, low), dscores = gpt_square(g, g->dscores, low);
    const gpt_heads dmixed = gpt_narrow(g, g->narrow);
    gpt_products(g, AMP_TRANS, AMP_NO_TRANS, T, D, T, 1.0f, weights, dmixed, gpt_part(g, g->dqkv, 2));
    gpt_products(g, AMP_NO_TRANS, AMP_TRANS, T, T, D, 1.0f, dmixed, gpt_part(g, b->qkv, 2),
                 gpt_square(g, g->scores, AMP_F32));
    g->backend->softmax_backward(amp_f32(g->scores), amp_ref_of(b->weights, low),
        amp_ref_of(g->dscores, low), 0, all, T, &g->exec);
    gpt_products(g, AMP_NO_TRANS, AMP_NO_TRANS, T, D, T, alpha, dscores, gpt_part(g, b->qkv, 1), gpt_part(g, g->dqkv, 0));
    gpt_products(g, AMP_TRANS, AMP_NO_TRANS, T, D, T, alpha, dscores, gpt_part(g, b->qkv, 0), gpt_part(g, g->dqkv, 1));
}
static void gpt_attention(const gpt* g, const gpt_block* b, void (*heads)(const gpt*, const gpt_block*, size_t)) {
    heads(g, b, 0);
}

/* --- memory --- */

/* Moves what gpt_create made to the device, and returns the memory there, which is to be freed. Host memory keeps the
   lists of parameters and layers and their names. */
static void* gpt_to_device(gpt_cuda* g) {
    char* there;
    NEED(cudaMalloc((void**)&there, g->used));
    NEED(cudaMemset(there, 0, g->used));
    auto move = [&](auto*& p) {
        if (p) p = reinterpret_cast<typename std::remove_reference<decltype(p)>::type>(there + ((char*)p - g->memory));
    };
    for (int i = 0; i < g->count; i++) {
        amp_param& p = g->params[i];
        const float* start = p.master;
        move(p.master); move(p.low); move(p.grad); move(p.m); move(p.v);
        NEED(cudaMemcpy(p.master, start, p.count * sizeof(float), cudaMemcpyHostToDevice));
    }
    for (size_t i = 0; i <= 2 * g->s.blocks; i++) {
        gpt_norm& n = g->norms[i];
        move(n.x); move(n.mean); move(n.invstd); move(n.y);
    }
    for (size_t i = 0; i < g->s.blocks; i++) {
        gpt_block& b = g->blocks[i];
        move(b.qkv); move(b.weights); move(b.mixed); move(b.up); move(b.gelu);
    }
    move(g->logits); move(g->scores); move(g->dstream); move(g->dnorm);
    move(g->dlogits); move(g->dscores); move(g->dqkv); move(g->dwide); move(g->narrow);
    return there;
}
/* Of device memory, for the largest of the products and norms. */
static size_t gpt_workspace(const gpt* g) {
    const size_t R = g->s.batch * g->s.length, C = g->s.channels, V = g->s.vocabulary;
    const size_t sizes[][3] = { { R, V, C }, { R, C, V }, { V, C, R }, { R, 4 * C, C }, { R, C, 4 * C }, { 4 * C, C, R },
                                { 3 * C, C, R }, { C, C, R } };
    size_t bytes = std::max((size_t)AMP_CUDA_LOSS_WORKSPACE, g->backend->layer_norm_workspace(R, C));
    for (const size_t(&s)[3] : sizes) bytes = std::max(bytes, g->backend->gemm_workspace(s[0], s[1], s[2]));
    return bytes;
}

#endif
