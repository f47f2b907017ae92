/* fuzz_api.c - the public functions on hostile arguments.
   With libFuzzer:   clang -g -fsanitize=fuzzer,address,undefined -DAMP_FUZZER fuzz_api.c ../impl.c -lm && ./a.out corpus/
   Without:          cc fuzz_api.c ../impl.c -lm && ./a.out [rounds] [seed]     (byte strings of its own)
   The first byte chooses a part of the library, the rest is read as its arguments: mostly small ones, some absurd.
   What must hold for all: nothing outside a buffer is touched, inputs stay as they are, a refused call has changed
   nothing and has told the logger why in a sentence. */
#include "../helpers.h"
#include "../upper.h"
#include <limits.h>

/* Says what went wrong and crashes, so that a fuzzer keeps the input. */
static void give_up(const char* what) {
    fprintf(stderr, "fuzz_api: %s\n", what);
    abort();
}

/* --- the input as a stream of arguments ------------------------------------------------------ */

static const unsigned char* input;
static size_t left;
static unsigned filler;                    /* continues the stream where it has ended */

/* An argument is drawn behind some call, which must not have left the upper halves of the registers in use. */
static unsigned byte(void) {
    if (upper_in_use() == 1) give_up("a call has left vector registers in use");
    filler = filler * 1664525u + 1013904223u;
    if (left == 0) return 0;
    left--;
    return *input++;
}
static unsigned below(unsigned n) { return byte() % n; }
static uint32_t word(void) {
    uint32_t a = byte(), b = byte(), c = byte(), d = byte();
    return a | b << 8 | c << 16 | d << 24;
}
static int absurd_int(void) {
    static const int list[] = { -1, 0, INT_MAX, INT_MIN, INT_MAX - 1, 1 << 30, 65536, 46341, -2, 1000, 255, 1 << 16 };
    return list[below(sizeof list / sizeof list[0])];
}
/* Mostly in [low, low + count); one time in 16 anything. */
static int number(int low, unsigned count) {
    unsigned b = byte();
    return b >= 240 ? absurd_int() : low + (int)(b % count);
}
static size_t size(unsigned count) {
    static const size_t list[] = { SIZE_MAX, SIZE_MAX / 2, SIZE_MAX / 2 + 1, SIZE_MAX / 4, SIZE_MAX / 8, SIZE_MAX / 8 + 1,
                                   SIZE_MAX / 16 + 1, (size_t)1 << (sizeof(size_t) * 4), 1000, 4097 };
    unsigned b = byte();
    return b >= 244 ? list[below(sizeof list / sizeof list[0])] : b % count;
}
static float number_f(void) {
    static const float list[] = { 0.0f, -1.0f, 1.0f, 0.5f, 2.0f, 0.1f, 0.999f, 65536.0f, 3.4e38f, 1.2e-38f, 1e-45f, -0.0f, 1e-5f };
    unsigned b = byte();
    uint32_t bits;
    float f;
    if (b >= 16) return list[b % (sizeof list / sizeof list[0])];
    bits = b < 4 ? 0x7f800000u : b < 6 ? 0x7fc00000u : b < 8 ? 0xff800000u : word();
    memcpy(&f, &bits, sizeof f);
    return f;
}
static amp_dtype type(void) {
    unsigned b = byte();
    return b >= 248 ? (amp_dtype)absurd_int() : b >= 240 ? AMP_F64 : (amp_dtype)(b % 4);
}

/* --- sentences and memory ------------------------------------------------------------------------ */

static void listen_closely(amp_result code, const char* sentence, void* user_data) {
    if (!sentence || strlen(sentence) < 10 || strchr(sentence, '\n')) give_up("a bad sentence");
    if (amp_result_string(code) == NULL || amp_result_string(code)[0] == 'u') give_up("an unknown result code");
    listen(code, sentence, user_data);
}
static const amp_logger logger = { listen_closely, NULL };

/* Under ASan a block is exactly as large as it is said to be; otherwise it lies between guard bytes. */
#if defined(__SANITIZE_ADDRESS__)
  #define GUARD 0u
#elif defined(__has_feature)
  #if __has_feature(address_sanitizer)
    #define GUARD 0u
  #endif
#endif
#ifndef GUARD
  #define GUARD 64u
#endif
#define LARGEST 65536u                     /* bytes of one block */
enum { INPUT, OUTPUT, MAX_BLOCKS = 24 };
static struct block { unsigned char *whole, *copy; size_t n; int kind; } blocks[MAX_BLOCKS];
static int block_count;

/* A block of the arguments of one call, filled with values of which many are ordinary and a few are not. */
static void* block_new(size_t n, int kind, int floats) {
    struct block* b = &blocks[block_count++];
    size_t i;
    unsigned mix = byte();
    if (block_count == MAX_BLOCKS) give_up("too many blocks");
    b->n = n + 2 * GUARD;
    b->kind = kind;
    b->whole = (unsigned char*)malloc(b->n ? b->n : 1);
    b->copy = (unsigned char*)malloc(b->n ? b->n : 1);
    if (!b->whole || !b->copy) give_up("no memory");
    for (i = 0; i < b->n; i++) {
        filler = filler * 1664525u + 1013904223u;
        b->whole[i] = (unsigned char)(filler >> 24);
        if (floats && mix >= 16 && i % 2 == 1) b->whole[i] = (unsigned char)((b->whole[i] & 0x80) | 0x3e);
    }
    memcpy(b->copy, b->whole, b->n);
    return b->whole + GUARD;
}
/* The same for an operand; now and then it is missing. */
static void* operand(size_t count, amp_dtype t, int kind) {
    size_t each = amp_dtype_size(t);
    if (byte() >= 250) return NULL;
    return block_new(count > LARGEST ? 0 : count * (each ? each : 4), kind, 1);
}

/* After the call: what may have changed, and what may not. */
static void settle(amp_result r) {
    int i;
    if (upper_in_use() == 1) give_up("a call has left vector registers in use");
    if (r != AMP_OK && refusals == 0) give_up("a refusal without a sentence");
    for (i = 0; i < block_count; i++) {
        struct block* b = &blocks[i];
        if ((r != AMP_OK || b->kind == INPUT) && memcmp(b->whole, b->copy, b->n) != 0)
            give_up(b->kind == INPUT ? "an input has changed" : "a refused call has changed an output");
        if (memcmp(b->whole, b->copy, GUARD) != 0 || memcmp(b->whole + b->n - GUARD, b->copy + b->n - GUARD, GUARD) != 0)
            give_up("a guard has changed");
        free(b->whole);
        free(b->copy);
    }
    block_count = 0;
    refusals = 0;
}

/* 1 if a call with a tensor of this many elements may be made: it is small, or no memory could hold it, and then it
   has to be refused. */
static int too_large;
static void count_in(double elements) {
    if (elements > (double)SIZE_MAX / 4) too_large |= 2;
    else if (elements > LARGEST / 8) too_large |= 1;
}
static int may_call(void) { return too_large != 1 && too_large != 3 ? 1 : (too_large & 2) != 0; }
static void settle_sized(amp_result r) {
    if ((too_large & 2) && r == AMP_OK) give_up("more elements than memory can hold were accepted");
    settle(r);
}

static amp_exec* some_exec(amp_exec* exec) {
    static const unsigned short sizes[] = { 0, 1, 63, 64, 1000, 4096, 20000, 65535 };
    memset(exec, 0, sizeof *exec);
    exec->logger = &logger;
    if (byte() & 1) {
        exec->workspace_size = sizes[below(8)];
        exec->workspace = block_new(exec->workspace_size, OUTPUT, 0);
        if (byte() & 1 && exec->workspace_size > 1) {
            exec->workspace = (char*)exec->workspace + 1;
            exec->workspace_size--;
        }
    }
    if (byte() >= 200) exec->operands = (amp_dtype)number(0, 20);
    return exec;
}

/* --- conversions, matrix products ----------------------------------------------------------------- */

static void try_convert(void) {
    amp_dtype to = type(), from = type();
    amp_convert_desc d;
    size_t n = size(255), counter, extra = byte() & 1 ? byte() * 16u : 0;
    void *src, *dst;
    int in_place = byte() >= 200;
    if (n < 255) n += extra;
    memset(&d, 0, sizeof d);
    d.logger = &logger;
    d.saturate = number(0, 2);
    d.rounding = (amp_rounding)number(0, 2);
    d.seed = word();
    d.offset = byte() & 1 ? UINT64_MAX - byte() : byte();
    counter = 7;
    d.saturated = byte() & 1 ? &counter : NULL;
    count_in((double)n);
    if (n > 5000) count_in((double)SIZE_MAX);
    if (n > 5000 && n < SIZE_MAX / 2) return;
    if (in_place && n < 5000) {
        size_t a = amp_dtype_size(to), b = amp_dtype_size(from);
        src = dst = block_new(n * (a > b ? a : b), OUTPUT, 1);
    } else {
        src = operand(n, from, INPUT);
        dst = operand(n, to, OUTPUT);
    }
    settle(amp_convert_with(amp_ref_of(dst, to), amp_ref_of(src, from), n,
        byte() >= 250 && amp_dtype_size(to) && amp_dtype_size(from) && src && dst && n < 5000 && src != dst ? NULL : &d));
    if (counter < 7 || counter - 7 > n) give_up("the counter of clamped elements is off");
}

static size_t matrix_size(size_t rows, size_t cols, size_t ld) {
    if (rows == 0 || cols == 0) return 0;
    if (ld < cols) return cols < LARGEST / 8 ? cols : 0;                        /* to be refused */
    count_in((double)rows * (double)ld);
    return too_large ? 0 : (rows - 1) * ld + cols;
}
static amp_gemm_shape shape_of(int ta, int tb, size_t m, size_t n, size_t k) {
    amp_gemm_shape s;
    memset(&s, 0, sizeof s);
    s.trans_a = (amp_transpose)ta; s.trans_b = (amp_transpose)tb;
    s.m = m; s.n = n; s.k = k;
    return s;
}
static void try_gemm(void) {
    int ta = number(0, 2), tb = number(0, 2);
    size_t m = size(40), n = size(40), k = byte() & 1 ? size(40) : size(200);
    size_t lda = (ta ? m : k) + below(3), ldb = (tb ? k : n) + below(3), ldc = n + below(3);
    amp_dtype a_type = type(), b_type = type(), c_type = type();
    float alpha = number_f(), beta = number_f();
    size_t a_size, b_size, c_size, r, gap;
    amp_gemm_shape shape;
    amp_exec exec;
    amp_result result;
    void *a, *b, *c;
    if (byte() >= 245) lda = size(50);
    if (byte() >= 245) ldc = size(50);
    shape = shape_of(ta, tb, m, n, k);
    shape.lda = lda; shape.ldb = ldb; shape.ldc = ldc;
    if (lda == 0) lda = ta ? m : k;
    if (ldb == 0) ldb = tb ? k : n;
    if (ldc == 0) ldc = n;
    a_size = ta ? matrix_size(k, m, lda) : matrix_size(m, k, lda);
    b_size = tb ? matrix_size(n, k, ldb) : matrix_size(k, n, ldb);
    c_size = matrix_size(m, n, ldc);
    (void)amp_gemm_workspace(m, n, k);
    if (!may_call()) return;
    a = operand(a_size, a_type, INPUT);
    b = operand(b_size, b_type, INPUT);
    c = operand(c_size, c_type, OUTPUT);
    result = amp_gemm(byte() >= 253 ? NULL : &shape, alpha, amp_ref_of(a, a_type),
        amp_ref_of(b, b_type), beta, amp_ref_of(c, c_type), some_exec(&exec));
    for (r = 0; result == AMP_OK && c && c_size && r + 1 < m; r++) {           /* between the rows of C */
        const struct block* block = &blocks[(a != NULL) + (b != NULL)];
        size_t each = amp_dtype_size(c_type);
        gap = GUARD + (r * ldc + n) * each;
        if (memcmp(block->whole + gap, block->copy + gap, (ldc - n) * each) != 0) give_up("gemm wrote between rows");
    }
    settle_sized(result);
}

