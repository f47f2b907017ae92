/* gpt.h - a GPT, the network of GPT-2 (Radford et al., 2019), on arrays of its own with the operators of amp.h.

   stream = token embedding + position embedding
   block:   stream += project(attention(norm(stream))), then stream += down(gelu(up(norm(stream))))
   logits = norm(stream) * token embedding^T

   Precision as under autocast: products take and give operands of type `low` (F32, F16 or BF16); the stream and its
   gradient, norms, attention scores, logits, the loss and all weight gradients are FP32. Matrices have FP32 masters and
   low copies, vectors are FP32 alone.

   Letters: B sequences of T tokens, R = B*T rows, C channels, H heads, D = C/H, V tokens in the vocabulary.
   A refused call says why on stderr. */
#ifndef GPT_H
#define GPT_H
#define AMP_BACKEND_API
#include "../../amp.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct gpt_shape {
    size_t batch, length, channels, heads, blocks, vocabulary;          /* B, T, C = H*D, H, how many, V */
    amp_dtype low;
} gpt_shape;

/* Parameters: two embeddings, 12 tensors for each block, a last norm. A norm is a gain and an offset, a dense layer a
   weight and a bias, one behind the other. */
enum { GPT_TOKENS, GPT_POSITIONS, GPT_FIRST_BLOCK,
       GPT_NORM1 = 0, GPT_QKV = 2, GPT_PROJECT = 4, GPT_NORM2 = 6, GPT_UP = 8, GPT_DOWN = 10, GPT_PER_BLOCK = 12 };

/* What the forward pass leaves for the backward pass: of a norm x[R,C], which is the stream, mean[R], invstd[R] and
   y[R,C]. Norms 2i and 2i+1 are those of block i, the last one is behind all blocks. */
typedef struct gpt_norm { float *x, *mean, *invstd; void* y; } gpt_norm;
/* Of the rest of a block: [R,3C], the attention weights [B,H,T,T] and the values they mix [R,C], [R,4C], [R,4C]. */
typedef struct gpt_block { void *qkv, *weights, *mixed, *up, *gelu; } gpt_block;

typedef struct gpt {
    gpt_shape s;
    size_t rows;                                        /* R of the last forward pass */
    int count;
    amp_param* params;
    gpt_norm* norms;
    gpt_block* blocks;
    float *logits, *scores, *dstream, *dnorm;           /* [R,V], [B,H,T,T], [R,C], [R,C] */
    void *dlogits, *dscores, *dqkv, *dwide, *narrow;    /* [R,V], [B,H,T,T], [R,3C], [R,4C], [R,C], all low */
    const amp_backend* backend;                         /* whose operators run: the CPU's, if nobody sets another */
    amp_logger logger;
    amp_exec exec;                                      /* sums = AMP_SUMS_FAST: the processor's matrix unit */
    char* memory;                                       /* every array above lies here */
    size_t used;
} gpt;

/* For the optimizer: matrices decay, vectors do not. */
static const amp_param_group gpt_groups[2] = { { 0.0f, 0.0f, 0, NULL }, { 0.0f, AMP_ZERO, 0, NULL } };

/* --- memory: handed out twice, the first time only to count the bytes --- */

static void* gpt_take(gpt* g, size_t bytes) {
    void* p = g->memory ? g->memory + g->used : NULL;
    g->used += (bytes + 63) / 64 * 64;
    return p;
}
static float* gpt_take_f32(gpt* g, size_t count) { return (float*)gpt_take(g, count * sizeof(float)); }
static void* gpt_take_low(gpt* g, size_t count) { return gpt_take(g, count * amp_dtype_size(g->s.low)); }

