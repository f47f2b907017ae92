/* networks.h - the networks that bench.c trains on the CPU and bench_cuda.cu on a GPU, written once; networks.py builds
   the same ones in PyTorch from the tables here. Include amp.h and tests/bench/gpt.h first. */
#ifndef NETWORKS_H
#define NETWORKS_H

/* Convolutional networks on images of 3 channels and `side` x `side` pixels; behind the layers an average over the image
   and a dense layer. Layers: "c WIDTH KERNEL STRIDE" a convolution, "d WIDTH 3 STRIDE" a depthwise one, each with batch
   norm and ReLU; "p 0 KERNEL STRIDE" a maximum; "r WIDTH 3 STRIDE" a residual block of two convolutions, "b" one of
   1 x 1, 3 x 3, 1 x 1 with a quarter of the width inside. */
typedef struct network { const char* name; int side, classes; const char* layers; } network;
static const network networks[] = {
    { "stack", 32, 10, "c 32 3 1 c 32 3 1 p 0 2 2 c 64 3 1 c 64 3 1 p 0 2 2 c 128 3 1 c 128 3 1" },
    { "residual", 32, 10, "c 32 3 1 r 32 3 1 r 64 3 2 r 128 3 2" },
    { "separable", 32, 10, "c 32 3 2 d 32 3 1 c 64 1 1 d 64 3 2 c 128 1 1 d 128 3 1 c 128 1 1 d 128 3 2 c 256 1 1" },
    { "bottleneck", 32, 10, "c 64 3 1 b 128 3 1 b 256 3 2 b 512 3 2" },
    { "vgg16", 32, 10, "c 64 3 1 c 64 3 1 p 0 2 2 c 128 3 1 c 128 3 1 p 0 2 2 c 256 3 1 c 256 3 1 c 256 3 1 p 0 2 2 "
      "c 512 3 1 c 512 3 1 c 512 3 1 p 0 2 2 c 512 3 1 c 512 3 1 c 512 3 1 p 0 2 2" },
    { "resnet34_32", 32, 10, "c 64 3 1 r 64 3 1 r 64 3 1 r 64 3 1 r 128 3 2 r 128 3 1 r 128 3 1 r 128 3 1 r 256 3 2 "
      "r 256 3 1 r 256 3 1 r 256 3 1 r 256 3 1 r 256 3 1 r 512 3 2 r 512 3 1 r 512 3 1" },
    { "resnet34", 224, 1000, "c 64 7 2 p 0 3 2 r 64 3 1 r 64 3 1 r 64 3 1 r 128 3 2 r 128 3 1 r 128 3 1 r 128 3 1 "
      "r 256 3 2 r 256 3 1 r 256 3 1 r 256 3 1 r 256 3 1 r 256 3 1 r 512 3 2 r 512 3 1 r 512 3 1" },
    { "mobilenet", 224, 1000, "c 32 3 2 d 32 3 1 c 64 1 1 d 64 3 2 c 128 1 1 d 128 3 1 c 128 1 1 d 128 3 2 c 256 1 1 "
      "d 256 3 1 c 256 1 1 d 256 3 2 c 512 1 1 d 512 3 1 c 512 1 1 d 512 3 1 c 512 1 1 d 512 3 1 c 512 1 1 d 512 3 1 "
      "c 512 1 1 d 512 3 1 c 512 1 1 d 512 3 2 c 1024 1 1 d 1024 3 1 c 1024 1 1" }
};
/* NULL if there is none of that name. */
static const network* network_named(const char* name) {
    size_t i;
    for (i = 0; i < sizeof networks / sizeof *networks; i++) if (!strcmp(networks[i].name, name)) return &networks[i];
    return NULL;
}

/* A network on its way: the size of what the last layer gives, and the work of a step so far. */
typedef struct building {
    amp_model* m;
    int batch, side, channels;
    int first;                          /* 1 = the next layer is the first, whose input has no gradient */
    double flops;
} building;

static building building_begin(amp_model* m, int batch, int channels, int side) {
    building b;
    memset(&b, 0, sizeof b);
    b.m = m; b.batch = batch; b.channels = channels; b.side = side; b.first = 1;
    return b;
}
/* Forward, weight gradient, and but for the first layer the input gradient. */
static void building_count(building* b, double multiplications) {
    b->flops += 2.0 * b->batch * multiplications * (b->first ? 2.0 : 3.0);
    b->first = 0;
}
static amp_value building_conv(building* b, amp_value x, int width, int kernel, int stride, int padding, int groups) {
    amp_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = width; d.kernel = kernel; d.stride = stride; d.pad = padding; d.groups = groups;
    b->side = (b->side + 2 * padding - kernel) / stride + 1;
    building_count(b, (double)b->side * b->side * width * (b->channels / groups) * kernel * kernel);
    b->channels = width;
    return amp_conv2d_with(b->m, x, &d);
}
static amp_value building_pool(building* b, amp_value x, int kernel, int stride) {
    amp_pool2d_desc d;
    memset(&d, 0, sizeof d);
    d.kernel = kernel; d.stride = stride; d.pad = (kernel - 1) / 2;
    b->side = (b->side + 2 * d.pad - kernel) / stride + 1;
    return amp_pool2d_with(b->m, x, &d);
}
static amp_value building_linear(building* b, amp_value x, int out) {
    const int in = b->channels * b->side * b->side;
    building_count(b, (double)in * out);
    b->channels = out; b->side = 1;
    return amp_linear(b->m, x, out);
}