/* Elements of a batch of matrices. */
static size_t series_size(size_t one, size_t stride, size_t batch) {
    if (one == 0) return 0;
    if (batch == 0) batch = 1;
    count_in((double)(batch - 1) * (double)stride + (double)one);
    return too_large ? 0 : (batch - 1) * stride + one;
}
static void try_gemm_batched(void) {
    int ta = number(0, 2), tb = number(0, 2);
    size_t m = size(12), n = size(12), k = size(30), batch = size(6);
    size_t lda = (ta ? m : k) + below(3), ldb = (tb ? k : n) + below(3), ldc = n + below(30);
    size_t as = size(300), bs = size(300), cs = byte() & 1 ? n + below(3) : size(300);
    amp_dtype a_type = type(), b_type = type(), c_type = type();
    float alpha = number_f(), beta = number_f();
    size_t a_size = series_size(ta ? matrix_size(k, m, lda) : matrix_size(m, k, lda), as, batch);
    size_t b_size = series_size(tb ? matrix_size(n, k, ldb) : matrix_size(k, n, ldb), bs, batch);
    size_t c_size = series_size(matrix_size(m, n, ldc), cs, batch);
    amp_gemm_shape shape = shape_of(ta, tb, m, n, k);
    amp_exec exec;
    void *a, *b, *c;
    shape.lda = lda; shape.ldb = ldb; shape.ldc = ldc;
    shape.batch = batch; shape.a_stride = as; shape.b_stride = bs; shape.c_stride = cs;
    if (!may_call()) return;
    a = operand(a_size, a_type, INPUT);
    b = operand(b_size, b_type, INPUT);
    c = operand(c_size, c_type, OUTPUT);
    settle_sized(amp_gemm(&shape, alpha, amp_ref_of(a, a_type), amp_ref_of(b, b_type), beta,
        amp_ref_of(c, c_type), some_exec(&exec)));
}

static void try_linear(void) {
    size_t n = size(20), in = size(40), out = size(40);
    amp_dtype x_type = type(), w_type = type(), b_type = type(), y_type = type();
    amp_exec exec;
    void *x, *w, *b, *y;
    count_in((double)n * (double)in); count_in((double)in * (double)out); count_in((double)n * (double)out);
    if (!may_call() || ((too_large || out > LARGEST / 8) && (n == 0 || in == 0 || out == 0))) return;
    if (byte() & 1) {
        x = operand(n * in, x_type, INPUT); w = operand(in * out, w_type, INPUT);
        b = operand(out, b_type, INPUT); y = operand(n * out, y_type, OUTPUT);
        settle_sized(amp_linear_forward(amp_ref_of(x, x_type), amp_ref_of(w, w_type),
            amp_ref_of(b, b_type), amp_ref_of(y, y_type), n, in, out, some_exec(&exec)));
    } else {
        amp_dtype dx_type = type(), dw_type = type();
        int bias = !too_large;
        void* dy = operand(n * out, y_type, INPUT);
        x = operand(n * in, x_type, INPUT); w = operand(in * out, w_type, INPUT);
        y = operand(n * in, dx_type, OUTPUT); b = operand(in * out, dw_type, OUTPUT);
        if (too_large && !(y && b)) { settle(AMP_OK); return; }
        settle_sized(amp_linear_backward(amp_ref_of(dy, y_type), amp_ref_of(x, x_type),
            amp_ref_of(w, w_type), amp_ref_of(y, dx_type), amp_ref_of(b, dw_type),
            amp_ref_of(bias ? operand(out, b_type, OUTPUT) : NULL, b_type), number(0, 2), n, in,
            out, some_exec(&exec)));
    }
}

/* --- convolution, pooling ---------------------------------------------------------------------------- */

static void try_conv(void) {
    amp_conv2d_shape s;
    amp_dtype t[6];
    amp_exec exec;
    amp_result r;
    int oh = -7, ow = -7, i;
    void *x, *w, *b, *y;
    size_t nx, nw, ny;
    memset(&s, 0, sizeof s);
    for (i = 0; i < 6; i++) t[i] = type();
    s.n = number(1, 3); s.channels = number(1, 4); s.height = number(1, 8); s.width = number(1, 20);
    s.out_channels = number(1, 4); s.kernel_h = number(1, 4); s.kernel_w = number(1, 4);
    s.stride_h = number(0, 4); s.stride_w = number(0, 4); s.pad_h = number(0, 4); s.pad_w = number(0, 4);
    s.pad_end_h = number(-1, 3); s.pad_end_w = number(-1, 3);
    s.dilation_h = number(0, 3); s.dilation_w = number(0, 3); s.groups = number(0, 3);
    memset(&exec, 0, sizeof exec);
    exec.logger = &logger;
    r = amp_conv2d_output(&s, &oh, &ow, &exec);
    if (r != AMP_OK && (oh != -7 || ow != -7)) give_up("a refused shape has an output size");
    if ((r == AMP_OK) != (amp_conv2d_workspace(&s) != 0) && r != AMP_OK) give_up("workspace for a refused shape");
    if (r != AMP_OK) {
        settle(r);
        if (amp_conv2d_forward(&s, amp_ref_of(&oh, t[0]), amp_ref_of(&oh, t[1]), AMP_NONE,
            amp_ref_of(&ow, t[3]), &exec) == AMP_OK) give_up("conv2d ran");
        refusals = 0;
        return;
    }
    count_in((double)s.n * s.channels * s.height * s.width);
    count_in((double)s.out_channels * (s.channels / (s.groups ? s.groups : 1)) * s.kernel_h * s.kernel_w);
    count_in((double)s.n * s.out_channels * oh * ow);
    if (too_large) return;
    nx = (size_t)s.n * (size_t)s.channels * (size_t)s.height * (size_t)s.width;
    nw = (size_t)s.out_channels * (size_t)(s.channels / (s.groups ? s.groups : 1)) * (size_t)s.kernel_h * (size_t)s.kernel_w;
    ny = (size_t)s.n * (size_t)s.out_channels * (size_t)oh * (size_t)ow;
    if (byte() & 1) {
        x = operand(nx, t[0], INPUT); w = operand(nw, t[1], INPUT);
        b = operand((size_t)s.out_channels, t[2], INPUT); y = operand(ny, t[3], OUTPUT);
        settle(amp_conv2d_forward(&s, amp_ref_of(x, t[0]), amp_ref_of(w, t[1]),
            amp_ref_of(b, t[2]), amp_ref_of(y, t[3]), some_exec(&exec)));
    } else {
        void* dy = operand(ny, t[3], INPUT);
        x = operand(nx, t[0], INPUT); w = operand(nw, t[1], INPUT);
        y = operand(nx, t[4], OUTPUT); b = operand(nw, t[5], OUTPUT);
        settle(amp_conv2d_backward(&s, amp_ref_of(dy, t[3]), amp_ref_of(x, t[0]),
            amp_ref_of(w, t[1]), amp_ref_of(y, t[4]), amp_ref_of(b, t[5]),
            amp_ref_of(operand((size_t)s.out_channels, t[2], OUTPUT), t[2]), number(0, 2),
            some_exec(&exec)));
    }
}

static void try_pool(void) {
    amp_pool2d_shape s;
    amp_dtype x_type = type(), y_type = type(), d_type = type();
    amp_exec exec;
    amp_result r;
    int oh = -7, ow = -7;
    size_t nx, ny;
    void *x, *y;
    s.kind = (amp_pool)number(0, 2);
    s.n = number(1, 3); s.channels = number(1, 3); s.height = number(1, 12); s.width = number(1, 40);
    s.kernel_h = number(1, 4); s.kernel_w = number(1, 4); s.stride_h = number(0, 4); s.stride_w = number(0, 4);
    s.pad_h = number(0, 2); s.pad_w = number(0, 2); s.exclude_pad = number(0, 2);
    s.pad_end_h = number(-1, 2); s.pad_end_w = number(-1, 2);
    memset(&exec, 0, sizeof exec);
    exec.logger = &logger;
    r = amp_pool2d_output(&s, &oh, &ow, &exec);
    if (r != AMP_OK) {
        if (oh != -7 || ow != -7) give_up("a refused shape has an output size");
        settle(r);
        if (amp_pool2d_forward(&s, amp_ref_of(&oh, x_type), amp_ref_of(&ow, y_type), &exec) == AMP_OK) give_up("pool2d ran");
        refusals = 0;
        return;
    }
    if (oh < 1 || ow < 1) give_up("an output without pixels");
    count_in((double)s.n * s.channels * s.height * s.width);
    count_in((double)s.n * s.channels * oh * ow);
    if (too_large) return;
    nx = (size_t)s.n * (size_t)s.channels * (size_t)s.height * (size_t)s.width;
    ny = (size_t)s.n * (size_t)s.channels * (size_t)oh * (size_t)ow;
    x = operand(nx, x_type, INPUT);
    if (byte() & 1) {
        y = operand(ny, y_type, OUTPUT);
        settle(amp_pool2d_forward(&s, amp_ref_of(x, x_type), amp_ref_of(y, y_type),
            some_exec(&exec)));
    } else {
        y = operand(ny, y_type, INPUT);
        settle(amp_pool2d_backward(&s, amp_ref_of(y, y_type), amp_ref_of(x, x_type),
            amp_ref_of(operand(nx, d_type, OUTPUT), d_type), 0, some_exec(&exec)));
    }
}

/* --- norms, rows, elements, losses ------------------------------------------------------------------------ */

static void try_batch_norm(void) {
    amp_batch_norm_shape s;
    amp_dtype t[4];
    amp_exec exec;
    size_t n, c;
    void *x, *gamma, *beta, *mean, *var, *save, *invstd;
    int i;
    for (i = 0; i < 4; i++) t[i] = type();
    s.n = number(1, 4); s.channels = number(1, 5); s.spatial = number(1, 40);
    s.eps = byte() & 1 ? 0.0f : number_f();
    s.momentum = byte() & 1 ? 0.0f : number_f();
    s.frozen = byte() & 1;
    s.held = NULL;
    if (s.n > 0 && s.channels > 0 && s.spatial > 0) count_in((double)s.n * s.channels * s.spatial);
    if (!may_call()) return;
    if (too_large || s.n < 1 || s.channels < 1 || s.spatial < 1) { n = c = 0; }
    else { c = (size_t)s.channels; n = (size_t)s.n * c * (size_t)s.spatial; }
    x = operand(n, t[0], INPUT);
    gamma = operand(c, t[1], INPUT);
    if (byte() & 1) {
        beta = operand(c, t[1], INPUT);
        mean = operand(c, AMP_F32, OUTPUT); var = operand(c, AMP_F32, OUTPUT);
        save = operand(c, AMP_F32, OUTPUT); invstd = operand(c, AMP_F32, OUTPUT);
        settle_sized(amp_batch_norm_forward(&s, number(0, 2), amp_ref_of(x, t[0]),
            amp_ref_of(gamma, t[1]), amp_ref_of(beta, t[1]), (float*)mean, (float*)var,
            (float*)save, (float*)invstd, amp_ref_of(operand(n, t[2], OUTPUT), t[2]),
            some_exec(&exec)));
    } else {
        void* dy = operand(n, t[3], INPUT);
        save = operand(c, AMP_F32, INPUT); invstd = operand(c, AMP_F32, INPUT);
        mean = operand(c, t[2], OUTPUT); var = operand(c, t[2], OUTPUT);
        settle_sized(amp_batch_norm_backward(&s, amp_ref_of(dy, t[3]), amp_ref_of(x, t[0]),
            amp_ref_of(gamma, t[1]), (const float*)save, (const float*)invstd,
            amp_ref_of(operand(n, t[2], OUTPUT), t[2]), amp_ref_of(mean, t[2]),
            amp_ref_of(var, t[2]), number(0, 2), some_exec(&exec)));
    }
}