/* A matrix begins with uniform numbers of deviation 0.02, a vector (0 columns) with `first` everywhere. */
static void gpt_take_param(gpt* g, const char* name, size_t rows, size_t columns, float first) {
    amp_param p = { NULL, NULL, g->s.low, NULL, AMP_F32, NULL, NULL, columns ? rows * columns : rows, !columns, name,
        AMP_F32, NULL };
    p.master = gpt_take_f32(g, p.count);
    p.grad = gpt_take_f32(g, p.count);
    p.m = gpt_take_f32(g, p.count);
    p.v = gpt_take_f32(g, p.count);
    if (columns && g->s.low != AMP_F32) p.low = gpt_take_low(g, p.count);
    for (size_t i = 0; g->memory && i < p.count; i++)
        p.master[i] = columns ? 0.0346f * (2.0f * amp_random_uniform((uint64_t)g->count, i) - 1.0f) : first;
    if (g->memory) g->params[g->count] = p;
    g->count++;
}
static void gpt_take_params(gpt* g) {
    static const struct { const char* name; size_t rows, columns; float first; } block[GPT_PER_BLOCK] = {
        { "norm1 gain", 1, 0, 1.0f }, { "norm1 offset", 1, 0, 0.0f }, { "qkv weight", 3, 1, 0.0f },
        { "qkv bias", 3, 0, 0.0f }, { "project weight", 1, 1, 0.0f }, { "project bias", 1, 0, 0.0f },
        { "norm2 gain", 1, 0, 1.0f }, { "norm2 offset", 1, 0, 0.0f }, { "up weight", 4, 1, 0.0f },
        { "up bias", 4, 0, 0.0f }, { "down weight", 1, 4, 0.0f }, { "down bias", 1, 0, 0.0f } };
    const size_t C = g->s.channels;                     /* the unit of the table */
    g->count = 0;
    gpt_take_param(g, "tokens", g->s.vocabulary, C, 0.0f);
    gpt_take_param(g, "positions", g->s.length, C, 0.0f);
    for (size_t n = 0; n < g->s.blocks; n++)
        for (size_t i = 0; i < GPT_PER_BLOCK; i++) {
            char* name = (char*)gpt_take(g, 32);
            if (name) snprintf(name, 32, "%d %s", (int)n + 1, block[i].name);
            gpt_take_param(g, name, C * block[i].rows, C * block[i].columns, block[i].first);
        }
    gpt_take_param(g, "last norm gain", C, 0, 1.0f);
    gpt_take_param(g, "last norm offset", C, 0, 0.0f);
}

static void gpt_take_activations(gpt* g) {
    const gpt_shape* s = &g->s;
    const size_t R = s->batch * s->length, C = s->channels, square = R * s->heads * s->length;
    for (size_t i = 0; i <= 2 * s->blocks; i++) {
        gpt_norm n = { gpt_take_f32(g, R * C), gpt_take_f32(g, R), gpt_take_f32(g, R), gpt_take_low(g, R * C) };
        if (g->memory) g->norms[i] = n;
    }
    for (size_t i = 0; i < s->blocks; i++) {
        gpt_block b = { gpt_take_low(g, R * 3 * C), gpt_take_low(g, square), gpt_take_low(g, R * C),
                        gpt_take_low(g, R * 4 * C), gpt_take_low(g, R * 4 * C) };
        if (g->memory) g->blocks[i] = b;
    }
    g->logits = gpt_take_f32(g, R * s->vocabulary);
    g->scores = gpt_take_f32(g, square);
    g->dstream = gpt_take_f32(g, R * C);
    g->dnorm = gpt_take_f32(g, R * C);
    g->dlogits = gpt_take_low(g, R * s->vocabulary);
    g->dscores = gpt_take_low(g, square);
    g->dqkv = gpt_take_low(g, R * 3 * C);
    g->dwide = gpt_take_low(g, R * 4 * C);
    g->narrow = gpt_take_low(g, R * C);
}

