/* shim_transformer.c - GPT-2, Llama (and Mistral, which is one with a window) and BERT, built of layers named as in the
   transformers library, for check_transformer.py: flat functions, and one struct that Python mirrors. */
#include "../../amp.h"
#include <stdlib.h>
#include <string.h>

enum { SHIM_GPT2 = 0, SHIM_LLAMA = 1, SHIM_BERT = 2 };

typedef struct shim_config {
    int32_t kind, batch, positions, width, heads, kv_heads, blocks, hidden;
    int32_t rows;        /* of the embedding: the vocabulary, and what fills it up */
    int32_t classes;     /* of the loss */
    int32_t fused;       /* Llama: one layer makes rows [q|k|v] */
    int32_t whole;       /* GPT-2, Llama: by amp_transformer_block */
    int32_t tied, window, ignores, ignored, level, low, optimizer;
    float eps, theta, lr, weight_decay, adam_eps, scale;
} shim_config;

typedef struct shim_text {
    shim_config c;
    amp_model* m;
    amp_value logits;
} shim_text;

/* format takes the number of a block. */
static amp_value shim_named(shim_text* t, amp_value v, const char* format, int block) {
    char name[128];
    snprintf(name, sizeof name, format, block);
    amp_name(t->m, v, name);
    return v;
}
static amp_value shim_dense(shim_text* t, amp_value x, int out, int no_bias, const char* format, int block) {
    amp_linear_desc d;
    memset(&d, 0, sizeof d);
    d.out_features = out; d.no_bias = no_bias;
    d.transposed = t->c.kind == SHIM_GPT2;      /* a Conv1D there */
    return shim_named(t, amp_linear_with(t->m, x, &d), format, block);
}
static amp_value shim_norm(shim_text* t, amp_value x, const char* format, int block) {
    amp_norm_desc d;
    memset(&d, 0, sizeof d);
    d.eps = t->c.eps;
    return shim_named(t, t->c.kind == SHIM_LLAMA ? amp_rms_norm_with(t->m, x, &d) : amp_layer_norm_with(t->m, x, &d),
        format, block);
}
static amp_attention_desc shim_attention(const shim_text* t) {
    amp_attention_desc d;
    memset(&d, 0, sizeof d);
    d.heads = t->c.heads; d.kv_heads = t->c.kv_heads; d.window = t->c.window;
    d.causal = t->c.kind != SHIM_BERT;
    return d;
}
static amp_value shim_rope(shim_text* t, amp_value x, int heads) {
    amp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.heads = heads; d.head_size = t->c.width / t->c.heads; d.theta = t->c.theta;
    return amp_rope(t->m, x, &d);
}

/* format names it. */
static amp_value shim_whole_block(shim_text* t, amp_value x, const char* format, int i) {
    char name[64];
    amp_transformer_desc d;
    snprintf(name, sizeof name, format, i);
    memset(&d, 0, sizeof d);
    d.kind = t->c.kind == SHIM_LLAMA ? AMP_BLOCK_LLAMA : AMP_BLOCK_GPT2;
    d.heads = t->c.heads; d.kv_heads = t->c.kv_heads; d.window = t->c.window; d.hidden = t->c.hidden;
    d.eps = t->c.eps; d.theta = t->c.theta; d.name = name;
    d.layers = d.kind == AMP_BLOCK_GPT2 ? t->c.blocks : 0;
    d.transposed = d.kind == AMP_BLOCK_GPT2;
    return amp_transformer_block(t->m, x, &d);
}

static amp_value shim_gpt2_block(shim_text* t, amp_value x, int i) {
    const int width = t->c.width;
    const amp_attention_desc d = shim_attention(t);
    amp_value y = shim_dense(t, shim_norm(t, x, "transformer.h.%d.ln_1", i), 3 * width, 0, "transformer.h.%d.attn.c_attn", i);
    x = amp_add(t->m, x, shim_dense(t, amp_attention(t->m, y, &d), width, 0, "transformer.h.%d.attn.c_proj", i));
    y = shim_dense(t, shim_norm(t, x, "transformer.h.%d.ln_2", i), t->c.hidden, 0, "transformer.h.%d.mlp.c_fc", i);
    return amp_add(t->m, x, shim_dense(t, amp_gelu_tanh(t->m, y), width, 0, "transformer.h.%d.mlp.c_proj", i));
}
static void shim_gpt2(shim_text* t, amp_value tokens) {
    const amp_value words = shim_named(t, amp_embedding(t->m, tokens, t->c.rows, t->c.width), "transformer.wte", 0);
    amp_value x = shim_named(t, amp_position_embedding(t->m, words), "transformer.wpe", 0);
    for (int i = 0; i < t->c.blocks; i++)
        x = t->c.whole ? shim_whole_block(t, x, "transformer.h.%d", i) : shim_gpt2_block(t, x, i);
    t->logits = amp_tied_linear(t->m, shim_norm(t, x, "transformer.ln_f", 0), words);
}

