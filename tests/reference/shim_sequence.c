/* shim_sequence.c - flat functions over a GPT-2 and a Llama for check_sequence.py, with the names of Hugging Face's files. Compiled
   into one shared library with the implementation of amp.h. */
#include "../../amp.h"
#include <stdio.h>
#include <string.h>

typedef struct shim_sequence { amp_model* m; amp_value logits; } shim_sequence;

/* kind: an amp_block_kind. scale: a static loss scale. NULL if anything is refused. */
void* shim_sequence_new(int kind, int batch, int positions, int vocabulary, int features, int heads, int kv_heads, int hidden, int layers,
                        int level, int low, float lr, float scale) {
    static shim_sequence w[16];
    static int count;
    shim_sequence* s = &w[count++ % 16];
    const amp_embedding_desc e = { vocabulary, features, AMP_INIT_NORMAL, 0.0f }, p = { 0, 0, AMP_INIT_NORMAL, 0.0f };
    const amp_linear_desc l = { vocabulary, 1, AMP_INIT_NORMAL, 0.0f };
    const int llama = kind == AMP_BLOCK_LLAMA;
    amp_model_desc d;
    amp_scaler_desc fixed;
    amp_transformer_desc t;
    amp_norm_desc n;
    amp_value x, words;
    int i;
    memset(&d, 0, sizeof d);
    memset(&fixed, 0, sizeof fixed);
    memset(&t, 0, sizeof t);
    memset(&n, 0, sizeof n);
    fixed.preset = AMP_SCALER_STATIC; fixed.init_scale = scale;
    d.batch = batch; d.scaler = &fixed;
    d.precision.level = (amp_level)level; d.precision.low_dtype = (amp_dtype)low;
    d.optimizer.kind = AMP_ADAMW; d.optimizer.lr = lr;
    d.logger.log = amp_log_stderr;
    if (amp_model_create(&s->m, &d) != AMP_OK) return NULL;
    words = x = amp_embedding_with(s->m, amp_tokens(s->m, positions), &e);
    amp_name(s->m, words, llama ? "model.embed_tokens" : "transformer.wte");
    if (!llama) {
        x = amp_position_embedding_with(s->m, x, &p);
        amp_name(s->m, x, "transformer.wpe");
    }
    t.kind = (amp_block_kind)kind; t.heads = heads; t.kv_heads = kv_heads; t.hidden = hidden;
    t.eps = n.eps = llama ? 1e-6f : 1e-5f;
    for (i = 0; i < layers; i++) {
        char name[40];
        snprintf(name, sizeof name, llama ? "model.layers.%d" : "transformer.h.%d", i);
        t.name = name;
        x = amp_transformer_block(s->m, x, &t);
    }
    x = llama ? amp_rms_norm_with(s->m, x, &n) : amp_layer_norm_with(s->m, x, &n);
    amp_name(s->m, x, llama ? "model.norm" : "transformer.ln_f");
    s->logits = llama ? amp_linear_with(s->m, x, &l) : amp_tied_linear(s->m, x, words);
    amp_name(s->m, s->logits, "lm_head");
    amp_softmax_cross_entropy(s->m, s->logits);
    if (amp_model_finalize(s->m) == AMP_OK) return s;
    amp_model_destroy(s->m);
    return NULL;
}
void shim_sequence_free(void* w) { amp_model_destroy(((shim_sequence*)w)->m); }

/* How many tensors were read; negative: a result code. */
int shim_sequence_load(void* w, const char* path) {
    int count = 0;
    const amp_result r = amp_checkpoint_load_weights(((shim_sequence*)w)->m, path, &count);
    return r == AMP_OK ? count : (int)r;
}

static amp_batch shim_text(const int32_t* words, const int32_t* next, int n, int positions, const int32_t* lengths) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n; b.inputs[0] = words; b.targets[0] = next; b.positions = positions; b.lengths = lengths;
    return b;
}
int shim_sequence_logits(void* w, const int32_t* words, int n, int positions, const int32_t* lengths, float* out) {
    const amp_batch b = shim_text(words, NULL, n, positions, lengths);
    return (int)amp_predict(((shim_sequence*)w)->m, &b, ((shim_sequence*)w)->logits, out);
}
/* A pass, whose gradients are left to shim_sequence_gradient, until the next call. */
int shim_sequence_pass(void* w, const int32_t* words, const int32_t* next, int n, int positions, const int32_t* lengths, float* loss) {
    const amp_batch b = shim_text(words, next, n, positions, lengths);
    amp_model* m = ((shim_sequence*)w)->m;
    amp_discard(m);
    const amp_result r = amp_forward(m, &b, loss);
    return (int)(r == AMP_OK ? amp_backward(m, NULL) : r);
}
/* Elements of that parameter, or 0; out: its gradient, or (weights) what it is. */
int shim_sequence_param(void* w, const char* name, int weights, float* out) {
    amp_model* m = ((shim_sequence*)w)->m;
    amp_param* p = amp_model_find_param(m, name);
    if (!p || !out) return p ? (int)p->count : 0;
    return (weights ? amp_model_read_param(m, p, out) : amp_model_read_param_gradient(m, p, out)) == AMP_OK ? (int)p->count : 0;
}
int shim_sequence_step(void* w, const int32_t* words, const int32_t* next, int n, int positions, const int32_t* lengths, float* loss) {
    const amp_batch b = shim_text(words, next, n, positions, lengths);
    amp_step_info info;
    const amp_result r = amp_train_step(((shim_sequence*)w)->m, &b, &info);
    *loss = info.loss;
    return r == AMP_OK ? (int)info.outcome : (int)r;
}