static void gpt_lay_out(gpt* g) {
    const size_t blocks = g->s.blocks, wide = g->s.batch * g->s.length + 4 * g->s.channels + g->s.vocabulary;
    g->used = 0;
    g->params = (amp_param*)gpt_take(g, (GPT_FIRST_BLOCK + blocks * GPT_PER_BLOCK + 2) * sizeof(amp_param));
    g->norms = (gpt_norm*)gpt_take(g, (2 * blocks + 1) * sizeof(gpt_norm));
    g->blocks = (gpt_block*)gpt_take(g, blocks * sizeof(gpt_block));
    gpt_take_params(g);
    gpt_take_activations(g);
    g->exec.workspace_size = amp_gemm_workspace(wide, wide, wide);      /* the largest needs about as much as any */
    g->exec.workspace = gpt_take(g, g->exec.workspace_size);
}

/* Returns 0 without memory. The low copies of the weights are written by amp_optimizer_init. */
static int gpt_create(gpt* g, const gpt_shape* shape) {
    memset(g, 0, sizeof *g);
    g->s = *shape;
    gpt_lay_out(g);
    g->memory = (char*)calloc(1, g->used);
    if (!g->memory) return 0;
    gpt_lay_out(g);
    g->backend = amp_cpu_backend();
    g->logger.log = amp_log_stderr;
    g->exec.logger = &g->logger;
    return 1;
}
static void gpt_free(gpt* g) { free(g->memory); }

/* --- layers; p is the first of a layer's two parameters --- */

static const void* gpt_weight(const amp_param* p) { return p->low ? p->low : p->master; }
static void* gpt_at(const gpt* g, void* low, size_t element) {
    return (char*)low + element * amp_dtype_size(g->s.low);
}

static void gpt_norm_forward(const gpt* g, const amp_param* p, const gpt_norm* n) {
    g->backend->layer_norm_forward(amp_f32(n->x), amp_f32(p[0].master), amp_f32(p[1].master),
        0.0f, n->mean, n->invstd, amp_ref_of(n->y, g->s.low), g->rows, g->s.channels, &g->exec);
}
/* dstream += gradient through the norm of what lies in narrow */
static void gpt_norm_backward(const gpt* g, const amp_param* p, const gpt_norm* n) {
    g->backend->layer_norm_backward(amp_ref_of(g->narrow, g->s.low), amp_f32(n->x),
        amp_f32(p[0].master), 0.0f, n->mean, n->invstd, amp_f32(g->dnorm), amp_ref_of(p[0].grad, AMP_F32),
        amp_ref_of(p[1].grad, AMP_F32), 0, g->rows, g->s.channels, &g->exec);
    g->backend->add_forward(amp_f32(g->dstream), amp_f32(g->dnorm), amp_f32(g->dstream),
        g->rows * g->s.channels, &g->exec);
}

/* y[R,out] = x[R,in] weight[out,in]^T + bias[out] */
static void gpt_dense_forward(const gpt* g, const amp_param* p, const void* x, void* y, size_t in, size_t out) {
    g->backend->linear_forward(amp_ref_of(x, g->s.low), amp_ref_of(gpt_weight(p), g->s.low),
        amp_f32(p[1].master), amp_ref_of(y, g->s.low), g->rows, in, out, &g->exec);
}
static void gpt_dense_backward(const gpt* g, const amp_param* p, const void* dy, const void* x, void* dx, size_t in,
                               size_t out) {
    g->backend->linear_backward(amp_ref_of(dy, g->s.low), amp_ref_of(x, g->s.low),
        amp_ref_of(gpt_weight(p), g->s.low), amp_ref_of(dx, g->s.low), amp_ref_of(p[0].grad, AMP_F32),
        amp_ref_of(p[1].grad, AMP_F32), 0, g->rows, in, out, &g->exec);
}