static void try_rows(void) {
    size_t rows = size(6), d = size(80), n;
    amp_dtype t[4];
    amp_exec exec;
    void *x, *gamma, *beta, *a, *b, *c;
    int i, which = (int)below(8);
    for (i = 0; i < 4; i++) t[i] = type();
    count_in((double)rows * (double)d);
    if (rows > LARGEST / 8 || d > LARGEST / 8) count_in((double)LARGEST);
    if (!may_call()) return;
    n = too_large ? 0 : rows * d;
    x = operand(n, t[0], INPUT);
    if (which == 0) {
        gamma = operand(d, t[1], INPUT); beta = operand(d, t[1], INPUT);
        a = operand(rows, AMP_F32, OUTPUT); b = operand(rows, AMP_F32, OUTPUT);
        settle_sized(amp_layer_norm_forward(amp_ref_of(x, t[0]), amp_ref_of(gamma, t[1]),
            amp_ref_of(beta, t[1]), number_f(), (float*)a, (float*)b,
            amp_ref_of(operand(n, t[2], OUTPUT), t[2]), rows, d, some_exec(&exec)));
    } else if (which == 1) {
        gamma = operand(d, t[1], INPUT); beta = operand(n, t[3], INPUT);
        a = operand(rows, AMP_F32, INPUT); b = operand(rows, AMP_F32, INPUT); c = operand(d, t[2], OUTPUT);
        settle_sized(amp_layer_norm_backward(amp_ref_of(beta, t[3]), amp_ref_of(x, t[0]),
            amp_ref_of(gamma, t[1]), 0.0f, (const float*)a, (const float*)b,
            amp_ref_of(operand(n, t[2], OUTPUT), t[2]), amp_ref_of(c, t[2]),
            amp_ref_of(operand(d, t[2], OUTPUT), t[2]), number(0, 2), rows, d, some_exec(&exec)));
    } else if (which == 6) {
        gamma = operand(d, t[1], INPUT); a = operand(rows, AMP_F32, OUTPUT);
        settle_sized(amp_rms_norm_forward(amp_ref_of(x, t[0]), amp_ref_of(gamma, t[1]), number_f(), (float*)a,
            amp_ref_of(operand(n, t[2], OUTPUT), t[2]), rows, d, some_exec(&exec)));
    } else if (which == 7) {
        gamma = operand(d, t[1], INPUT); beta = operand(n, t[3], INPUT);
        a = operand(rows, AMP_F32, INPUT); c = operand(d, t[2], OUTPUT);
        settle_sized(amp_rms_norm_backward(amp_ref_of(beta, t[3]), amp_ref_of(x, t[0]), amp_ref_of(gamma, t[1]), 0.0f,
            (const float*)a, amp_ref_of(operand(n, t[2], OUTPUT), t[2]), amp_ref_of(c, t[2]), number(0, 2), rows, d,
            some_exec(&exec)));
    } else if (which == 2) {
        settle_sized(amp_softmax_forward(amp_ref_of(x, t[0]),
            amp_ref_of(operand(n, t[1], OUTPUT), t[1]), rows, d, some_exec(&exec)));
    } else if (which == 3) {
        a = operand(n, t[1], INPUT);
        settle_sized(amp_softmax_backward(amp_ref_of(x, t[0]), amp_ref_of(a, t[1]),
            amp_ref_of(operand(n, t[2], OUTPUT), t[2]), 0, rows, d, some_exec(&exec)));
    } else {
        size_t total = size(90), column = size(20);
        settle(AMP_OK);
        if (rows > 100 || d > 5000) return;
        if (column < LARGEST && d < LARGEST && total < d + column && byte() < 200) total = d + column + below(4);
        if (total <= LARGEST && rows * total > LARGEST / 8) return;
        if (total > LARGEST && (rows == 0 || (double)rows * (double)total < (double)SIZE_MAX / 4)) return;
        n = total > LARGEST ? 0 : rows * total;
        x = operand(rows * d, t[0], which == 4 ? INPUT : OUTPUT);
        a = operand(n, t[1], which == 4 ? OUTPUT : INPUT);
        if (which == 4) settle(amp_concat_forward(amp_ref_of(x, t[0]), d, amp_ref_of(a, t[1]),
            total, column, rows, some_exec(&exec)));
        else settle(amp_concat_backward(amp_ref_of(a, t[1]), total, column, amp_ref_of(x, t[0]),
            d, rows, number(0, 2), some_exec(&exec)));
    }
}

static void try_elements(void) {
    size_t n = size(200);
    amp_dtype x_type = type(), y_type = type(), z_type = type();
    amp_activation f = (amp_activation)number(0, AMP_ACTIVATION_COUNT);
    amp_exec exec;
    void *x, *y;
    count_in((double)n);
    if (!may_call()) return;
    x = operand(n, x_type, INPUT);
    switch (below(5)) {
        case 4: y = operand(n, y_type, INPUT);
                settle_sized(amp_leaky_relu_backward(amp_ref_of(y, y_type), amp_ref_of(x, x_type),
                    amp_ref_of(operand(n, z_type, OUTPUT), z_type), number(0, 2), n, number_f(),
                    some_exec(&exec)));
                break;
        case 0: settle_sized(amp_activation_forward(f, amp_ref_of(x, x_type),
            amp_ref_of(operand(n, y_type, OUTPUT), y_type), n, some_exec(&exec)));
                break;
        case 1: y = operand(n, y_type, INPUT);
                settle_sized(amp_activation_backward(f, amp_ref_of(y, y_type),
                    amp_ref_of(x, x_type), amp_ref_of(operand(n, z_type, OUTPUT), z_type), 0, n,
                    some_exec(&exec)));
                break;
        case 2: y = operand(n, y_type, OUTPUT);
                settle_sized(amp_dropout_forward(amp_ref_of(x, x_type), amp_ref_of(y, y_type), n,
                    number_f(), word(), byte() & 1 ? UINT64_MAX : 5, some_exec(&exec)));
                break;
        default: y = operand(n, y_type, INPUT);
                settle_sized(amp_add_forward(amp_ref_of(x, x_type), amp_ref_of(y, y_type),
                    amp_ref_of(operand(n, z_type, OUTPUT), z_type), n, some_exec(&exec)));
    }
}

static void try_losses(void) {
    size_t n = size(6), k = size(40), i, elements;
    amp_dtype x_type = type(), t_type = type(), d_type = type();
    amp_cross_entropy_desc smooth = { 0, 0, NULL, NULL, 0 };
    int32_t* labels, ignored = 0;
    amp_exec exec;
    void *x, *target, *loss;
    unsigned which = below(6);
    if (byte() & 1) smooth.smoothing = number_f();
    if (byte() < 30) smooth.ignored = &ignored;
    if (byte() < 30) smooth.ld = number(0, 2) ? k : k + 3;
    if (which > 1) k = n, n = 1;
    count_in((double)n * (double)k);
    if (n > LARGEST || k > LARGEST) count_in((double)LARGEST);
    if (!may_call()) return;
    elements = too_large ? 0 : n * (which < 2 && smooth.ld ? smooth.ld : k);
    x = operand(elements, x_type, INPUT);
    loss = which % 2 == 0 ? operand(1, AMP_F32, OUTPUT) : operand(1, AMP_F32, INPUT);
    if (which < 2) {
        labels = (int32_t*)operand(too_large ? 0 : n, AMP_F32, INPUT);
        for (i = 0; labels && !too_large && i < n; i++) labels[i] = k && byte() < 240 ? (int)(byte() % k) : number(0, 4);
        if (labels) memcpy(blocks[block_count - 1].copy, blocks[block_count - 1].whole, blocks[block_count - 1].n);
        if (which == 0) settle_sized(amp_softmax_cross_entropy_forward(amp_ref_of(x, x_type),
            labels, &smooth, (float*)loss, n, k, some_exec(&exec)));
        else settle_sized(amp_softmax_cross_entropy_backward(amp_ref_of(x, x_type), labels,
            &smooth, (float*)loss, number_f(),
            amp_ref_of(operand(elements, d_type, OUTPUT), d_type), n, k, some_exec(&exec)));
        return;
    }
    target = operand(elements, t_type, INPUT);
    if (which == 2) settle_sized(amp_mse_forward(amp_ref_of(x, x_type),
        amp_ref_of(target, t_type), (float*)loss, k, some_exec(&exec)));
    else if (which == 4) settle_sized(amp_bce_with_logits_forward(amp_ref_of(x, x_type),
        amp_ref_of(target, t_type), (float*)loss, k, some_exec(&exec)));
    else settle_sized((which == 3 ? amp_mse_backward : amp_bce_with_logits_backward)
                      (amp_ref_of(x, x_type), amp_ref_of(target, t_type), (float*)loss, number_f(),
                       amp_ref_of(operand(elements, d_type, OUTPUT), d_type), k, some_exec(&exec)));
}

/* --- sequences ------------------------------------------------------------------------------------------- */

/* 1 or more, but now and then 0 or absurd. */
static size_t extent(unsigned count) {
    size_t n = size(count);
    return n || byte() >= 200 ? n : 1;
}
/* Elements of rows of d elements, ld apart (0 = packed). */
static size_t rows_size(size_t rows, size_t d, size_t ld) {
    if (rows == 0 || d == 0) return 0;
    if (ld == 0) ld = d;
    count_in((double)rows * (double)(ld > d ? ld : d));
    return too_large ? 0 : (rows - 1) * ld + d;
}
static size_t gap(void) { unsigned b = byte(); return b < 128 ? 0 : b < 240 ? b % 5 : size(9); }
/* int32 numbers in [low, low + count), but now and then others. */
static int32_t* some_ints(size_t n, int low, unsigned count) {
    int32_t* p = (int32_t*)operand(n, AMP_F32, INPUT);
    const int sound = byte() < 200;
    size_t i;
    for (i = 0; p && i < n; i++) p[i] = sound ? low + (int)below(count ? count : 1) : number(low, count ? count : 1);
    if (p) memcpy(blocks[block_count - 1].copy, blocks[block_count - 1].whole, blocks[block_count - 1].n);
    return p;
}
/* What a call may write of a block are rows of d elements alone. */
static void check_between(const void* of, size_t rows, size_t d, size_t ld, amp_dtype t) {
    const size_t each = amp_dtype_size(t);
    int i;
    size_t r;
    for (i = 0; of && ld > d && i < block_count; i++) {
        const struct block* b = &blocks[i];
        if (b->whole + GUARD != (const unsigned char*)of) continue;
        for (r = 0; r + 1 < rows; r++)
            if (memcmp(b->whole + GUARD + (r * ld + d) * each, b->copy + GUARD + (r * ld + d) * each, (ld - d) * each) != 0)
                give_up("attention wrote between rows");
    }
}

static void some_attention(amp_attention_shape* s) {
    memset(s, 0, sizeof *s);
    s->batch = extent(4);
    s->queries = extent(byte() & 1 ? 6 : 90);
    s->keys = byte() & 1 ? 0 : extent(byte() & 1 ? 6 : 90);
    s->kv_heads = byte() & 1 ? 0 : extent(3);
    s->heads = byte() < 240 && s->kv_heads < 4 ? (s->kv_heads ? s->kv_heads : 1) * (1 + below(3)) : extent(6);
    s->head_size = extent(byte() & 1 ? 9 : 80);
    if (byte() & 1) s->key_stride = byte() < 230 && s->keys < 100 ? (s->keys ? s->keys : s->queries) + below(3) : size(9);
    s->causal = byte() & 1;
    s->window = byte() < 200 || (!s->causal && byte() < 240) ? 0 : size(20);
    s->scale = byte() < 200 ? 0.0f : number_f();
}
/* q, k and v lie apart; or in rows [q|k|v], as their gradients do. */
static void try_attention(void) {
    amp_attention_shape s;
    amp_dtype t[9];
    amp_exec exec;
    amp_result r;
    size_t q_d, kv_d, q_rows, kv_rows, size_of[4], at[3] = { 0, 0, 0 };
    void *q, *k, *v, *y, *lse, *dq, *dk, *dv, *dy;
    int i, together = byte() >= 192, accumulate = number(0, 4);
    for (i = 0; i < 9; i++) t[i] = type();
    some_attention(&s);
    if (together) { s.keys = s.key_stride = 0; t[1] = t[2] = t[0]; t[6] = t[7] = t[5]; }
    {
        const size_t keys = s.keys ? s.keys : s.queries, kv_heads = s.kv_heads ? s.kv_heads : s.heads;
        const size_t stride = s.key_stride ? s.key_stride : keys;
        count_in((double)s.batch * (double)s.heads * (double)s.head_size * (double)s.queries);
        count_in((double)s.batch * (double)kv_heads * (double)s.head_size * (double)stride);
        count_in((double)s.batch * (double)s.heads * (double)s.queries);
        if (s.heads > LARGEST || s.head_size > LARGEST || s.queries > LARGEST || stride > LARGEST || keys > LARGEST
            || kv_heads > LARGEST || s.batch > LARGEST) count_in((double)LARGEST);
        (void)amp_attention_workspace(&s);
        if (!may_call()) return;
        q_d = too_large ? 0 : s.heads * s.head_size; kv_d = too_large ? 0 : kv_heads * s.head_size;
        q_rows = too_large ? 0 : s.batch * s.queries;
        kv_rows = too_large || s.batch == 0 ? 0 : (s.batch - 1) * stride + keys;
        if (together) {
            s.ldq = s.ldk = s.ldv = q_d + 2 * kv_d + gap();
            at[1] = q_d; at[2] = q_d + kv_d;
        } else {
            if (byte() & 1) s.ldq = q_d + gap();
            if (byte() & 1) s.ldk = kv_d + gap();
            if (byte() & 1) s.ldv = kv_d + gap();
        }
        if (byte() & 1) s.ldy = q_d + gap();
        if (!together && byte() >= 250) s.ldq = size(40);
        size_of[0] = rows_size(q_rows, q_d, s.ldq); size_of[1] = rows_size(kv_rows, kv_d, s.ldk);
        size_of[2] = rows_size(kv_rows, kv_d, s.ldv); size_of[3] = rows_size(q_rows, q_d, s.ldy);
        if (together && !too_large) size_of[0] = size_of[2] + at[2];
        if (!may_call()) return;
        if (byte() & 1) s.lengths = some_ints(too_large ? 0 : s.batch, 0, keys < 200 ? (unsigned)keys + 1 : 200);
    }
    q = operand(size_of[0], t[0], INPUT);
    k = together ? q : operand(size_of[1], t[1], INPUT); v = together ? q : operand(size_of[2], t[2], INPUT);
    for (i = 1; i < 3; i++) if (q && together) *(i == 1 ? &k : &v) = (char*)q + at[i] * amp_dtype_size(t[0]);
    if (byte() & 1) {
        y = operand(size_of[3], t[3], OUTPUT);
        lse = byte() & 1 ? NULL : operand(q_rows * (too_large ? 0 : s.heads), AMP_F32, OUTPUT);
        r = amp_attention_forward(byte() >= 254 ? NULL : &s, amp_ref_of(q, t[0]), amp_ref_of(k, t[1]), amp_ref_of(v, t[2]),
            amp_ref_of(y, t[3]), (float*)lse, some_exec(&exec));
        if (r == AMP_OK) check_between(y, q_rows, q_d, s.ldy, t[3]);
        settle_sized(r);
        return;
    }
    y = operand(size_of[3], t[3], INPUT);
    lse = operand(q_rows * (too_large ? 0 : s.heads), AMP_F32, INPUT);
    dy = operand(size_of[3], t[4], INPUT);
    dq = operand(size_of[0], t[5], OUTPUT);
    dk = together ? dq : operand(size_of[1], t[6], OUTPUT); dv = together ? dq : operand(size_of[2], t[7], OUTPUT);
    for (i = 1; i < 3; i++) if (dq && together) *(i == 1 ? &dk : &dv) = (char*)dq + at[i] * amp_dtype_size(t[5]);
    r = amp_attention_backward(&s, amp_ref_of(dy, t[4]), amp_ref_of(q, t[0]), amp_ref_of(k, t[1]), amp_ref_of(v, t[2]),
        amp_ref_of(y, t[3]), (const float*)lse, amp_ref_of(dq, t[5]), amp_ref_of(dk, t[6]), amp_ref_of(dv, t[7]), accumulate,
        some_exec(&exec));
    if (r == AMP_OK && together) check_between(dq, q_rows, q_d + 2 * kv_d, s.ldq, t[5]);
    else if (r == AMP_OK) {
        check_between(dq, q_rows, q_d, s.ldq, t[5]);
        check_between(dk, kv_rows, kv_d, s.ldk, t[6]);
        check_between(dv, kv_rows, kv_d, s.ldv, t[7]);
    }
    settle_sized(r);
}

