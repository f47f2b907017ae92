/* test_model.c - the graph: shapes, mistakes, types, casts, memory, and the gradients of whole models against a
   reference in double precision that is written here, shares no code with the library, and uses no memory twice. */
#define AMP_BACKEND_API
#include "small_model.h"
#include <limits.h>
#include <math.h>

static amp_model* model_of(int batch, amp_level level, amp_dtype low) {
    const amp_model_desc d = model_desc(batch, level, low);
    return new_model(&d);
}
static amp_value conv(amp_model* m, amp_value x, int out, int kernel, int stride, int pad) {
    return amp_conv2d(m, x, out, kernel, stride, pad);
}
static const amp_layer* layer_of(const amp_model* m, amp_value v) {
    return amp_model_layer(m, amp_model_layer_of(m, v));
}

/* ======================================================================================= */
/* The reference: the same graph in double, naive loops, one buffer per value.              */
/* ======================================================================================= */

enum { MAX_NODES = 96, MAX_PARAMS = 160 };
typedef struct node {
    amp_op op;
    int in[2], inputs, c, h, w;
    int kernel, stride, pad, dilation, groups, exclude_pad;    /* conv, pools */
    int weight, bias;                                          /* parameter numbers, or -1 */
    double eps, loss_weight, smoothing;
    int index;                                                 /* of an input or a loss */
    amp_value v;
    double *x[2], *y, *dy, *mean, *invstd, *running_mean, *running_var;
} node;
static node net[MAX_NODES];
static int net_size, net_params, net_inputs, net_losses, net_batch;
static double* param_value[MAX_PARAMS];
static double* param_grad[MAX_PARAMS];
static amp_model* net_model;

static size_t features(const node* n) { return (size_t)n->c * (size_t)n->h * (size_t)n->w; }
static double* zeros(size_t n) {
    double* p = (double*)calloc(n ? n : 1, sizeof *p);
    if (!p) exit(2);
    return p;
}
static int is_loss(const node* n) {
    return n->op == AMP_OP_SOFTMAX_CROSS_ENTROPY || n->op == AMP_OP_MSE || n->op == AMP_OP_BCE_WITH_LOGITS;
}

static int is_norm(const node* n) {
    return n->op == AMP_OP_BATCH_NORM || n->op == AMP_OP_LAYER_NORM || n->op == AMP_OP_RMS_NORM
        || n->op == AMP_OP_GROUP_NORM || n->op == AMP_OP_INSTANCE_NORM;
}

static size_t norm_groups(const node* n) {
    return (size_t)(n->op == AMP_OP_BATCH_NORM ? n->c : net_batch)
        * (n->op == AMP_OP_GROUP_NORM || n->op == AMP_OP_INSTANCE_NORM ? (size_t)n->groups : 1);
}
static void net_begin(amp_model* m, int batch) {
    net_model = m;
    net_batch = batch;
    net_size = net_params = net_inputs = net_losses = 0;
}
static int net_node(amp_op op, int a, int b, int c, int h, int w, amp_value v) {
    node* n = &net[net_size];
    memset(n, 0, sizeof *n);
    n->op = op; n->in[0] = a; n->in[1] = b; n->inputs = (a >= 0) + (b >= 0);
    n->c = c; n->h = h; n->w = w; n->v = v;
    n->weight = n->bias = -1;
    if (op == AMP_OP_CONV2D || op == AMP_OP_CONV_TRANSPOSE2D || op == AMP_OP_LINEAR || is_norm(n)) {
        n->weight = net_params++;
        if (op != AMP_OP_RMS_NORM) n->bias = net_params++;
    }
    return net_size++;
}

/* The builders add to both graphs; a value is known by its number. */
static int b_input(int c, int h, int w) {
    int i = net_node(AMP_OP_INPUT, -1, -1, c, h, w, amp_input(net_model, c, h, w));
    net[i].index = net_inputs++;
    return i;
}
static int b_conv(int x, int out, int kernel, int stride, int pad, int dilation, int groups, int no_bias) {
    amp_conv2d_desc d;
    int i, reach = dilation * (kernel - 1) + 1;
    memset(&d, 0, sizeof d);
    d.out_channels = out; d.kernel = kernel; d.stride = stride; d.pad = pad; d.dilation = dilation; d.groups = groups;
    d.no_bias = no_bias;
    i = net_node(AMP_OP_CONV2D, x, -1, out, (net[x].h + 2 * pad - reach) / stride + 1, (net[x].w + 2 * pad - reach) / stride + 1,
                 amp_conv2d_with(net_model, net[x].v, &d));
    net[i].kernel = kernel; net[i].stride = stride; net[i].pad = pad; net[i].dilation = dilation; net[i].groups = groups;
    if (no_bias) { net[i].bias = -1; net_params--; }
    return i;
}
static int b_transposed(int x, int out, int kernel, int stride, int pad, int groups, int output_pad) {
    amp_conv2d_desc d;
    int i;
    memset(&d, 0, sizeof d);
    d.out_channels = out; d.kernel = kernel; d.stride = stride; d.pad = pad; d.groups = groups; d.output_pad = output_pad;
    i = net_node(AMP_OP_CONV_TRANSPOSE2D, x, -1, out, (net[x].h - 1) * stride - 2 * pad + kernel + output_pad,
                 (net[x].w - 1) * stride - 2 * pad + kernel + output_pad, amp_conv_transpose2d_with(net_model, net[x].v, &d));
    net[i].kernel = kernel; net[i].stride = stride; net[i].pad = pad; net[i].dilation = 1; net[i].groups = groups;
    return i;
}
static int b_linear(int x, int out) {
    return net_node(AMP_OP_LINEAR, x, -1, out, 1, 1, amp_linear(net_model, net[x].v, out));
}
static int b_pool(int x, amp_pool kind, int kernel, int stride, int pad, int exclude_pad) {
    amp_pool2d_desc d;
    int i;
    memset(&d, 0, sizeof d);
    d.kind = kind; d.kernel = kernel; d.stride = stride; d.pad = pad; d.exclude_pad = exclude_pad;
    i = net_node(kind == AMP_POOL_MAX ? AMP_OP_MAX_POOL2D : AMP_OP_AVG_POOL2D, x, -1, net[x].c, (net[x].h + 2 * pad - kernel) / stride + 1,
                 (net[x].w + 2 * pad - kernel) / stride + 1, amp_pool2d_with(net_model, net[x].v, &d));
    net[i].kernel = kernel; net[i].stride = stride; net[i].pad = pad; net[i].exclude_pad = exclude_pad;
    return i;
}
static int b_upsample(int x, int factor) {
    const int i = net_node(AMP_OP_UPSAMPLE, x, -1, net[x].c, net[x].h * factor, net[x].w * factor,
                           amp_upsample(net_model, net[x].v, factor));
    net[i].kernel = factor;
    return i;
}
static int b_norm(int x, amp_op op, float eps) {
    amp_norm_desc d;
    int i;
    memset(&d, 0, sizeof d);
    d.eps = eps;
    d.groups = net[x].c % 2 == 0 ? 2 : 1;
    i = net_node(op, x, -1, net[x].c, net[x].h, net[x].w,
                 (op == AMP_OP_BATCH_NORM ? amp_batch_norm_with : op == AMP_OP_RMS_NORM ? amp_rms_norm_with
                  : op == AMP_OP_GROUP_NORM ? amp_group_norm_with : op == AMP_OP_INSTANCE_NORM ? amp_instance_norm_with
                  : amp_layer_norm_with)(net_model, net[x].v, &d));
    net[i].groups = op == AMP_OP_GROUP_NORM ? d.groups : net[x].c;
    net[i].eps = (double)eps;
    return i;
}
static int b_same(int x, amp_op op) {
    amp_value v = net[x].v;
#define X(NAME, name, ...) if (op == AMP_OP_##NAME) v = amp_##name(net_model, v);
    AMP_ACTIVATION_LIST(X)
#undef X
    if (op == AMP_OP_SOFTMAX) v = amp_softmax(net_model, v);
    if (op == AMP_OP_DROPOUT) v = amp_dropout(net_model, v, 0.0f);
    if (op == AMP_OP_LEAKY_RELU) v = amp_leaky_relu(net_model, v, 0.25f);
    return net_node(op, x, -1, net[x].c, net[x].h, net[x].w, v);
}
static int b_flatten(int x) {
    return net_node(AMP_OP_FLATTEN, x, -1, (int)features(&net[x]), 1, 1, amp_flatten(net_model, net[x].v));
}
static int b_add(int a, int b) {
    return net_node(AMP_OP_ADD, a, b, net[a].c, net[a].h, net[a].w, amp_add(net_model, net[a].v, net[b].v));
}
static int b_mul(int a, int b) {
    return net_node(AMP_OP_MUL, a, b, net[a].c, net[a].h, net[a].w, amp_mul(net_model, net[a].v, net[b].v));
}
/* a times one number a channel: squeeze and excite. */
static int b_excite(int a) {
    int pixels = net[a].h * net[a].w, x = a;
    if (pixels > 1) {
        if (net[a].h == net[a].w) x = net_node(AMP_OP_AVG_POOL2D, a, -1, net[a].c, 1, 1, amp_global_avg_pool2d(net_model, net[a].v));
        if (x != a) { net[x].kernel = net[a].h; net[x].stride = 1; }
    }
    return b_mul(a, b_same(x, AMP_OP_SIGMOID));
}
static int b_concat(int a, int b) {
    return net_node(AMP_OP_CONCAT, a, b, net[a].c + net[b].c, net[a].h, net[a].w, amp_concat(net_model, net[a].v, net[b].v));
}
static int b_loss(int x, amp_op op, float weight, float smoothing) {
    amp_loss_desc d;
    amp_value v;
    int i;
    memset(&d, 0, sizeof d);
    d.weight = weight; d.smoothing = smoothing;
    if (op == AMP_OP_MSE) v = amp_mse_with(net_model, net[x].v, &d);
    else if (op == AMP_OP_BCE_WITH_LOGITS) v = amp_bce_with_logits_with(net_model, net[x].v, &d);
    else v = amp_softmax_cross_entropy_with(net_model, net[x].v, &d);
    i = net_node(op, x, -1, 1, 1, 1, v);
    net[i].loss_weight = weight != 0.0f ? (double)weight : 1.0;
    net[i].smoothing = (double)smoothing;
    net[i].index = net_losses++;
    return i;
}

/* Rounding to a stored type; FP32 counts as exact here. */
static double rounded(double x, amp_dtype t) {
    if (t == AMP_F16) return amp_half_to_double(amp_half_from_double(x));
    if (t == AMP_BF16) return amp_bfloat16_to_double(amp_bfloat16_from_double(x));
    return x;
}

/* After finalize: buffers, and the weights as the layers read them. */
static void net_alloc(void) {
    amp_param* p;
    int i, j, count;
    size_t k;
    p = amp_model_params(net_model, &count);
    CHECK_MSG(count == net_params, "%d parameters, the reference has %d", count, net_params);
    for (i = 0; i < net_params; i++) { param_value[i] = zeros(p[i].count); param_grad[i] = zeros(p[i].count); }
    for (i = 0; i < net_size; i++) {
        node* n = &net[i];
        const amp_layer* l = amp_model_layer(net_model, i);
        CHECK_MSG(l->op == n->op && l->channels == n->c && l->height == n->h && l->width == n->w,
                  "layer %d '%s' is %dx%dx%d", i, l->name, l->channels, l->height, l->width);
        n->y = zeros(features(n) * (size_t)net_batch);
        n->dy = zeros(features(n) * (size_t)net_batch);
        for (j = 0; j < n->inputs; j++) n->x[j] = zeros(features(&net[n->in[j]]) * (size_t)net_batch);
        if (is_norm(n)) {
            size_t stats = norm_groups(n);
            n->mean = zeros(stats); n->invstd = zeros(stats); n->running_mean = zeros(stats); n->running_var = zeros(stats);
            for (k = 0; k < stats; k++) n->running_var[k] = 1.0;
        }
        for (j = 0; j < 2; j++) {
            int q = j ? n->bias : n->weight;
            for (k = 0; q >= 0 && k < p[q].count; k++) {
                double w = p[q].master ? (double)p[q].master[k]
                         : p[q].low_dtype == AMP_F16 ? amp_half_to_double(((const amp_half*)p[q].low)[k])
                                                     : amp_bfloat16_to_double(((const amp_bfloat16*)p[q].low)[k]);
                param_value[q][k] = rounded(w, l->param_dtype);
            }
        }
    }
}
static void net_free(void) {
    int i;
    for (i = 0; i < net_params; i++) { free(param_value[i]); free(param_grad[i]); }
    for (i = 0; i < net_size; i++) {
        node* n = &net[i];
        free(n->x[0]); free(n->x[1]); free(n->y); free(n->dy); free(n->mean); free(n->invstd); free(n->running_mean); free(n->running_var);
    }
}

/* --- forward ---------------------------------------------------------------------------- */

/* f(position in x, position in w, position in y) for every product of a convolution. */
typedef void (*conv_term)(const node* n, size_t x, size_t w, size_t y);
static void conv_each(const node* n, conv_term f) {
    /* A transposed one scatters from its input: windows are around pixels of the input, and see those of the output. */
    const int transposed = n->op == AMP_OP_CONV_TRANSPOSE2D;
    const node *of = transposed ? &net[n->in[0]] : n, *in = transposed ? n : &net[n->in[0]];
    int b, o, c, y, x, i, j, cg = in->c / n->groups, og = of->c / n->groups;
    for (b = 0; b < net_batch; b++)
        for (o = 0; o < of->c; o++)
            for (y = 0; y < of->h; y++)
                for (x = 0; x < of->w; x++)
                    for (c = 0; c < cg; c++)
                        for (i = 0; i < n->kernel; i++)
                            for (j = 0; j < n->kernel; j++) {
                                int iy = y * n->stride - n->pad + i * n->dilation, ix = x * n->stride - n->pad + j * n->dilation;
                                size_t seen = (size_t)(((b * in->c + o / og * cg + c) * in->h + iy) * in->w + ix);
                                size_t window = (size_t)(((b * of->c + o) * of->h + y) * of->w + x);
                                if (iy < 0 || iy >= in->h || ix < 0 || ix >= in->w) continue;
                                f(n, transposed ? window : seen, (size_t)(((o * cg + c) * n->kernel + i) * n->kernel + j),
                                  transposed ? seen : window);
                            }
}
static void conv_forward_term(const node* n, size_t x, size_t w, size_t y) {
    n->y[y] += n->x[0][x] * param_value[n->weight][w];
}
static void conv_forward(const node* n) {
    size_t k, area = (size_t)n->h * (size_t)n->w;
    for (k = 0; k < features(n) * (size_t)net_batch; k++) n->y[k] = n->bias >= 0 ? param_value[n->bias][k / area % (size_t)n->c] : 0.0;
    conv_each(n, conv_forward_term);
}

static void linear_forward(const node* n) {
    size_t b, o, i, in = features(&net[n->in[0]]), out = (size_t)n->c;
    for (b = 0; b < (size_t)net_batch; b++)
        for (o = 0; o < out; o++) {
            double s = param_value[n->bias][o];
            for (i = 0; i < in; i++) s += n->x[0][b * in + i] * param_value[n->weight][o * in + i];
            n->y[b * out + o] = s;
        }
}

/* Gives y (backward == 0) or spreads dy into dx. */
static void pool_run(const node* n, double* dx) {
    const node* in = &net[n->in[0]];
    int plane, y, x, i, j;
    for (plane = 0; plane < net_batch * n->c; plane++)
        for (y = 0; y < n->h; y++)
            for (x = 0; x < n->w; x++) {
                size_t at = (size_t)((plane * n->h + y) * n->w + x), best = 0;
                double sum = 0.0, most = -HUGE_VAL, share;
                int inside = 0, pass;
                for (pass = 0; pass < 2; pass++) {
                    share = n->dy[at] / (n->exclude_pad ? inside : n->kernel * n->kernel);
                    for (i = 0; i < n->kernel; i++)
                        for (j = 0; j < n->kernel; j++) {
                            int iy = y * n->stride - n->pad + i, ix = x * n->stride - n->pad + j;
                            size_t from = (size_t)((plane * in->h + iy) * in->w + ix);
                            if (iy < 0 || iy >= in->h || ix < 0 || ix >= in->w) continue;
                            if (pass == 1) { if (dx && n->op == AMP_OP_AVG_POOL2D) dx[from] += share; continue; }
                            inside++;
                            sum += n->x[0][from];
                            if (n->x[0][from] > most) { most = n->x[0][from]; best = from; }
                        }
                }
                if (!dx) n->y[at] = n->op == AMP_OP_MAX_POOL2D ? most : sum / (n->exclude_pad ? inside : n->kernel * n->kernel);
                else if (n->op == AMP_OP_MAX_POOL2D) dx[best] += n->dy[at];
            }
}

/* Norms: element k of the batch belongs to group g (a channel, or a sample) and has parameter q. */
static void norm_place(const node* n, size_t k, size_t* g, size_t* q) {
    size_t area = (size_t)n->h * (size_t)n->w;
    if (n->op == AMP_OP_BATCH_NORM) *g = *q = k / area % (size_t)n->c;
    else if (n->op == AMP_OP_GROUP_NORM || n->op == AMP_OP_INSTANCE_NORM) {
        *g = k / (features(n) / (size_t)n->groups);
        *q = k / area % (size_t)n->c;
    }
    else { *g = k / features(n); *q = k % features(n); }
}
static void norm_forward(node* n, int training) {
    size_t total = features(n) * (size_t)net_batch, groups = norm_groups(n), k, g, q;
    double count = (double)(total / groups);
    if (n->op != AMP_OP_BATCH_NORM || training) {
        for (g = 0; g < groups; g++) n->mean[g] = n->invstd[g] = 0.0;
        for (k = 0; k < total && n->op != AMP_OP_RMS_NORM; k++) { norm_place(n, k, &g, &q); n->mean[g] += n->x[0][k] / count; }
        for (k = 0; k < total; k++) { norm_place(n, k, &g, &q); n->invstd[g] += (n->x[0][k] - n->mean[g]) * (n->x[0][k] - n->mean[g]) / count; }
        for (g = 0; g < groups; g++) {
            if (n->op == AMP_OP_BATCH_NORM) {
                n->running_mean[g] = 0.9 * n->running_mean[g] + 0.1 * n->mean[g];
                n->running_var[g] = 0.9 * n->running_var[g] + 0.1 * n->invstd[g] * count / (count - 1.0);
            }
            n->invstd[g] = 1.0 / sqrt(n->invstd[g] + n->eps);
        }
    } else {
        for (g = 0; g < groups; g++) { n->mean[g] = n->running_mean[g]; n->invstd[g] = 1.0 / sqrt(n->running_var[g] + n->eps); }
    }
    for (k = 0; k < total; k++) {
        norm_place(n, k, &g, &q);
        n->y[k] = (n->x[0][k] - n->mean[g]) * n->invstd[g] * param_value[n->weight][q] + (n->bias >= 0 ? param_value[n->bias][q] : 0.0);
    }
}