#ifdef GPT_DEVICE       /* a program that has its arrays on a device defines these itself */
static void gpt_head_forward(const gpt* g, const gpt_block* b, size_t n);
static void gpt_head_backward(const gpt* g, const gpt_block* b, size_t n);
static void gpt_attention(const gpt* g, const gpt_block* b, void (*head)(const gpt*, const gpt_block*, size_t));
static void gpt_embed(const gpt* g, const int32_t* tokens);
static void gpt_embed_backward(const gpt* g, const int32_t* tokens);
#else
/* --- attention, head by head: weights = softmax(Q K^T / sqrt(D), each token seeing itself and those before it),
   mixed = weights V. Q, K and V are D columns each of qkv's 3C. --- */

/* c = alpha op(a) op(b) of one head, where a and b are low. A workspace would be needed for each thread. */
static void gpt_gemm(const gpt* g, const amp_gemm_shape* s, float alpha, const void* a, const void* b, void* c,
                     amp_dtype c_dtype) {
    amp_exec exec = g->exec;
    exec.workspace = NULL;
    g->backend->gemm(s, alpha, amp_ref_of(a, g->s.low), amp_ref_of(b, g->s.low), 0.0f,
        amp_ref_of(c, c_dtype), &exec);
}
static void gpt_hide_future(float* scores, size_t T) {
    for (size_t t = 0; t < T; t++)
        for (size_t u = t + 1; u < T; u++) scores[t * T + u] = -INFINITY;
}
static void gpt_head_forward(const gpt* g, const gpt_block* b, size_t n) {
    const size_t T = g->s.length, C = g->s.channels, H = g->s.heads, D = C / H, W = 3 * C;
    const amp_gemm_shape similar = { .trans_b = AMP_TRANS, .m = T, .n = T, .k = D, .lda = W, .ldb = W };
    const amp_gemm_shape mix = { .m = T, .n = D, .k = T, .ldb = W, .ldc = C };
    const amp_dtype low = g->s.low;
    void *q = gpt_at(g, b->qkv, n / H * T * W + n % H * D), *k = gpt_at(g, q, C), *v = gpt_at(g, k, C);
    void *weights = gpt_at(g, b->weights, n * T * T), *mixed = gpt_at(g, b->mixed, n / H * T * C + n % H * D);
    float* scores = g->scores + n * T * T;
    gpt_gemm(g, &similar, 1.0f / sqrtf((float)D), q, k, scores, AMP_F32);
    gpt_hide_future(scores, T);
    g->backend->softmax_forward(amp_f32(scores), amp_ref_of(weights, low), T, T, &g->exec);
    gpt_gemm(g, &mix, 1.0f, weights, v, mixed, low);
}
/* From the gradient of mixed, which lies in narrow, to dqkv. */
static void gpt_head_backward(const gpt* g, const gpt_block* b, size_t n) {
    const size_t T = g->s.length, C = g->s.channels, H = g->s.heads, D = C / H, W = 3 * C;
    const size_t first = n / H * T * W + n % H * D;
    const amp_gemm_shape to_v = { .trans_a = AMP_TRANS, .m = T, .n = D, .k = T, .ldb = C, .ldc = W };
    const amp_gemm_shape to_weights = { .trans_b = AMP_TRANS, .m = T, .n = T, .k = D, .lda = C, .ldb = W };
    const amp_gemm_shape to_q = { .m = T, .n = D, .k = T, .ldb = W, .ldc = W };
    const amp_gemm_shape to_k = { .trans_a = AMP_TRANS, .m = T, .n = D, .k = T, .ldb = W, .ldc = W };
    const amp_dtype low = g->s.low;
    const float alpha = 1.0f / sqrtf((float)D);
    void *q = gpt_at(g, b->qkv, first), *k = gpt_at(g, q, C), *v = gpt_at(g, k, C);
    const void *weights = gpt_at(g, b->weights, n * T * T), *dmixed = gpt_at(g, g->narrow, n / H * T * C + n % H * D);
    void *dq = gpt_at(g, g->dqkv, first), *dk = gpt_at(g, dq, C), *dv = gpt_at(g, dk, C);
    void* dscores = gpt_at(g, g->dscores, n * T * T);
    float* dweights = g->scores + n * T * T;
    gpt_gemm(g, &to_v, 1.0f, weights, dmixed, dv, low);
    gpt_gemm(g, &to_weights, 1.0f, dmixed, v, dweights, AMP_F32);
    g->backend->softmax_backward(amp_f32(dweights), amp_ref_of(weights, low),
        amp_ref_of(dscores, low), 0, T, T, &g->exec);
    gpt_gemm(g, &to_q, alpha, dscores, k, dq, low);
    gpt_gemm(g, &to_k, alpha, dscores, q, dk, low);
}

