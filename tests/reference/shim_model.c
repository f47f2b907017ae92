/* shim_model.c - flat functions over three small models for check_model.py: no structs to mirror. Compiled into one shared
   library with the implementation of amp.h. */
#include "../../amp.h"
#include <string.h>

static amp_value shim_conv(amp_model* m, amp_value x, int out, int kernel, int stride, int padding, int no_bias) {
    amp_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = out; d.kernel = kernel; d.stride = stride; d.pad = padding; d.no_bias = no_bias;
    return amp_conv2d_with(m, x, &d);
}

/* LeNet-5 on 1x32x32. */
static amp_value shim_lenet(amp_model* m) {
    amp_value x = amp_input(m, 1, 32, 32);
    x = amp_max_pool2d(m, amp_relu(m, shim_conv(m, x, 6, 5, 1, 0, 0)), 2);
    x = amp_max_pool2d(m, amp_relu(m, shim_conv(m, x, 16, 5, 1, 0, 0)), 2);
    x = amp_relu(m, amp_linear(m, amp_flatten(m, x), 120));
    return amp_linear(m, amp_relu(m, amp_linear(m, x, 84)), 10);
}

/* A residual net with batch norm on 3x8x8. frozen: as for fine-tuning, with all statistics and the first layers frozen. */
static amp_value shim_residual(amp_model* m, int frozen) {
    amp_norm_desc n;
    amp_value x = shim_conv(m, amp_input(m, 3, 8, 8), 8, 3, 1, 1, 1), y;
    memset(&n, 0, sizeof n);
    n.frozen = frozen;
    amp_group(m, x, frozen);
    x = amp_batch_norm_with(m, x, &n);
    amp_group(m, x, frozen);
    x = amp_relu(m, x);
    y = amp_relu(m, amp_batch_norm_with(m, shim_conv(m, x, 8, 3, 1, 1, 1), &n));
    y = amp_batch_norm_with(m, shim_conv(m, y, 8, 3, 1, 1, 1), &n);
    x = amp_relu(m, amp_add(m, x, y));
    x = amp_relu(m, amp_batch_norm_with(m, shim_conv(m, x, 16, 3, 2, 1, 1), &n));
    return amp_linear(m, amp_global_avg_pool2d(m, x), 10);
}

/* A class for each of 6x5 pixels, with weights and label 255 left out. */
static void shim_segmentation(amp_model* m) {
    static const float weights[3] = { 1.0f, 0.5f, 2.0f };
    static const int32_t ignored = 255;
    amp_loss_desc l;
    memset(&l, 0, sizeof l);
    l.smoothing = 0.1f; l.class_weights = weights; l.ignored = &ignored;
    amp_softmax_cross_entropy_with(m, shim_conv(m, amp_relu(m, shim_conv(m, amp_input(m, 2, 6, 5), 12, 3, 1, 1, 0)),
        3, 1, 1, 0, 0), &l);
}

static amp_value shared_input;       /* the same in each such model */
/* On 3x8x8: a convolution used twice, norms of groups, instances and rows, and the mean as loss. The input's gradient is kept. */
static void shim_shared(amp_model* m) {
    amp_value x = amp_input(m, 3, 8, 8), y;
    amp_retain_gradient(m, shared_input = x);
    x = amp_silu(m, amp_group_norm(m, shim_conv(m, x, 8, 3, 1, 1, 0), 2));
    y = shim_conv(m, x, 8, 3, 1, 1, 0);
    y = amp_reuse(m, y, amp_silu(m, amp_instance_norm(m, y)));
    amp_mean(m, amp_sigmoid(m, amp_linear(m, amp_rms_norm(m, amp_add(m, x, y)), 10)));
}

/* which: 0 LeNet-5, 1 the residual net, 2 the same frozen, 3 the segmentation net, 4 the one of shared weights. scale: a static loss scale. NULL if anything is refused. */
void* shim_model_new(int which, int batch, int level, int low, int optimizer, float lr, float momentum, float weight_decay, float scale) {
    static const amp_param_group groups[2] = { { 0.0f, 0.0f, 0 }, { 0.0f, 0.0f, 1 } };
    amp_model_desc d;
    amp_scaler_desc s;
    amp_model* m = NULL;
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    s.preset = AMP_SCALER_STATIC; s.init_scale = scale;
    d.batch = batch; d.scaler = &s;
    d.precision.level = (amp_level)level; d.precision.low_dtype = (amp_dtype)low;
    d.optimizer.kind = (amp_optimizer_kind)optimizer; d.optimizer.lr = lr; d.optimizer.momentum = momentum;
    d.optimizer.weight_decay = weight_decay;
    d.optimizer.groups = groups; d.optimizer.group_count = 2;
    d.logger.log = amp_log_stderr;
    if (amp_model_create(&m, &d) != AMP_OK) return NULL;
    if (which == 4) shim_shared(m);
    else if (which == 3) shim_segmentation(m);
    else amp_softmax_cross_entropy(m, which ? shim_residual(m, which == 2) : shim_lenet(m));
    if (amp_model_finalize(m) == AMP_OK) return m;
    amp_model_destroy(m);
    return NULL;
}
void shim_model_free(void* m) { amp_model_destroy((amp_model*)m); }

int shim_model_params(void* m) {
    int count;
    amp_model_params((amp_model*)m, &count);
    return count;
}
size_t shim_model_param_size(void* m, int i) { return amp_model_params((amp_model*)m, NULL)[i].count; }
float* shim_model_weights(void* m, int i) { return amp_model_params((amp_model*)m, NULL)[i].master; }
float* shim_model_gradient(void* m, int i) { return (float*)amp_model_params((amp_model*)m, NULL)[i].grad; }
int shim_model_sync(void* m) { return (int)amp_model_sync_params((amp_model*)m); }

static amp_batch shim_batch(const float* x, const int32_t* labels, int n) {
    amp_batch b;
    memset(&b, 0, sizeof b);
    b.n = n; b.inputs[0] = x; b.targets[0] = labels;
    return b;
}
/* The outcome of a step, or a negative result code. */
int shim_model_step(void* m, const float* x, const int32_t* labels, int n, float* loss) {
    amp_batch b = shim_batch(x, labels, n);
    amp_step_info info;
    amp_result r = amp_train_step((amp_model*)m, &b, &info);
    *loss = info.loss;
    return r == AMP_OK ? (int)info.outcome : (int)r;
}
int shim_model_evaluate(void* m, const float* x, const int32_t* labels, int n, float* loss, int* correct) {
    amp_batch b = shim_batch(x, labels, n);
    amp_eval_info info;
    amp_result r = amp_evaluate((amp_model*)m, &b, &info);
    if (r == AMP_OK) { *loss = info.loss; *correct = (int)info.correct; }
    return (int)r;
}
/* The gradient of shim_shared's input, by a pass without an update. */
int shim_model_input_gradient(void* m, const float* x, int n, float* out) {
    amp_batch b = shim_batch(x, NULL, n);
    amp_model* model = (amp_model*)m;
    amp_result r = amp_forward(model, &b, NULL);
    if (r == AMP_OK) r = amp_backward(model, NULL);
    if (r == AMP_OK) r = amp_model_read_gradient(model, shared_input, out);
    return (int)(r == AMP_OK ? amp_discard(model) : r);
}