static void try_rope(void) {
    amp_rope_shape s;
    amp_dtype x_type = type(), y_type = type();
    amp_exec exec;
    size_t n, heads;
    void *x, *y;
    memset(&s, 0, sizeof s);
    s.batch = extent(4); s.positions = extent(10); s.heads = extent(5);
    s.head_size = byte() < 230 ? 2 * (1 + below(byte() & 1 ? 5 : 60)) : byte() < 128 ? 1024 + below(4) : size(20);
    heads = s.heads > LARGEST || s.head_size > LARGEST ? LARGEST : s.heads * s.head_size;
    s.width = byte() & 1 ? 0 : byte() < 230 && heads < LARGEST ? heads + below(9) : size(40);
    s.theta = byte() < 200 ? 0.0f : number_f();
    s.interleaved = number(0, 2);
    s.offset = byte() & 1 ? 0 : size(200);
    if (s.batch && s.positions) {
        count_in((double)s.batch * (double)s.positions * (s.width ? (double)s.width : (double)s.heads * (double)s.head_size));
        if (s.batch > LARGEST || s.positions > LARGEST || s.heads > LARGEST) count_in((double)LARGEST);
    } else if (s.batch > LARGEST || s.positions > LARGEST || heads >= LARGEST || s.width > LARGEST) return;
    if (!may_call()) return;
    n = too_large ? 0 : s.batch * s.positions * (s.width ? s.width : heads);
    if (byte() >= 200) { x = y = operand(n, x_type, OUTPUT); y_type = x_type; }
    else { x = operand(n, x_type, INPUT); y = operand(n, y_type, OUTPUT); }
    if (byte() & 1) settle_sized(amp_rope_forward(byte() >= 254 ? NULL : &s, amp_ref_of(x, x_type), amp_ref_of(y, y_type),
        some_exec(&exec)));
    else settle_sized(amp_rope_backward(&s, amp_ref_of(x, x_type), amp_ref_of(y, y_type), y && y_type ? number(0, 4) : 0,
        some_exec(&exec)));
}

static void try_embedding(void) {
    size_t n = extent(20), rows = extent(12), d = extent(50);
    amp_dtype w_type = type(), y_type = type();
    amp_exec exec;
    int32_t* tokens;
    count_in((double)n * (double)d); count_in((double)rows * (double)d);
    if (n > LARGEST || d > LARGEST || rows > LARGEST) count_in((double)LARGEST);
    if (!may_call() || (too_large && (n == 0 || d == 0 || rows == 0))) return;
    tokens = some_ints(too_large ? 0 : n, 0, rows < 100 ? (unsigned)rows : 100);
    if (byte() & 1) {
        void* w = operand(rows * d, w_type, INPUT);
        void* y = operand(n * d, y_type, OUTPUT);
        settle_sized(amp_embedding_forward(tokens, amp_ref_of(w, w_type), amp_ref_of(y, y_type), n, rows, d, some_exec(&exec)));
    } else {
        void* dy = operand(n * d, y_type, INPUT);
        void* dw = operand(rows * d, w_type, OUTPUT);
        if (too_large && !dw) { settle(AMP_OK); return; }
        settle_sized(amp_embedding_backward(amp_ref_of(dy, y_type), tokens, amp_ref_of(dw, w_type), number(0, 4), n, rows, d,
            some_exec(&exec)));
    }
}

static void try_group_norm(void) {
    amp_group_norm_shape s;
    amp_dtype t[4];
    amp_exec exec;
    size_t n = 0, c = 0, groups = 0;
    void *x, *gamma, *mean, *invstd;
    int i;
    for (i = 0; i < 4; i++) t[i] = type();
    s.n = number(1, 4); s.channels = number(1, 8); s.spatial = number(1, byte() & 1 ? 4 : 60);
    s.groups = byte() & 1 ? 0 : number(0, 5);
    s.eps = byte() & 1 ? 0.0f : number_f();
    if (s.n > 0 && s.channels > 0 && s.spatial > 0) count_in((double)s.n * s.channels * s.spatial);
    if (!may_call()) return;
    if (!too_large && s.n > 0 && s.channels > 0 && s.spatial > 0) {
        c = (size_t)s.channels; n = (size_t)s.n * c * (size_t)s.spatial;
        groups = (size_t)s.n * (s.groups > 0 && s.groups <= s.channels ? (size_t)s.groups : c);
    }
    x = operand(n, t[0], INPUT);
    gamma = operand(c, t[1], INPUT);
    if (byte() & 1) {
        void* beta = operand(c, t[1], INPUT);
        mean = operand(groups, AMP_F32, OUTPUT); invstd = operand(groups, AMP_F32, OUTPUT);
        settle_sized(amp_group_norm_forward(&s, amp_ref_of(x, t[0]), amp_ref_of(gamma, t[1]), amp_ref_of(beta, t[1]), (float*)mean,
            (float*)invstd, amp_ref_of(operand(n, t[2], OUTPUT), t[2]), some_exec(&exec)));
    } else {
        void* dy = operand(n, t[3], INPUT);
        void* dx = operand(n, t[2], OUTPUT);
        void* dgamma = operand(c, t[2], OUTPUT);
        mean = operand(groups, AMP_F32, INPUT); invstd = operand(groups, AMP_F32, INPUT);
        settle_sized(amp_group_norm_backward(&s, amp_ref_of(dy, t[3]), amp_ref_of(x, t[0]), amp_ref_of(gamma, t[1]),
            (const float*)mean, (const float*)invstd, amp_ref_of(dx, t[2]), amp_ref_of(dgamma, t[2]),
            amp_ref_of(operand(c, t[2], OUTPUT), t[2]), number(0, 4), some_exec(&exec)));
    }
}

static void try_mul(void) {
    size_t n = extent(200), repeat = byte() & 1 ? 1 : extent(6), rows = extent(5);
    amp_dtype t[5];
    amp_exec exec;
    void *a, *b;
    int i;
    for (i = 0; i < 5; i++) t[i] = type();
    if (n < 1000 && repeat < 1000 && repeat > 0 && byte() < 230) n -= n % repeat;
    count_in((double)n);
    if (repeat > LARGEST || rows > LARGEST) count_in((double)LARGEST);
    if (!may_call()) return;
    a = operand(n, t[0], INPUT);
    switch (below(3)) {
        case 0: b = operand(repeat ? n / repeat : n, t[1], INPUT);
                settle_sized(amp_mul_forward(amp_ref_of(a, t[0]), amp_ref_of(b, t[1]),
                    amp_ref_of(operand(n, t[2], OUTPUT), t[2]), n, repeat, some_exec(&exec)));
                break;
        case 1: {
            void *dy = operand(n, t[2], INPUT), *da = operand(n, t[3], OUTPUT);
            b = operand(repeat ? n / repeat : n, t[1], INPUT);
            settle_sized(amp_mul_backward(amp_ref_of(dy, t[2]), amp_ref_of(a, t[0]), amp_ref_of(b, t[1]), amp_ref_of(da, t[3]),
                amp_ref_of(operand(repeat ? n / repeat : n, t[4], OUTPUT), t[4]), number(0, 4), n, repeat, some_exec(&exec)));
            break;
        }
        default:
            settle(AMP_OK);
            if (too_large || rows == 0 || repeat == 0) return;
            n = below(4) * rows * repeat;
            a = operand(n, t[0], INPUT);
            settle(amp_transpose_forward(amp_ref_of(a, t[0]), amp_ref_of(operand(n, t[1], OUTPUT), t[1]), n / (rows * repeat),
                rows, repeat, some_exec(&exec)));
    }
}

/* --- the scaler ---------------------------------------------------------------------------------------------- */

static int on_limit(const amp_scaler* s, void* user_data) { (void)s; (void)user_data; return (int)below(2); }

static void some_scaler_desc(amp_scaler_desc* d) {
    memset(d, 0, sizeof *d);
    d->preset = (amp_scaler_preset)number(0, AMP_SCALER_PRESET_COUNT);
    d->init_scale = byte() & 1 ? 1024.0f : number_f();
    if (byte() & 1) d->growth_interval = number(-1, 4);
    if (byte() & 1) d->growth_factor = (double)number_f();
    if (byte() & 1) d->backoff_factor = (double)number_f();
    if (byte() & 1) d->min_scale = number_f();
    if (byte() & 1) d->max_scale = number_f();
    if (byte() & 1) d->hysteresis = number(0, 4);
    if (byte() & 1) d->at_min = (amp_scaler_limit)number(0, 4);
    if (byte() & 1) d->max_skips = number(-1, 4);
    if (byte() & 1) d->max_unsound = number(-1, 4);
    if (byte() >= 200) d->ignore_overflow = number(0, 2);
    if (byte() & 1) d->on_limit = on_limit;
    d->logger = &logger;
}