/* All heads, several at a time if the compiler has threads. */
static void gpt_attention(const gpt* g, const gpt_block* b, void (*head)(const gpt*, const gpt_block*, size_t)) {
    const int64_t count = (int64_t)(g->rows / g->s.length * g->s.heads);
#ifdef _OPENMP
#pragma omp parallel for
#endif
    for (int64_t n = 0; n < count; n++) head(g, b, (size_t)n);
}
#endif

/* --- one block: n is its first norm --- */

static void gpt_block_forward(const gpt* g, const amp_param* p, const gpt_norm* n, const gpt_block* b) {
    const size_t R = g->rows, C = g->s.channels;
    const amp_dtype low = g->s.low;
    gpt_norm_forward(g, p + GPT_NORM1, &n[0]);
    gpt_dense_forward(g, p + GPT_QKV, n[0].y, b->qkv, C, 3 * C);
    gpt_attention(g, b, gpt_head_forward);
    gpt_dense_forward(g, p + GPT_PROJECT, b->mixed, g->narrow, C, C);
    g->backend->add_forward(amp_f32(n[0].x), amp_ref_of(g->narrow, low), amp_f32(n[1].x), R * C,
        &g->exec);
    gpt_norm_forward(g, p + GPT_NORM2, &n[1]);
    gpt_dense_forward(g, p + GPT_UP, n[1].y, b->up, C, 4 * C);
    g->backend->activation_forward(AMP_GELU_TANH, amp_ref_of(b->up, low),
        amp_ref_of(b->gelu, low), R * 4 * C, &g->exec);
    gpt_dense_forward(g, p + GPT_DOWN, b->gelu, g->narrow, 4 * C, C);
    g->backend->add_forward(amp_f32(n[1].x), amp_ref_of(g->narrow, low), amp_f32(n[2].x), R * C,
        &g->exec);
}
/* dstream: the gradient of the block's output, then of its input. */
static void gpt_block_backward(const gpt* g, const amp_param* p, const gpt_norm* n, const gpt_block* b) {
    const size_t R = g->rows, C = g->s.channels;
    const amp_dtype low = g->s.low;
    g->backend->convert(amp_ref_of(g->narrow, low), amp_f32(g->dstream), R * C, &g->exec);
    gpt_dense_backward(g, p + GPT_DOWN, g->narrow, b->gelu, g->dwide, 4 * C, C);
    g->backend->activation_backward(AMP_GELU_TANH, amp_ref_of(g->dwide, low),
        amp_ref_of(b->up, low), amp_ref_of(g->dwide, low), 0, R * 4 * C, &g->exec);
    gpt_dense_backward(g, p + GPT_UP, g->dwide, n[1].y, g->narrow, C, 4 * C);
    gpt_norm_backward(g, p + GPT_NORM2, &n[1]);
    g->backend->convert(amp_ref_of(g->dwide, low), amp_f32(g->dstream), R * C, &g->exec);
    gpt_dense_backward(g, p + GPT_PROJECT, g->dwide, b->mixed, g->narrow, C, C);
    gpt_attention(g, b, gpt_head_backward);
    gpt_dense_backward(g, p + GPT_QKV, g->dqkv, n[0].y, g->narrow, C, 3 * C);
    gpt_norm_backward(g, p + GPT_NORM1, &n[0]);
}

/* --- the network; tokens[B,T] and targets[B,T] are numbers below V --- */