static double phi(double x) { return 0.5 * (1.0 + erf(x / sqrt(2.0))); }
/* The logistic function of GELU_TANH's argument, and that argument's derivative. */
static double tanh_gate(double x) { return 1.0 / (1.0 + exp(-1.5957691216057307 * (x + 0.044715 * x * x * x))); }
static double tanh_gate_slope(double x) { return 1.5957691216057307 * (1.0 + 3.0 * 0.044715 * x * x); }
static double act(amp_op op, double x) {
    if (op == AMP_OP_RELU) return x > 0.0 ? x : 0.0;
    if (op == AMP_OP_LEAKY_RELU) return x > 0.0 ? x : 0.25 * x;
    if (op == AMP_OP_GELU) return x * phi(x);
    if (op == AMP_OP_GELU_TANH) return x * tanh_gate(x);
    if (op == AMP_OP_TANH) return tanh(x);
    if (op == AMP_OP_SIGMOID) return 1.0 / (1.0 + exp(-x));
    if (op == AMP_OP_SILU) return x / (1.0 + exp(-x));
    if (op == AMP_OP_HARD_SWISH) return x * fmin(fmax(x + 3.0, 0.0), 6.0) / 6.0;
    return x;   /* dropout with p = 0, flatten */
}
/* From the stored output or the input, as the library does. */
static double act_slope(amp_op op, double x, double y) {
    if (op == AMP_OP_RELU) return y > 0.0 ? 1.0 : 0.0;
    if (op == AMP_OP_LEAKY_RELU) return y > 0.0 ? 1.0 : 0.25;
    if (op == AMP_OP_GELU) return phi(x) + x * exp(-0.5 * x * x) / sqrt(2.0 * 3.14159265358979323846);
    if (op == AMP_OP_GELU_TANH) return tanh_gate(x) * (1.0 + x * (1.0 - tanh_gate(x)) * tanh_gate_slope(x));
    if (op == AMP_OP_TANH) return 1.0 - y * y;
    if (op == AMP_OP_SIGMOID) return y * (1.0 - y);
    if (op == AMP_OP_SILU) return (1.0 + x / (1.0 + exp(x))) / (1.0 + exp(-x));
    if (op == AMP_OP_HARD_SWISH) return fabs(x) < 3.0 ? x / 3.0 + 0.5 : x > 0.0;
    return 1.0;
}

/* From each pixel of the output to that of the input which it copies: values, or gradients back. */
static void upsample_run(node* n, double* dx) {
    const size_t w = (size_t)n->w, area = (size_t)n->h * w, f = (size_t)n->kernel;
    size_t k;
    for (k = 0; k < features(n) * (size_t)net_batch; k++) {
        const size_t from = k / area * (area / f / f) + k % area / w / f * (w / f) + k % w / f;
        if (dx) dx[from] += n->dy[k];
        else n->y[k] = n->x[0][from];
    }
}
static void softmax_row(const double* x, double* y, size_t d) {
    double most = x[0], sum = 0.0;
    size_t i;
    for (i = 1; i < d; i++) if (x[i] > most) most = x[i];
    for (i = 0; i < d; i++) sum += y[i] = exp(x[i] - most);
    for (i = 0; i < d; i++) y[i] /= sum;
}

static double loss_value(const node* n, const void* target) {
    size_t d = features(&net[n->in[0]]), rows = (size_t)net_batch, i, r;
    const float* t = (const float*)target;
    double sum = 0.0, *p = zeros(d);
    for (i = 0; n->op == AMP_OP_MSE && i < rows * d; i++) sum += (n->x[0][i] - (double)t[i]) * (n->x[0][i] - (double)t[i]) / (double)(rows * d);
    for (i = 0; n->op == AMP_OP_BCE_WITH_LOGITS && i < rows * d; i++) {
        double x = n->x[0][i];
        sum += ((x > 0 ? x : 0.0) - x * (double)t[i] + log1p(exp(-fabs(x)))) / (double)(rows * d);
    }
    for (r = 0; n->op == AMP_OP_SOFTMAX_CROSS_ENTROPY && r < rows; r++) {
        softmax_row(n->x[0] + r * d, p, d);
        for (i = 0; i < d; i++) {
            double want = (i == (size_t)((const int32_t*)target)[r] ? 1.0 - n->smoothing : 0.0) + n->smoothing / (double)d;
            sum -= want * log(p[i]) / (double)rows;
        }
    }
    free(p);
    return sum;
}

/* Returns the weighted loss. Values are rounded to the types that the model says it stores and computes in. */
static double net_forward(const amp_batch* batch, int training) {
    double loss = 0.0;
    size_t k;
    int i, j;
    for (i = 0; i < net_size; i++) {
        node* n = &net[i];
        const amp_layer* l = amp_model_layer(net_model, i);
        size_t total = features(n) * (size_t)net_batch, d = features(n);
        for (j = 0; j < n->inputs; j++)
            for (k = 0; k < features(&net[n->in[j]]) * (size_t)net_batch; k++) n->x[j][k] = rounded(net[n->in[j]].y[k], l->compute_dtype);
        switch (n->op) {
            case AMP_OP_INPUT: for (k = 0; k < total; k++) n->y[k] = (double)((const float*)batch->inputs[n->index])[k]; break;
            case AMP_OP_CONV2D: case AMP_OP_CONV_TRANSPOSE2D: conv_forward(n); break;
            case AMP_OP_LINEAR: linear_forward(n); break;
            case AMP_OP_MAX_POOL2D: case AMP_OP_AVG_POOL2D: pool_run(n, NULL); break;
            case AMP_OP_UPSAMPLE: upsample_run(n, NULL); break;
            case AMP_OP_BATCH_NORM: case AMP_OP_LAYER_NORM: case AMP_OP_RMS_NORM: case AMP_OP_GROUP_NORM: case AMP_OP_INSTANCE_NORM:
                norm_forward(n, training);
                break;
            case AMP_OP_SOFTMAX: for (k = 0; k < (size_t)net_batch; k++) softmax_row(n->x[0] + k * d, n->y + k * d, d); break;
            case AMP_OP_ADD: for (k = 0; k < total; k++) n->y[k] = n->x[0][k] + n->x[1][k]; break;
            case AMP_OP_MUL: for (k = 0; k < total; k++) n->y[k] = n->x[0][k] * n->x[1][k / (d / features(&net[n->in[1]]))]; break;
            case AMP_OP_CONCAT: {
                size_t da = features(&net[n->in[0]]), db = features(&net[n->in[1]]);
                for (k = 0; k < total; k++) n->y[k] = k % d < da ? n->x[0][k / d * da + k % d] : n->x[1][k / d * db + k % d - da];
                break;
            }
            case AMP_OP_SOFTMAX_CROSS_ENTROPY: case AMP_OP_MSE: case AMP_OP_BCE_WITH_LOGITS:
                if (batch->targets[n->index]) loss += n->loss_weight * loss_value(n, batch->targets[n->index]);
                break;
            default: for (k = 0; k < total; k++) n->y[k] = act(n->op, n->x[0][k]); break;
        }
        for (k = 0; k < total; k++) n->y[k] = rounded(n->y[k], l->storage_dtype);
    }
    return loss;
}

/* --- backward ----------------------------------------------------------------------------- */

static double* conv_dx;
static void conv_backward_term(const node* n, size_t x, size_t w, size_t y) {
    param_grad[n->weight][w] += n->dy[y] * n->x[0][x];
    conv_dx[x] += n->dy[y] * param_value[n->weight][w];
}
static void linear_backward(const node* n, double* dx) {
    size_t b, o, i, in = features(&net[n->in[0]]), out = (size_t)n->c;
    for (b = 0; b < (size_t)net_batch; b++)
        for (o = 0; o < out; o++) {
            double g = n->dy[b * out + o];
            param_grad[n->bias][o] += g;
            for (i = 0; i < in; i++) {
                param_grad[n->weight][o * in + i] += g * n->x[0][b * in + i];
                dx[b * in + i] += g * param_value[n->weight][o * in + i];
            }
        }
}
static void norm_backward(const node* n, double* dx) {
    size_t total = features(n) * (size_t)net_batch, groups = norm_groups(n), k, g, q;
    double count = (double)(total / groups), *s0 = zeros(groups), *s1 = zeros(groups);
    for (k = 0; k < total; k++) {
        double xhat, dxhat;
        norm_place(n, k, &g, &q);
        xhat = (n->x[0][k] - n->mean[g]) * n->invstd[g];
        dxhat = n->dy[k] * param_value[n->weight][q];
        s0[g] += n->op == AMP_OP_RMS_NORM ? 0.0 : dxhat;
        s1[g] += dxhat * xhat;
        param_grad[n->weight][q] += n->dy[k] * xhat;
        if (n->bias >= 0) param_grad[n->bias][q] += n->dy[k];
    }
    for (k = 0; k < total; k++) {
        norm_place(n, k, &g, &q);
        dx[k] += n->invstd[g] * (n->dy[k] * param_value[n->weight][q] - s0[g] / count - (n->x[0][k] - n->mean[g]) * n->invstd[g] * s1[g] / count);
    }
    free(s0); free(s1);
}
static void loss_backward(const node* n, const void* target, double scale, double* dx) {
    size_t d = features(&net[n->in[0]]), rows = (size_t)net_batch, i, r;
    const float* t = (const float*)target;
    double each = scale * n->loss_weight / (double)(rows * d), *p = zeros(d);
    for (i = 0; n->op == AMP_OP_MSE && i < rows * d; i++) dx[i] += each * 2.0 * (n->x[0][i] - (double)t[i]);
    for (i = 0; n->op == AMP_OP_BCE_WITH_LOGITS && i < rows * d; i++) dx[i] += each * (1.0 / (1.0 + exp(-n->x[0][i])) - (double)t[i]);
    for (r = 0; n->op == AMP_OP_SOFTMAX_CROSS_ENTROPY && r < rows; r++) {
        softmax_row(n->x[0] + r * d, p, d);
        for (i = 0; i < d; i++) {
            double want = (i == (size_t)((const int32_t*)target)[r] ? 1.0 - n->smoothing : 0.0) + n->smoothing / (double)d;
            dx[r * d + i] += each * (double)d * (p[i] - want);
        }
    }
    free(p);
}
static void softmax_backward(const node* n, double* dx) {
    size_t d = features(n), r, i;
    for (r = 0; r < (size_t)net_batch; r++) {
        double dot = 0.0;
        for (i = r * d; i < (r + 1) * d; i++) dot += n->dy[i] * n->y[i];
        for (i = r * d; i < (r + 1) * d; i++) dx[i] += n->y[i] * (n->dy[i] - dot);
    }
}

/* Leaves the gradients of scale * loss in param_grad. */
static void net_backward(const amp_batch* batch, double scale) {
    amp_param* p = amp_model_params(net_model, NULL);
    size_t k;
    int i, j;
    for (i = 0; i < net_params; i++) for (k = 0; k < p[i].count; k++) param_grad[i][k] = 0.0;
    for (i = 0; i < net_size; i++) for (k = 0; k < features(&net[i]) * (size_t)net_batch; k++) net[i].dy[k] = 0.0;
    for (i = net_size - 1; i >= 0; i--) {
        node* n = &net[i];
        const amp_layer* l = amp_model_layer(net_model, i);
        size_t total = features(n) * (size_t)net_batch, d = features(n), area = (size_t)n->h * (size_t)n->w;
        double* dx[2] = { NULL, NULL };
        for (k = 0; k < total; k++) n->dy[k] = rounded(n->dy[k], l->storage_dtype);
        for (j = 0; j < n->inputs; j++) dx[j] = zeros(features(&net[n->in[j]]) * (size_t)net_batch);
        switch (n->op) {
            case AMP_OP_INPUT: break;
            case AMP_OP_CONV2D: case AMP_OP_CONV_TRANSPOSE2D:
                conv_dx = dx[0];
                conv_each(n, conv_backward_term);
                for (k = 0; n->bias >= 0 && k < total; k++) param_grad[n->bias][k / area % (size_t)n->c] += n->dy[k];
                break;
            case AMP_OP_LINEAR: linear_backward(n, dx[0]); break;
            case AMP_OP_MAX_POOL2D: case AMP_OP_AVG_POOL2D: pool_run(n, dx[0]); break;
            case AMP_OP_UPSAMPLE: upsample_run(n, dx[0]); break;
            case AMP_OP_BATCH_NORM: case AMP_OP_LAYER_NORM: case AMP_OP_RMS_NORM: case AMP_OP_GROUP_NORM: case AMP_OP_INSTANCE_NORM:
                norm_backward(n, dx[0]);
                break;
            case AMP_OP_SOFTMAX: softmax_backward(n, dx[0]); break;
            case AMP_OP_ADD: for (k = 0; k < total; k++) { dx[0][k] = n->dy[k]; dx[1][k] = n->dy[k]; } break;
            case AMP_OP_MUL:
                for (k = 0; k < total; k++) {
                    const size_t at = k / (d / features(&net[n->in[1]]));
                    dx[0][k] += n->dy[k] * n->x[1][at];
                    dx[1][at] += n->dy[k] * n->x[0][k];
                }
                break;
            case AMP_OP_CONCAT: {
                size_t da = features(&net[n->in[0]]), db = features(&net[n->in[1]]);
                for (k = 0; k < total; k++) *(k % d < da ? &dx[0][k / d * da + k % d] : &dx[1][k / d * db + k % d - da]) = n->dy[k];
                break;
            }
            case AMP_OP_SOFTMAX_CROSS_ENTROPY: case AMP_OP_MSE: case AMP_OP_BCE_WITH_LOGITS:
                loss_backward(n, batch->targets[n->index], scale, dx[0]);
                break;
            default: for (k = 0; k < total; k++) dx[0][k] = n->dy[k] * act_slope(n->op, n->x[0][k], n->y[k]); break;
        }
        for (j = 0; j < n->inputs; j++) {
            node* in = &net[n->in[j]];
            for (k = 0; k < features(in) * (size_t)net_batch; k++) in->dy[k] += rounded(dx[j][k], l->compute_dtype);
            free(dx[j]);
        }
    }
}

/* --- comparison ----------------------------------------------------------------------------- */

static float* input_data[AMP_MAX_INPUTS];
static void* target_data[AMP_MAX_LOSSES];

static void fill_batch(amp_batch* b) {
    int i;
    size_t k;
    memset(b, 0, sizeof *b);
    b->n = net_batch;
    for (i = 0; i < net_size; i++) {
        const node* n = &net[i];
        if (n->op == AMP_OP_INPUT) {
            size_t total = features(n) * (size_t)net_batch;
            float* x = (float*)malloc(total * sizeof *x);
            for (k = 0; k < total; k++) x[k] = test_uniform();
            b->inputs[n->index] = input_data[n->index] = x;
        } else if (is_loss(n)) {
            size_t d = features(&net[n->in[0]]), total = d * (size_t)net_batch;
            float* t = (float*)malloc(total * sizeof *t);
            for (k = 0; k < total; k++) t[k] = n->op == AMP_OP_MSE ? test_uniform() : 0.5f + 0.5f * test_uniform();
            for (k = 0; n->op == AMP_OP_SOFTMAX_CROSS_ENTROPY && k < (size_t)net_batch; k++) ((int32_t*)(void*)t)[k] = (int32_t)(test_random() % d);
            b->targets[n->index] = target_data[n->index] = t;
        }
    }
}
static void free_batch(void) {
    int i;
    for (i = 0; i < net_inputs; i++) free(input_data[i]);
    for (i = 0; i < net_losses; i++) free(target_data[i]);
}

/* |a - b| over |b| of n numbers, with `floor` added to the denominator. */
static double relative_error(const float* a, const double* b, double b_factor, size_t n, double floor) {
    double diff = 0.0, norm = 0.0;
    size_t k;
    for (k = 0; k < n; k++) {
        double want = b[k] * b_factor, e = (double)a[k] - want;
        if (!(e * e < HUGE_VAL)) return HUGE_VAL;
        diff += e * e;
        norm += want * want;
    }
    return sqrt(diff) / (sqrt(norm) + floor);
}

static double worst_gradient[4], worst_value[4];     /* by amp_dtype, for the closing line */

/* Runs one training step with learning rate 0 and compares loss and gradients; then every value in evaluation mode, with
   the running statistics that the step has left. `bound` is on relative L2 errors. A gradient that is 100 times smaller
   than all together may be what is left of larger ones (a bias before batch norm has none at all): it is compared with
   1 % of all. */
static void compare(amp_dtype low, double bound, const char* what) {
    const double scale = low == AMP_F16 ? 1024.0 : 1.0;
    amp_batch b;
    amp_step_info info;
    amp_param* p = amp_model_params(net_model, NULL);
    double want, all = 0.0;
    int i;
    size_t k;
    fill_batch(&b);
    CHECK_MSG(amp_train_step(net_model, &b, &info) == AMP_OK, "%s: %s", what, amp_model_error(net_model));
    CHECK_MSG(info.outcome == AMP_STEP_APPLIED, "%s: %s", what, info.message);
    want = net_forward(&b, 1);
    net_backward(&b, scale);
    CHECK_MSG(fabs((double)info.loss - want) <= bound * (fabs(want) + 1e-3), "%s: loss %.9g, reference %.9g", what,
              (double)info.loss, want);
    for (i = 0; i < net_params; i++) for (k = 0; k < p[i].count; k++) all += param_grad[i][k] * param_grad[i][k];
    for (i = 0; i < net_params; i++) {
        double e = relative_error((const float*)p[i].grad, param_grad[i], 1.0, p[i].count, 1e-2 * sqrt(all));
        CHECK_MSG(e <= bound, "%s: gradient of %s is off by %g", what, p[i].name, e);
        if (e > worst_gradient[low]) worst_gradient[low] = e;
    }
    net_forward(&b, 0);
    for (i = 0; i < net_size; i++) {
        size_t total = features(&net[i]) * (size_t)net_batch;
        float* out = (float*)malloc(total * sizeof *out);
        double e;
        if (is_loss(&net[i])) { free(out); continue; }
        CHECK(amp_predict(net_model, &b, net[i].v, out) == AMP_OK);
        e = relative_error(out, net[i].y, 1.0, total, 1e-3);
        CHECK_MSG(e <= bound, "%s: value of '%s' is off by %g", what, amp_model_layer(net_model, i)->name, e);
        if (e > worst_value[low]) worst_value[low] = e;
        free(out);
    }
    free_batch();
}