static amp_value shim_llama_heads(shim_text* t, amp_value h, int i) {
    const int size = t->c.width / t->c.heads, shared = t->c.kv_heads;
    const amp_attention_desc d = shim_attention(t);
    if (t->c.fused) {
        h = shim_dense(t, h, (t->c.heads + 2 * shared) * size, 1, "model.layers.%d.self_attn.qkv_proj", i);
        return amp_attention(t->m, shim_rope(t, h, t->c.heads + shared), &d);
    }
    const amp_value q = shim_dense(t, h, t->c.width, 1, "model.layers.%d.self_attn.q_proj", i);
    const amp_value k = shim_dense(t, h, shared * size, 1, "model.layers.%d.self_attn.k_proj", i);
    const amp_value v = shim_dense(t, h, shared * size, 1, "model.layers.%d.self_attn.v_proj", i);
    return amp_attention_qkv(t->m, shim_rope(t, q, t->c.heads), shim_rope(t, k, shared), v, &d);
}
static amp_value shim_llama_block(shim_text* t, amp_value x, int i) {
    amp_model* m = t->m;
    amp_value h = shim_llama_heads(t, shim_norm(t, x, "model.layers.%d.input_layernorm", i), i);
    x = amp_add(m, x, shim_dense(t, h, t->c.width, 1, "model.layers.%d.self_attn.o_proj", i));
    h = shim_norm(t, x, "model.layers.%d.post_attention_layernorm", i);
    h = amp_mul(m, amp_silu(m, shim_dense(t, h, t->c.hidden, 1, "model.layers.%d.mlp.gate_proj", i)),
        shim_dense(t, h, t->c.hidden, 1, "model.layers.%d.mlp.up_proj", i));
    return amp_add(m, x, shim_dense(t, h, t->c.width, 1, "model.layers.%d.mlp.down_proj", i));
}
static void shim_llama(shim_text* t, amp_value tokens) {
    const amp_value words = shim_named(t, amp_embedding(t->m, tokens, t->c.rows, t->c.width), "model.embed_tokens", 0);
    amp_value x = words;
    for (int i = 0; i < t->c.blocks; i++)
        x = t->c.whole ? shim_whole_block(t, x, "model.layers.%d", i) : shim_llama_block(t, x, i);
    x = shim_norm(t, x, "model.norm", 0);
    t->logits = t->c.tied ? amp_tied_linear(t->m, x, words) : shim_dense(t, x, t->c.rows, 1, "lm_head", 0);
}

#define SHIM_LAYER "bert.encoder.layer.%d."
static amp_value shim_bert_block(shim_text* t, amp_value x, int i) {
    const int width = t->c.width;
    const amp_attention_desc d = shim_attention(t);
    const amp_value q = shim_dense(t, x, width, 0, SHIM_LAYER "attention.self.query", i);
    const amp_value k = shim_dense(t, x, width, 0, SHIM_LAYER "attention.self.key", i);
    const amp_value v = shim_dense(t, x, width, 0, SHIM_LAYER "attention.self.value", i);
    amp_value y = shim_dense(t, amp_attention_qkv(t->m, q, k, v, &d), width, 0, SHIM_LAYER "attention.output.dense", i);
    x = shim_norm(t, amp_add(t->m, x, y), SHIM_LAYER "attention.output.LayerNorm", i);
    y = amp_gelu(t->m, shim_dense(t, x, t->c.hidden, 0, SHIM_LAYER "intermediate.dense", i));
    y = shim_dense(t, y, width, 0, SHIM_LAYER "output.dense", i);
    return shim_norm(t, amp_add(t->m, x, y), SHIM_LAYER "output.LayerNorm", i);
}
/* Each token has a class, and one of two types. */
static void shim_bert(shim_text* t, amp_value tokens) {
    const amp_value types = amp_tokens(t->m, t->c.positions);
    amp_value x = shim_named(t, amp_embedding(t->m, tokens, t->c.rows, t->c.width), "bert.embeddings.word_embeddings", 0);
    amp_value y = shim_named(t, amp_embedding(t->m, types, 2, t->c.width), "bert.embeddings.token_type_embeddings", 0);
    x = shim_named(t, amp_position_embedding(t->m, amp_add(t->m, x, y)), "bert.embeddings.position_embeddings", 0);
    x = shim_norm(t, x, "bert.embeddings.LayerNorm", 0);
    for (int i = 0; i < t->c.blocks; i++) x = shim_bert_block(t, x, i);
    t->logits = shim_dense(t, x, t->c.classes, 0, "classifier", 0);
}