#ifndef GPT_DEVICE
static void gpt_embed(const gpt* g, const int32_t* tokens) {
    const size_t C = g->s.channels;
    for (size_t r = 0; r < g->rows; r++) {
        const float* token = g->params[GPT_TOKENS].master + (size_t)tokens[r] * C;
        const float* position = g->params[GPT_POSITIONS].master + r % g->s.length * C;
        for (size_t c = 0; c < C; c++) g->norms[0].x[r * C + c] = token[c] + position[c];
    }
}
/* Adds to the tokens' gradient, which the logits have written. */
static void gpt_embed_backward(const gpt* g, const int32_t* tokens) {
    const size_t C = g->s.channels;
    float *dtokens = (float*)g->params[GPT_TOKENS].grad, *dpositions = (float*)g->params[GPT_POSITIONS].grad;
    memset(dpositions, 0, g->s.length * C * sizeof(float));
    for (size_t r = 0; r < g->rows; r++)
        for (size_t c = 0; c < C; c++) {
            dtokens[(size_t)tokens[r] * C + c] += g->dstream[r * C + c];
            dpositions[r % g->s.length * C + c] += g->dstream[r * C + c];
        }
}
#endif

static amp_param* gpt_block_params(const gpt* g, size_t i) { return g->params + GPT_FIRST_BLOCK + i * GPT_PER_BLOCK; }

/* Fills logits[R,V]; `batch` may be less than B. */
static void gpt_forward(gpt* g, const int32_t* tokens, size_t batch) {
    const size_t L = g->s.blocks;
    g->rows = batch * g->s.length;
    gpt_embed(g, tokens);
    for (size_t i = 0; i < L; i++) gpt_block_forward(g, gpt_block_params(g, i), &g->norms[2 * i], &g->blocks[i]);
    gpt_norm_forward(g, gpt_block_params(g, L), &g->norms[2 * L]);
    g->backend->linear_forward(amp_ref_of(g->norms[2 * L].y, g->s.low),
        amp_ref_of(gpt_weight(&g->params[GPT_TOKENS]), g->s.low), AMP_NONE, amp_f32(g->logits),
        g->rows, g->s.channels, g->s.vocabulary, &g->exec);
}

#ifndef GPT_DEVICE
/* The mean loss of the last forward pass. */
static float gpt_loss(const gpt* g, const int32_t* targets) {
    float loss = NAN;
    g->backend->softmax_cross_entropy_forward(amp_f32(g->logits), targets, NULL, &loss, g->rows,
        g->s.vocabulary, &g->exec);
    return loss;
}
#endif

/* Writes all gradients of *loss_scale * loss; NULL is 1. */
static void gpt_backward(const gpt* g, const int32_t* tokens, const int32_t* targets, const float* loss_scale) {
    const size_t L = g->s.blocks, C = g->s.channels, V = g->s.vocabulary;
    const amp_dtype low = g->s.low;
    const amp_param* embedding = &g->params[GPT_TOKENS];
    g->backend->softmax_cross_entropy_backward(amp_f32(g->logits), targets, NULL, loss_scale,
        1.0f, amp_ref_of(g->dlogits, low), g->rows, V, &g->exec);
    g->backend->linear_backward(amp_ref_of(g->dlogits, low), amp_ref_of(g->norms[2 * L].y, low),
        amp_ref_of(gpt_weight(embedding), low), amp_ref_of(g->narrow, low),
        amp_ref_of(embedding->grad, AMP_F32), AMP_NONE, 0, g->rows, C, V, &g->exec);
    g->backend->zero(g->dstream, g->rows * C * sizeof(float), &g->exec);
    gpt_norm_backward(g, gpt_block_params(g, L), &g->norms[2 * L]);
    for (size_t i = L; i-- > 0;) gpt_block_backward(g, gpt_block_params(g, i), &g->norms[2 * i], &g->blocks[i]);
    gpt_embed_backward(g, tokens);
}

#endif