static amp_value building_normed(building* b, amp_value x, int width, int kernel, int stride, int groups) {
    return amp_batch_norm(b->m, building_conv(b, x, width, kernel, stride, kernel / 2, groups));
}
static amp_value building_residual(building* b, amp_value x, int width, int stride, int narrow) {
    building past = *b;
    amp_value y = x;
    if (b->channels != width || stride != 1) x = building_normed(&past, x, width, 1, stride, 1);
    b->flops = past.flops;
    if (narrow) y = amp_relu(b->m, building_normed(b, y, width / 4, 1, 1, 1));
    y = amp_relu(b->m, building_normed(b, y, narrow ? width / 4 : width, 3, stride, 1));
    return amp_relu(b->m, amp_add(b->m, x, building_normed(b, y, width, narrow ? 1 : 3, 1, 1)));
}
/* Its logits; every width is divided by `divide`, the pixels of an input are b's. */
static amp_value building_network(building* b, const network* n, int divide) {
    amp_value x = amp_input(b->m, b->channels, b->side, b->side);
    const char* at = n->layers;
    int width, kernel, stride, read;
    char kind;
    for (; sscanf(at, " %c %d %d %d%n", &kind, &width, &kernel, &stride, &read) == 4; at += read) {
        width /= divide;
        if (kind == 'p') x = building_pool(b, x, kernel, stride);
        else if (kind == 'c') x = amp_relu(b->m, building_normed(b, x, width, kernel, stride, 1));
        else if (kind == 'd') x = amp_relu(b->m, building_normed(b, x, width, kernel, stride, width));
        else x = building_residual(b, x, width, stride, kind == 'b');
    }
    b->side = 1;
    return building_linear(b, amp_global_avg_pool2d(b->m, x), n->classes);
}

/* LeNet-5 on 1 x 28 x 28 pixels. */
static amp_value building_lenet(building* b) {
    static const struct { int width, pad; } convolutions[] = { { 6, 2 }, { 16, 0 } };
    amp_value x = amp_input(b->m, b->channels, b->side, b->side);
    size_t i;
    for (i = 0; i < 2; i++) {
        x = building_conv(b, x, convolutions[i].width, 5, 1, convolutions[i].pad, 1);
        x = building_pool(b, amp_relu(b->m, x), 2, 2);
    }
    x = amp_relu(b->m, building_linear(b, x, 120));
    x = amp_relu(b->m, building_linear(b, x, 84));
    return building_linear(b, x, 10);
}
/* Dense layers with ReLU between them; width[0] is the input's. */
static amp_value building_dense(building* b, const int* width, int count) {
    amp_value x = amp_input(b->m, width[0], 1, 1);
    int i;
    for (i = 1; i < count; i++) {
        x = building_linear(b, x, width[i]);
        if (i + 1 < count) x = amp_relu(b->m, x);
    }
    return x;
}

/* The smallest GPT-2; the vocabulary of 50257 is filled up to a multiple of 128. */
static gpt_shape gpt2_shape(size_t batch, size_t length, amp_dtype low) {
    gpt_shape s;
    s.batch = batch; s.length = length; s.channels = 768; s.heads = 12; s.blocks = 12; s.vocabulary = 50304; s.low = low;
    return s;
}
/* The same in the graph: its logits, whose layer has the embedding's weight. */
static amp_value building_gpt2(amp_model* m, const gpt_shape* s) {
    amp_transformer_desc block;
    amp_value embedded, x;
    size_t i;
    memset(&block, 0, sizeof block);
    block.heads = (int)s->heads;
    block.layers = (int)s->blocks;
    embedded = amp_embedding(m, amp_tokens(m, (int)s->length), (int)s->vocabulary, (int)s->channels);
    x = amp_position_embedding(m, embedded);
    for (i = 0; i < s->blocks; i++) x = amp_transformer_block(m, x, &block);
    return amp_tied_linear(m, amp_layer_norm(m, x), embedded);
}
/* Of a step. The work of attention is counted for the tokens that one may see. */
static double gpt_flops(const gpt_shape* s) {
    const double C = (double)s->channels, a_block = C * (12.0 * C + (double)s->length);
    return 6.0 * (double)(s->batch * s->length) * (C * (double)s->vocabulary + (double)s->blocks * a_block);
}

#endif