static void shim_build(shim_text* t) {
    const amp_value tokens = amp_tokens(t->m, t->c.positions);
    amp_loss_desc l;
    memset(&l, 0, sizeof l);
    l.ignored = t->c.ignores ? &t->c.ignored : NULL; l.classes = t->c.classes;
    if (t->c.kind == SHIM_GPT2) shim_gpt2(t, tokens);
    else if (t->c.kind == SHIM_LLAMA) shim_llama(t, tokens);
    else shim_bert(t, tokens);
    amp_softmax_cross_entropy_with(t->m, t->logits, &l);
}

void shim_text_free(void* text) {
    shim_text* t = (shim_text*)text;
    if (!t) return;
    amp_model_destroy(t->m);
    free(t);
}
/* NULL if anything is refused. */
void* shim_text_new(const shim_config* c) {
    shim_text* t = (shim_text*)calloc(1, sizeof *t);
    amp_model_desc d;
    amp_scaler_desc s;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    if (!t) return NULL;
    t->c = *c;
    s.preset = AMP_SCALER_STATIC; s.init_scale = c->scale;
    d.batch = c->batch; d.scaler = &s;
    d.precision.level = (amp_level)c->level; d.precision.low_dtype = (amp_dtype)c->low;
    d.optimizer.kind = (amp_optimizer_kind)c->optimizer; d.optimizer.lr = c->lr; d.optimizer.weight_decay = c->weight_decay;
    d.optimizer.eps = c->adam_eps;
    d.logger.log = amp_log_stderr;
    if (amp_model_create(&t->m, &d) == AMP_OK) {
        shim_build(t);
        if (amp_model_finalize(t->m) == AMP_OK) return t;
    }
    shim_text_free(t);
    return NULL;
}
void* shim_text_model(void* text) { return ((shim_text*)text)->m; }
const char* shim_text_param_name(void* text, int i) { return amp_model_params(((shim_text*)text)->m, NULL)[i].name; }

/* types: the second input of BERT. */
static amp_batch shim_text_batch(const int32_t* tokens, const int32_t* types, const int32_t* labels, int n, int positions,
        const int32_t* lengths) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n; b.inputs[0] = tokens; b.inputs[1] = types; b.targets[0] = labels;
    b.positions = positions; b.lengths = lengths;
    return b;
}
/* The outcome of a step, or a negative result code. culprit[136]. */
int shim_text_step(void* text, const int32_t* tokens, const int32_t* types, const int32_t* labels, int n, int positions,
        const int32_t* lengths, float* loss, char* culprit) {
    amp_batch b = shim_text_batch(tokens, types, labels, n, positions, lengths);
    amp_step_info info;
    amp_result r = amp_train_step(((shim_text*)text)->m, &b, &info);
    if (r != AMP_OK) return (int)r;
    *loss = info.loss;
    memcpy(culprit, info.culprit, sizeof info.culprit);
    return (int)info.outcome;
}
int shim_text_evaluate(void* text, const int32_t* tokens, const int32_t* types, const int32_t* labels, int n, int positions,
        const int32_t* lengths, float* loss, int64_t* counts) {
    amp_batch b = shim_text_batch(tokens, types, labels, n, positions, lengths);
    amp_eval_info info;
    amp_result r = amp_evaluate(((shim_text*)text)->m, &b, &info);
    if (r != AMP_OK) return (int)r;
    *loss = info.loss;
    counts[0] = info.correct; counts[1] = info.predictions;
    return AMP_OK;
}
/* The logits: out[n,positions,rows]. */
int shim_text_predict(void* text, const int32_t* tokens, const int32_t* types, int n, int positions, const int32_t* lengths,
        float* out) {
    shim_text* t = (shim_text*)text;
    amp_batch b = shim_text_batch(tokens, types, NULL, n, positions, lengths);
    return (int)amp_predict(t->m, &b, t->logits, out);
}
/* count tokens, each with the largest logit. */
int shim_text_generate(void* text, const int32_t* prompt, int prompt_count, int32_t* out, int count) {
    shim_text* t = (shim_text*)text;
    amp_generate_desc d;
    memset(&d, 0, sizeof d);
    d.temperature = AMP_ZERO; d.classes = t->c.classes;
    return (int)amp_generate(t->m, t->logits, prompt, prompt_count, out, count, &d);
}

int shim_text_save(void* text, const char* path) { return (int)amp_checkpoint_save(((shim_text*)text)->m, path); }
/* The number of tensors read, or a negative result code. */
int shim_text_load(void* text, const char* path) {
    int count = 0;
    const amp_result r = amp_checkpoint_load_weights(((shim_text*)text)->m, path, &count);
    return r == AMP_OK ? count : (int)r;
}