/* A saved state, damaged, with a checksum that fits again. */
static void damage(unsigned char* p) {
    uint32_t crc = 0xffffffffu, i, bit;
    unsigned count = below(5);
    while (count--) p[64 + below(60)] = (unsigned char)byte();
    if (byte() >= 200) p[below(128)] = (unsigned char)byte();
    for (i = 0; i < 124; i++)
        for (crc ^= p[i], bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
    for (i = 0; i < 4 && byte() < 250; i++) p[124 + i] = (unsigned char)(~crc >> (8 * i));
}

static void some_tensors(amp_tensor* list, int count, const amp_tensor* like) {
    int i;
    for (i = 0; i < count; i++) {
        list[i].dtype = (amp_dtype)below(4);
        list[i].count = like && byte() < 250 ? like[i].count : below(40);
        list[i].name = byte() & 1 ? "a tensor whose name is longer than what an overflow report keeps of it" : NULL;
        list[i].data = block_new(list[i].count * amp_dtype_size(list[i].dtype), OUTPUT, 1);
    }
}

static void check_scaler(const amp_scaler* before, const amp_scaler* s, amp_result r, int is_update, int is_load) {
    const amp_scaler_rule* rule = &s->rule;
    float old = before->state.scale, scale = s->state.scale;
    if (r != AMP_OK && !(is_update && r == AMP_ERR_OVERFLOW) && memcmp(before, s, sizeof *s) != 0)
        give_up("a refused call has changed the scaler");
    if (!is_update && before->state.found_inf && !s->state.found_inf) give_up("found_inf was cleared");
    if (is_update && r != AMP_ERR_STATE && s->state.found_inf) give_up("found_inf outlived its window");
    if (is_load) return;
    if (!(scale >= 0.0f)) give_up("the scale is negative or NaN");
    if (rule->max > 0.0f && old <= rule->max && scale > rule->max) give_up("the scale is above its ceiling");
    if (old >= rule->min && scale < rule->min) give_up("the scale is below its floor");
}

static void try_scaler_call(amp_scaler* s, amp_tensor* list, amp_tensor* other) {
    amp_scaler before;
    amp_overflow_info info;
    amp_result r = AMP_OK;
    unsigned char state[AMP_SCALER_STATE_BYTES];
    unsigned what = below(10);
    int count = byte() >= 250 ? -1 : (int)below(3);
    memcpy(&before, s, sizeof before);
    refusals = 0;
    if (what <= 2) (void)amp_scaler_scale_loss(s, number_f());
    else if (what == 3) r = amp_scaler_check(s, byte() >= 250 ? NULL : list, count, &info);
    else if (what == 4) r = amp_scaler_unscale(s, list, count, &info);
    else if (what == 5) r = amp_scaler_unscale_into(s, other, list, count, number(0, 2), NULL);
    else if (what == 6) r = amp_scaler_report_overflow(s);
    else if (what == 7) r = amp_scaler_set_scale(s, number_f());
    else if (what == 8) {
        r = amp_scaler_save(s, state, sizeof state);
        if (r == AMP_OK) { damage(state); r = amp_scaler_load(s, state, byte() >= 250 ? byte() : sizeof state); }
    } else r = amp_scaler_update(s);
    if (r != AMP_OK && refusals == 0) give_up("the scaler refused without a sentence");
    check_scaler(&before, s, r, what == 9, what == 8 || what == 7);
    if (amp_scaler_may_step(s) == 1 && s->state.found_inf) give_up("a step in spite of an overflow");
}

static void try_scaler(void) {
    amp_scaler_desc d;
    amp_scaler s, old;
    amp_tensor list[3], other[3];
    amp_result r;
    int calls = 60;
    some_scaler_desc(&d);
    memset(&s, 0xa5, sizeof s);
    memset(&old, 0xa5, sizeof old);
    r = amp_scaler_init(&s, &d);
    if (r != AMP_OK) {
        if (memcmp(&s, &old, sizeof s) != 0) give_up("a refused init has changed the scaler");
        settle(r);
        return;
    }
    some_tensors(list, 3, NULL);
    some_tensors(other, 3, list);
    while (calls-- && left) try_scaler_call(&s, list, other);
    settle(AMP_OK);
}

/* --- optimizers, policies, statistics ------------------------------------------------------------------------- */

static void some_optimizer_desc(amp_optimizer_desc* d, amp_param_group* groups) {
    memset(d, 0, sizeof *d);
    d->kind = (amp_optimizer_kind)number(0, 5);
    d->eps_in_root = d->kind == AMP_RMSPROP && (byte() & 1);
    if (byte() & 1) d->lr = number_f();
    if (byte() >= 128) d->momentum = number_f();
    if (byte() >= 200) d->dampening = number_f();
    if (byte() >= 200) d->nesterov = number(0, 2);
    if (byte() >= 128) d->beta1 = number_f();
    if (byte() >= 128) d->beta2 = number_f();
    if (byte() >= 128) d->eps = number_f();
    if (byte() >= 128) d->weight_decay = number_f();
    if (byte() >= 128) d->clip_norm = number_f();
    d->maximize = number(0, 2);
    d->unchecked = number(0, 2);
    d->schedule.kind = (amp_schedule_kind)number(0, 4);
    d->schedule.warmup_steps = number(0, 3);
    d->schedule.total_steps = number(0, 20);
    d->schedule.step_size = number(0, 4);
    if (byte() & 1) d->schedule.gamma = number_f();
    if (byte() & 1) d->schedule.floor = number_f();
    if (byte() >= 200) {
        d->groups = groups;
        d->group_count = number(0, 3);
        memset(groups, 0, AMP_MAX_GROUPS * sizeof *groups);
        groups[0].lr = number_f(); groups[0].weight_decay = number_f();
        groups[1].lr = number_f(); groups[1].weight_decay = number_f();
        groups[0].frozen = 0; groups[1].frozen = byte() & 1;
    }
    d->logger = &logger;
}

static void some_params(amp_param* p, int count) {
    int i;
    for (i = 0; i < count; i++) {
        memset(&p[i], 0, sizeof p[i]);
        p[i].count = below(50);
        p[i].grad_dtype = type();
        p[i].grad = operand(p[i].count, p[i].grad_dtype, OUTPUT);
        p[i].low_dtype = byte() & 1 ? AMP_F16 : type();
        if (byte() & 1) p[i].low = operand(p[i].count, p[i].low_dtype, OUTPUT);
        if (!p[i].low || byte() & 1) p[i].master = (float*)operand(p[i].count, AMP_F32, OUTPUT);
        p[i].m = (float*)operand(p[i].count, AMP_F32, OUTPUT);
        p[i].v = (float*)operand(p[i].count, AMP_F32, OUTPUT);
        p[i].group = byte() >= 240 ? number(0, 2) : 0;
    }
}

static void try_optimizer(void) {
    amp_param_group groups[AMP_MAX_GROUPS];
    amp_optimizer_desc d;
    amp_optimizer o, old;
    amp_optimizer_info info;
    amp_scaler s, s_old;
    amp_param params[3];
    amp_result r;
    int count = byte() >= 250 ? number(0, 1) : 1 + (int)below(3), i;
    memset(groups, 0, sizeof groups);
    some_optimizer_desc(&d, groups);
    some_params(params, 3);
    memset(&o, 0xa5, sizeof o);
    memset(&old, 0xa5, sizeof old);
    if (count > 3) count = -1;
    (void)amp_schedule_lr(&d.schedule, number_f(), number(0, 5));
    i = amp_optimizer_moments(&d);
    if (i < -1 || i > 2) give_up("a strange number of moments");
    refusals = 0;
    r = amp_optimizer_init(&o, &d, params, count);
    if (r != AMP_OK && memcmp(&o, &old, sizeof o) != 0) give_up("a refused init has changed the optimizer");
    if (r == AMP_OK && i < 0) give_up("a desc that is not valid was accepted");
    if (r != AMP_OK) { settle(r); return; }
    if (amp_scaler_init(&s, NULL) != AMP_OK) give_up("the default scaler was refused");
    s.logger = logger;
    for (i = 0; i < 12 && left; i++) {
        unsigned what = below(6);
        memcpy(&old, &o, sizeof o);
        memcpy(&s_old, &s, sizeof s);
        refusals = 0;
        r = AMP_OK;
        if (what == 0) (void)amp_scaler_scale_loss(&s, 1.0f);
        else if (what == 1) r = amp_optimizer_step(&o, byte() & 1 ? &s : NULL, &info);
        else if (what == 2) r = amp_optimizer_unscale(&o, &s);
        else if (what == 3) r = amp_optimizer_set_lr(&o, number_f());
        else if (what == 4) r = amp_optimizer_zero_grad(&o);
        else r = amp_scaler_update(&s);
        if (r == AMP_OK) continue;
        if (refusals == 0) give_up("the optimizer refused without a sentence");
        if (memcmp(&o, &old, sizeof o) != 0 || memcmp(&s, &s_old, sizeof s) != 0) give_up("a refused call has changed state");
    }
    settle(AMP_OK);
}

static void some_policy_desc(amp_policy_desc* d, amp_op* white, amp_op* black) {
    int i;
    memset(d, 0, sizeof *d);
    for (i = 0; i < 4; i++) { white[i] = (amp_op)number(0, AMP_OP_COUNT); black[i] = (amp_op)number(0, AMP_OP_COUNT); }
    d->level = (amp_level)number(0, 4);
    if (byte() & 1) d->low_dtype = type();
    if (byte() >= 200) d->style = (amp_style)number(0, 5);
    if (byte() >= 200) { d->white = byte() >= 250 ? NULL : white; d->white_count = number(0, 5); }
    if (byte() >= 200) { d->black = black; d->black_count = number(0, 5); }
    if (d->white_count > 4) d->white_count = -1;
    if (d->black_count > 4) d->black_count = -1;
    if (byte() >= 200) d->keep_batchnorm_fp32 = number(-1, 3);
    if (byte() >= 200) d->master_weights = number(-1, 3);
    d->logger = &logger;
}

static void try_policy(void) {
    amp_policy_desc d;
    amp_policy p, old;
    amp_op white[4], black[4], out[AMP_OP_COUNT];
    amp_result r;
    memset(&p, 0xa5, sizeof p);
    memset(&old, 0xa5, sizeof old);
    some_policy_desc(&d, white, black);
    r = amp_policy_init(&p, &d);
    if (r != AMP_OK && memcmp(&p, &old, sizeof p) != 0) give_up("a refused init has changed the policy");
    settle(r);
    if (r != AMP_OK) return;
    memcpy(&old, &p, sizeof p);
    r = amp_policy_set_rule(&p, (amp_op)number(0, AMP_OP_COUNT), (amp_rule)number(0, 4));
    if (r != AMP_OK && memcmp(&p, &old, sizeof p) != 0) give_up("a refused rule has changed the policy");
    if (amp_policy_white_list(&p, out, (int)below(AMP_OP_COUNT + 1)) + amp_policy_black_list(&p, NULL, 0) > AMP_OP_COUNT)
        give_up("more operators than there are");
    (void)amp_op_name((amp_op)absurd_int()); (void)amp_rule_name((amp_rule)absurd_int());
    (void)amp_level_name((amp_level)absurd_int()); (void)amp_reason_name((amp_reason)absurd_int());
    (void)amp_scaler_preset_name((amp_scaler_preset)absurd_int()); (void)amp_outcome_name((amp_outcome)absurd_int());
    (void)amp_result_string((amp_result)absurd_int()); (void)amp_isa_name((amp_isa)absurd_int());
    refusals = 0;
}

static void try_stats(void) {
    amp_stats* s = (amp_stats*)block_new(sizeof(amp_stats), OUTPUT, 0);
    amp_dtype t = type(), target = type();
    size_t n = byte();
    void* x = operand(n, t, INPUT);
    amp_result r;
    if (amp_stats_collect(s, x, t, n / 2, target, 0) != AMP_OK) { refusals = 1; settle(AMP_ERR_ARGUMENT); return; }
    r = amp_stats_collect(s, x, t, n, target, number(0, 2));
    if (r == AMP_OK && s->zeros + s->infs + s->nans > s->count) give_up("statistics that cannot be");
    if (r != AMP_OK && x) give_up("statistics refused what they have taken before");
    if (r != AMP_OK) { refusals = 1; settle(AMP_OK); return; }
    settle(r);
}

/* --- graphs ------------------------------------------------------------------------------------------------------ */

static size_t given;                       /* bytes in use, by the model's allocator */
static int allowed;                        /* allocations before it fails; negative = any number */
static void* limited_alloc(size_t n, void* user_data) {
    size_t* p;
    (void)user_data;
    if (n > (1u << 22) - given || allowed == 0) return NULL;
    if (allowed > 0) allowed--;
    p = (size_t*)malloc(n + 16);
    if (!p) return NULL;
    *p = n;
    given += n;
    return p + 16 / sizeof *p;
}
static void limited_free(void* ptr, void* user_data) {
    size_t* p = (size_t*)ptr - 16 / sizeof(size_t);
    (void)user_data;
    given -= *p;
    free(p);
}

/* One object with an optimizer and a scaler, of parameters that lack some of their arrays. */
static void try_mixed(void) {
    amp_param_group groups[AMP_MAX_GROUPS];
    amp_param params[3];
    amp_mixed_desc d;
    amp_mixed x, old;
    amp_optimizer_info info;
    amp_result r;
    int i;
    memset(groups, 0, sizeof groups);
    memset(&d, 0, sizeof d);
    memset(&x, 0xa5, sizeof x);
    memset(&old, 0xa5, sizeof old);
    some_optimizer_desc(&d.optimizer, groups);
    some_params(params, 3);
    for (i = 0; i < 3; i++) {
        if (byte() & 1) params[i].m = NULL;
        if (byte() & 1) params[i].v = NULL;
        if (byte() >= 250) params[i].count = SIZE_MAX / 16 + below(3);   /* refused, or no memory holds it */
    }
    if (byte() >= 200) some_scaler_desc(&d.scaler);
    d.params = byte() >= 250 ? NULL : params;
    d.count = byte() >= 250 ? number(-1, 2) : 1 + (int)below(3);
    if (d.count > 3) d.count = -1;
    d.logger = &logger;
    allowed = byte() >= 240 ? 0 : -1;
    d.allocator.alloc = limited_alloc;
    if (byte() < 250) d.allocator.free = limited_free;
    refusals = 0;
    r = amp_mixed_init(byte() >= 250 ? NULL : &x, &d);
    if (r != AMP_OK) {
        if (memcmp(&x, &old, sizeof x) != 0 || given != 0) give_up("a refused init has left something");
        settle(r);
        return;
    }
    for (i = 0; i < 12 && left; i++) {
        unsigned what = below(4);
        refusals = 0;
        r = AMP_OK;
        if (what == 0) (void)amp_mixed_scale(&x, number_f(), number_f());
        else if (what == 1) r = amp_mixed_step(&x, byte() & 1 ? &info : NULL);
        else if (what == 2) (void)amp_mixed_low(&x, params[below(3)].master);
        else r = amp_optimizer_set_lr(&x.optimizer, number_f());
        if (r != AMP_OK && refusals == 0) give_up("amp_mixed refused without a sentence");
    }
    amp_mixed_free(&x);
    if (given != 0) give_up("amp_mixed_free has left memory");
    settle(AMP_OK);
}

static amp_value values[64];
static int value_count;
static amp_value some_value(void) {
    amp_value v;
    unsigned b = byte();
    v.id = absurd_int();
    v.tag = word();
    return b >= 252 || value_count == 0 ? v : b < 128 ? values[value_count - 1] : values[b % (unsigned)value_count];
}

static amp_value add_conv(amp_model* m) {
    amp_conv2d_desc d;
    memset(&d, 0, sizeof d);
    d.out_channels = number(1, 5);
    d.kernel = number(1, 3);
    if (byte() >= 200) { d.kernel_h = number(0, 4); d.kernel_w = number(0, 4); }
    if (byte() >= 128) { d.stride = number(0, 3); d.pad = number(0, 3); d.dilation = number(0, 3); }
    if (byte() >= 200) { d.stride_h = number(0, 3); d.pad_w = number(0, 3); d.dilation_h = number(0, 3); }
    if (byte() >= 200) d.groups = number(0, 3);
    d.no_bias = number(0, 2);
    d.init = (amp_init)number(0, 4);
    if (byte() >= 192) d.output_pad = number(0, 2);
    return (d.output_pad ? amp_conv_transpose2d_with : amp_conv2d_with)(m, some_value(), byte() >= 254 ? NULL : &d);
}
static amp_value add_pool(amp_model* m) {
    amp_pool2d_desc d;
    unsigned b = byte();
    if (b < 64) return amp_max_pool2d(m, some_value(), number(1, 3));
    if (b < 96) return amp_avg_pool2d(m, some_value(), number(1, 3));
    if (b < 128) return amp_global_avg_pool2d(m, some_value());
    memset(&d, 0, sizeof d);
    d.kind = (amp_pool)number(0, 2);
    d.kernel = number(1, 3);
    d.stride = number(0, 3); d.pad = number(0, 2); d.exclude_pad = number(0, 2);
    if (b >= 200) { d.kernel_h = number(0, 3); d.stride_w = number(0, 3); d.pad_h = number(0, 2); }
    return amp_pool2d_with(m, some_value(), b >= 254 ? NULL : &d);
}
static amp_value add_norm(amp_model* m) {
    amp_norm_desc d;
    d.eps = byte() < 200 ? 0.0f : number_f();
    d.momentum = byte() < 200 ? 0.0f : number_f();
    d.frozen = byte() & 1;
    d.groups = number(0, 4);
    switch (byte() % 5) {
        case 3: return amp_group_norm_with(m, some_value(), &d);
        case 4: return amp_instance_norm_with(m, some_value(), &d);
        case 0: return amp_batch_norm_with(m, some_value(), &d);
        case 1: return amp_layer_norm_with(m, some_value(), &d);
        default: return amp_rms_norm_with(m, some_value(), &d);
    }
}
static amp_value add_loss(amp_model* m) {
    static float class_weights[1u << 20];      /* as many as the allocator has room for */
    amp_scaler_desc own;
    amp_loss_desc d;
    int32_t ignored = number(-1, 3);
    memset(&d, 0, sizeof d);
    memset(&own, 0, sizeof own);
    d.weight = byte() < 200 ? 0.0f : number_f();
    d.smoothing = byte() < 200 ? 0.0f : number_f();
    if (byte() >= 200) d.ignored = &ignored;
    if (byte() >= 200) {
        class_weights[below(4)] = number_f();
        d.class_weights = class_weights;
    }
    if (byte() >= 250) { own.init_scale = number_f(); d.scaler = &own; }
    switch (below(4)) {
        case 3: return amp_mean_with(m, some_value(), byte() & 1 ? &d : NULL);
        case 0: return amp_softmax_cross_entropy_with(m, some_value(), &d);
        case 1: return amp_mse_with(m, some_value(), byte() & 1 ? &d : NULL);
        default: return amp_bce_with_logits_with(m, some_value(), &d);
    }
}

/* Custom operators, with the sizes of what their functions get. */
enum { MAX_OWN = 8 };
static struct own {
    size_t in[AMP_MAX_OPERANDS], out, params[AMP_MAX_OPERANDS], saved, workspace;
    int positions[AMP_MAX_OPERANDS + 1];   /* of the inputs and, last, of the output */
    int inputs, param_count, may_fail;
    amp_value x[AMP_MAX_OPERANDS], y;
} owns[MAX_OWN];
static int own_count;
static size_t features_of(amp_model* m, amp_value v) {
    const amp_layer* l = amp_model_layer(m, amp_model_layer_of(m, v));
    return l ? (size_t)l->channels * (size_t)l->height * (size_t)l->width : 0;
}
/* Reads all that it may read, and writes all that it has to write. */
static double sum_of(amp_ref x, size_t n) {
    double sum = 0.0;
    size_t i;
    for (i = 0; i < n; i++) sum += value_at(x.data, x.dtype, i);
    return sum;
}
static void fill(amp_ref y, size_t n, double x, int add) {
    size_t i;
    for (i = 0; y.data && i < n; i++)
        put_value(y.data, y.dtype, i, x + (double)(i % 5) / 8 + (add ? value_at(y.data, y.dtype, i) : 0.0));
}
/* Rows of operand i in this pass: where a batch may have left positions out, those that there are for certain. */
static size_t own_rows(const struct own* o, const amp_custom_call* c, int i) {
    const int all = o->positions[i];
    return (size_t)c->n * (size_t)(all < c->positions ? all : c->positions);
}
static void measure_owns(amp_model* m) {
    int i, k;
    for (i = 0; i < own_count; i++) {
        struct own* o = &owns[i];
        for (k = 0; k <= AMP_MAX_OPERANDS; k++) {
            const amp_value v = k < AMP_MAX_OPERANDS ? o->x[k] : o->y;
            const amp_layer* l = amp_model_layer(m, amp_model_layer_of(m, v));
            o->positions[k] = l ? l->positions : 1;
            *(k < AMP_MAX_OPERANDS ? &o->in[k] : &o->out) = features_of(m, v);
        }
    }
}
static amp_result own_forward(const amp_custom_call* c) {
    const struct own* o = (const struct own*)c->user_data;
    const size_t n = (size_t)c->n, out = o->out * own_rows(o, c, AMP_MAX_OPERANDS);
    double sum = 0.0;
    int i;
    for (i = 0; i < o->inputs; i++) sum += sum_of(c->x[i], own_rows(o, c, i) * o->in[i]);
    if (c->lengths && c->lengths[0] < 1) give_up("a custom operator gets other lengths");
    for (i = 0; i < o->param_count; i++) sum += sum_of(c->w[i], o->params[i]);
    fill(c->y, out, sum == sum ? 0.25 : sum, 0);
    if (o->saved) memset(c->saved, 0x5a, n * o->saved);
    if (c->exec->workspace_size < o->workspace) give_up("a custom operator lacks its workspace");
    if (o->workspace) memset(c->exec->workspace, 0x77, o->workspace);
    return o->may_fail && byte() >= 200 ? AMP_ERR_MEMORY : AMP_OK;
}
static amp_result own_backward(const amp_custom_call* c) {
    const struct own* o = (const struct own*)c->user_data;
    const size_t n = (size_t)c->n, out = o->out * own_rows(o, c, AMP_MAX_OPERANDS);
    const double sum = sum_of(c->dy, out) + sum_of(c->y, out);
    size_t k;
    int i;
    for (k = 0; k < n * o->saved; k++)
        if (((const unsigned char*)c->saved)[k] != 0x5a) give_up("what a custom operator saved has changed");
    for (i = 0; i < o->inputs; i++) fill(c->dx[i], own_rows(o, c, i) * o->in[i], sum == sum ? 0.125 : sum, 0);
    for (i = 0; i < o->param_count; i++) fill(c->dw[i], o->params[i], 0.5, c->add_dw);
    return o->may_fail && byte() >= 200 ? AMP_ERR_SHAPE : AMP_OK;
}
static amp_value add_custom(amp_model* m, int sound) {
    static const char* const names[] = { "w", "gain", "sevenxx", "eightxxx", "\xff", "" };
    amp_value v[AMP_MAX_OPERANDS + 1], y;
    amp_custom_param params[AMP_MAX_OPERANDS + 1];
    amp_rule rules[4];
    amp_custom_desc d;
    struct own* o = &owns[own_count];
    int i, count = number(1, 4);
    memset(&d, 0, sizeof d);
    memset(params, 0, sizeof params);
    memset(o, 0, sizeof *o);
    for (i = 0; i <= AMP_MAX_OPERANDS; i++) {
        v[i] = some_value();
        params[i].name = byte() < 250 ? names[byte() < 240 ? (unsigned)i % 3 : below(6)] : NULL;
        params[i].count = size(30);
        params[i].init = (amp_init)number(0, 4);
        params[i].fan_in = size(30); params[i].fan_out = size(30);
        params[i].value = number_f();
        if (i < 4) rules[i] = (amp_rule)number(0, 4);
    }
    if (byte() >= 128) { d.channels = number(1, 4); d.height = number(1, 3); d.width = number(1, 3); }
    if (byte() >= 230) d.positions = number(0, 5);
    d.rules = byte() & 1 ? rules : NULL;
    d.params = byte() < 250 ? params : NULL;
    d.param_count = number(0, 4);
    d.saved_bytes = size(40); d.workspace_bytes = size(200);
    d.name = byte() < 200 ? NULL : byte() < 250 ? "own" : "a name that is too long for it";
    d.forward = byte() < 250 ? own_forward : NULL;
    d.backward = byte() < 240 ? own_backward : NULL;
    d.user_data = o;
    if (sound) {
        for (i = 0; i < 2; i++) {
            params[i].name = names[i];
            params[i].count = 1 + below(30);
            params[i].init = AMP_INIT_ZERO;
            params[i].value = 0.5f;
        }
        count = 1 + (int)below(2);
        d.rules = NULL;
        d.params = params;
        d.param_count = (int)below(3);
        d.saved_bytes = below(40); d.workspace_bytes = below(200);
        d.name = NULL;
        d.forward = own_forward;
        d.backward = own_backward;
        if (d.channels < 1 || d.height < 1 || d.width < 1) d.channels = d.height = d.width = 0;
        if (d.positions < 0 || d.positions > 5) d.positions = 0;
    }
    if (count > AMP_MAX_OPERANDS) count = AMP_MAX_OPERANDS + 1;
    for (i = 0; i < AMP_MAX_OPERANDS; i++) {
        o->x[i] = v[i];
        o->params[i] = params[i].count;
    }
    o->inputs = count; o->param_count = d.param_count;
    o->saved = d.saved_bytes; o->workspace = d.workspace_bytes;
    o->may_fail = byte() >= 240;
    y = o->y = amp_custom(m, sound || byte() < 254 ? v : NULL, count, sound || byte() < 254 ? &d : NULL);
    if (y.id) own_count++;
    return y;
}

/* Inputs that are sequences: of tokens, or of numbers. */
static amp_value token_inputs[8];
static int token_count;
static amp_value add_sequence(amp_model* m) {
    amp_input_desc d;
    amp_value v;
    memset(&d, 0, sizeof d);
    if (byte() & 1) {
        v = amp_tokens(m, number(1, 6));
        if (v.id && token_count < 8) token_inputs[token_count++] = v;
        return v;
    }
    d.channels = number(1, 8); d.height = number(1, 2); d.width = number(1, 2);
    d.positions = number(0, 6);
    return amp_input_with(m, &d);
}
static amp_value add_embedding(amp_model* m, amp_value x) {
    amp_embedding_desc d;
    memset(&d, 0, sizeof d);
    d.vocabulary = number(1, 8); d.features = number(1, 16);
    d.init = (amp_init)number(0, 5);
    if (byte() >= 200) d.sd = number_f();
    if (byte() & 1) return amp_embedding_with(m, x, byte() >= 254 ? NULL : &d);
    return amp_embedding(m, x, d.vocabulary, d.features);
}
static amp_value add_attention(amp_model* m) {
    amp_attention_desc d;
    amp_value q = some_value();
    memset(&d, 0, sizeof d);
    d.heads = number(1, 3);
    if (byte() >= 200) d.kv_heads = number(0, 3);
    d.causal = byte() & 1;
    if (byte() >= 200) d.window = number(0, 4);
    if (byte() >= 230) d.scale = number_f();
    if (byte() < 80) return amp_attention(m, q, byte() >= 254 ? NULL : &d);
    return byte() & 1 ? amp_attention_qkv(m, q, q, q, &d) : amp_attention_qkv(m, q, some_value(), some_value(), &d);
}
static amp_value add_block(amp_model* m, amp_value x) {
    amp_transformer_desc d;
    memset(&d, 0, sizeof d);
    d.kind = (amp_block_kind)number(0, 2);
    d.heads = number(1, 3);
    if (byte() >= 128) d.kv_heads = number(0, 3);
    if (byte() >= 200) d.window = number(0, 4);
    if (byte() >= 128) d.bidirectional = number(0, 2);
    d.hidden = byte() < 30 ? 0 : number(1, 12);
    if (byte() >= 200) d.no_bias = number(0, 2);
    if (byte() >= 200) d.dropout = number_f();
    if (byte() >= 200) d.eps = number_f();
    if (byte() >= 230) d.theta = number_f();
    if (byte() >= 200) d.sd = number_f();
    if (byte() >= 200) d.layers = number(0, 4);
    if (byte() >= 200) d.name = byte() < 200 ? "h.0" : byte() & 1 ? "\xff" : "";
    return amp_transformer_block(m, x, byte() >= 254 ? NULL : &d);
}
static amp_value add_rope(amp_model* m, amp_value x) {
    amp_rope_desc d;
    memset(&d, 0, sizeof d);
    d.heads = number(1, 3);
    if (byte() & 1) d.head_size = number(0, 9);
    if (byte() >= 200) d.theta = number_f();
    d.interleaved = byte() & 1;
    return amp_rope(m, x, byte() >= 254 ? NULL : &d);
}
static amp_value add_positions(amp_model* m) {
    amp_embedding_desc d;
    amp_value x = some_value();
    memset(&d, 0, sizeof d);
    switch (below(4)) {
        case 0: return amp_to_positions(m, x);
        case 1: return amp_to_image(m, x, number(1, 4), number(1, 4));
        case 2: d.vocabulary = number(0, 4); d.features = number(0, 4); d.init = (amp_init)number(0, 5);
                return amp_position_embedding_with(m, x, byte() < 128 ? NULL : &d);
        default: return amp_position_embedding(m, x);
    }
}

#define X(NAME, name, ...) amp_##name,
static amp_value (*const activations[])(amp_model*, amp_value) = { AMP_ACTIVATION_LIST(X) };
#undef X
static amp_value add_layer(amp_model* m) {
    amp_value none = { 0 }, a;
    switch (below(29)) {
        case 21: return add_sequence(m);
        case 22: return add_embedding(m, token_count && byte() < 240 ? token_inputs[below((unsigned)token_count)] : some_value());
        case 23: case 24: return add_attention(m);
        case 25: return add_block(m, some_value());
        case 26: return add_rope(m, some_value());
        case 27: return add_positions(m);
        case 28: a = some_value(); return amp_tied_linear(m, a, byte() & 1 ? values[value_count > 1] : some_value());
        case 18: if (own_count < MAX_OWN) return add_custom(m, byte() & 1);
                 return none;
        case 19: a = some_value(); return amp_reuse(m, a, byte() & 1 ? a : some_value());
        case 20: if (byte() & 1) amp_output(m, some_value());
                 else amp_retain_gradient(m, some_value());
                 return none;
        case 0: return amp_input(m, number(1, 4), number(1, 10), number(1, 10));
        case 1: case 2: case 3: return add_conv(m);
        case 4: return amp_linear(m, some_value(), number(1, 10));
        case 5: return add_pool(m);
        case 6: return add_norm(m);
        case 7: return activations[below(AMP_ACTIVATION_COUNT)](m, some_value());
        case 8: return amp_leaky_relu(m, some_value(), byte() < 230 ? 0.1f : number_f());
        case 9: return amp_softmax(m, some_value());
        case 10: return amp_dropout(m, some_value(), byte() < 230 ? 0.3f : number_f());
        case 11: a = some_value(); return (byte() & 1 ? amp_add : amp_mul)(m, a, byte() & 1 ? a : some_value());
        case 12: a = some_value(); return amp_concat(m, a, byte() & 1 ? a : some_value());
        case 13: return byte() & 1 ? amp_upsample(m, some_value(), byte() < 240 ? (int)below(4) : number(0, 3))
                                   : amp_flatten(m, some_value());
        case 14: amp_autocast_push(m, byte() < 240 ? (amp_dtype)below(4) : type()); return none;
        case 15: if (byte() < 32) amp_autocast_pop(m); return none;
        case 16: if (byte() < 128) amp_pin(m, some_value(), byte() < 240 ? (amp_dtype)(1 + below(3)) : type());
                 else amp_group(m, some_value(), byte() < 240 ? (int)below(2) : number(0, 2));
                 return none;
        default: {
            static const char* const names[] = { "first", "conv2d2", "linear1", "x\n", "a.weight", "\xff", "second" };
            amp_name(m, some_value(), byte() >= 250 ? NULL : names[below(7)]);
            return none;
        }
    }
}

static int is_loss(amp_op op) {
    return op == AMP_OP_SOFTMAX_CROSS_ENTROPY || op == AMP_OP_MSE || op == AMP_OP_BCE_WITH_LOGITS || op == AMP_OP_MEAN;
}
static int is_tokens(amp_model* m, int layer) {
    int i;
    for (i = 0; i < token_count; i++) if (amp_model_layer_of(m, token_inputs[i]) == layer) return 1;
    return 0;
}
/* Positions of a batch and lengths of its samples, mostly of those that its first sequence has. */
static void some_lengths(amp_model* m, amp_batch* b, int max_n) {
    int i, most = 0;
    for (i = 0; i < amp_model_layer_count(m); i++) {
        const amp_layer* l = amp_model_layer(m, i);
        if (l->op == AMP_OP_INPUT && l->positions > 1 && (most == 0 || byte() & 1)) most = l->positions;
    }
    if (most == 0 && byte() < 250) return;
    if (byte() >= 128) b->positions = number(1, most ? (unsigned)most : 3);
    if (byte() >= 128) b->lengths = some_ints((size_t)max_n + 1, 1,
        (unsigned)(b->positions > 0 && b->positions < most ? b->positions : most));
}
/* Input data and targets of the sizes that the model says; labels are mostly right. */
static void some_batch(amp_model* m, amp_batch* b, int max_n) {
    int i, inputs = 0, losses = 0, labels = 0, k;
    memset(b, 0, sizeof *b);
    b->n = byte() < 230 ? 1 + (int)below((unsigned)max_n) : byte() & 1 ? 0 : max_n + 1;
    b->input_dtype = byte() < 64 ? AMP_U8 : (amp_dtype)below(4);
    b->label_dtype = byte() < 240 ? (amp_dtype)(below(2) * (AMP_U8 + below(3))) : type();
    for (i = 0; i < amp_model_layer_count(m); i++) {
        const amp_layer* l = amp_model_layer(m, i);
        size_t n = (size_t)(max_n + 1) * (size_t)l->channels * (size_t)l->height * (size_t)l->width * (size_t)l->positions;
        if (l->op == AMP_OP_INPUT && inputs < AMP_MAX_INPUTS)
            b->inputs[inputs++] = is_tokens(m, i) ? (void*)some_ints(n, 0, 2) : operand(n, b->input_dtype, INPUT);
        if (!is_loss(l->op) || losses == AMP_MAX_LOSSES) continue;
        n = (size_t)(max_n + 1) * 1024;
        b->targets[losses++] = block_new(n * 8, INPUT, l->op != AMP_OP_SOFTMAX_CROSS_ENTROPY);
        if (l->op != AMP_OP_SOFTMAX_CROSS_ENTROPY) continue;
        labels = 1;
        memset(blocks[block_count - 1].whole + GUARD, 0, n * 8);
        for (k = 0; k < max_n && byte() >= 128; k++) blocks[block_count - 1].whole[GUARD + amp_dtype_size(b->label_dtype) * (size_t)k] = (unsigned char)below(4);
        memcpy(blocks[block_count - 1].copy, blocks[block_count - 1].whole, blocks[block_count - 1].n);
    }
    if (!labels && byte() < 240) b->label_dtype = AMP_DTYPE_DEFAULT;
    some_lengths(m, b, max_n);
}

static int is_small(amp_model* m) {
    amp_memory bytes;
    int i;
    if (amp_model_memory(m, &bytes) != AMP_OK) give_up("no memory report");
    for (i = 0; i < amp_model_layer_count(m); i++) {
        const amp_layer* l = amp_model_layer(m, i);
        if ((double)l->channels * l->height * l->width * l->positions > 1000.0) return 0;
    }
    return bytes.activation_bytes + bytes.parameter_bytes < (1u << 16);
}

/* The allocator gives 4 MB, so no layer can have more. */
static int is_possible(amp_model* m) {
    int i;
    for (i = 0; i < amp_model_layer_count(m); i++)
        if (amp_model_layer(m, i)->activation_bytes > (1u << 22)) return 0;
    return 1;
}

/* What a planned model may never say. */
static void check_plan(const amp_model* m) {
    if (strstr(amp_model_error(m), "overlap")) give_up("a model has planned arrays over others");
}

/* The parts of a step in any order, with seeds, values and gradients, on memory that holds any tensor of a small model. */
static void run_parts(amp_model* m, const amp_batch* b, int max_n) {
    const size_t features = 1001 * 4 * (size_t)max_n, bytes = features > LARGEST ? features : LARGEST;
    float* out = (float*)block_new(bytes, OUTPUT, 0);
    float* gradient = (float*)block_new(2 * bytes, INPUT, 1);
    amp_step_info info;
    amp_eval_info eval;
    double norm;
    int i, k, count;
    amp_param* params = amp_model_params(m, &count);
    for (i = 0; i < 40 && left; i++) {
        const amp_param* p = byte() >= 250 || !count ? NULL : &params[below((unsigned)count)];
        amp_batch given_batch = *b;
        amp_seeds seeds;
        amp_result r = AMP_OK;
        memset(&seeds, 0, sizeof seeds);
        for (k = 0; k < AMP_MAX_OUTPUTS && byte() >= 128; k++)
            if (byte() & 1) seeds.gradients[k] = amp_ref_of(gradient, byte() < 200 ? (amp_dtype)below(4) : type());
        seeds.scaled = byte() & 1;
        seeds.on_device = byte() & 1;
        refusals = 0;
        switch (byte() & 1 ? (unsigned)i % 8 : below(16)) {      /* every other call is the one that may come next */
            case 0: case 1: case 2: r = amp_forward(m, &given_batch, byte() & 1 ? out : NULL); break;
            case 3: case 4: case 5: r = amp_backward(m, byte() & 1 ? &seeds : NULL); break;
            case 6: case 7: r = amp_update(m, byte() & 1 ? &info : NULL); break;
            case 8: r = amp_discard(m); break;
            case 9: r = amp_model_read_value(m, some_value(), byte() < 250 ? out : NULL); break;
            case 10: r = amp_model_read_gradient(m, some_value(), byte() < 250 ? out : NULL); break;
            case 11: r = amp_model_read_param_gradient(m, p, byte() < 250 ? out : NULL); break;
            case 12: r = amp_model_write_param_gradient(m, p, byte() < 250 ? gradient : NULL); break;
            case 13: r = amp_model_clip_gradients(m, number_f()); break;
            case 14: r = amp_model_gradient_norm(m, p, byte() < 250 ? &norm : NULL); break;
            default: r = byte() & 1 ? amp_train_step(m, b, NULL) : amp_evaluate(m, b, &eval);
        }
        memset(&given_batch, 0x55, sizeof given_batch);
        if (r != AMP_OK && refusals == 0) give_up("a part of a step was refused without a sentence");
        if (r != AMP_OK) check_plan(m);
    }
    if (amp_discard(m) != AMP_OK) give_up("a step cannot be discarded");
}

static int hears_token(int32_t token, void* user_data) {
    if (token < 0) give_up("a token below 0 was drawn");
    (void)user_data;
    return byte() >= 240;
}
static void run_text(amp_model* m) {
    const int prompt_count = number(1, 8), count = number(0, 9);
    const int32_t* prompt = some_ints(prompt_count > 0 && prompt_count < 100 ? (size_t)prompt_count : 0, 0, 2);
    int32_t* out = (int32_t*)operand(count > 0 && count < 100 ? (size_t)count : 0, AMP_F32, OUTPUT);
    amp_generate_desc d;
    amp_result r;
    size_t before = given;
    if (prompt_count > 100 || count > 100) return;
    memset(&d, 0, sizeof d);
    if (byte() & 1) d.temperature = number_f();
    if (byte() & 1) d.top_k = number(0, 4);
    if (byte() >= 200) d.classes = number(0, 4);
    d.seed = word();
    if (byte() & 1) d.on_token = hears_token;
    allowed = byte() >= 200 ? (int)below(5) : -1;
    refusals = 0;
    r = amp_generate(m, some_value(), prompt, prompt_count, out, count, byte() & 1 ? &d : NULL);
    allowed = -1;
    if (r != AMP_OK && refusals == 0) give_up("a text was refused without a sentence");
    if (given != before) give_up("a text has kept memory");
}

static FILE* sink;      /* of reports */
static void run_model(amp_model* m, int max_n) {
    amp_batch b;
    amp_step_info info;
    amp_eval_info eval;
    amp_result r;
    int i;
    size_t before = given;
    measure_owns(m);
    for (i = 0; i < 3; i++) {
        amp_optimizer* o = amp_model_optimizer(m);
        if (o && byte() >= 128) o->groups[below(2)].frozen = byte() & 1;
        some_batch(m, &b, max_n);
        r = amp_train_step(m, &b, byte() & 1 ? &info : NULL);
        if (r != AMP_OK && amp_model_error(m)[0] == 0) give_up("a step failed without a sentence");
        if (r != AMP_OK) check_plan(m);
        if (r == AMP_OK) r = amp_evaluate(m, &b, &eval);
        if (r == AMP_OK) {
            amp_value v = some_value();
            float* out = (float*)block_new(1001 * 4 * (size_t)max_n, OUTPUT, 0);
            amp_predict(m, &b, v, out);
        }
        if (byte() & 1) run_parts(m, &b, max_n);
        if (token_count > 0) run_text(m);
        if (!sink) sink = fopen("/dev/null", "wb");
        if (sink && byte() < 64) (void)amp_report_print(m, &b, sink);
        refusals = 1;
        settle(AMP_OK);
    }
    if (given != before) give_up("a step has allocated");
}

static void try_graph(void) {
    amp_policy_desc precision;
    amp_scaler_desc scaler;
    amp_param_group groups[AMP_MAX_GROUPS];
    amp_op white[4], black[4];
    amp_model_desc d;
    amp_model* m = (amp_model*)&d;
    amp_result r;
    int layers = 3 + (int)below(30);
    memset(&d, 0, sizeof d);
    memset(groups, 0, sizeof groups);
    d.batch = number(1, 4);
    d.logger = logger;
    d.allocator.alloc = byte() >= 254 ? NULL : limited_alloc;
    d.allocator.free = limited_free;
    allowed = byte() >= 220 ? (int)below(14) : -1;
    given = 0;
    d.precision.level = (amp_level)below(4);
    if (byte() >= 200) { some_policy_desc(&precision, white, black); d.precision = precision; }
    if (byte() >= 200) { some_scaler_desc(&scaler); d.scaler = &scaler; }
    if (byte() >= 200) some_optimizer_desc(&d.optimizer, groups);
    else {
        d.optimizer.kind = (amp_optimizer_kind)below(4);
        d.optimizer.groups = groups;
        d.optimizer.group_count = byte() >= 16 ? 2 : 0;
    }
    if (byte() >= 200) { d.grad_dtype = type(); d.accumulate = number(0, 3); d.max_replays = number(0, 3); }
    if (d.max_replays > 100) d.max_replays = 100;
    r = amp_model_create(&m, &d);
    if (r != AMP_OK && m) give_up("a model in spite of a failure");
    if (r != AMP_OK) { settle(r); return; }
    value_count = own_count = token_count = 0;
    values[value_count++] = amp_input(m, number(1, 3), number(1, 8), number(1, 8));
    while (layers-- && left && value_count < 60) {
        amp_value v = add_layer(m);
        if (v.id) values[value_count++] = v;
    }
    if (byte() < 250) (void)add_loss(m);
    refusals = 0;
    r = amp_model_finalize(m);
    if (r != AMP_OK && (amp_model_error(m)[0] == 0 || amp_train_step(m, NULL, NULL) == AMP_OK)) give_up("a broken graph runs");
    if (r == AMP_OK && !is_possible(m)) give_up("a layer is larger than all memory");
    if (r == AMP_OK && d.batch < 100 && is_small(m)) run_model(m, d.batch);
    amp_model_destroy(m);
    if (given != 0) give_up("the model has kept memory");
    refusals = 0;
}

/* A model of a sequence of which most settings are sound: tokens or numbers, blocks and layers on them, logits. */
static void try_sequence(void) {
    amp_param_group groups[AMP_MAX_GROUPS];
    amp_embedding_desc e;
    amp_model_desc d;
    amp_model* m;
    amp_value v;
    int layers = (int)below(6), tokens = byte() < 200, width = 4 * (1 + (int)below(3)), steps = 1 + (int)below(5);
    memset(&d, 0, sizeof d);
    memset(&e, 0, sizeof e);
    memset(groups, 0, sizeof groups);
    d.batch = 1 + (int)below(3);
    d.precision.level = (amp_level)below(4);
    d.precision.low_dtype = byte() & 1 ? AMP_BF16 : AMP_F16;
    d.inference = byte() >= 230;
    d.accumulate = byte() >= 200 ? 2 : 1;
    d.optimizer.kind = (amp_optimizer_kind)below(4);
    d.optimizer.groups = groups;
    d.optimizer.group_count = 2;
    d.logger = logger;
    d.allocator.alloc = limited_alloc;
    d.allocator.free = limited_free;
    allowed = -1;
    given = 0;
    value_count = own_count = token_count = 0;
    if (amp_model_create(&m, &d) != AMP_OK) give_up("a model of sound settings was refused");
    if (tokens) {
        values[value_count++] = token_inputs[token_count++] = amp_tokens(m, steps);
        e.vocabulary = 2 + (int)below(4); e.features = width; e.init = AMP_INIT_NORMAL;
        values[value_count++] = amp_embedding_with(m, values[0], &e);
    } else if (byte() & 1) {
        amp_input_desc in;
        memset(&in, 0, sizeof in);
        in.channels = width; in.height = in.width = 1; in.positions = steps;
        values[value_count++] = amp_input_with(m, &in);
    } else {
        values[value_count++] = amp_input(m, width, 2, 2);
        values[value_count++] = amp_to_positions(m, values[0]);
    }
    while (layers-- && left && value_count < 60) {
        const amp_value x = values[value_count - 1];
        amp_transformer_desc block;
        amp_rope_desc rope;
        amp_attention_desc att;
        memset(&block, 0, sizeof block); memset(&rope, 0, sizeof rope); memset(&att, 0, sizeof att);
        switch (below(9)) {
            case 0: case 1:
                block.kind = (amp_block_kind)below(2);
                block.heads = byte() & 1 ? 2 : 1; block.kv_heads = byte() & 1; block.hidden = 1 + (int)below(8);
                block.bidirectional = byte() & 1; block.window = block.bidirectional ? 0 : (int)below(3);
                block.dropout = byte() & 1 ? 0.25f : 0.0f; block.no_bias = byte() & 1;
                v = amp_transformer_block(m, x, &block);
                break;
            case 2: rope.heads = 1; rope.head_size = 2 * (1 + (int)below(2)); v = amp_rope(m, x, &rope); break;
            case 3: att.heads = 2; att.causal = byte() & 1; v = amp_attention_qkv(m, x, x, x, &att); break;
            case 4: v = amp_position_embedding(m, x); break;
            case 5: v = amp_rms_norm(m, x); break;
            case 6: v = byte() & 1 ? amp_add(m, x, x) : amp_mul(m, x, x); break;
            case 7: v = own_count < MAX_OWN ? add_custom(m, 1) : amp_silu(m, x); break;
            default: v = amp_reuse(m, some_value(), x);
        }
        if (v.id) values[value_count++] = v;
    }
    if (tokens && byte() & 1) { v = amp_tied_linear(m, values[value_count - 1], values[1]); if (v.id) values[value_count++] = v; }
    if (byte() >= 128) amp_output(m, values[value_count - 1]);
    if (byte() < 200) (void)add_loss(m);
    refusals = 0;
    if (amp_model_finalize(m) == AMP_OK) {
        if (is_small(m)) run_model(m, d.batch);
    } else if (amp_model_error(m)[0] == 0) give_up("a graph was refused without a sentence");
    amp_model_destroy(m);
    if (given != 0) give_up("the model has kept memory");
    refusals = 0;
}

/* A small graph with what the parts of a step need: outputs, retained gradients, a custom operator, a layer used again. */
static void try_parts(void) {
    amp_scaler_desc scaler;
    amp_model_desc d;
    amp_model* m;
    amp_batch b;
    amp_value x, v;
    int i;
    memset(&d, 0, sizeof d);
    memset(&scaler, 0, sizeof scaler);
    d.batch = 1 + (int)below(3);
    d.precision.level = (amp_level)below(4);
    d.accumulate = 1 + (int)below(2);
    d.logger = logger;
    d.allocator.alloc = limited_alloc;
    d.allocator.free = limited_free;
    scaler.init_scale = byte() & 1 ? 1e30f : 64.0f;
    d.scaler = &scaler;
    allowed = -1;
    given = 0;
    value_count = own_count = token_count = 0;
    if (amp_model_create(&m, &d) != AMP_OK) give_up("a model of sound settings was refused");
    x = amp_input(m, 1 + (int)below(3), 2, 2);
    v = amp_linear(m, x, 3);
    values[value_count++] = x;
    values[value_count++] = v;
    for (i = 0; i < 3; i++) {
        v = byte() & 1 ? add_custom(m, 1) : amp_tanh(m, some_value());
        if (v.id) values[value_count++] = v;
    }
    v = byte() & 1 ? amp_reuse(m, values[1], x) : amp_linear(m, v, 3);
    values[value_count++] = v;
    for (i = 0; i < value_count; i++) {
        if (byte() & 1) amp_output(m, values[i]);
        if (byte() & 1) amp_retain_gradient(m, values[i]);
    }
    if (byte() & 1) amp_mean(m, v);
    else if (byte() & 1) amp_softmax_cross_entropy(m, v);
    if (amp_model_finalize(m) == AMP_OK && is_small(m)) {
        measure_owns(m);
        some_batch(m, &b, d.batch);
        run_parts(m, &b, d.batch);
        refusals = 1;
        settle(AMP_OK);
    }
    amp_model_destroy(m);
    if (given != 0) give_up("the model has kept memory");
    refusals = 0;
}

/* --- the dispatcher ------------------------------------------------------------------------------------------------ */

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t n);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t n) {
    static void (*const parts[])(void) = {
        try_convert, try_gemm, try_gemm_batched, try_linear, try_conv, try_pool, try_batch_norm, try_rows, try_elements, try_losses,
        try_scaler, try_scaler, try_optimizer, try_mixed, try_policy, try_stats, try_graph, try_graph,
        try_parts, try_parts, try_attention, try_attention, try_rope, try_embedding, try_group_norm, try_mul, try_sequence,
        try_sequence
    };
    input = data;
    left = n;
    filler = 1;
    refusals = too_large = 0;
    parts[below(sizeof parts / sizeof parts[0])]();
    refusals = 1;                         /* a part may leave before its call */
    settle(AMP_OK);
    return 0;
}

#if !defined(AMP_FUZZER)

/* Byte strings of random lengths, on memory of exactly that size. */
int main(int argc, char** argv) {
    unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 20000, i;
    unsigned long long state = argc > 2 ? strtoul(argv[2], NULL, 10) : 1;
    for (i = 0; i < rounds; i++) {
        size_t n, k;
        unsigned char* p;
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        n = 1 + (size_t)(state >> 33) % 400;
        p = (unsigned char*)malloc(n);
        if (!p) give_up("no memory");
        for (k = 0; k < n; k++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            p[k] = (unsigned char)(state >> 50);
        }
        LLVMFuzzerTestOneInput(p, n);
        free(p);
    }
    printf("%lu passed, 0 failed\n", rounds);
    return 0;
}

#endif