/* A model that trains with learning rate 0 and a static loss scale, so that gradients can be looked at. */
static amp_model* still_model(int batch, amp_level level, amp_dtype low, amp_style style) {
    amp_model_desc d = model_desc(batch, level, level == AMP_O0 ? AMP_DTYPE_DEFAULT : low);
    amp_scaler_desc s;
    amp_model* m = NULL;
    memset(&s, 0, sizeof s);
    s.preset = AMP_SCALER_STATIC;
    s.init_scale = low == AMP_F16 ? 1024.0f : 1.0f;
    d.scaler = &s;
    d.precision.style = style;
    d.optimizer.lr = (float)AMP_ZERO;
    m = new_model(&d);
    return m;
}

/* Bounds. FP32: u = 2^-24; the longest sums here have 300 terms, about 12 layers follow each other, and a sum of k terms
   is off by at most k*u of the sum of magnitudes: 12 * 300 * u = 2e-4. 16 bits: values and gradients are rounded alike in
   the reference, so only those that lie so near a rounding border that FP32 and double fall on different sides differ, by
   one u (2^-11, 2^-8) each; that all of 24 roundings on the way, there and back, do is the worst case: 24 u. */
static double bound_of(amp_dtype low) {
    return low == AMP_F32 ? 2e-4 : low == AMP_F16 ? 24.0 / 2048.0 : 24.0 / 256.0;
}

typedef void (*graph_fn)(void);
static void every_precision(graph_fn build, int batch, const char* what) {
    static const struct { amp_level level; amp_dtype low; amp_style style; } kinds[] = {
        { AMP_O0, AMP_F32, AMP_STYLE_PYTORCH },
        { AMP_O1, AMP_F16, AMP_STYLE_PYTORCH }, { AMP_O1, AMP_BF16, AMP_STYLE_PYTORCH },
        { AMP_O1, AMP_F16, AMP_STYLE_MINDSPORE }, { AMP_O1, AMP_BF16, AMP_STYLE_MINDSPORE },
        { AMP_O1, AMP_F16, AMP_STYLE_ONEFLOW }, { AMP_O2, AMP_F16, AMP_STYLE_APEX },
        { AMP_O2, AMP_F16, AMP_STYLE_PYTORCH }, { AMP_O2, AMP_BF16, AMP_STYLE_PYTORCH },
        { AMP_O3, AMP_F16, AMP_STYLE_PYTORCH }, { AMP_O3, AMP_BF16, AMP_STYLE_PYTORCH } };
    int i;
    for (i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++) {
        char name[80];
        amp_model* m = still_model(batch, kinds[i].level, kinds[i].low, kinds[i].style);
        snprintf(name, sizeof name, "%s %s %s %s", what, amp_level_name(kinds[i].level),
                 amp_dtype_name(kinds[i].low), amp_style_name(kinds[i].style));
        net_begin(m, batch);
        build();
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s: %s", name, amp_model_error(m));
        if (amp_model_layer_count(m)) {
            net_alloc();
            compare(kinds[i].low, bound_of(kinds[i].low), name);
            net_free();
        }
        amp_model_destroy(m);
    }
}

/* --- graphs ------------------------------------------------------------------------------------ */

/* Every layer type, two inputs (one declared late), residuals, x + x, a concat of a value with itself, a value with many
   consumers, three losses, a head for prediction only. */
static void every_layer(void) {
    int x = b_input(4, 9, 8), late, a, b, c, d, e, logits;
    a = b_conv(x, 6, 3, 1, 1, 1, 1, 0);
    a = b_same(b_norm(a, AMP_OP_BATCH_NORM, 0.01f), AMP_OP_RELU);
    b = b_conv(a, 6, 3, 1, 2, 2, 2, 1);                 /* dilated, grouped, no bias */
    b = b_same(b_norm(b, AMP_OP_GROUP_NORM, 0.01f), AMP_OP_TANH);
    b = b_add(b_norm(b, AMP_OP_INSTANCE_NORM, 0.25f), a);   /* residual */
    c = b_add(b, b);
    late = b_input(12, 9, 8);
    c = b_concat(c, b_same(b, AMP_OP_SIGMOID));
    c = b_add(c, late);
    c = b_same(c, AMP_OP_DROPOUT);
    d = b_pool(c, AMP_POOL_MAX, 3, 2, 1, 0);
    e = b_pool(c, AMP_POOL_AVERAGE, 3, 2, 1, 1);
    d = b_norm(b_add(d, e), AMP_OP_LAYER_NORM, 0.01f);
    d = b_norm(b_same(d, AMP_OP_GELU), AMP_OP_RMS_NORM, 0.01f);
    d = b_pool(d, AMP_POOL_AVERAGE, 2, 1, 1, 0);
    d = b_conv(d, 12, 1, 1, 0, 1, 12, 0);               /* depthwise */
    e = b_flatten(d);
    logits = b_linear(b_same(b_linear(e, 16), AMP_OP_RELU), 7);
    b_loss(logits, AMP_OP_SOFTMAX_CROSS_ENTROPY, 0.0f, 0.1f);
    b_same(logits, AMP_OP_SOFTMAX);
    b_loss(b_linear(b_same(b_linear(d, 5), AMP_OP_SOFTMAX), 3), AMP_OP_MSE, 0.5f, 0.0f);
    b_loss(b_linear(b_concat(e, e), 4), AMP_OP_BCE_WITH_LOGITS, 2.0f, 0.0f);
}
static void test_gradients_every_layer(void) { every_precision(every_layer, 4, "every layer"); }

/* In-place layers after layers whose backward pass needs their own output, and before several readers. */
static void in_place_traps(void) {
    int x = b_input(6, 1, 1), a = b_linear(x, 8), b, c;
    b = b_same(b_same(a, AMP_OP_TANH), AMP_OP_RELU);        /* relu must not overwrite tanh's output */
    b = b_same(b_same(b_linear(b, 8), AMP_OP_RELU), AMP_OP_DROPOUT);
    b = b_same(b_same(b_linear(b, 8), AMP_OP_DROPOUT), AMP_OP_SIGMOID);
    c = b_linear(b, 8);
    b = b_add(b_same(c, AMP_OP_RELU), b_same(c, AMP_OP_TANH));     /* two would-be in-place readers */
    b = b_add(b, c);
    b = b_same(b_flatten(b_same(b, AMP_OP_SIGMOID)), AMP_OP_RELU);
    b_flatten(b);
    b = b_same(b_linear(b, 8), AMP_OP_SOFTMAX);
    b = b_same(b, AMP_OP_RELU);
    b_loss(b, AMP_OP_MSE, 1.0f, 0.0f);
    b_loss(b_same(a, AMP_OP_RELU), AMP_OP_MSE, 1.0f, 0.0f);
}
static void test_gradients_in_place(void) { every_precision(in_place_traps, 5, "in place"); }

/* A value that flatten shows to predictions while an in-place layer takes its memory. */
static void view_beside_in_place(void) {
    int x = b_input(3, 4, 4), a = b_conv(x, 4, 3, 1, 1, 1, 1, 0), r = b_same(a, AMP_OP_RELU);
    b_flatten(a);
    b_loss(b_linear(r, 3), AMP_OP_SOFTMAX_CROSS_ENTROPY, 0.0f, 0.0f);
}
static void test_view_beside_in_place(void) { every_precision(view_beside_in_place, 3, "view"); }

/* --- random graphs -------------------------------------------------------------------------------- */

static int random_value(void) {
    int i;
    do i = (int)(test_random() % (unsigned)net_size); while (is_loss(&net[i]));
    return i;
}
static int random_partner(int a, int same_channels) {
    int tries, i;
    for (tries = 0; tries < 20; tries++) {
        i = random_value();
        if (net[i].h == net[a].h && net[i].w == net[a].w && (!same_channels || net[i].c == net[a].c)) return i;
    }
    return a;
}
static int random_layer(void) {
    static const amp_op same[] = { AMP_OP_RELU, AMP_OP_GELU, AMP_OP_TANH, AMP_OP_SIGMOID, AMP_OP_DROPOUT, AMP_OP_RELU,
                                  AMP_OP_TANH, AMP_OP_GELU_TANH, AMP_OP_SILU, AMP_OP_HARD_SWISH,
                                  AMP_OP_LEAKY_RELU };
    int x = random_value(), small = net[x].h < net[x].w ? net[x].h : net[x].w;
    unsigned kind = test_random() % 16;
    int out = 2 + 2 * (int)(test_random() % 3), kernel = 1 + (int)(test_random() % 3), stride = 1 + (int)(test_random() % 2);
    int pad = (int)(test_random() % 2), groups = net[x].c % 2 == 0 && test_random() % 3 == 0 ? 2 : 1;
    if (kernel > small + 2 * pad) kernel = 1;
    if (kind < 3) return b_same(x, same[test_random() % (sizeof same / sizeof *same)]);
    if (kind == 5 && kernel > 1 && features(&net[x]) < 100)
        return b_transposed(x, out, kernel, stride, 0, groups, stride - 1);
    if (kind < 6) return b_conv(x, out, kernel, stride, pad, 1, groups, test_random() % 4 == 0);
    if (kind == 6) return b_norm(x, AMP_OP_BATCH_NORM, 0.25f);
    if (kind == 7 && test_random() % 2) return b_norm(x, test_random() % 2 ? AMP_OP_GROUP_NORM : AMP_OP_INSTANCE_NORM, 0.25f);
    if (kind == 7) return b_norm(x, test_random() % 2 ? AMP_OP_LAYER_NORM : AMP_OP_RMS_NORM, 0.25f);
    if (kind == 8 && small >= 2) return b_pool(x, AMP_POOL_MAX, 2, stride, 0, 0);
    if (kind == 9 && small >= 2) return b_pool(x, AMP_POOL_AVERAGE, 2, stride, 0, 0);
    if (kind == 10 && small > 1 && features(&net[x]) < 100) return b_upsample(x, 2 + (int)(test_random() % 2));
    if (kind == 10) return b_flatten(x);
    if (kind == 11) return b_linear(x, 2 + (int)(test_random() % 6));
    if (kind == 12 && net_inputs < 4) return b_input(net[x].c, net[x].h, net[x].w);
    if (kind == 13 && features(&net[x]) < 300) return b_concat(x, random_partner(x, 0));
    if (kind == 14) return test_random() % 2 ? b_excite(x) : b_mul(x, b_same(random_partner(x, 1), AMP_OP_SIGMOID));
    return b_add(x, random_partner(x, 1));
}

/* Some layers are pinned, some lie in regions; every value without a reader ends in the sum that is the first loss's logits. */
static void random_graph(void) {
    int i, j, layers = 6 + (int)(test_random() % 20), logits = -1, count, open = 0;
    int c = 2 + (int)(test_random() % 3), h = 4 + (int)(test_random() % 4), w = 4 + (int)(test_random() % 4);
    b_input(c, h, w);
    for (i = 0; i < layers; i++) {
        static const amp_dtype types[] = { AMP_F32, AMP_F16, AMP_BF16, AMP_DTYPE_DEFAULT };
        int mixed = amp_model_policy(net_model)->level != AMP_O0, made;
        amp_dtype low = amp_model_policy(net_model)->low_dtype;
        amp_dtype type = types[test_random() % 4];
        if (low == AMP_F16 && type == AMP_BF16) type = low;     /* its bound is too tight for both */
        if (mixed && test_random() % 6 == 0) { amp_autocast_push(net_model, type); open++; }
        made = random_layer();
        if (mixed && open && test_random() % 3 == 0) { amp_autocast_pop(net_model); open--; }
        if (mixed && test_random() % 6 == 0 && type != AMP_DTYPE_DEFAULT && net[made].op != AMP_OP_INPUT && net[made].op != AMP_OP_FLATTEN)
            amp_pin(net_model, net[made].v, type);
    }
    while (open--) amp_autocast_pop(net_model);
    count = net_size;
    for (i = 0; i < count; i++) {
        int read = 0, head;
        for (j = 0; j < net_size; j++) read |= net[j].inputs > 0 && (net[j].in[0] == i || net[j].in[1] == i);
        if (read) continue;
        head = b_linear(i, 5);
        logits = logits < 0 ? head : b_add(logits, head);
    }
    b_loss(logits, AMP_OP_SOFTMAX_CROSS_ENTROPY, 1.0f, 0.0f);
    b_same(logits, AMP_OP_SOFTMAX);
    b_loss(b_linear(random_value(), 3), AMP_OP_MSE, 0.25f, 0.0f);
}

static void test_gradients_random(void) {
    static const struct { amp_level level; amp_dtype low; amp_style style; } kinds[] = {
        { AMP_O0, AMP_F32, AMP_STYLE_PYTORCH }, { AMP_O1, AMP_F16, AMP_STYLE_PYTORCH }, { AMP_O2, AMP_F16, AMP_STYLE_PYTORCH },
        { AMP_O0, AMP_F32, AMP_STYLE_PYTORCH }, { AMP_O1, AMP_F16, AMP_STYLE_MINDSPORE }, { AMP_O3, AMP_F16, AMP_STYLE_PYTORCH },
        { AMP_O1, AMP_BF16, AMP_STYLE_PYTORCH }, { AMP_O2, AMP_BF16, AMP_STYLE_PYTORCH }, { AMP_O3, AMP_BF16, AMP_STYLE_PYTORCH } };
    const int count = (int)(sizeof kinds / sizeof *kinds);
    int seed;
    for (seed = 1; seed <= 180; seed++) {
        char name[40];
        amp_dtype low = kinds[seed % count].low;
        amp_model* m;
        test_seed = (unsigned long long)seed * 1000003u;
        m = still_model(4, kinds[seed % count].level, low, kinds[seed % count].style);
        net_begin(m, 4);
        random_graph();
        snprintf(name, sizeof name, "graph %d %s %s", seed, amp_level_name(kinds[seed % count].level),
                 amp_dtype_name(low));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s: %s", name, amp_model_error(m));
        if (amp_model_layer_count(m)) {
            net_alloc();
            compare(low, bound_of(low), name);
            net_free();
        }
        amp_model_destroy(m);
    }
    test_seed = 1;
}

/* ======================================================================================= */
/* Building                                                                                 */
/* ======================================================================================= */

static void test_shapes(void) {
    amp_model* m = model_of(2, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_conv2d_desc c;
    amp_pool2d_desc p;
    amp_linear_desc l;
    amp_value x = amp_input(m, 4, 11, 8), v[24];
    const int want[24][3] = { { 4, 11, 8 }, { 6, 9, 6 }, { 6, 11, 8 }, { 6, 5, 3 }, { 8, 9, 2 }, { 4, 5, 4 }, { 4, 4, 3 }, { 4, 6, 3 },
                              { 4, 1, 1 }, { 4, 11, 8 }, { 4, 11, 8 }, { 4, 11, 8 }, { 4, 11, 8 }, { 4, 11, 8 }, { 4, 11, 8 },
                              { 4, 11, 8 }, { 4, 11, 8 }, { 4, 11, 8 }, { 10, 11, 8 }, { 352, 1, 1 }, { 7, 1, 1 }, { 3, 1, 1 },
                              { 1, 1, 1 }, { 1, 1, 1 } };
    size_t parameters = 0;
    int i, count = 0;
    v[0] = x;
    v[1] = conv(m, x, 6, 3, 0, 0);
    v[2] = conv(m, x, 6, 3, 0, 1);
    v[3] = conv(m, x, 6, 3, 2, 0);
    memset(&c, 0, sizeof c);
    c.out_channels = 8; c.kernel_h = 3; c.kernel_w = 4; c.stride_w = 2; c.pad_w = 1; c.dilation_w = 2; c.groups = 2; c.no_bias = 1;
    v[4] = amp_conv2d_with(m, x, &c);
    v[5] = amp_max_pool2d(m, x, 2);
    memset(&p, 0, sizeof p);
    p.kind = AMP_POOL_AVERAGE; p.kernel = 4; p.stride = 2;
    v[6] = amp_pool2d_with(m, x, &p);
    p.kind = AMP_POOL_MAX; p.kernel = 0; p.kernel_h = 2; p.kernel_w = 3; p.stride = 0; p.pad_h = 1; p.pad_w = 1;
    v[7] = amp_pool2d_with(m, x, &p);
    v[8] = amp_global_avg_pool2d(m, x);
    v[9] = amp_batch_norm(m, x);
    v[10] = amp_layer_norm(m, x);
    v[11] = amp_relu(m, x); v[12] = amp_gelu(m, x); v[13] = amp_tanh(m, x); v[14] = amp_sigmoid(m, x); v[15] = amp_softmax(m, x);
    v[16] = amp_dropout(m, x, 0.5f);
    v[17] = amp_add(m, x, v[9]);
    v[18] = amp_concat(m, x, v[2]);
    v[19] = amp_flatten(m, x);
    v[20] = amp_linear(m, x, 7);
    memset(&l, 0, sizeof l);
    l.out_features = 3; l.no_bias = 1;
    v[21] = amp_linear_with(m, v[20], &l);
    v[22] = amp_avg_pool2d(m, v[8], 1);
    v[22] = amp_mse(m, amp_add(m, v[8], v[22]));
    v[23] = amp_softmax_cross_entropy(m, v[21]);
    /* Whatever has weights must lead to a loss. */
    amp_mse(m, v[18]); amp_mse(m, v[1]); amp_mse(m, v[3]); amp_mse(m, v[4]);
    amp_mse(m, amp_add(m, v[17], v[10]));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    for (i = 0; i < 24; i++) {
        const amp_layer* s = layer_of(m, v[i]);
        CHECK(s != NULL);
        if (s) CHECK_MSG(s->channels == want[i][0] && s->height == want[i][1] && s->width == want[i][2], "%d '%s': %dx%dx%d", i, s->name,
                         s->channels, s->height, s->width);
    }
    amp_model_params(m, &count);
    CHECK(count == 14);
    for (i = 0; i < amp_model_layer_count(m); i++) parameters += amp_model_layer(m, i)->parameters;
    CHECK(parameters == 3 * (6u * 36 + 6) + 8u * 2 * 12 + 8 + 2 * 352 + 7 * 352 + 7 + 21);
    amp_model_destroy(m);
}

/* tanh, as an operator of the caller's own. */
static amp_result own_tanh(const amp_custom_call* c) {
    const size_t n = (size_t)c->n * 2 * 4 * 4;
    if (!c->dy.data) return amp_activation_forward(AMP_TANH, c->x[0], c->y, n, c->exec);
    return amp_activation_backward(AMP_TANH, c->dy, c->y, c->dx[0], 0, n, c->exec);
}
static amp_value own_layer(amp_model* m, amp_value x) {
    amp_custom_desc d;
    memset(&d, 0, sizeof d);
    d.forward = d.backward = own_tanh;
    return amp_custom(m, &x, 1, &d);
}

/* A layer of the operator on x, of 2x4x4; no value if this list has forgotten it. */
static amp_value layer_with_op(amp_model* m, amp_op op, amp_value x) {
    amp_value none = { 0, 0 };
    switch (op) {
#define X(NAME, name, ...) case AMP_OP_##NAME: return amp_##name(m, x);
        AMP_ACTIVATION_LIST(X)
#undef X
        case AMP_OP_INPUT: return amp_add(m, x, amp_input(m, 2, 4, 4));
        case AMP_OP_CONV2D: return conv(m, x, 3, 3, 1, 1);
        case AMP_OP_CONV_TRANSPOSE2D: return amp_conv_transpose2d(m, x, 3, 4, 2, 1);
        case AMP_OP_LINEAR: return amp_linear(m, x, 5);
        case AMP_OP_MAX_POOL2D: return amp_max_pool2d(m, x, 2);
        case AMP_OP_AVG_POOL2D: return amp_avg_pool2d(m, x, 2);
        case AMP_OP_UPSAMPLE: return amp_max_pool2d(m, amp_upsample(m, x, 3), 4);
        case AMP_OP_BATCH_NORM: return amp_batch_norm(m, x);
        case AMP_OP_LAYER_NORM: return amp_layer_norm(m, x);
        case AMP_OP_RMS_NORM: return amp_rms_norm(m, x);
        case AMP_OP_GROUP_NORM: return amp_group_norm(m, conv(m, x, 6, 3, 1, 1), 2);
        case AMP_OP_INSTANCE_NORM: return amp_instance_norm(m, x);
        case AMP_OP_SOFTMAX: return amp_softmax(m, x);
        case AMP_OP_DROPOUT: return amp_dropout(m, x, 0.0f);
        case AMP_OP_LEAKY_RELU: return amp_leaky_relu(m, x, 0.1f);
        case AMP_OP_ADD: return amp_add(m, x, x);
        case AMP_OP_MUL: return amp_mul(m, amp_mul(m, x, x), amp_sigmoid(m, amp_global_avg_pool2d(m, x)));
        case AMP_OP_CONCAT: return amp_concat(m, x, x);
        case AMP_OP_FLATTEN: return amp_flatten(m, x);
        case AMP_OP_SOFTMAX_CROSS_ENTROPY: return amp_softmax_cross_entropy(m, amp_flatten(m, x));
        case AMP_OP_MSE: return amp_mse(m, x);
        case AMP_OP_BCE_WITH_LOGITS: return amp_bce_with_logits(m, x);
        case AMP_OP_CUSTOM: return own_layer(m, x);
        case AMP_OP_MEAN: return amp_mean(m, amp_sigmoid(m, x));
        case AMP_OP_EMBEDDING: return amp_add(m, amp_flatten(m, x), amp_embedding(m, amp_tokens(m, 1), 3, 32));
        case AMP_OP_POSITION_EMBEDDING: return amp_position_embedding(m, x);
        case AMP_OP_ATTENTION: {
            const amp_attention_desc d = { 2, 1, 0, 0, 0.0f };
            return amp_attention(m, x, &d);
        }
        case AMP_OP_TO_POSITIONS: return amp_linear(m, amp_to_positions(m, x), 3);
        case AMP_OP_TO_IMAGE: return conv(m, amp_to_image(m, amp_to_positions(m, x), 4, 4), 3, 3, 1, 1);
        case AMP_OP_ROPE: {
            const amp_rope_desc d = { 4, 0, 0.0f, 0 };
            return amp_rope(m, x, &d);
        }
    }
    return none;
}

/* Steps of a model with that layer: all is finite, and in FP32 the loss falls as the gradient says. */
static void train_with_op(amp_op op, amp_level level) {
    static float inputs[2][3 * 32], targets[3 * 256];
    static int32_t labels[3];
    const char* name = amp_op_name(op);
    amp_model* m = model_of(3, level, AMP_F16);
    amp_value v = amp_batch_norm(m, conv(m, amp_input(m, 2, 4, 4), 2, 3, 1, 1));
    amp_step_info first, second;
    amp_batch b;
    double expected;

    test_seed = 1;
    for (int i = 0; i < 3 * 32; i++) inputs[0][i] = inputs[1][i] = 2.0f * test_uniform();
    for (int i = 0; i < 3 * 256; i++) targets[i] = 0.5f + 0.5f * test_uniform();
    for (int i = 0; i < 3; i++) labels[i] = i;
    memset(&b, 0, sizeof b);
    b.n = 3; b.inputs[0] = inputs[0];
    b.inputs[1] = op == AMP_OP_EMBEDDING ? (const void*)labels : (const void*)inputs[1];
    b.targets[0] = op == AMP_OP_SOFTMAX_CROSS_ENTROPY ? (const void*)labels : (const void*)targets;
    v = layer_with_op(m, op, v);
    CHECK_MSG(v.id != 0, "AMP_OP_LIST has %s: add the call that builds it to layer_with_op, above this test", name);
    if (v.id == 0) { amp_model_destroy(m); return; }
    if (op != AMP_OP_SOFTMAX_CROSS_ENTROPY && op != AMP_OP_MSE && op != AMP_OP_BCE_WITH_LOGITS && op != AMP_OP_MEAN)
        amp_mse(m, v);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s: %s", name, amp_model_error(m));

    amp_optimizer_set_lr(amp_model_optimizer(m), 0.0f);
    CHECK_MSG(amp_train_step(m, &b, &first) == AMP_OK, "%s at %s: %s: has it its cases in ampi_forward_node and "
              "ampi_backward_input?", name, amp_level_name(level), amp_model_error(m));
    expected = 0.003 * (double)first.loss;
    amp_optimizer_set_lr(amp_model_optimizer(m), (float)(expected / (first.grad_norm * first.grad_norm)));
    CHECK(amp_train_step(m, &b, &first) == AMP_OK && amp_train_step(m, &b, &second) == AMP_OK);
    CHECK_MSG(first.step == 2 && second.step == 3 && isfinite(first.loss) && first.grad_norm > 0.0, "%s at %s: %s", name,
              amp_level_name(level), second.message);
    if (level == AMP_O0)
        CHECK_MSG(fabs((double)(first.loss - second.loss) / expected - 1.0) < 0.05, "%s: the loss falls by %g, not by %g: does "
                  "its row read what its backward call takes?", name, (double)(first.loss - second.loss), expected);
    amp_model_destroy(m);
}

/* Weights [C,O/groups,KH,KW] start as PyTorch's ConvTranspose2d: within 1/sqrt(O/groups * KH * KW), and biases too. */
static void test_transposed_weights(void) {
    amp_model* m = model_of(2, AMP_O0, AMP_F16);
    amp_value v = amp_input(m, 40, 3, 5);
    amp_conv2d_desc d;
    const amp_layer* l;
    int i, count;
    memset(&d, 0, sizeof d);
    d.out_channels = 4; d.kernel = 5; d.stride = 2; d.pad = 2; d.output_pad_w = 1; d.groups = 2;
    v = amp_conv_transpose2d_with(m, v, &d);
    amp_mse(m, v);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    l = amp_model_layer(m, 1);
    CHECK(strcmp(l->name, "conv_transpose2d1") == 0 && l->channels == 4 && l->height == 5 && l->width == 10);
    CHECK(l->parameters == 40 * 2 * 25 + 4);
    for (i = 0; i < 2; i++) {
        const amp_param* p = &amp_model_params(m, &count)[i];
        const double bound = 1.0 / sqrt(2 * 25);
        double largest = 0.0;
        size_t k;
        for (k = 0; k < p->count; k++) largest = fmax(largest, fabs((double)p->master[k]));
        CHECK(p->count == (i ? 4u : 2000u) && largest <= bound && largest > (i ? 0.2 : 0.99) * bound);
    }
    CHECK(count == 2);
    amp_model_destroy(m);
}

static void test_every_operator(void) {
    for (int op = 0; op < AMP_OP_COUNT; op++)
        for (int level = AMP_O0; level <= AMP_O3; level++) train_with_op((amp_op)op, (amp_level)level);
}

/* LeNet-5 as in MindSpore's guide. */
static amp_value lenet(amp_model* m) {
    amp_value x = amp_input(m, 1, 32, 32);
    x = amp_max_pool2d(m, amp_relu(m, conv(m, x, 6, 5, 0, 0)), 2);
    x = amp_max_pool2d(m, amp_relu(m, conv(m, x, 16, 5, 0, 0)), 2);
    x = amp_flatten(m, x);
    x = amp_relu(m, amp_linear(m, x, 120));
    x = amp_relu(m, amp_linear(m, x, 84));
    return amp_linear(m, x, 10);
}

static void test_lenet(void) {
    static const struct { const char* name; int c, h, w; size_t parameters; } want[] = {
        { "input1", 1, 32, 32, 0 }, { "conv2d1", 6, 28, 28, 156 }, { "relu1", 6, 28, 28, 0 }, { "max_pool2d1", 6, 14, 14, 0 },
        { "conv2d2", 16, 10, 10, 2416 }, { "relu2", 16, 10, 10, 0 }, { "max_pool2d2", 16, 5, 5, 0 }, { "flatten1", 400, 1, 1, 0 },
        { "linear1", 120, 1, 1, 48120 }, { "relu3", 120, 1, 1, 0 }, { "linear2", 84, 1, 1, 10164 }, { "relu4", 84, 1, 1, 0 },
        { "linear3", 10, 1, 1, 850 }, { "softmax_cross_entropy1", 1, 1, 1, 0 } };
    amp_model* m = model_of(64, AMP_O2, AMP_F16);
    const amp_param* p;
    size_t parameters = 0;
    int i, count;
    amp_softmax_cross_entropy(m, lenet(m));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(amp_model_layer_count(m) == 14);
    for (i = 0; i < amp_model_layer_count(m) && i < 14; i++) {
        const amp_layer* l = amp_model_layer(m, i);
        CHECK_MSG(strcmp(l->name, want[i].name) == 0, "%s", l->name);
        CHECK(l->channels == want[i].c && l->height == want[i].h && l->width == want[i].w
              && l->parameters == want[i].parameters);
    }
    p = amp_model_params(m, &count);
    CHECK(count == 10 && strcmp(p[0].name, "conv2d1.weight") == 0 && strcmp(p[9].name, "linear3.bias") == 0);
    for (i = 0; i < count; i++) parameters += p[i].count;
    CHECK(parameters == 61706);
    CHECK(amp_model_find_param(m, "linear1.weight") == &p[4] && p[4].count == 48000);
    CHECK(amp_model_find_param(m, "linear9.weight") == NULL && amp_model_find_param(m, NULL) == NULL);
    CHECK(amp_model_layer(m, -1) == NULL && amp_model_layer(m, 14) == NULL);
    amp_model_destroy(m);
}

/* --- mistakes ---------------------------------------------------------------------------------- */

typedef void (*mistake)(amp_model* m, amp_value x);      /* x is an input of 3x6x5 named "photo" */
static amp_value rows_of(amp_model* m, amp_value x, int out) { return amp_linear(m, x, out); }
static amp_value foreign(int id) { amp_value v; v.id = id; v.tag = 0; return v; }
static void conv_of(amp_model* m, amp_value x, int out, int kernel, int stride, int padding, int dilation, int groups) {
    amp_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = out; d.kernel = kernel; d.stride = stride; d.pad = padding; d.dilation = dilation; d.groups = groups;
    amp_conv2d_with(m, x, &d);
}
static void pool_of(amp_model* m, amp_value x, int kernel, int stride, int padding) {
    amp_pool2d_desc d;
    memset(&d, 0, sizeof d);
    d.kernel = kernel; d.stride = stride; d.pad = padding;
    amp_pool2d_with(m, x, &d);
}
static void norm_of(amp_model* m, amp_value x, float eps, float momentum) {
    amp_norm_desc d;
    memset(&d, 0, sizeof d);
    d.eps = eps; d.momentum = momentum;
    amp_batch_norm_with(m, x, &d);
}
static void loss_of(amp_model* m, amp_value x, float weight, float smoothing) {
    amp_loss_desc d;
    memset(&d, 0, sizeof d);
    d.weight = weight; d.smoothing = smoothing;
    amp_softmax_cross_entropy_with(m, x, &d);
}
static void linear_init(amp_model* m, amp_value x, int out, int init) {
    amp_linear_desc d;
    memset(&d, 0, sizeof d);
    d.out_features = out; d.init = (amp_init)init;
    amp_linear_with(m, x, &d);
}
static void e_conv_kernel(amp_model* m, amp_value x) { conv_of(m, x, 4, 7, 0, 0, 0, 0); }
static void e_conv_no_kernel(amp_model* m, amp_value x) { conv_of(m, x, 4, 0, 0, 0, 0, 0); }
static void e_conv_negative_kernel(amp_model* m, amp_value x) { conv_of(m, x, 4, -1, 0, 0, 0, 0); }
static void e_conv_channels(amp_model* m, amp_value x) { conv_of(m, x, 0, 3, 0, 0, 0, 0); }
static void e_conv_least(amp_model* m, amp_value x) { conv_of(m, x, -2147483647 - 1, 3, 0, 0, 0, -1); }
static void e_conv_stride(amp_model* m, amp_value x) { conv_of(m, x, 4, 3, -1, 0, 0, 0); }
static void e_conv_padding(amp_model* m, amp_value x) { conv_of(m, x, 4, 3, 0, -1, 0, 0); }
static void e_conv_dilation(amp_model* m, amp_value x) { conv_of(m, x, 4, 3, 0, 0, -2, 0); }
static void e_conv_groups(amp_model* m, amp_value x) { conv_of(m, x, 4, 3, 0, 0, 0, 2); }
static void e_conv_negative_groups(amp_model* m, amp_value x) { conv_of(m, x, 4, 3, 0, 0, 0, -3); }
static void e_conv_huge(amp_model* m, amp_value x) { conv_of(m, x, 0x7fffffff, 3, 0, 0, 0, 0); }
static void e_conv_huge_kernel(amp_model* m, amp_value x) {
    conv_of(m, x, 1000000000, 1000000001, 0, 500000000, 0, 0);
}
static void e_conv_null(amp_model* m, amp_value x) { amp_conv2d_with(m, x, NULL); }
static void e_pool_kernel(amp_model* m, amp_value x) { pool_of(m, x, 6, 0, 0); }
static void e_pool_no_kernel(amp_model* m, amp_value x) { amp_max_pool2d(m, x, 0); }
static void e_pool_negative(amp_model* m, amp_value x) { amp_avg_pool2d(m, x, -2); }
static void e_pool_stride(amp_model* m, amp_value x) { pool_of(m, x, 2, -1, 0); }
static void e_pool_padding(amp_model* m, amp_value x) { pool_of(m, x, 2, 0, 2); }
static void e_conv_init(amp_model* m, amp_value x) {
    amp_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = 2; d.kernel = 3; d.init = (amp_init)9;
    amp_conv2d_with(m, x, &d);
}
static void e_pool_null(amp_model* m, amp_value x) { amp_pool2d_with(m, x, NULL); }
static void e_pool_kind(amp_model* m, amp_value x) {
    amp_pool2d_desc d;
    memset(&d, 0, sizeof d);
    d.kernel = 2; d.kind = (amp_pool)7;
    amp_pool2d_with(m, x, &d);
}
static void e_linear_zero(amp_model* m, amp_value x) { amp_linear(m, x, 0); }
static void e_linear_negative(amp_model* m, amp_value x) { amp_linear(m, x, -5); }
static void e_linear_huge(amp_model* m, amp_value x) { amp_linear(m, amp_linear(m, x, 0x7fffffff), 0x7fffffff); }
static void e_linear_null(amp_model* m, amp_value x) { amp_linear_with(m, x, NULL); }
static void e_linear_init(amp_model* m, amp_value x) { linear_init(m, x, 4, 9); }
static void e_dropout_one(amp_model* m, amp_value x) { amp_dropout(m, x, 1.0f); }
static void e_dropout_negative(amp_model* m, amp_value x) { amp_dropout(m, x, -0.1f); }
static void e_transposed_pad(amp_model* m, amp_value x) { amp_conv_transpose2d(m, x, 4, 3, 2, 9); }
static void e_output_pad(amp_model* m, amp_value x) {
    amp_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = 4; d.kernel = 3; d.stride = 2; d.output_pad = 2;
    amp_conv_transpose2d_with(m, x, &d);
}
static void e_upsample_zero(amp_model* m, amp_value x) { amp_upsample(m, x, 0); }
static void e_upsample_huge(amp_model* m, amp_value x) { amp_upsample(m, x, 400000000); }
static void e_upsample_large(amp_model* m, amp_value x) { amp_upsample(m, x, 9000); }
static void e_mul_first(amp_model* m, amp_value x) { amp_mul(m, amp_global_avg_pool2d(m, x), x); }
static void e_mul_channels(amp_model* m, amp_value x) { amp_mul(m, x, amp_input(m, 7, 1, 1)); }
static void e_leaky_negative(amp_model* m, amp_value x) { amp_leaky_relu(m, x, -0.1f); }
static void e_leaky_infinite(amp_model* m, amp_value x) { amp_leaky_relu(m, x, HUGE_VALF); }
static void e_norm_eps(amp_model* m, amp_value x) { norm_of(m, x, -1e-3f, 0.0f); }
static void e_norm_momentum(amp_model* m, amp_value x) { norm_of(m, x, 0.0f, 1.5f); }
static void e_add(amp_model* m, amp_value x) { amp_add(m, x, amp_max_pool2d(m, x, 2)); }
static void e_add_channels(amp_model* m, amp_value x) { amp_add(m, conv(m, x, 4, 1, 0, 0), x); }
static void e_concat(amp_model* m, amp_value x) { amp_concat(m, x, amp_max_pool2d(m, x, 2)); }
static void e_loss_weight(amp_model* m, amp_value x) { loss_of(m, rows_of(m, x, 3), -2.0f, 0.0f); }
static void e_loss_smoothing(amp_model* m, amp_value x) { loss_of(m, rows_of(m, x, 3), 0.0f, 1.0f); }
static amp_loss_desc smoothing_of(float smoothing) {
    amp_loss_desc d;
    memset(&d, 0, sizeof d);
    d.smoothing = smoothing;
    return d;
}
static void e_mse_smoothing(amp_model* m, amp_value x) { amp_loss_desc d = smoothing_of(0.1f); amp_mse_with(m, x, &d); }
static void e_bce_smoothing(amp_model* m, amp_value x) { amp_loss_desc d = smoothing_of(0.5f); amp_bce_with_logits_with(m, x, &d); }
static void e_on_loss(amp_model* m, amp_value x) { amp_relu(m, amp_mse(m, x)); }
static void e_loss_on_loss(amp_model* m, amp_value x) { amp_mse(m, amp_mse(m, x)); }
static void e_nine_losses(amp_model* m, amp_value x) { int i; for (i = 0; i < 9; i++) amp_mse(m, x); }
static void e_nine_inputs(amp_model* m, amp_value x) { int i; (void)x; for (i = 0; i < 8; i++) amp_input(m, 1, 1, 1); }
static void e_input_zero(amp_model* m, amp_value x) { (void)x; amp_input(m, 0, 4, 4); }
static void e_input_negative(amp_model* m, amp_value x) { (void)x; amp_input(m, 1, -4, 4); }
static void e_input_huge(amp_model* m, amp_value x) { (void)x; amp_input(m, 0x7fffffff, 0x7fffffff, 0x7fffffff); }
static void input_of(amp_model* m, float scale, float mean, float std) {
    amp_input_desc d;
    memset(&d, 0, sizeof d);
    d.channels = d.height = d.width = 1;
    d.scale = scale; d.mean = &mean; d.std = &std;
    amp_input_with(m, &d);
}
static void e_input_null(amp_model* m, amp_value x) { (void)x; amp_input_with(m, NULL); }
static void e_input_scale(amp_model* m, amp_value x) { (void)x; input_of(m, -1.0f, 0.0f, 1.0f); }
static void e_input_mean(amp_model* m, amp_value x) { (void)x; input_of(m, 1.0f, (float)HUGE_VAL, 1.0f); }
static void e_input_std(amp_model* m, amp_value x) { (void)x; input_of(m, 1.0f, 0.0f, 0.0f); }
static void e_class_weight(amp_model* m, amp_value x) {
    const float weights[3] = { 1.0f, 1.0f, -2.0f };
    amp_loss_desc d = smoothing_of(0.0f);
    d.class_weights = weights;
    amp_softmax_cross_entropy_with(m, x, &d);
}
static void e_mse_ignored(amp_model* m, amp_value x) {
    const int32_t label = 0;
    amp_loss_desc d = smoothing_of(0.0f);
    d.ignored = &label;
    amp_mse_with(m, x, &d);
}
static void e_foreign_zero(amp_model* m, amp_value x) { (void)x; amp_relu(m, foreign(0)); }
static void e_foreign_large(amp_model* m, amp_value x) { (void)x; amp_linear(m, foreign(77), 4); }
static void e_foreign_negative(amp_model* m, amp_value x) { amp_add(m, x, foreign(-3)); }
static void e_unclosed(amp_model* m, amp_value x) { amp_autocast_push(m, AMP_F32); amp_mse(m, x); }
static void e_pop(amp_model* m, amp_value x) { amp_autocast_pop(m); amp_mse(m, x); }
static void e_region_type(amp_model* m, amp_value x) { (void)x; amp_autocast_push(m, AMP_F64); }
static void e_region_depth(amp_model* m, amp_value x) { int i; (void)x; for (i = 0; i <= AMP_MAX_REGIONS; i++) amp_autocast_push(m, AMP_F32); }
static void e_pin_type(amp_model* m, amp_value x) { amp_pin(m, rows_of(m, x, 3), AMP_F64); }
static void e_pin_default(amp_model* m, amp_value x) { amp_pin(m, rows_of(m, x, 3), AMP_DTYPE_DEFAULT); }
static void e_pin_loss(amp_model* m, amp_value x) { amp_pin(m, amp_mse(m, x), AMP_F16); }
static void e_pin_input(amp_model* m, amp_value x) { amp_pin(m, x, AMP_F16); }
static void e_name_twice(amp_model* m, amp_value x) { amp_name(m, rows_of(m, x, 3), "photo"); }
static void e_name_later(amp_model* m, amp_value x) {
    amp_name(m, rows_of(m, x, 3), "linear2");
    amp_mse(m, rows_of(m, x, 3));
}
#define THIRTY_TWO "0123456789abcdef0123456789abcdef"
static void e_name_long(amp_model* m, amp_value x) { amp_name(m, x, THIRTY_TWO THIRTY_TWO THIRTY_TWO THIRTY_TWO); }
static void e_name_empty(amp_model* m, amp_value x) { amp_name(m, x, ""); }
static void e_name_bytes(amp_model* m, amp_value x) { amp_name(m, x, "caf\xe9"); }
static void e_name_null(amp_model* m, amp_value x) { amp_name(m, x, NULL); }
static void e_group(amp_model* m, amp_value x) { amp_group(m, rows_of(m, x, 3), 1); }
static void e_group_vectors(amp_model* m, amp_value x) { amp_group_vectors(m, 1); (void)x; }
static void e_group_of_relu(amp_model* m, amp_value x) { amp_group(m, amp_relu(m, rows_of(m, x, 3)), 0); }
static void e_no_loss_behind(amp_model* m, amp_value x) { amp_mse(m, rows_of(m, x, 3)); rows_of(m, x, 4); }

static const struct { mistake make; amp_result code; const char* word; const char* place; } mistakes[] = {
    { e_conv_kernel, AMP_ERR_SHAPE, "7", "photo" },          { e_conv_no_kernel, AMP_ERR_DESC, "kernel", "photo" },
    { e_conv_negative_kernel, AMP_ERR_DESC, "-1", "photo" }, { e_conv_channels, AMP_ERR_DESC, "out_channels", "photo" },
    { e_conv_least, AMP_ERR_DESC, "out_channels", "photo" },
    { e_conv_stride, AMP_ERR_DESC, "stride", "photo" },      { e_conv_padding, AMP_ERR_DESC, "-1", "photo" },
    { e_conv_dilation, AMP_ERR_DESC, "dilation", "photo" },  { e_conv_groups, AMP_ERR_SHAPE, "groups", "photo" },
    { e_conv_negative_groups, AMP_ERR_DESC, "groups", "photo" }, { e_conv_huge, AMP_ERR_SHAPE, "2147483647", "photo" },
    { e_conv_huge_kernel, AMP_ERR_SHAPE, "more elements", "photo" }, { e_conv_null, AMP_ERR_DESC, "'photo': the desc is NULL", "photo" },
    { e_conv_init, AMP_ERR_DESC, "'photo': init 9 does", "photo" },
    { e_pool_kernel, AMP_ERR_SHAPE, "6", "photo" },          { e_pool_no_kernel, AMP_ERR_DESC, "kernel", "photo" },
    { e_pool_negative, AMP_ERR_DESC, "-2", "photo" },        { e_pool_stride, AMP_ERR_DESC, "stride", "photo" },
    { e_pool_padding, AMP_ERR_DESC, "pad", "photo" },        { e_pool_null, AMP_ERR_DESC, "NULL", "photo" },
    { e_pool_kind, AMP_ERR_DESC, "7", "photo" },             { e_linear_zero, AMP_ERR_DESC, "0 outputs", "photo" },
    { e_linear_negative, AMP_ERR_DESC, "-5", "photo" },      { e_linear_huge, AMP_ERR_DESC, "2147483647", "linear1" },
    { e_linear_null, AMP_ERR_DESC, "desc is NULL", "photo" },     { e_linear_init, AMP_ERR_DESC, "init 9", "photo" },
    { e_dropout_one, AMP_ERR_DESC, "dropout", "1" },         { e_dropout_negative, AMP_ERR_DESC, "dropout", "-0.1" },
    { e_transposed_pad, AMP_ERR_SHAPE, "conv_transpose2d", "1..2^31-1" },
    { e_output_pad, AMP_ERR_DESC, "output_pad 2x2", "stride, 2x2" },
    { e_upsample_zero, AMP_ERR_DESC, "upsample", "factor 0" },
    { e_upsample_huge, AMP_ERR_DESC, "upsample", "factor 400000000" },
    { e_upsample_large, AMP_ERR_SHAPE, "upsample", "2^31" },
    { e_mul_first, AMP_ERR_SHAPE, "mul", "does not fit" },
    { e_mul_channels, AMP_ERR_SHAPE, "mul", "7x1x1 of 'input2'" },
    { e_leaky_negative, AMP_ERR_DESC, "leaky_relu", "slope -0.1" },
    { e_leaky_infinite, AMP_ERR_DESC, "leaky_relu", "slope inf" },
    { e_norm_eps, AMP_ERR_DESC, "'photo': eps -0.001 must", "batch_norm" }, { e_norm_momentum, AMP_ERR_DESC, "'photo': momentum 1.5 must", "batch_norm" },
    { e_add, AMP_ERR_SHAPE, "3x6x5", "max_pool2d1" },        { e_add_channels, AMP_ERR_SHAPE, "4x6x5", "photo" },
    { e_concat, AMP_ERR_SHAPE, "3x3x2", "photo" },           { e_loss_weight, AMP_ERR_DESC, "'linear1': weight -2 must", "softmax_cross_entropy" },
    { e_loss_smoothing, AMP_ERR_DESC, "'linear1': smoothing 1 must", "softmax_cross_entropy" }, { e_on_loss, AMP_ERR_SHAPE, "relu", "loss" },
    { e_mse_smoothing, AMP_ERR_DESC, "mse on 'photo': smoothing 0.1", "softmax_cross_entropy only" },
    { e_bce_smoothing, AMP_ERR_DESC, "bce_with_logits on 'photo': smoothing 0.5", "softmax_cross_entropy only" },
    { e_loss_on_loss, AMP_ERR_SHAPE, "mse", "loss" },        { e_nine_losses, AMP_ERR_SHAPE, "8", "losses" },
    { e_nine_inputs, AMP_ERR_SHAPE, "8", "inputs" },         { e_input_zero, AMP_ERR_SHAPE, "0 x 4 x 4", "input" },
    { e_input_negative, AMP_ERR_SHAPE, "-4", "input" },      { e_input_huge, AMP_ERR_SHAPE, "2147483647", "input" },
    { e_class_weight, AMP_ERR_DESC, "'photo': weight -2", "class 2" },
    { e_mse_ignored, AMP_ERR_DESC, "mse on 'photo': ignored", "softmax_cross_entropy only" },
    { e_input_null, AMP_ERR_DESC, "input: the desc", "NULL" }, { e_input_scale, AMP_ERR_DESC, "input: scale -1", "negative" },
    { e_input_mean, AMP_ERR_DESC, "input: mean", "channel 0" }, { e_input_std, AMP_ERR_DESC, "std of channel 0", "above 0" },
    { e_foreign_zero, AMP_ERR_ARGUMENT, "0", "relu" },       { e_foreign_large, AMP_ERR_ARGUMENT, "77", "linear" },
    { e_foreign_negative, AMP_ERR_ARGUMENT, "-3", "add" },   { e_unclosed, AMP_ERR_STATE, "1", "region" },
    { e_pop, AMP_ERR_STATE, "pop", "region" },               { e_region_type, AMP_ERR_DTYPE, "f64", "autocast_push" },
    { e_region_depth, AMP_ERR_STATE, "32", "region" },       { e_pin_type, AMP_ERR_DTYPE, "pin", "linear1" },
    { e_pin_default, AMP_ERR_DTYPE, "pin", "linear1" },      { e_pin_loss, AMP_ERR_POLICY, "loss", "mse1" },
    { e_pin_input, AMP_ERR_POLICY, "pin", "photo" },         { e_name_twice, AMP_ERR_ARGUMENT, "two layers", "photo" },
    { e_name_later, AMP_ERR_ARGUMENT, "two layers", "linear2" }, { e_name_long, AMP_ERR_ARGUMENT, "127", "photo" },
    { e_name_empty, AMP_ERR_ARGUMENT, "name", "photo" },     { e_name_null, AMP_ERR_ARGUMENT, "name", "photo" },
    { e_name_bytes, AMP_ERR_ARGUMENT, "UTF-8", "photo" },
    { e_group_of_relu, AMP_ERR_ARGUMENT, "no parameters", "relu1" },
    { e_group, AMP_ERR_ARGUMENT, "group", "linear1" },       { e_group_vectors, AMP_ERR_ARGUMENT, "has 1", "group_vectors" },
    { e_no_loss_behind, AMP_ERR_SHAPE, "no loss", "linear2" }
};

/* Each mistake is reported by finalize with its code and a sentence with number and place; what was built on it, and what
   comes after it, does not crash; the first mistake is the one that is told. */
static void test_mistakes(void) {
    int i;
    for (i = 0; i < (int)(sizeof mistakes / sizeof *mistakes); i++) {
        amp_model* m = model_of(2, AMP_O1, AMP_F16);
        amp_value x = amp_input(m, 3, 6, 5), y;
        amp_layer_stats stats[1];
        amp_step_info info;
        amp_batch b;
        float out[4];
        amp_result r;
        amp_name(m, x, "photo");
        mistakes[i].make(m, x);
        if (mistakes[i].make != e_unclosed && mistakes[i].make != e_name_twice && mistakes[i].make != e_name_later
            && mistakes[i].make != e_no_loss_behind) {
            y = amp_add(m, amp_linear(m, foreign(0), -1), amp_relu(m, amp_conv2d_with(m, x, NULL)));
            amp_autocast_pop(m);
            amp_name(m, y, "later");
            amp_pin(m, y, AMP_F32);
            amp_group(m, y, 99); amp_group_vectors(m, 99);
            amp_softmax_cross_entropy(m, amp_concat(m, amp_flatten(m, y), amp_global_avg_pool2d(m, y)));
        }
        heard[0] = 0;
        r = amp_model_finalize(m);
        CHECK_MSG(r == mistakes[i].code, "mistake %d: %s: %s", i, amp_result_string(r), amp_model_error(m));
        CHECK_MSG(strstr(amp_model_error(m), mistakes[i].word) && strstr(amp_model_error(m), mistakes[i].place),
                  "mistake %d: %s", i, amp_model_error(m));
        CHECK(amp_model_finalize(m) == r);
        memset(&b, 0, sizeof b);
        b.n = 1;
        CHECK(amp_train_step(m, &b, &info) != AMP_OK && amp_evaluate(m, &b, NULL) != AMP_OK
              && amp_predict(m, &b, x, out) != AMP_OK);
        CHECK(amp_model_stats(m, &b, stats, 1) != AMP_OK);
        CHECK(amp_model_scaler(m) == NULL && amp_model_params(m, NULL) == NULL && amp_model_layer_count(m) == 0);
        amp_model_destroy(m);
    }
}

/* Two models at a time, as a generator and its critic: what one has made is no value of the other, whose layer of that number
   is another, or made from others. Models that are built alike may share. */
static amp_model* two_layers(int features, int hidden, amp_value* x, amp_value* h, amp_value* y) {
    amp_model* m = model_of(2, AMP_O0, AMP_F16);
    *x = amp_input(m, features, 1, 1);
    *h = amp_relu(m, amp_linear(m, *x, hidden));
    *y = amp_linear(m, amp_add(m, *h, *h), 2);
    return m;
}
static void test_values_of_others(void) {
    amp_value x[3], h[3], y[3], z;
    amp_model *a, *b = two_layers(5, 4, &x[1], &h[1], &y[1]), *alike = two_layers(3, 4, &x[2], &h[2], &y[2]);
    float data[6] = { 1, 2, 3, 4, 5, 6 }, out[2][4];
    amp_batch batch;
    int i;
    memset(&batch, 0, sizeof batch);
    batch.n = 2; batch.inputs[0] = data;
    for (i = 0; i < 5; i++) {                   /* the last one is in order */
        a = two_layers(3, 4, &x[0], &h[0], &y[0]);
        CHECK(amp_model_layer_of(a, h[0]) == 2 && amp_model_layer_of(a, h[1]) == -1 && amp_model_layer_of(a, h[2]) == 2);
        z = y[0];
        if (i == 0) z = amp_relu(a, x[1]);      /* of another size */
        if (i == 1) z = amp_add(a, h[0], h[1]); /* a layer like ours, but behind other layers */
        if (i == 2) z = amp_concat(a, h[1], h[0]);
        if (i == 3) amp_name(a, h[1], "critic");
        if (i == 4) z = amp_relu(a, y[2]);
        CHECK((z.id == 0) == (i < 3));
        CHECK_MSG((amp_model_finalize(a) == AMP_ERR_ARGUMENT) == (i < 4), "%d: %s", i, amp_model_error(a));
        CHECK_MSG(i == 4 || strstr(amp_model_error(a), i ? "value 3 is not one of this model" : "relu: value 1 is not"), "%d: %s",
                  i, amp_model_error(a));
        if (i < 4) amp_model_destroy(a);
    }
    CHECK(amp_model_finalize(alike) == AMP_OK);
    CHECK(amp_predict(a, &batch, y[2], out[0]) == AMP_OK && amp_predict(alike, &batch, y[0], out[1]) == AMP_OK);
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    CHECK(amp_predict(a, &batch, y[1], out[0]) == AMP_ERR_ARGUMENT);
    CHECK_MSG(strstr(amp_model_error(a), "predict: value 5 is not of this model"), "%s", amp_model_error(a));
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    amp_model_destroy(a); amp_model_destroy(b); amp_model_destroy(alike);
}

/* Of 20000 models that differ in one size, none takes the value of another. */
static void test_values_of_many(void) {
    amp_value x, v[3];
    amp_model *a = two_layers(3, 4, &v[0], &v[1], &v[2]), *b;
    int i, taken = 0;
    for (i = 0; i < 20000; i++) {
        b = model_of(1, AMP_O0, AMP_DTYPE_DEFAULT);
        x = amp_input(b, i + 4, 1, 1);
        taken += amp_model_layer_of(a, x) >= 0;
        amp_model_destroy(b);
    }
    CHECK_MSG(taken == 0, "%d taken", taken);
    amp_model_destroy(a);
}

/* What is allowed and rarely meant is told once, as no error. */
static void test_doubts(void) {
    int kind, softmax;
    for (kind = AMP_SGD; kind <= AMP_RMSPROP; kind++)
        for (softmax = 0; softmax < 2; softmax++) {
            const int told = kind != AMP_SGD && kind != AMP_RMSPROP;
            amp_model_desc d;
            amp_model* m;
            amp_value x;
            const char* first;
            memset(&d, 0, sizeof d);
            d.batch = 2;
            d.optimizer.kind = (amp_optimizer_kind)kind;
            d.optimizer.momentum = 0.9f;
            d.logger.log = listen;
            heard_count = remarks = 0;
            m = new_model(&d);
            x = amp_linear(m, amp_input(m, 3, 1, 1), 4);
            amp_mse(m, amp_softmax(m, x));
            amp_softmax_cross_entropy(m, softmax ? amp_flatten(m, amp_softmax(m, x)) : x);
            CHECK(amp_model_finalize(m) == AMP_OK && amp_model_error(m)[0] == 0);
            CHECK_MSG(heard_count == softmax + told && remarks == heard_count, "%d, %d", heard_count, remarks);
            first = heard_count > 1 ? heard_before : heard;
            CHECK(!softmax || (strstr(heard, "'softmax_cross_entropy1'") && strstr(heard, "'softmax2'")));
            CHECK(!told || strstr(first, "momentum 0.9 is for SGD and RMSprop"));
            amp_model_destroy(m);
        }
}

/* A loss of one class, beta1 for SGD, masters that nothing splits, an array that nothing reads. */
static void test_doubts_of_settings(void) {
    static const struct { int classes, beta, split, extra; amp_dtype low; const char* says; } cases[] = {     /* 3: frozen */
        { 2, 0, 0, 0, AMP_F16, "" }, { 2, 0, 1, 0, AMP_BF16, "" },
        { 1, 0, 0, 0, AMP_F16, "'softmax_cross_entropy1' has one class" },
        { 2, 1, 0, 0, AMP_F16, "optimizer: beta1 0.9 is for Adam, here only momentum counts" },
        { 2, 0, 0, 4, AMP_F16, "optimizer: groups are given, but group_count is 0: none counts" },
        { 2, 0, 0, 5, AMP_F16, "optimizer: schedule.kind is 0, constant: of the schedule only warmup_steps counts" },
        { 2, 0, 1, 0, AMP_F16, "model: split_masters splits nothing" },
        { 2, 0, 0, 1, AMP_F16, "train step: inputs[1] is given, but nothing in the model reads it" },
        { 2, 0, 0, 2, AMP_F16, "train step: targets[7] is given, but nothing in the model reads it" },
        { 2, 0, 0, 3, AMP_F16, "model: all parameters are in frozen groups, so none moves" } };
    static const amp_param_group frozen[2] = { { 0, 0, 1, NULL }, { 0, 0, 0, NULL } };
    static const float x[4] = { 1, 2, 3, 4 };
    static const int32_t labels[2] = { 0, 0 };
    for (int i = 0; i < COUNT(cases); i++) {
        amp_model_desc d = model_desc(2, AMP_O2, cases[i].low);
        amp_batch b;
        memset(&b, 0, sizeof b);
        b.n = 2; b.inputs[0] = x; b.targets[0] = labels;
        if (cases[i].extra == 1) b.inputs[1] = x;
        if (cases[i].extra == 2) b.targets[AMP_MAX_LOSSES - 1] = x;
        if (cases[i].extra == 3) { d.optimizer.groups = frozen; d.optimizer.group_count = 2; }
        if (cases[i].extra == 4) d.optimizer.groups = frozen;
        if (cases[i].extra == 5) d.optimizer.schedule.total_steps = 9;
        if (cases[i].beta) d.optimizer.beta1 = 0.9f;
        d.split_masters = cases[i].split;
        amp_model* m = new_model(&d);
        heard[0] = 0;
        remarks = 0;
        amp_softmax_cross_entropy(m, amp_linear(m, amp_input(m, 2, 1, 1), cases[i].classes));
        CHECK(amp_model_finalize(m) == AMP_OK);
        for (int k = 0; k < 2; k++) CHECK_MSG(amp_train_step(m, &b, NULL) == AMP_OK, "%s", amp_model_error(m));
        CHECK_MSG(strncmp(heard, cases[i].says, strlen(cases[i].says)) == 0 && remarks == (i > 1), "%d: %s", i, heard);
        amp_model_destroy(m);
    }
}

/* Images given as height, width, channels train on nonsense: sizes that look so are told once. */
static void test_doubts_of_sizes(void) {
    static const struct { int size[3], doubtful; } cases[] = {
        { { 32, 32, 3 }, 1 }, { { 5, 5, 4 }, 1 }, { { 3, 32, 32 }, 0 }, { { 32, 32, 1 }, 0 }, { { 32, 16, 3 }, 0 }, { { 32, 32, 2 }, 0 },
        { { 3, 3, 3 }, 0 }, { { 4, 4, 4 }, 0 }, { { 1, 1, 3 }, 0 }, { { 3, 3, 4 }, 0 }, { { 5, 5, 5 }, 0 } };
    int i;
    for (i = 0; i < COUNT(cases); i++) {
        amp_model_desc d = model_desc(2, AMP_O0, AMP_DTYPE_DEFAULT);
        const int* size = cases[i].size;
        amp_model* m;
        amp_value image, flat;
        m = new_model(&d);
        remarks = 0;
        heard[0] = 0;
        image = amp_flatten(m, amp_input(m, size[0], size[1], size[2]));
        flat = amp_flatten(m, amp_input(m, size[0] * size[1] * size[2], 1, 1));
        amp_mse(m, amp_linear(m, amp_add(m, image, flat), 2));
        CHECK_MSG(amp_model_finalize(m) == AMP_OK && remarks == cases[i].doubtful, "%d: %d", i, remarks);
        CHECK_MSG(i != 0 || strcmp(heard, "'input1' has 32 channels of 32x3 pixels: sizes and data are in the order channels, height, width") == 0,
                  "%s", heard);
        amp_model_destroy(m);
    }
}

/* A backend that takes a ReLU along: the CPU's operators, one after the other, counted. */
static int relus_taken;
static amp_result linear_relu(amp_ref x, amp_ref w, amp_ref b, amp_ref y, size_t n, size_t in,
        size_t out, const amp_exec* e) {
    amp_result r = amp_linear_forward(x, w, b,
        y, n, in, out, e);
    relus_taken++;
    return r == AMP_OK ? amp_activation_forward(AMP_RELU, y, y,
        n * out, e) : r;
}
static amp_result conv2d_relu(const amp_conv2d_shape* s, amp_ref x, amp_ref w, amp_ref b, amp_ref y,
        const amp_exec* e) {
    amp_result r = amp_conv2d_forward(s, x, w, b,
        y, e);
    relus_taken++;
    return r == AMP_OK ? amp_activation_forward(AMP_RELU, y, y,
        (size_t)(s->n * s->out_channels) * 36, e) : r;
}
/* Two ReLUs right behind a product; one behind another product than its own, and that one's; one whose product has
   another reader, one behind a sum: those stay apart. */
static amp_model* with_relus(const amp_backend* backend, amp_value* y) {
    amp_model_desc d = model_desc(3, AMP_O1, AMP_F16);
    amp_model* m = NULL;
    amp_value x, z, p, q;
    d.backend = backend;
    m = new_model(&d);
    x = amp_relu(m, amp_linear(m, amp_relu(m, conv(m, amp_input(m, 1, 6, 6), 2, 3, 1, 1)), 9));
    p = amp_linear(m, x, 9);
    q = amp_linear(m, x, 9);
    x = amp_relu(m, p);
    x = amp_add(m, x, amp_relu(m, q));
    z = amp_linear(m, x, 9);
    x = amp_relu(m, amp_add(m, amp_relu(m, z), z));
    *y = amp_linear(m, x, 4);
    amp_softmax_cross_entropy(m, *y);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    return m;
}
static void test_relu_is_taken_along(void) {
    amp_backend backend = *amp_cpu_backend();
    amp_value here, there;
    float images[3 * 36], y[3 * 4], z[3 * 4];
    const int32_t labels[3] = { 0, 3, 2 };
    static amp_layer_stats stats[2][20];      /* 7 KB each: not on the stack */
    amp_batch batch;
    int i, count;
    backend.linear_relu_forward = linear_relu;
    backend.conv2d_relu_forward = conv2d_relu;
    amp_model *plain = with_relus(NULL, &here), *taken = with_relus(&backend, &there);
    for (i = 0; i < 3 * 36; i++) images[i] = test_uniform();
    memset(&batch, 0, sizeof batch);
    batch.n = 3; batch.inputs[0] = images; batch.targets[0] = labels;
    relus_taken = 0;
    for (i = 0; i < 3; i++) CHECK(amp_train_step(plain, &batch, NULL) == AMP_OK && amp_train_step(taken, &batch, NULL) == AMP_OK);
    CHECK_MSG(relus_taken == 6, "%d", relus_taken);
    CHECK(amp_predict(plain, &batch, here, y) == AMP_OK && amp_predict(taken, &batch, there, z) == AMP_OK);
    CHECK(relus_taken == 8 && memcmp(y, z, sizeof y) == 0);
    count = amp_model_layer_count(plain);
    CHECK(count <= 20 && amp_model_stats(plain, &batch, stats[0], 20) == AMP_OK && amp_model_stats(taken, &batch, stats[1], 20) == AMP_OK);
    CHECK(relus_taken == 8);      /* each output has to be seen */
    CHECK(memcmp(stats[0], stats[1], (size_t)count * sizeof stats[0][0]) == 0);
    amp_model_destroy(plain); amp_model_destroy(taken);
}

static void refused_desc(amp_model_desc d, amp_result code, const char* word) {
    amp_model* m = (amp_model*)(void*)&d;
    heard[0] = 0;
    CHECK(amp_model_create(&m, &d) == code);
    CHECK(m == NULL);
    CHECK_MSG(strstr(heard, word), "wanted '%s': %s", word, heard);
}
static amp_result no_sum(void* data, amp_dtype t, size_t n, void* stream, void* user) { (void)data; (void)t; (void)n; (void)stream; (void)user; return AMP_OK; }
static void* no_alloc(size_t n, void* user) { (void)n; (void)user; return NULL; }
static void no_free(void* p, void* user) { (void)p; (void)user; }

static void test_desc_errors(void) {
    amp_backend backend;
    amp_model_desc d = model_desc(0, AMP_O1, AMP_F16);
    amp_comm comm;
    amp_policy policy;
    amp_model* m = NULL;
    amp_scaler_desc s;
    amp_op op = AMP_OP_GELU;
    refused_desc(d, AMP_ERR_DESC, "batch is 0");
    d.batch = -4; refused_desc(d, AMP_ERR_DESC, "-4");
    d = model_desc(2, AMP_O1, AMP_F16); d.accumulate = -1; refused_desc(d, AMP_ERR_DESC, "accumulate");
    d = model_desc(2, AMP_O1, AMP_F16); d.sums = (amp_sums)7; refused_desc(d, AMP_ERR_DESC, "sums");
    d = model_desc(2, AMP_O1, AMP_F16); d.max_replays = -1; refused_desc(d, AMP_ERR_DESC, "max_replays");
    d = model_desc(2, AMP_O1, AMP_F16); d.max_replays = 1; d.accumulate = 2; refused_desc(d, AMP_ERR_DESC, "max_replays");
    d = model_desc(2, AMP_O1, AMP_F16); d.grad_dtype = AMP_F64; refused_desc(d, AMP_ERR_DESC, "grad_dtype is f64 (4)");
    d = model_desc(2, AMP_O1, AMP_F16); d.allocator.alloc = no_alloc; refused_desc(d, AMP_ERR_DESC, "allocator");
    d = model_desc(2, AMP_O1, AMP_F16); d.allocator.alloc = no_alloc; d.allocator.free = no_free; refused_desc(d, AMP_ERR_MEMORY, "memory");
    d = model_desc(2, AMP_O1, AMP_F16); d.optimizer.group_count = 2; refused_desc(d, AMP_ERR_DESC, "group_count");
    d.optimizer.group_count = -1; refused_desc(d, AMP_ERR_DESC, "group_count");
    d.optimizer.group_count = AMP_MAX_GROUPS + 1; refused_desc(d, AMP_ERR_DESC, "17");
    d = model_desc(2, AMP_O1, AMP_F16); d.precision.master_weights = 1; refused_desc(d, AMP_ERR_POLICY, "master_weights");
    d = model_desc(2, (amp_level)9, AMP_F16); refused_desc(d, AMP_ERR_POLICY, "level 9");
    d = model_desc(2, AMP_O2, AMP_F16); d.precision.white = d.precision.black = &op; d.precision.white_count = d.precision.black_count = 1;
    refused_desc(d, AMP_ERR_POLICY, "not both");
    memset(&policy, 0, sizeof policy);                   /* never initialised */
    d = model_desc(2, AMP_O1, AMP_F16); d.policy = &policy; refused_desc(d, AMP_ERR_POLICY, "low_dtype");
    amp_policy_init(&policy, NULL);
    policy.rules[AMP_OP_MSE] = AMP_RULE_LOW;             /* edited by hand, past amp_policy_set_rule */
    refused_desc(d, AMP_ERR_POLICY, "mse");
    amp_policy_init(&policy, NULL);
    policy.rules[AMP_OP_FLATTEN] = AMP_RULE_FP32;
    refused_desc(d, AMP_ERR_POLICY, "flatten");
    memset(&backend, 0, sizeof backend);
    d = model_desc(2, AMP_O1, AMP_F16); d.backend = &backend; refused_desc(d, AMP_ERR_DESC, "backend lacks");
    backend = *amp_cpu_backend(); backend.bce_with_logits_backward = NULL; refused_desc(d, AMP_ERR_DESC, "backend lacks");
    backend = *amp_cpu_backend(); backend.name = NULL; refused_desc(d, AMP_ERR_DESC, "backend lacks");
    memset(&comm, 0, sizeof comm);
    d = model_desc(2, AMP_O1, AMP_F16); d.comm = &comm; refused_desc(d, AMP_ERR_DESC, "comm");
    comm.all_reduce_sum = no_sum; refused_desc(d, AMP_ERR_DESC, "comm");
    comm.size = 2; comm.rank = 2; refused_desc(d, AMP_ERR_DESC, "rank");
    comm.rank = 1; comm.start = comm.all_reduce_sum; refused_desc(d, AMP_ERR_DESC, "wait");
    CHECK(amp_model_create(NULL, &d) == AMP_ERR_ARGUMENT);
    CHECK(amp_model_create(&m, NULL) == AMP_ERR_ARGUMENT);
    /* What only finalize can see. */
    memset(&s, 0, sizeof s);
    s.backoff_factor = 2.0;
    d = model_desc(2, AMP_O1, AMP_F16); d.scaler = &s;
    m = new_model(&d);
    amp_mse(m, amp_linear(m, amp_input(m, 3, 1, 1), 2));
    CHECK(amp_model_finalize(m) == AMP_ERR_DESC && strstr(amp_model_error(m), "backoff_factor"));
    amp_model_destroy(m);
    d = model_desc(2, AMP_O1, AMP_F16); d.optimizer.momentum = 1.5f;
    m = new_model(&d);
    amp_mse(m, amp_linear(m, amp_input(m, 3, 1, 1), 2));
    CHECK(amp_model_finalize(m) == AMP_ERR_DESC && strstr(amp_model_error(m), "momentum"));
    amp_model_destroy(m);
    m = model_of(1, AMP_O0, AMP_DTYPE_DEFAULT);
    CHECK(amp_model_finalize(m) == AMP_ERR_SHAPE && strstr(amp_model_error(m), "no input"));
    amp_model_destroy(m);
}

/* What a desc points at may be gone when finalize runs. */
static void test_desc_is_copied(void) {
    amp_scaler_desc s;
    amp_param_group groups[2];
    amp_policy policy;
    amp_model_desc d = model_desc(2, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_model* m = NULL;
    amp_value v;
    memset(&s, 0, sizeof s);
    memset(groups, 0, sizeof groups);
    s.init_scale = 512.0f;
    groups[1].lr = 0.125f;
    amp_policy_init(&policy, NULL);
    amp_policy_set_rule(&policy, AMP_OP_LINEAR, AMP_RULE_LOW);
    d.scaler = &s; d.policy = &policy; d.optimizer.groups = groups; d.optimizer.group_count = 2;
    m = new_model(&d);
    memset(&s, 0xff, sizeof s);
    memset(groups, 0xff, sizeof groups);
    memset(&policy, 0xff, sizeof policy);
    memset(&d, 0xff, sizeof d);
    v = amp_linear(m, amp_input(m, 3, 1, 1), 2);
    amp_group(m, v, 1);
    amp_mse(m, v);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(amp_model_scaler(m)->state.scale == 512.0f);
    CHECK(amp_model_optimizer(m)->groups[1].lr == 0.125f && amp_model_params(m, NULL)[0].group == 1);
    CHECK(layer_of(m, v)->compute_dtype == AMP_F16 && layer_of(m, v)->reason == AMP_REASON_RULE);
    amp_model_destroy(m);
}

static void test_wrong_time(void) {
    amp_model* m = model_of(2, AMP_O2, AMP_F16);
    amp_value x = amp_input(m, 3, 1, 1), y = amp_linear(m, x, 2), loss;
    amp_batch b;
    amp_step_info info;
    amp_eval_info eval;
    amp_memory memory;
    amp_layer_stats stats[3];
    float data[8] = { 0 }, out[8];
    int layers;
    memset(&b, 0, sizeof b);
    b.n = 2; b.inputs[0] = data; b.targets[0] = data;
    loss = amp_mse(m, y);
    CHECK(amp_train_step(m, &b, &info) == AMP_ERR_STATE && strstr(amp_model_error(m), "not finalized"));
    CHECK(amp_evaluate(m, &b, &eval) == AMP_ERR_STATE && amp_predict(m, &b, y, out) == AMP_ERR_STATE);
    CHECK(amp_model_stats(m, &b, stats, 3) == AMP_ERR_STATE && amp_model_sync_params(m) == AMP_ERR_STATE);
    CHECK(amp_model_memory(m, &memory) == AMP_ERR_STATE && amp_model_layer_count(m) == 0
          && amp_model_layer(m, 0) == NULL);
    CHECK(amp_model_scaler(m) == NULL && amp_model_optimizer(m) == NULL
          && amp_model_find_param(m, "linear1.weight") == NULL);
    CHECK(amp_model_policy(m) != NULL);
    CHECK(amp_model_finalize(m) == AMP_OK);
    layers = amp_model_layer_count(m);
    CHECK(amp_model_finalize(m) == AMP_ERR_STATE && strstr(amp_model_error(m), "finalized already"));
    amp_relu(m, y);
    CHECK(strstr(amp_model_error(m), "relu") && strstr(amp_model_error(m), "finalized"));
    amp_input(m, 1, 1, 1);
    CHECK(strstr(amp_model_error(m), "input"));
    amp_autocast_push(m, AMP_F32);
    CHECK(strstr(amp_model_error(m), "autocast_push"));
    amp_pin(m, y, AMP_F32);
    amp_name(m, y, "late");
    amp_group(m, y, 0);
    CHECK(amp_model_layer_count(m) == layers && strcmp(layer_of(m, y)->name, "linear1") == 0);
    CHECK(amp_train_step(m, &b, &info) == AMP_OK);       /* all that has changed nothing */
    /* NULL everywhere. */
    CHECK(amp_model_finalize(NULL) == AMP_ERR_ARGUMENT && amp_train_step(NULL, &b, &info) == AMP_ERR_ARGUMENT);
    CHECK(amp_evaluate(NULL, &b, &eval) == AMP_ERR_ARGUMENT && amp_evaluate(m, &b, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_predict(NULL, &b, y, out) == AMP_ERR_ARGUMENT && amp_predict(m, &b, y, NULL) == AMP_ERR_ARGUMENT);
    CHECK_MSG(strstr(amp_model_error(m), "out is NULL") && !strstr(amp_model_error(m), "value"), "%s", amp_model_error(m));
    CHECK(amp_predict(m, &b, foreign(0), out) == AMP_ERR_ARGUMENT
          && amp_predict(m, &b, foreign(4), out) == AMP_ERR_ARGUMENT);
    CHECK_MSG(strstr(amp_model_error(m), "value 4 is not of this model"), "%s", amp_model_error(m));
    CHECK(amp_predict(m, &b, loss, out) == AMP_ERR_ARGUMENT);
    CHECK_MSG(strstr(amp_model_error(m), "is a loss"), "%s", amp_model_error(m));
    CHECK(amp_model_memory(m, NULL) == AMP_ERR_ARGUMENT && amp_model_sync_params(NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_model_layer_of(m, foreign(0)) == -1 && amp_model_layer_of(m, foreign(9)) == -1
          && amp_model_layer_of(m, foreign(-0x7fffffff - 1)) == -1 && amp_model_layer_of(m, foreign(0x7fffffff)) == -1
          && amp_model_layer_of(NULL, y) == -1);
    CHECK(amp_model_scaler(NULL) == NULL && amp_model_policy(NULL) == NULL && amp_model_params(NULL, NULL) == NULL);
    amp_relu(NULL, y); amp_input(NULL, 1, 1, 1); amp_autocast_push(NULL, AMP_F32); amp_autocast_pop(NULL); amp_name(NULL, y, "a");
    amp_pin(NULL, y, AMP_F32); amp_group(NULL, y, 0); amp_conv2d_with(NULL, y, NULL); amp_linear(NULL, y, 2); amp_mse(NULL, y);
    amp_add(NULL, y, y); amp_global_avg_pool2d(NULL, y); amp_batch_norm(NULL, y); amp_model_destroy(NULL);
    CHECK(amp_model_error(NULL)[0] != 0);
    amp_model_destroy(m);
}

/* --- types ----------------------------------------------------------------------------------- */

/* A small network with an operator of every class; the values by name. */
typedef struct classes { amp_value x, conv, bn, relu, pool, add, fc, gelu, ln, fc2, soft, loss; } classes;
static classes build_classes(amp_model* m) {
    classes v;
    v.x = amp_input(m, 3, 6, 6);
    v.conv = conv(m, v.x, 4, 3, 0, 1);
    v.bn = amp_batch_norm(m, v.conv);
    v.relu = amp_relu(m, v.bn);
    v.add = amp_add(m, v.relu, v.conv);
    v.pool = amp_avg_pool2d(m, v.add, 2);
    v.fc = amp_linear(m, v.pool, 8);
    v.gelu = amp_gelu(m, v.fc);
    v.ln = amp_layer_norm(m, v.gelu);
    v.fc2 = amp_linear(m, v.ln, 5);
    v.soft = amp_softmax(m, v.fc2);
    v.loss = amp_softmax_cross_entropy(m, v.fc2);
    return v;
}

/* "compute storage parameters casts" of the layers of build_classes: l = the 16-bit type, f = FP32, - = none. */
static void check_types(const amp_model* m, classes v, amp_dtype low, const char* what, const char* const want[12]) {
    const amp_value all[12] = { v.x, v.conv, v.bn, v.relu, v.add, v.pool, v.fc, v.gelu, v.ln, v.fc2, v.soft, v.loss };
    int i;
    for (i = 0; i < 12; i++) {
        const amp_layer* l = layer_of(m, all[i]);
        char got[8];
        got[0] = l->compute_dtype == AMP_F32 ? 'f' : l->compute_dtype == low ? 'l' : '?';
        got[1] = l->storage_dtype == AMP_F32 ? 'f' : l->storage_dtype == low ? 'l' : '?';
        got[2] = !l->parameters ? '-' : l->param_dtype == AMP_F32 ? 'f' : l->param_dtype == low ? 'l' : '?';
        got[3] = (char)('0' + l->casts);
        got[4] = 0;
        CHECK_MSG(strcmp(got, want[i]) == 0, "%s: '%s' is %s, expected %s", what, l->name, got, want[i]);
        CHECK(l->rule == amp_model_policy(m)->rules[l->op] && l->reason == AMP_REASON_LEVEL);
    }
}

static void test_types_by_level(void) {
    static const amp_dtype lows[] = { AMP_F16, AMP_BF16 };
    /*                              x       conv    bn      relu    add     pool    fc      gelu    ln      fc2     soft    loss */
    static const char* const O0[] = { "ff-0", "fff0", "fff0", "ff-0", "ff-0", "ff-0", "fff0", "ff-0", "fff0", "fff0", "ff-0", "ff-0" };
    /* The input's only reader wants 16 bits, so it is kept in 16; layer norm computes in FP32 but is read by a matrix layer. */
    static const char* const O1[] = { "fl-0", "lll0", "llf0", "ll-0", "ll-0", "ll-0", "lll0", "ll-0", "flf0", "lll0", "ff-0", "ff-0" };
    /* MindSpore: what follows a matrix layer or a ReLU computes in FP32, though their own results are kept in 16 bits. */
    static const char* const O1m[] = { "fl-0", "lll0", "flf0", "ll-0", "ff-0", "fl-0", "lll0", "ff-0", "flf0", "lll0", "ff-0", "ff-0" };
    static const char* const O2[] = { "fl-0", "lll0", "flf0", "ll-0", "ll-0", "ll-0", "lll0", "ll-0", "flf0", "lll0", "ll-0", "ff-0" };
    static const char* const O3[] = { "fl-0", "lll0", "lll0", "ll-0", "ll-0", "ll-0", "lll0", "ll-0", "lll0", "lll0", "ll-0", "ff-0" };
    const char* const* const want[] = { O0, O1, O1m, O2, O3 };
    static const amp_level levels[] = { AMP_O0, AMP_O1, AMP_O1, AMP_O2, AMP_O3 };
    int i, t, k;
    for (t = 0; t < 2; t++)
        for (i = 0; i < 5; i++) {
            amp_model_desc d = model_desc(2, levels[i], lows[t]);
            amp_model* m = NULL;
            classes v;
            char what[32];
            d.precision.style = i == 2 ? AMP_STYLE_MINDSPORE : AMP_STYLE_PYTORCH;
            m = new_model(&d);
            v = build_classes(m);
            CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
            snprintf(what, sizeof what, "%s %s%s", amp_level_name(levels[i]), amp_dtype_name(lows[t]),
                     i == 2 ? " mindspore" : "");
            check_types(m, v, lows[t], what, want[i]);
            for (k = 0; k < 8; k++) {
                const amp_param* p = &amp_model_params(m, NULL)[k];
                CHECK((p->master != NULL) == (levels[i] != AMP_O3));
                CHECK((p->low != NULL) == (levels[i] == AMP_O3
                                           || (levels[i] != AMP_O0 && (k < 2 || k == 4 || k == 5))));
            }
            amp_model_destroy(m);
        }
}

/* A scaler that the desc does not name is that of the style's system. */
static void test_scaler_of_a_style(void) {
    static const struct { amp_style style; amp_level level; amp_scaler_preset preset; float init; } want[] = {
        { AMP_STYLE_PYTORCH, AMP_O1, AMP_SCALER_PYTORCH, 65536 }, { AMP_STYLE_MINDSPORE, AMP_O2, AMP_SCALER_MINDSPORE_MANAGER, 16777216 },
        { AMP_STYLE_MINDSPORE, AMP_O0, AMP_SCALER_STATIC, 1 }, { AMP_STYLE_MINDSPORE, AMP_O1, AMP_SCALER_STATIC, 1 },
        { AMP_STYLE_MINDSPORE, AMP_O3, AMP_SCALER_STATIC, 1 }, { AMP_STYLE_APEX, AMP_O1, AMP_SCALER_APEX, 65536 },
        { AMP_STYLE_APEX, AMP_O2, AMP_SCALER_APEX, 65536 }, { AMP_STYLE_APEX, AMP_O3, AMP_SCALER_STATIC, 1 },
        { AMP_STYLE_NNABLA, AMP_O2, AMP_SCALER_NNABLA, 8 }, { AMP_STYLE_ONEFLOW, AMP_O1, AMP_SCALER_STATIC, 1 } };
    int i;
    for (i = 0; i < (int)(sizeof want / sizeof want[0]); i++) {
        amp_model_desc d = model_desc(2, want[i].level, AMP_F16);
        amp_scaler_desc sd;
        amp_scaler s;
        amp_model* m = NULL;
        memset(&sd, 0, sizeof sd);
        sd.preset = want[i].preset;
        sd.init_scale = want[i].init;
        CHECK(amp_scaler_init(&s, &sd) == AMP_OK);
        d.precision.style = want[i].style;
        m = new_model(&d);
        build_classes(m);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        CHECK_MSG(!memcmp(&amp_model_scaler(m)->rule, &s.rule, sizeof s.rule) && amp_model_scaler(m)->state.scale == want[i].init,
                  "%s %s: not %s", amp_style_name(want[i].style), amp_level_name(want[i].level),
                  amp_scaler_preset_name(want[i].preset));
        amp_model_destroy(m);
    }
}

/* OneFlow's gray operators: half on the way from one white operator to another, or to an end; FP32 before a loss. */
static void test_gray_operators(void) {
    amp_model_desc d = model_desc(2, AMP_O1, AMP_F16);
    amp_model* m = NULL;
    amp_value x, early, c, g, p, r, back, sum, f, late, loss, pinned, behind, end;
    int i;
    d.precision.style = AMP_STYLE_ONEFLOW;
    m = new_model(&d);
    x = amp_input(m, 3, 6, 6);
    early = amp_tanh(m, x);                     /* no white one before it */
    c = conv(m, early, 4, 3, 0, 1);
    g = amp_gelu(m, c);
    p = amp_avg_pool2d(m, g, 2);
    r = amp_relu(m, p);
    back = conv(m, r, 4, 3, 0, 1);
    sum = amp_add(m, back, p);                  /* gray itself, before a flatten and a white one */
    f = amp_linear(m, amp_flatten(m, sum), 5);
    late = amp_tanh(m, f);                      /* only a loss behind it */
    loss = amp_softmax_cross_entropy(m, late);
    pinned = amp_tanh(m, f);
    behind = amp_gelu(m, pinned);               /* between FP32 and an end */
    end = amp_softmax(m, f);                    /* between a white one and an end */
    amp_pin(m, pinned, AMP_F32);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    {
        const amp_value all[] = { early, c, g, p, r, back, sum, f, late, loss, pinned, behind, end };
        static const char want[] = "flllllllffffl";
        for (i = 0; i < 13; i++)
            CHECK_MSG((layer_of(m, all[i])->compute_dtype == AMP_F16) == (want[i] == 'l'), "%s", layer_of(m, all[i])->name);
    }
    CHECK(layer_of(m, g)->rule == AMP_RULE_GRAY && layer_of(m, g)->reason == AMP_REASON_LEVEL);
    amp_model_destroy(m);
}

/* Layer norms that run in half: their weights are half in Apex's O2 and in OneFlow, which except batch norms alone. */
static void test_norm_weights_of_a_style(void) {
    static const struct { amp_style style; amp_level level; int is_low; } want[] = {
        { AMP_STYLE_APEX, AMP_O2, 1 }, { AMP_STYLE_ONEFLOW, AMP_O1, 1 }, { AMP_STYLE_NNABLA, AMP_O2, 0 },
        { AMP_STYLE_MINDSPORE, AMP_O3, 0 }, { AMP_STYLE_APEX, AMP_O3, 1 }, { AMP_STYLE_PYTORCH, AMP_O2, 0 } };
    int i;
    for (i = 0; i < (int)(sizeof want / sizeof want[0]); i++) {
        amp_model_desc d = model_desc(2, want[i].level, AMP_F16);
        amp_model* m = NULL;
        const amp_param *gamma, *moving;
        classes v;
        d.precision.style = want[i].style;
        m = new_model(&d);
        v = build_classes(m);
        CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
        gamma = amp_model_find_param(m, "layer_norm1.weight");
        moving = amp_model_find_param(m, "batch_norm1.weight");
        CHECK_MSG(gamma && (gamma->low != NULL) == want[i].is_low, "%s", amp_style_name(want[i].style));
        CHECK(layer_of(m, v.ln)->param_dtype == (want[i].is_low ? AMP_F16 : AMP_F32));
        CHECK(gamma && (gamma->master != NULL) == (want[i].level != AMP_O3 || want[i].style == AMP_STYLE_MINDSPORE));
        CHECK(moving && (moving->low != NULL) == (want[i].level == AMP_O3 && want[i].style != AMP_STYLE_MINDSPORE));
        amp_model_destroy(m);
    }
}

/* OneFlow adds a bias in a gray operator: before a loss it is FP32, and so are the logits; between two matrix layers,
   or where a pin says so, they are half. */
static void test_last_bias_of_oneflow(void) {
    static const float weight = 2048.0f, bias = 0.25f, one = 1.0f;
    amp_model_desc d = model_desc(1, AMP_O1, AMP_F16);
    amp_model* m = NULL;
    amp_value x, first, logits, pinned;
    amp_param* p[2];
    amp_batch b;
    float out = 0;
    d.precision.style = AMP_STYLE_ONEFLOW;
    m = new_model(&d);
    x = amp_input(m, 1, 1, 1);
    first = amp_linear(m, x, 1);
    logits = amp_linear(m, first, 1);
    pinned = amp_linear(m, first, 1);
    amp_pin(m, pinned, AMP_F16);
    amp_mse(m, logits);
    amp_mse(m, pinned);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(layer_of(m, logits)->compute_dtype == AMP_F16 && layer_of(m, logits)->param_dtype == AMP_F16);
    CHECK(layer_of(m, logits)->storage_dtype == AMP_F32);
    CHECK(layer_of(m, first)->storage_dtype == AMP_F16 && layer_of(m, pinned)->storage_dtype == AMP_F16);
    CHECK(amp_model_find_param(m, "linear1.bias")->low != NULL && amp_model_find_param(m, "linear2.weight")->low != NULL);
    CHECK(amp_model_find_param(m, "linear2.bias")->low == NULL && amp_model_find_param(m, "linear2.bias")->master != NULL);
    CHECK(amp_model_find_param(m, "linear3.bias")->low != NULL);
    p[0] = amp_model_find_param(m, "linear1.weight");
    p[1] = amp_model_find_param(m, "linear2.weight");
    CHECK(amp_model_write_param(m, p[0], &one) == AMP_OK && amp_model_write_param(m, p[1], &weight) == AMP_OK);
    p[0] = amp_model_find_param(m, "linear1.bias");
    p[1] = amp_model_find_param(m, "linear2.bias");
    CHECK(amp_model_write_param(m, p[0], &out) == AMP_OK && amp_model_write_param(m, p[1], &bias) == AMP_OK);
    memset(&b, 0, sizeof b);
    b.n = 1;
    b.inputs[0] = &one;
    CHECK(amp_predict(m, &b, logits, &out) == AMP_OK);
    CHECK_MSG(out == 2048.25f, "%.9g", (double)out);          /* 2048 in half */
    amp_model_destroy(m);
}

/* Lists move an operator and say so; a policy edited by hand, too. */
static void test_lists_in_a_model(void) {
    static const amp_op black[] = { AMP_OP_RELU, AMP_OP_LINEAR };
    amp_model_desc d = model_desc(2, AMP_O1, AMP_F16);
    amp_policy policy;
    amp_model* m = NULL;
    amp_value swapped;
    classes v;
    d.precision.black = black; d.precision.black_count = 2;
    CHECK(amp_policy_init(&policy, &d.precision) == AMP_OK);
    CHECK(amp_policy_set_rule(&policy, AMP_OP_LAYER_NORM, AMP_RULE_LOW) == AMP_OK);
    d.policy = &policy;
    m = new_model(&d);
    v = build_classes(m);
    swapped = amp_concat(m, v.conv, v.relu);
    CHECK(amp_model_finalize(m) == AMP_OK);
    CHECK(layer_of(m, v.ln)->compute_dtype == AMP_F16 && layer_of(m, v.ln)->reason == AMP_REASON_RULE);
    CHECK(layer_of(m, v.relu)->compute_dtype == AMP_F32 && layer_of(m, v.relu)->reason == AMP_REASON_BLACK);
    CHECK(layer_of(m, v.fc)->compute_dtype == AMP_F32 && layer_of(m, v.fc)->param_dtype == AMP_F32);
    CHECK(layer_of(m, v.add)->compute_dtype == AMP_F32);          /* FP32 and half: the widest */
    CHECK(layer_of(m, swapped)->compute_dtype == AMP_F32);        /* half and FP32 too */
    CHECK(layer_of(m, v.gelu)->compute_dtype == AMP_F32 && layer_of(m, v.gelu)->rule == AMP_RULE_FOLLOW);
    CHECK(layer_of(m, v.ln)->casts == 0);       /* gelu's only reader wants half: it is stored so at once */
    CHECK(layer_of(m, v.gelu)->storage_dtype == AMP_F16);
    amp_model_destroy(m);
}

/* A pin beats a region, a region beats the lists; conflicting pins end in the widest, whatever the order. */
static void test_pins_and_regions(void) {
    static const amp_dtype orders[6][3] = { { AMP_F32, AMP_F16, AMP_BF16 }, { AMP_F32, AMP_BF16, AMP_F16 }, { AMP_F16, AMP_F32, AMP_BF16 },
                                            { AMP_F16, AMP_BF16, AMP_F32 }, { AMP_BF16, AMP_F32, AMP_F16 }, { AMP_BF16, AMP_F16, AMP_F32 } };
    static const amp_op black[] = { AMP_OP_LINEAR };
    amp_model_desc d = model_desc(2, AMP_O2, AMP_F16);
    amp_model* m = NULL;
    amp_value x, in_region, pinned, listed, inner, back, relu, loss, after;
    int i;
    d.precision.black = black; d.precision.black_count = 1;
    m = new_model(&d);
    x = amp_input(m, 4, 1, 1);
    listed = amp_linear(m, x, 4);
    amp_autocast_push(m, AMP_BF16);
    in_region = amp_linear(m, listed, 4);
    pinned = amp_linear(m, in_region, 4);
    amp_pin(m, pinned, AMP_F16);
    amp_autocast_push(m, AMP_F32);
    inner = amp_linear(m, pinned, 4);
    amp_autocast_push(m, AMP_DTYPE_DEFAULT);
    back = amp_linear(m, inner, 4);
    relu = amp_relu(m, back);
    amp_autocast_pop(m);
    amp_autocast_pop(m);
    loss = amp_mse(m, relu);
    amp_autocast_pop(m);
    after = amp_relu(m, relu);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(layer_of(m, listed)->compute_dtype == AMP_F32 && layer_of(m, listed)->reason == AMP_REASON_BLACK);
    CHECK(layer_of(m, in_region)->compute_dtype == AMP_BF16 && layer_of(m, in_region)->reason == AMP_REASON_REGION);
    CHECK(layer_of(m, in_region)->param_dtype == AMP_BF16 && layer_of(m, in_region)->rule == AMP_RULE_LOW);
    CHECK(layer_of(m, pinned)->compute_dtype == AMP_F16 && layer_of(m, pinned)->reason == AMP_REASON_PIN);
    CHECK(layer_of(m, inner)->compute_dtype == AMP_F32 && layer_of(m, inner)->reason == AMP_REASON_REGION);
    CHECK(layer_of(m, back)->compute_dtype == AMP_F32 && layer_of(m, back)->reason == AMP_REASON_BLACK);
    CHECK(layer_of(m, relu)->compute_dtype == AMP_F16 && layer_of(m, relu)->reason == AMP_REASON_LEVEL);
    CHECK(layer_of(m, loss)->compute_dtype == AMP_F32 && layer_of(m, loss)->reason == AMP_REASON_LEVEL);
    CHECK(layer_of(m, after)->reason == AMP_REASON_LEVEL);
    CHECK(layer_of(m, listed)->storage_dtype == AMP_BF16);       /* its only reader is bfloat16 */
    CHECK(layer_of(m, pinned)->casts == 1);                      /* bfloat16 to half */
    amp_model_destroy(m);
    for (i = 0; i < 6; i++) {
        int k, count;
        for (count = 2; count <= 3; count++) {
            amp_dtype want = AMP_BF16;
            m = model_of(2, AMP_O1, AMP_F16);
            x = amp_linear(m, amp_input(m, 4, 1, 1), 3);
            for (k = 0; k < count; k++) {
                amp_pin(m, x, orders[i][k]);
                if (orders[i][k] == AMP_F32 || (orders[i][k] == AMP_F16 && want == AMP_BF16)) want = orders[i][k];
            }
            amp_mse(m, x);
            CHECK(amp_model_finalize(m) == AMP_OK);
            CHECK(layer_of(m, x)->compute_dtype == want && layer_of(m, x)->reason == AMP_REASON_PIN);
            amp_model_destroy(m);
        }
    }
}

/* LeNet-5 in MindSpore's manual way: all half but the last dense layer. */
static void test_manual_lenet(void) {
    amp_model* m = model_of(8, AMP_O3, AMP_F16);
    amp_value logits = lenet(m);
    int i;
    amp_pin(m, logits, AMP_F32);
    amp_mse(m, logits);
    CHECK(amp_model_finalize(m) == AMP_OK);
    for (i = 0; i < amp_model_layer_count(m); i++) {
        const amp_layer* l = amp_model_layer(m, i);
        int last = i == amp_model_layer_of(m, logits);
        if (!l->parameters) continue;
        CHECK(l->compute_dtype == (last ? AMP_F32 : AMP_F16)
              && l->reason == (last ? AMP_REASON_PIN : AMP_REASON_LEVEL));
        CHECK(l->storage_dtype == (last ? AMP_F32 : AMP_F16));
    }
    CHECK(amp_model_find_param(m, "linear3.weight")->master && !amp_model_find_param(m, "linear3.weight")->low);
    CHECK(!amp_model_find_param(m, "linear2.weight")->master && amp_model_find_param(m, "linear2.weight")->low);
    amp_model_destroy(m);
}

/* A value with readers of several types is cast once for each type; widening is never a cast. */
static void test_casts_once(void) {
    amp_model* m = model_of(2, AMP_O1, AMP_F16);
    amp_value x, v[6], sum, both;
    int i, casts = 0;
    amp_autocast_push(m, AMP_F32);
    x = amp_linear(m, amp_input(m, 4, 1, 1), 4);            /* FP32, and one of its readers wants FP32 */
    v[0] = amp_tanh(m, x);
    amp_autocast_pop(m);
    v[1] = amp_linear(m, x, 4);                             /* half */
    v[2] = amp_linear(m, amp_flatten(m, x), 4);             /* half again, behind flatten */
    v[3] = amp_linear(m, x, 4); amp_pin(m, v[3], AMP_BF16);
    v[4] = amp_linear(m, x, 4); amp_pin(m, v[4], AMP_BF16);
    v[5] = amp_tanh(m, v[1]); amp_pin(m, v[5], AMP_F32);    /* reads half as it is */
    sum = amp_add(m, amp_add(m, v[0], v[2]), amp_add(m, v[3], amp_add(m, v[4], v[5])));
    both = amp_add(m, v[1], v[3]);                          /* half and bfloat16: only FP32 holds both */
    amp_mse(m, sum);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(layer_of(m, both)->compute_dtype == AMP_F32 && layer_of(m, both)->casts == 0);
    CHECK(layer_of(m, v[1])->casts == 1 && layer_of(m, v[2])->casts == 0);
    CHECK(layer_of(m, v[3])->casts == 1 && layer_of(m, v[4])->casts == 0);
    CHECK(layer_of(m, v[5])->casts == 0 && layer_of(m, sum)->casts == 0);
    for (i = 0; i < amp_model_layer_count(m); i++) casts += amp_model_layer(m, i)->casts;
    CHECK(casts == 2);
    amp_model_destroy(m);
}

static void test_names_and_groups(void) {
    amp_param_group groups[2];
    amp_model_desc d = model_desc(2, AMP_O0, AMP_DTYPE_DEFAULT);
    amp_model* m = NULL;
    amp_value a, b;
    char longest[128], weight[160];
    memset(groups, 0, sizeof groups);
    memset(longest, 'n', sizeof longest);
    strcpy(longest + 122, "caf\xc3\xa9");
    snprintf(weight, sizeof weight, "%s.weight", longest);
    d.optimizer.groups = groups; d.optimizer.group_count = 2;
    m = new_model(&d);
    a = amp_linear(m, amp_input(m, 3, 1, 1), 4);
    b = amp_linear(m, a, 2);
    amp_name(m, a, longest);
    amp_name(m, b, "first");
    amp_name(m, b, "head");                       /* a second name replaces the first */
    amp_group(m, b, 1);
    amp_mse(m, b);
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(amp_model_find_param(m, weight) != NULL);
    CHECK(amp_model_find_param(m, "head.bias") && amp_model_find_param(m, "head.bias")->group == 1);
    CHECK(amp_model_find_param(m, "first.bias") == NULL && amp_model_params(m, NULL)[0].group == 0);
    amp_model_destroy(m);
}

/* --- starting values --------------------------------------------------------------------------- */

/* He: sd sqrt(2/fan_in); Xavier and torch: uniform. 20000 weights: the sample's deviation of an sd is about sd/200, of a
   mean sd/141; six of those are allowed. */
/* Norms start as the identity: weights of 1, biases of 0. */
static void test_norm_init(void) {
    static const char* const names[] = { "batch_norm1.weight", "batch_norm1.bias", "layer_norm1.weight", "layer_norm1.bias" };
    amp_model* m = model_of(2, AMP_O0, AMP_DTYPE_DEFAULT);
    size_t i, k;
    amp_mse(m, amp_layer_norm(m, amp_batch_norm(m, amp_input(m, 3, 2, 2))));
    CHECK(amp_model_finalize(m) == AMP_OK);
    for (k = 0; k < 4; k++) {
        const amp_param* p = amp_model_find_param(m, names[k]);
        CHECK_MSG(p && p->count > 0, "%s", names[k]);
        for (i = 0; p && i < p->count; i++) CHECK_MSG(p->master[i] == (k % 2 ? 0.0f : 1.0f), "%s: %g", names[k], (double)p->master[i]);
    }
    amp_model_destroy(m);
}

static void test_init(void) {
    int kind, i;
    for (kind = 0; kind <= AMP_INIT_ZERO; kind++) {
        amp_model* m = model_of(1, AMP_O0, AMP_DTYPE_DEFAULT);
        amp_linear_desc d;
        const amp_param *w, *bias;
        double mean = 0.0, square = 0.0, most = 0.0, limit, sd, bias_most = 0.0;
        memset(&d, 0, sizeof d);
        d.out_features = 100; d.init = (amp_init)kind;
        amp_mse(m, amp_linear_with(m, amp_input(m, 200, 1, 1), &d));
        CHECK(amp_model_finalize(m) == AMP_OK);
        w = amp_model_find_param(m, "linear1.weight");
        bias = amp_model_find_param(m, "linear1.bias");
        for (i = 0; i < 20000; i++) {
            double x = (double)w->master[i];
            mean += x / 20000.0; square += x * x / 20000.0;
            if (fabs(x) > most) most = fabs(x);
        }
        for (i = 0; i < 100; i++) if (fabs((double)bias->master[i]) > bias_most) bias_most = fabs((double)bias->master[i]);
        limit = kind == AMP_INIT_XAVIER ? sqrt(6.0 / 300.0) : 1.0 / sqrt(200.0);
        sd = kind == AMP_INIT_HE ? sqrt(2.0 / 200.0) : limit / sqrt(3.0);
        if (kind == AMP_INIT_ZERO) { CHECK(most == 0.0 && bias_most == 0.0); }
        else {
            CHECK_MSG(fabs(sqrt(square) - sd) < sd * 6.0 / 200.0 && fabs(mean) < sd * 6.0 / 141.0,
                      "init %d: mean %g sd %g", kind, mean, sqrt(square));
            if (kind != AMP_INIT_HE) CHECK(most <= limit * 1.0000001 && most > 0.99 * limit);
            CHECK(kind == AMP_INIT_TORCH ? bias_most <= limit && bias_most > 0.9 * limit : bias_most == 0.0);
        }
        amp_model_destroy(m);
    }
}

/* --- memory ---------------------------------------------------------------------------------------- */

static amp_value residual_cnn(amp_model* m) {
    amp_value x = amp_relu(m, amp_batch_norm(m, conv(m, amp_input(m, 3, 16, 16), 16, 3, 0, 1))), y;
    int block;
    for (block = 0; block < 7; block++) {        /* 2 convolutions each, 16 layers with the first and the last */
        y = amp_relu(m, amp_batch_norm(m, conv(m, x, 16, 3, 0, 1)));
        y = amp_batch_norm(m, conv(m, y, 16, 3, 0, 1));
        x = amp_relu(m, amp_add(m, x, y));
    }
    return amp_linear(m, amp_global_avg_pool2d(m, x), 10);
}

static amp_memory memory_of(int which, int batch, amp_level level) {
    amp_model* m = model_of(batch, level, level == AMP_O0 ? AMP_DTYPE_DEFAULT : AMP_F16);
    amp_memory memory;
    memset(&memory, 0, sizeof memory);
    amp_softmax_cross_entropy(m, which ? residual_cnn(m) : lenet(m));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    CHECK(amp_model_memory(m, &memory) == AMP_OK);
    CHECK(memory.total_bytes >= memory.activation_bytes + memory.parameter_bytes + memory.low_parameter_bytes + memory.gradient_bytes
                                + memory.optimizer_bytes + memory.workspace_bytes);
    amp_model_destroy(m);
    return memory;
}

/* Half of everything would be 0.5; statistics and rounding to whole cache lines leave at most 0.55. And the plan must reuse
   memory: LeNet-5 has 15,626 values and 14,602 gradients of them per sample, 120,912 bytes if each had its own place. */
static void test_memory(void) {
    static const char* const names[] = { "LeNet-5, batch 64", "residual CNN of 16 layers, batch 8" };
    int which;
    for (which = 0; which < 2; which++) {
        amp_memory full = memory_of(which, which ? 8 : 64, AMP_O0), half = memory_of(which, which ? 8 : 64, AMP_O2);
        double ratio = (double)half.activation_bytes / (double)full.activation_bytes;
        printf("%s: activations %lu bytes in FP32, %lu at O2, ratio %.3f\n", names[which],
               (unsigned long)full.activation_bytes, (unsigned long)half.activation_bytes, ratio);
        CHECK_MSG(ratio <= 0.55, "%g", ratio);
        CHECK(full.low_parameter_bytes == 0 && half.parameter_bytes == full.parameter_bytes);
        CHECK(half.low_parameter_bytes * 2 <= half.parameter_bytes + 4096
              && half.gradient_bytes == full.gradient_bytes);
        if (which == 0) {
            CHECK(full.parameter_bytes >= 61706 * 4 && full.parameter_bytes < 61706 * 4 + 10 * 64);
            CHECK(full.activation_bytes < 64 * 120912 * 4 / 10);
        }
    }
}

/* 16,000 layers, each found by number and value; without a loss two places of memory do for their values. Of
   their names two may not be equal. */
static void test_many_layers(void) {
    enum { MANY = 16000 };
    static amp_value v[MANY];
    int loss, i, wrong;
    for (loss = 0; loss < 3; loss++) {
        amp_model* m = model_of(4, AMP_O1, AMP_BF16);
        amp_memory memory;
        char name[128];
        v[0] = amp_input(m, 8, 1, 1);
        for (i = 1; i < MANY; i++) {
            v[i] = i % 2 ? amp_linear(m, v[i - 1], 8) : amp_tanh(m, v[i - 1]);
            snprintf(name, sizeof name, "layer %0120d", i);
            amp_name(m, v[i], name);
        }
        if (loss == 1) amp_mse(m, v[MANY - 1]);
        if (loss == 2) { amp_name(m, v[77], "one"); amp_name(m, v[15000], "one"); }
        CHECK(amp_model_finalize(m) == (loss < 2 ? AMP_OK : AMP_ERR_ARGUMENT));
        if (loss == 2) CHECK_MSG(strcmp(amp_model_error(m), "model: there are two layers named 'one'") == 0, "%s", amp_model_error(m));
        for (i = wrong = 0; loss < 2 && i < MANY; i++) {
            const amp_layer* l = amp_model_layer(m, i);
            snprintf(name, sizeof name, i ? "layer %0120d" : "input1", i);
            wrong += !l || strcmp(l->name, name) != 0 || amp_model_layer_of(m, v[i]) != i;
        }
        CHECK(wrong == 0 && amp_model_layer_count(m) == (loss < 2 ? MANY + loss : 0));
        CHECK(!amp_model_layer(m, MANY + loss) && !amp_model_layer(m, -1));
        if (loss < 2) CHECK(amp_model_memory(m, &memory) == AMP_OK);
        if (loss < 2) CHECK_MSG(memory.activation_bytes == (loss ? 512128 : 2 * 64), "%lu", (unsigned long)memory.activation_bytes);
        amp_model_destroy(m);
    }
}

/* The size of an input costs nothing before finalize. */
static void test_largest_input(void) {
    amp_model* m = model_of(1, AMP_O0, AMP_DTYPE_DEFAULT);
    CHECK(amp_input(m, INT_MAX, 1, 1).id == 1 && amp_input(m, INT_MAX, 1, 2).id == 0);
    amp_model_destroy(m);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_gradients_every_layer);
    TEST(test_gradients_in_place);
    TEST(test_view_beside_in_place);
    TEST(test_gradients_random);
    TEST(test_shapes);
    TEST(test_every_operator);
    TEST(test_transposed_weights);
    TEST(test_lenet);
    TEST(test_mistakes);
    TEST(test_values_of_others);
    TEST(test_values_of_many);
    TEST(test_doubts);
    TEST(test_doubts_of_settings);
    TEST(test_doubts_of_sizes);
    TEST(test_relu_is_taken_along);
    TEST(test_desc_errors);
    TEST(test_desc_is_copied);
    TEST(test_wrong_time);
    TEST(test_types_by_level);
    TEST(test_scaler_of_a_style);
    TEST(test_gray_operators);
    TEST(test_norm_weights_of_a_style);
    TEST(test_last_bias_of_oneflow);
    TEST(test_lists_in_a_model);
    TEST(test_pins_and_regions);
    TEST(test_manual_lenet);
    TEST(test_casts_once);
    TEST(test_names_and_groups);
    TEST(test_norm_init);
    TEST(test_init);
    TEST(test_memory);
    TEST(test_many_layers);
    TEST(test_largest_input);
    printf("largest relative errors: gradients %.2g (f32) %.2g (f16) %.2g (bf16), values %.2g %.2g %.2g\n",
           worst_gradient[AMP_F32], worst_gradient[AMP_F16], worst_gradient[AMP_BF16], worst_value[AMP_F32],
           worst_value[AMP_F16], worst_value[AMP_BF16]);
    TEST_END();
}
