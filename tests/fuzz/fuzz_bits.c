/* fuzz_bits.c - the same bits wherever the arrays lie: random calls of the operators, conversions, scalers and optimizers.
   fuzz_bits [rounds] [seed]; the n-th round is also the first one of seed + n - 1.
   A round makes a call in plain C, on arrays that begin cache lines, without a workspace and with one thread; then
   with each instruction set, on arrays that begin anywhere, some workspace, in place where that is allowed, and, built
   with OpenMP, one or three threads. All results must have the bits of the first, and nothing else may have changed. */
#include "../../amp.h"
#include "../test.h"
#include "../upper.h"
#include <math.h>
#ifdef _OPENMP
  #include <omp.h>
#endif

/* EXACT: NaNs too have the same bits. COVERED: in this run another result has taken its place. */
enum { INPUT, LABELS, OUTPUT, EXACT, COVERED, MAX_ARRAYS = 24, MAX_GUARD = 128, MARK = 0xa5 };
/* `start` before each run, `want` after the first: the elements with guards on both sides. `now`: those of this run. */
static struct array { unsigned char *start, *want, *room, *now; amp_dtype t; size_t n, bytes; int kind; } arrays[MAX_ARRAYS];
static int count;                          /* of the arrays of this round */
static int next;                           /* of those that this run has taken */
static int reference;                      /* 1: this is the first run of the round */
static size_t guard;                       /* bytes on both sides, none now and then: for the address sanitizer */
static unsigned long long places;          /* the random numbers that differ from run to run */
static char what[600];                     /* the call, for people */

static unsigned below(unsigned n) { return test_random() % n; }
/* The same of the run's own: 0 in the first. */
static unsigned other_below(unsigned n) {
    unsigned long long kept = test_seed;
    unsigned r;
    if (reference) return 0;
    test_seed = places;
    r = below(n);
    places = test_seed;
    test_seed = kept;
    return r;
}

/* --- sizes, types, values ------------------------------------------------------------------------ */

/* Around what vectors, cache lines and tiles hold. */
static size_t some_size(void) {
    static const unsigned short round[] = { 16, 32, 64, 128, 256, 512, 1024, 2048 };
    switch (below(8)) {
        case 0: case 1: return 1 + below(8);
        case 2: case 3: return 16 * (1 + below(4)) - 3 + below(7);
        case 4: return (size_t)round[below(8)];
        case 5: return 64 * (1 + below(12)) - 2 + below(5);
        case 6: return 16 * (1 + below(40));
        default: return 1 + below(300);
    }
}
static size_t some_depth(void) { return below(24) ? some_size() : 4097 + below(2000); }
static amp_dtype some_type(void) { return (amp_dtype)(1 + below(3)); }
/* Most often the type that the last array has. */
static amp_dtype like(amp_dtype t) { return below(3) ? t : some_type(); }
/* Halves the largest until their product is small: in one of eight rounds not that small. */
static void limit(size_t* a, size_t* b, size_t* c) {
    const double most = below(8) ? 4e5 : 6e6;
    while ((double)*a * (double)*b * (double)*c > most) {
        size_t* large = *a >= *b && *a >= *c ? a : *b >= *c ? b : c;
        *large = (*large + 1) / 2;
    }
}
static int some_int(int low, unsigned n) { return low + (int)below(n); }
static float some_factor(void) {
    static const float list[] = { 1.0f, 0.0f, -1.0f, 0.5f, 0.3f, -2.7f };
    return below(2) ? 1.0f : list[below(6)];
}

/* Bits of a float: mostly ordinary. Moods: 10, 11 with special ones among them, 12 subnormals, 13 subnormal products,
   14 mostly zeros, 15 any bits. */
static float some_value(unsigned mood, amp_dtype t) {
    static const float special[] = { 0.0f, -0.0f, 1e-40f, -1e-45f, 6e-8f, -3e-6f, 65504.0f, -3e38f, 88.0f, -104.0f };
    const uint32_t r = test_random(), odd[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffa00001u };
    const uint32_t bits = mood == 15 ? r << 1 ^ r >> 20 : odd[r / 512 % 4];
    float v;
    memcpy(&v, &bits, 4);
    if (mood == 15 || (mood == 11 && r % 331 == 0)) return v;
    if ((mood == 10 || mood == 11) && r % 31 == 0) return special[r / 31 % 10];
    if (mood == 14 && r % 4) return r % 8 == 1 ? -0.0f : 0.0f;
    v = test_uniform() * (float)(1u << r / 64 % 4);
    return mood == 12 ? ldexpf(v, t == AMP_F16 ? -16 : -126) : mood == 13 ? ldexpf(v, t == AMP_F16 ? -9 : -66) : v;
}
/* classes: of labels; of other values, 0 lets no sign remain. */
static void fill(struct array* a, unsigned classes) {
    const unsigned mood = below(20);
    unsigned char* p = a->start + MAX_GUARD;
    size_t i;
    memset(a->start, MARK, a->bytes + 2 * MAX_GUARD);
    memset(a->want, MARK, a->bytes + 2 * MAX_GUARD);
    for (i = 0; i < a->n; i++, p += amp_dtype_size(a->t)) {
        const int32_t label = (int32_t)(classes ? below(classes) : 0);
        float v = some_value(mood, a->t);
        if (classes == 0) v = v < 0 ? -v : v;
        if (a->kind == LABELS) memcpy(p, &label, 4);
        else if (a->t == AMP_F64) { double d = (double)v + 1e-9 * (double)test_uniform(); memcpy(p, &d, sizeof d); }
        else if (amp_convert(amp_ref_of(p, a->t), amp_f32(&v), 1) != AMP_OK) abort();
    }
}

/* --- arrays --------------------------------------------------------------------------------------- */

static unsigned char* memory(size_t n) {
    unsigned char* p = (unsigned char*)malloc(n ? n : 1);
    if (!p) { puts("no memory"); exit(1); }
    return p;
}
/* Room for guards and an array that begins `offset` bytes behind a line: nothing is left behind it, where malloc lets. */
static unsigned char* place(size_t bytes, size_t offset, unsigned char** room) {
    size_t skip = 0, lead, i;
    for (i = 0; ; i++) {
        *room = memory(skip + 2 * guard + offset + bytes);
        lead = (64 - (size_t)((uintptr_t)*room % 64)) % 64;
        if (lead == skip || i == 3) return *room + lead + guard + offset;
        free(*room);
        skip = i == 2 ? 64 : lead;
    }
}
static struct array* take(size_t n, amp_dtype t, int kind, unsigned classes) {
    struct array* a = &arrays[next++];
    const size_t each = amp_dtype_size(t);
    const unsigned where = other_below(3);
    if (next > MAX_ARRAYS) abort();
    a->kind = kind;
    if (reference) {
        const unsigned long long kept = test_seed;
        count = next;
        a->t = t; a->n = n; a->bytes = n * each;
        a->start = memory(a->bytes + 2 * MAX_GUARD);
        a->want = memory(a->bytes + 2 * MAX_GUARD);
        test_seed = kept ^ (unsigned long long)next << 40;
        fill(a, classes);
        test_seed = kept;
    }
    a->now = place(a->bytes, where == 0 ? 0 : where == 1 ? 16 : each * other_below((unsigned)(64 / each)), &a->room);
    memcpy(a->now - guard, a->start + MAX_GUARD - guard, a->bytes + 2 * guard);
    return a;
}
static void* in(size_t n, amp_dtype t) { return take(n, t, INPUT, 1)->now; }
static void* positive(size_t n, amp_dtype t, int kind) { return take(n, t, kind, 0)->now; }
static void* out(size_t n, amp_dtype t) { return take(n, t, OUTPUT, 1)->now; }
static float* out_f(size_t n) { return (float*)out(n, AMP_F32); }
static float* in_f(size_t n) { return (float*)in(n, AMP_F32); }
/* One of three times NULL. */
static void* maybe(size_t n, amp_dtype t, int kind) { return below(3) ? take(n, t, kind, 1)->now : NULL; }
static const int32_t* labels(size_t n, size_t classes) {
    return (const int32_t*)(const void*)take(n, AMP_F32, LABELS, (unsigned)classes)->now;
}
/* A result that may lie in the place of `x`, if that has its type: in some runs it does. */
static void* over(void* x, size_t n, amp_dtype t, int kind) {
    struct array *y = take(n, t, kind, 1), *a = arrays;
    while (a->now != (unsigned char*)x) a++;
    if (a->t != t || other_below(3) != 1) return y->now;
    free(y->room);
    y->room = a->room;
    y->now = a->now;
    a->room = NULL;
    a->kind = COVERED;
    return y->now;
}

/* Where an array differs from what it must be; its size + 1: nowhere. Two NaNs are equal, where that is enough. */
static size_t first_difference(const struct array* a, const unsigned char* must) {
    const size_t each = amp_dtype_size(a->t), whole = a->bytes + 2 * guard;
    const unsigned char* now = a->now;
    size_t i;
    if (memcmp(now - guard, must - guard, whole) == 0) return a->n + 1;
    for (i = 0; i < a->n; i++, now += each, must += each) {
        double x = 0, y = 0;
        if (memcmp(now, must, each) == 0) continue;
        if (a->kind != OUTPUT || amp_convert(amp_ref_of(&x, AMP_F64), amp_ref_of(now, a->t), 1) != AMP_OK ||
            amp_convert(amp_ref_of(&y, AMP_F64), amp_ref_of(must, a->t), 1) != AMP_OK || x == x || y == y) return i;
    }
    return memcmp(now, must, guard) || memcmp(a->now - guard, now, guard) ? a->n : a->n + 1;
}
/* None, some, enough or more than enough, anywhere. */
static struct array scratch;
static amp_exec* some_exec(size_t enough) {
    static amp_exec exec;
    const unsigned how = other_below(5);
    memset(&exec, 0, sizeof exec);
    if (how == 0) return other_below(2) ? &exec : NULL;
    exec.workspace_size = scratch.bytes = how == 1 ? enough / 2 : how == 2 ? other_below(70000) : enough;
    exec.workspace = scratch.now = place(scratch.bytes, how == 3 ? 0 : other_below(64), &scratch.room);
    memset(scratch.now, 0xff, scratch.bytes);
    memset(scratch.now - guard, MARK, guard);
    memset(scratch.now + scratch.bytes, MARK, guard);
    return &exec;
}

/* --- products ----------------------------------------------------------------------------------------- */

/* Elements from row to row. */
static size_t some_ld(size_t rows, size_t columns) {
    size_t ld = columns;
    switch (below(6)) {
        case 0: ld += 1 + below(20); break;
        case 1: ld = (ld + 15) / 16 * 16; break;
        case 2: ld = (ld + 2047) / 2048 * 2048; break;
        case 3: ld += 16 * (1 + below(4)); break;
        default: break;
    }
    return rows * ld > 300000 ? columns : ld;
}
static size_t reach(size_t rows, size_t columns, size_t ld) { return rows && columns ? (rows - 1) * ld + columns : 0; }
static void some_product(size_t* m, size_t* n, size_t* k) {
    const unsigned form = below(4);
    *m = some_size();
    *n = some_size();
    *k = some_depth();
    if (form == 0) *m = 1 + below(9);
    if (form == 1) *n = 1 + below(9);
    limit(m, n, k);
}
static amp_result try_gemm(void) {
    const amp_transpose ta = (amp_transpose)below(2), tb = (amp_transpose)below(2);
    const amp_dtype at = some_type(), bt = like(at), ct = like(AMP_F32);
    const float alpha = some_factor(), beta = below(2) ? 0.0f : some_factor();
    size_t m, n, k, ar, ac, br, bc, lda, ldb, ldc;
    void *a, *b, *c;
    some_product(&m, &n, &k);
    ar = ta ? k : m; ac = ta ? m : k; br = tb ? n : k; bc = tb ? k : n;
    lda = some_ld(ar, ac); ldb = some_ld(br, bc); ldc = some_ld(m, n);
    sprintf(what, "gemm %d%d %lux%lux%lu ld %lu %lu %lu types %d%d%d, %g, %g", ta, tb, (unsigned long)m, (unsigned long)n,
            (unsigned long)k, (unsigned long)lda, (unsigned long)ldb, (unsigned long)ldc, at, bt, ct, (double)alpha, (double)beta);
    a = in(reach(ar, ac, lda), at); b = in(reach(br, bc, ldb), bt); c = take(reach(m, n, ldc), ct, EXACT, 1)->now;
    return amp_gemm(PRODUCT(ta, tb, m, n, k, lda, ldb, ldc), alpha, amp_ref_of(a, at),
        amp_ref_of(b, bt), beta, amp_ref_of(c, ct), some_exec(amp_gemm_workspace(m, n, k)));
}
/* From matrix to matrix of a batch: none, as far as one reaches or further, or side by side in rows that are longer. */
static size_t some_stride(size_t rows, size_t columns, size_t* ld, size_t batch, int may_share) {
    unsigned how = below(4);
    if (may_share && how == 0) return 0;
    if (how == 1) { *ld = columns * batch; return columns; }
    return reach(rows, columns, *ld) + (how == 2 ? below(40) : 0);
}
static amp_result try_batched(void) {
    const amp_transpose ta = (amp_transpose)below(2), tb = (amp_transpose)below(2);
    const amp_dtype at = some_type(), bt = like(at), ct = like(AMP_F32);
    const float alpha = some_factor(), beta = below(2) ? 0.0f : some_factor();
    size_t m, n, k, ar, ac, br, bc, lda, ldb, ldc, as, bs, cs, batch = 1 + below(below(4) ? 6 : 40);
    void *a, *b, *c;
    do some_product(&m, &n, &k); while (m * n * k * batch > 1000000 || (m * n + m * k + n * k) * batch > 200000);
    ar = ta ? k : m; ac = ta ? m : k; br = tb ? n : k; bc = tb ? k : n;
    lda = ac + below(3); ldb = bc + below(3); ldc = n + below(3);
    as = some_stride(ar, ac, &lda, batch, 1); bs = some_stride(br, bc, &ldb, batch, 1); cs = some_stride(m, n, &ldc, batch, 0);
    sprintf(what, "gemm_batched %d%d %lux%lux%lu x%lu ld %lu %lu %lu strides %lu %lu %lu types %d%d%d, %g, %g", ta, tb,
            (unsigned long)m, (unsigned long)n, (unsigned long)k, (unsigned long)batch, (unsigned long)lda, (unsigned long)ldb,
            (unsigned long)ldc, (unsigned long)as, (unsigned long)bs, (unsigned long)cs, at, bt, ct, (double)alpha, (double)beta);
    a = in((batch - 1) * as + reach(ar, ac, lda), at);
    b = in((batch - 1) * bs + reach(br, bc, ldb), bt);
    c = take((batch - 1) * cs + reach(m, n, ldc), ct, EXACT, 1)->now;
    return amp_gemm(PRODUCTS(ta, tb, m, n, k, lda, ldb, ldc, batch, as, bs, cs), alpha,
        amp_ref_of(a, at), amp_ref_of(b, bt), beta, amp_ref_of(c, ct),
        some_exec(amp_gemm_workspace(m, n, k)));
}
/* What a backward function adds to. */
static int some_sums(void) { return (int)below(2) | (below(3) ? 0 : AMP_ACCUMULATE_INPUT); }
static amp_result try_linear(void) {
    const int backward = (int)below(2), add = some_sums();
    const amp_dtype xt = some_type(), wt = like(xt), bt = like(xt), yt = like(xt), gt = like(AMP_F32);
    size_t n, i, o, enough;
    void *x, *w, *b, *dy, *dx, *dw;
    some_product(&n, &o, &i);
    sprintf(what, "linear %s n %lu in %lu out %lu types %d%d%d%d%d", backward ? add ? "backward added" : "backward" : "forward",
            (unsigned long)n, (unsigned long)i, (unsigned long)o, xt, wt, bt, yt, gt);
    x = in(n * i, xt); w = in(o * i, wt);
    enough = amp_gemm_workspace(n, o, i);
    if (!backward) {
        b = maybe(o, bt, INPUT); dy = out(n * o, yt);
        return amp_linear_forward(amp_ref_of(x, xt), amp_ref_of(w, wt), amp_ref_of(b, bt),
            amp_ref_of(dy, yt), n, i, o, some_exec(enough));
    }
    dy = in(n * o, yt); dx = maybe(n * i, xt, OUTPUT); dw = maybe(o * i, gt, OUTPUT); b = maybe(o, bt, OUTPUT);
    enough = amp_gemm_workspace(n, i, o);
    if (enough < amp_gemm_workspace(o, i, n)) enough = amp_gemm_workspace(o, i, n);
    return amp_linear_backward(amp_ref_of(dy, yt), amp_ref_of(x, xt), amp_ref_of(w, wt),
        amp_ref_of(dx, xt), amp_ref_of(dw, gt), amp_ref_of(b, bt), add, n, i, o, some_exec(enough));
}

/* --- convolution, pooling ---------------------------------------------------------------------------- */

/* Image, kernel and channels until all is small. */
static void some_conv(amp_conv2d_shape* s, int* oh, int* ow) {
    double work;
    do {
        const int wide = (int)below(2);
        const int each = wide ? 16 * some_int(1, below(4) ? 4 : 16) - some_int(0, 3) : some_int(1, 9);
        const int outs = below(3) == 0 ? some_int(1, 9) : 16 * some_int(1, 4) - some_int(0, 3);
        memset(s, 0, sizeof *s);
        s->groups = below(3) ? 1 : below(2) ? some_int(2, 3) : some_int(2, 40);
        s->n = some_int(1, 4);
        s->channels = each * s->groups;
        s->out_channels = (s->groups > 4 ? some_int(1, 2) : outs) * s->groups;
        s->height = some_int(1, below(2) ? 12 : 40);
        s->width = below(3) ? some_int(1, 40) : 16 * some_int(1, 10) - some_int(0, 3);
        s->kernel_h = below(3) ? 3 : some_int(1, 7);
        s->kernel_w = below(3) ? s->kernel_h : some_int(1, 7);
        if (below(3) == 0) s->kernel_h = s->kernel_w = 1;
        s->stride_h = below(2) ? 1 : some_int(1, 4);
        s->stride_w = below(2) ? s->stride_h : some_int(1, 4);
        s->pad_h = below(2) ? s->kernel_h / 2 : some_int(0, 4);
        s->pad_w = below(2) ? s->kernel_w / 2 : some_int(0, 4);
        if (below(4) == 0) { s->dilation_h = some_int(1, 3); s->dilation_w = some_int(1, 3); }
        if (amp_conv2d_output(s, oh, ow, NULL) != AMP_OK) { work = 1e9; continue; }
        work = (double)s->n * s->out_channels * *oh * *ow * each * s->kernel_h * s->kernel_w;
    } while (work > 5e6 || (double)s->n * (s->channels * s->height * s->width + s->out_channels * *oh * *ow) > 1e5);
}
static amp_result try_conv(void) {
    const int backward = (int)below(3), add = some_sums();
    const amp_dtype xt = some_type(), wt = like(xt), bt = like(xt), yt = like(xt), gt = like(AMP_F32);
    amp_conv2d_shape s;
    int oh = 0, ow = 0;
    size_t nx, nw, ny;
    void *x, *w, *b, *dy, *dx, *dw;
    some_conv(&s, &oh, &ow);
    sprintf(what, "conv2d %s %dx%dx%dx%d -> %dx%dx%d kernel %dx%d stride %dx%d pad %dx%d dilation %dx%d groups %d types %d%d%d%d%d",
            backward ? add ? "backward added" : "backward" : "forward", s.n, s.channels, s.height, s.width, s.out_channels, oh, ow,
            s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.pad_h, s.pad_w, s.dilation_h, s.dilation_w, s.groups, xt, wt, bt, yt,
            gt);
    nx = (size_t)s.n * (size_t)s.channels * (size_t)s.height * (size_t)s.width;
    nw = (size_t)s.out_channels * (size_t)(s.channels / s.groups) * (size_t)s.kernel_h * (size_t)s.kernel_w;
    ny = (size_t)s.n * (size_t)s.out_channels * (size_t)oh * (size_t)ow;
    x = in(nx, xt); w = in(nw, wt);
    if (!backward) {
        b = maybe((size_t)s.out_channels, bt, INPUT); dy = out(ny, yt);
        return amp_conv2d_forward(&s, amp_ref_of(x, xt), amp_ref_of(w, wt), amp_ref_of(b, bt),
            amp_ref_of(dy, yt), some_exec(amp_conv2d_workspace(&s)));
    }
    dy = in(ny, yt); dx = maybe(nx, xt, OUTPUT); dw = maybe(nw, gt, OUTPUT); b = maybe((size_t)s.out_channels, bt, OUTPUT);
    return amp_conv2d_backward(&s, amp_ref_of(dy, yt), amp_ref_of(x, xt), amp_ref_of(w, wt),
        amp_ref_of(dx, xt), amp_ref_of(dw, gt), amp_ref_of(b, bt), add,
        some_exec(amp_conv2d_workspace(&s)));
}
static amp_result try_pool(void) {
    const amp_dtype xt = some_type(), yt = like(xt), dt = like(xt);
    amp_pool2d_shape s;
    int oh = 0, ow = 0, backward = (int)below(2);
    size_t nx, ny;
    void *x, *y;
    do {
        memset(&s, 0, sizeof s);
        s.kind = (amp_pool)below(2);
        s.n = some_int(1, 3); s.channels = some_int(1, below(3) ? 4 : 40);
        s.height = some_int(1, 30); s.width = below(2) ? some_int(1, 40) : 16 * some_int(1, 12) - some_int(-2, 5);
        s.kernel_h = some_int(1, 4); s.kernel_w = below(2) ? s.kernel_h : some_int(1, 5);
        if (below(8) == 0) { s.kernel_h = s.height; s.kernel_w = s.width; }
        if (below(2)) { s.stride_h = some_int(1, 3); s.stride_w = some_int(1, 3); }
        s.pad_h = some_int(0, (unsigned)s.kernel_h / 2 + 1); s.pad_w = some_int(0, (unsigned)s.kernel_w / 2 + 1);
        s.exclude_pad = (int)below(2);
    } while (s.width < 1 || amp_pool2d_output(&s, &oh, &ow, NULL) != AMP_OK || s.n * s.channels * s.height * s.width > 100000);
    sprintf(what, "pool2d %s %d of %dx%dx%dx%d kernel %dx%d stride %dx%d pad %dx%d%s types %d%d%d", backward ? "backward" : "forward",
            s.kind, s.n, s.channels, s.height, s.width, s.kernel_h, s.kernel_w, s.stride_h, s.stride_w, s.pad_h, s.pad_w,
            s.exclude_pad ? " excluded" : "", xt, yt, dt);
    nx = (size_t)s.n * (size_t)s.channels * (size_t)s.height * (size_t)s.width;
    ny = (size_t)s.n * (size_t)s.channels * (size_t)oh * (size_t)ow;
    x = in(nx, xt);
    if (!backward) { y = out(ny, yt); return amp_pool2d_forward(&s, amp_ref_of(x, xt),
        amp_ref_of(y, yt), some_exec(0)); }
    y = in(ny, yt);
    return amp_pool2d_backward(&s, amp_ref_of(y, yt), amp_ref_of(x, xt),
        amp_ref_of(out(nx, dt), dt), 0, some_exec(0));
}

/* --- attention ------------------------------------------------------------------------------------- */

static amp_result try_attention(void) {
    const int backward = (int)below(2), add = some_sums();
    const amp_dtype qt = some_type(), kt = like(qt), vt = like(kt), yt = like(qt), gt = like(qt);
    amp_attention_shape s;
    size_t rows, keys, lse;
    void *q, *k, *v, *y, *dy;
    memset(&s, 0, sizeof s);
    s.batch = 1 + below(3); s.kv_heads = 1 + below(2); s.heads = s.kv_heads * (1 + below(3));
    s.queries = 1 + below(below(3) ? 70 : 200); s.keys = 1 + below(below(3) ? 70 : 600); s.head_size = 1 + below(below(3) ? 40 : 80);
    s.causal = (int)below(2); s.window = s.causal && below(2) ? 1 + below(90) : 0;
    s.ldq = s.heads * s.head_size + below(3); s.ldk = s.kv_heads * s.head_size + below(3); s.ldv = s.kv_heads * s.head_size;
    s.ldy = s.heads * s.head_size; s.key_stride = s.keys + below(3);
    sprintf(what, "attention %s %lux%lux%lu heads %lu/%lu of %lu causal %d window %lu types %d%d%d%d%d",
            backward ? add ? "backward added" : "backward" : "forward", (unsigned long)s.batch, (unsigned long)s.queries,
            (unsigned long)s.keys, (unsigned long)s.heads, (unsigned long)s.kv_heads, (unsigned long)s.head_size, s.causal,
            (unsigned long)s.window, qt, kt, vt, yt, gt);
    rows = s.batch * s.queries; keys = (s.batch - 1) * s.key_stride + s.keys; lse = rows * s.heads;
    q = in(rows * s.ldq, qt); k = in(keys * s.ldk, kt); v = in(keys * s.ldv, vt);
    if (!backward) {
        y = out(rows * s.ldy, yt);
        return amp_attention_forward(&s, amp_ref_of(q, qt), amp_ref_of(k, kt), amp_ref_of(v, vt), amp_ref_of(y, yt),
            (float*)maybe(lse, AMP_F32, OUTPUT), some_exec(amp_attention_workspace(&s)));
    }
    y = in(rows * s.ldy, yt); dy = in(rows * s.ldy, yt);
    {
        const float* saved = in_f(lse);
        void *dq = maybe(rows * s.ldq, gt, OUTPUT), *dk = maybe(keys * s.ldk, gt, OUTPUT), *dv = maybe(keys * s.ldv, gt, OUTPUT);
        return amp_attention_backward(&s, amp_ref_of(dy, yt), amp_ref_of(q, qt), amp_ref_of(k, kt), amp_ref_of(v, vt),
            amp_ref_of(y, yt), saved, amp_ref_of(dq, gt), amp_ref_of(dk, gt), amp_ref_of(dv, gt), add,
            some_exec(amp_attention_workspace(&s)));
    }
}

/* --- norms, rows, elements, losses ------------------------------------------------------------------- */

static amp_result try_batch_norm(void) {
    const amp_dtype xt = some_type(), pt = like(AMP_F32), yt = like(xt), dt = like(xt);
    const int training = (int)below(2), backward = (int)below(2), add = some_sums();
    size_t n = 1 + below(4), c = some_size(), spatial = below(3) ? some_size() : 1, all;
    amp_batch_norm_shape s;
    void *x, *gamma, *beta, *y;
    float *mean, *var, *save, *invstd;
    if (spatial == 1 && below(2)) n = some_size();
    limit(&n, &c, &spatial);
    memset(&s, 0, sizeof s);
    s.n = (int)n; s.channels = (int)c; s.spatial = (int)spatial;
    s.frozen = below(4) == 0;
    if (s.n * s.spatial < 2) s.n++;
    all = (size_t)s.n * c * spatial;
    sprintf(what, "batch_norm %s %d, frozen %d, %dx%dx%d types %d%d%d%d", backward ? "backward" : "forward", training, s.frozen, s.n,
            s.channels, s.spatial, xt, pt, yt, dt);
    x = in(all, xt); gamma = maybe(c, pt, INPUT);
    if (!backward) {
        beta = maybe(c, pt, INPUT); mean = out_f(c); var = (float*)positive(c, AMP_F32, OUTPUT);
        save = out_f(c); invstd = out_f(c); y = out(all, yt);
        return amp_batch_norm_forward(&s, training, amp_ref_of(x, xt), amp_ref_of(gamma, pt),
            amp_ref_of(beta, pt), mean, var, save, invstd, amp_ref_of(y, yt), some_exec(0));
    }
    y = in(all, yt); save = in_f(c); invstd = (float*)positive(c, AMP_F32, INPUT);
    gamma = below(4) ? gamma : NULL;
    beta = maybe(c, dt, OUTPUT); mean = (float*)maybe(c, dt, OUTPUT);
    return amp_batch_norm_backward(&s, amp_ref_of(y, yt), amp_ref_of(x, xt),
        amp_ref_of(gamma, pt), save, invstd,
        amp_ref_of(add & AMP_ACCUMULATE_INPUT ? out(all, dt) : over(y, all, dt, OUTPUT), dt),
        amp_ref_of(beta, dt), amp_ref_of(mean, dt), add, some_exec(0));
}
static amp_result try_rows(void) {
    const amp_dtype xt = some_type(), pt = like(AMP_F32), yt = like(xt), dt = like(xt);
    const unsigned which = below(8);
    const int add = some_sums();
    const size_t few = 16384, total_more = below(40), column = total_more ? below((unsigned)total_more) : 0;
    size_t rows = some_size(), d = below(16) ? some_size() : 2000 + below(4000), one = below(8) ? 25 : 2, n;
    void *x, *gamma, *beta, *y;
    float *save, *invstd;
    limit(&rows, &d, &one);
    if (one == 25 && rows * d > few) rows = few / d + 1;
    n = rows * d;
    sprintf(what, "rows, part %u: %lux%lu types %d%d%d%d, column %lu, %lu more", which, (unsigned long)rows, (unsigned long)d, xt, pt,
            yt, dt, (unsigned long)column, (unsigned long)total_more);
    if (which == 4) {
        x = in(n, xt); y = out(rows * (d + total_more), yt);
        return amp_concat_forward(amp_ref_of(x, xt), d, amp_ref_of(y, yt), d + total_more, column,
            rows, some_exec(0));
    }
    if (which == 5) {
        y = in(rows * (d + total_more), yt); x = out(n, xt);
        return amp_concat_backward(amp_ref_of(y, yt), d + total_more, column, amp_ref_of(x, xt),
            d, rows, add, some_exec(0));
    }
    x = in(n, xt);
    if (which == 0) return amp_softmax_forward(amp_ref_of(x, xt),
        amp_ref_of(over(x, n, yt, OUTPUT), yt), rows, d, some_exec(0));
    if (which == 1) { y = in(n, yt); return amp_softmax_backward(amp_ref_of(x, xt),
        amp_ref_of(y, yt), amp_ref_of(out(n, dt), dt), 0, rows, d, some_exec(0)); }
    gamma = maybe(d, pt, INPUT);
    if (which == 2) {
        beta = maybe(d, pt, INPUT); y = out(n, yt);
        save = (float*)maybe(rows, AMP_F32, OUTPUT); invstd = (float*)maybe(rows, AMP_F32, OUTPUT);
        return amp_layer_norm_forward(amp_ref_of(x, xt), amp_ref_of(gamma, pt),
            amp_ref_of(beta, pt), 0.0f, save, invstd, amp_ref_of(y, yt), rows, d, some_exec(0));
    }
    if (which == 6) {
        y = out(n, yt); invstd = (float*)maybe(rows, AMP_F32, OUTPUT);
        return amp_rms_norm_forward(amp_ref_of(x, xt), amp_ref_of(gamma, pt), 0.0f, invstd, amp_ref_of(y, yt), rows, d, some_exec(0));
    }
    y = in(n, yt); save = in_f(rows); invstd = (float*)positive(rows, AMP_F32, INPUT);
    beta = maybe(d, pt, OUTPUT);
    if (which == 7)
        return amp_rms_norm_backward(amp_ref_of(y, yt), amp_ref_of(x, xt), amp_ref_of(gamma, pt), 0.0f, invstd,
            amp_ref_of(out(n, dt), dt), amp_ref_of(beta, pt), add, rows, d, some_exec(amp_layer_norm_workspace(rows, d)));
    return amp_layer_norm_backward(amp_ref_of(y, yt), amp_ref_of(x, xt), amp_ref_of(gamma, pt),
        0.0f, save, invstd, amp_ref_of(out(n, dt), dt), amp_ref_of(beta, pt),
        amp_ref_of(maybe(d, pt, OUTPUT), pt), add, rows, d,
        some_exec(amp_layer_norm_workspace(rows, d)));
}
static size_t some_count(void) { return below(12) ? below(4) ? some_size() : 1 + below(6000) : 65000 + below(9000); }
static amp_result try_elements(void) {
    const amp_dtype xt = some_type(), yt = like(xt), dt = like(xt);
    const amp_activation f = (amp_activation)below(AMP_ACTIVATION_COUNT);
    const unsigned which = below(4);
    const size_t n = some_count(), offset = below(70);
    void *x, *y;
    sprintf(what, "elements, part %u: %lu types %d%d%d, activation %d, offset %lu", which, (unsigned long)n, xt, yt, dt, f,
            (unsigned long)offset);
    x = in(n, xt);
    if (which == 0)
        return amp_activation_forward(f, amp_ref_of(x, xt),
            amp_ref_of(over(x, n, yt, OUTPUT), yt), n, some_exec(AMP_ACTIVATION_WORKSPACE));
    if (which == 1) return amp_dropout_forward(amp_ref_of(x, xt),
        amp_ref_of(over(x, n, yt, OUTPUT), yt), n, 0.3f, 7, offset, some_exec(0));
    y = in(n, yt);
    if (which == 2)
        return amp_activation_backward(f, amp_ref_of(x, xt), amp_ref_of(y, yt),
            amp_ref_of(over(x, n, dt, OUTPUT), dt), 0, n, some_exec(AMP_ACTIVATION_WORKSPACE));
    return amp_add_forward(amp_ref_of(x, xt), amp_ref_of(y, yt),
        amp_ref_of(over(below(2) ? x : y, n, dt, OUTPUT), dt), n, some_exec(0));
}
static amp_result try_losses(void) {
    const amp_dtype xt = some_type(), tt = like(AMP_F32), dt = like(xt);
    const unsigned which = below(6);
    const float scale = below(2) ? 1.0f : 1024.0f;
    const amp_cross_entropy_desc smooth = { below(2) ? 0.0f : 0.1f, 0, NULL, NULL, 0 };
    size_t k = some_size(), n = 1 + below(20000) / (unsigned)k, all = n * k;
    const int32_t* label;
    void *x, *target;
    if (which > 1) all = some_count();
    sprintf(what, "losses, part %u: %lu rows of %lu, or %lu, types %d%d%d", which, (unsigned long)n, (unsigned long)k,
            (unsigned long)all, xt, tt, dt);
    x = in(all, xt);
    label = labels(n, k); target = positive(all, tt, INPUT);
    switch (which) {
        case 0: return amp_softmax_cross_entropy_forward(amp_ref_of(x, xt), label, &smooth,
            out_f(1), n, k, some_exec(0));
        case 1: return amp_softmax_cross_entropy_backward(amp_ref_of(x, xt), label, &smooth,
            &scale, 0.7f, amp_ref_of(out(all, dt), dt), n, k, some_exec(0));
        case 2: return amp_mse_forward(amp_ref_of(x, xt), amp_ref_of(target, tt), out_f(1), all,
            some_exec(0));
        case 3: return amp_mse_backward(amp_ref_of(x, xt), amp_ref_of(target, tt), &scale, 0.7f,
            amp_ref_of(out(all, dt), dt), all, some_exec(0));
        case 4: return amp_bce_with_logits_forward(amp_ref_of(x, xt), amp_ref_of(target, tt),
            out_f(1), all, some_exec(0));
        default: return amp_bce_with_logits_backward(amp_ref_of(x, xt), amp_ref_of(target, tt),
            &scale, 0.7f, amp_ref_of(out(all, dt), dt), all, some_exec(0));
    }
}

/* --- conversions, statistics, scalers, optimizers ------------------------------------------------------- */

static amp_result try_convert(void) {
    const amp_dtype from = (amp_dtype)(1 + below(4)), to = (amp_dtype)(1 + below(4));
    const size_t n = some_count();
    size_t clamped = 0;
    amp_convert_desc d;
    amp_result r;
    double* report;
    void* x;
    memset(&d, 0, sizeof d);
    d.saturate = (int)below(2);
    if (amp_dtype_size(to) == 2 && below(2)) d.rounding = AMP_ROUND_STOCHASTIC;
    d.seed = test_random();
    d.offset = below(70);
    if (below(2)) d.saturated = &clamped;
    sprintf(what, "convert %lu from %d to %d, saturate %d, rounding %d", (unsigned long)n, from, to, d.saturate, d.rounding);
    report = (double*)out(1, AMP_F64);
    x = in(n, from);
    r = amp_convert_with(amp_ref_of(over(x, n, to, EXACT), to), amp_ref_of(x, from), n, &d);
    *report = (double)clamped;
    return r;
}
static amp_result try_stats(void) {
    const amp_dtype t = (amp_dtype)(1 + below(4)), target = some_type();
    const size_t n = some_count();
    void *out_of = take(sizeof(amp_stats) / 8, AMP_F64, EXACT, 1)->now, *x = in(n, t);
    sprintf(what, "stats of %lu, types %d%d", (unsigned long)n, t, target);
    return amp_stats_collect((amp_stats*)out_of, x, t, n, target, 0);
}
static void write_info(double* report, const amp_overflow_info* i, float inverse) {
    report[0] = i->found_inf; report[1] = (double)i->inf_count; report[2] = (double)i->nan_count; report[3] = i->first_tensor;
    report[4] = (double)i->first_index; report[5] = i->last_tensor; report[6] = i->norm; report[7] = (double)inverse;
}
static amp_result try_scaler(void) {
    const unsigned which = below(3);
    const int tensors = some_int(1, 3), add = (int)below(2);
    double* report = (double*)out(8, AMP_F64);
    amp_tensor src[3], dst[3];
    amp_scaler_desc d;
    amp_scaler s;
    amp_overflow_info info;
    amp_result r;
    int i;
    memset(&d, 0, sizeof d);
    memset(src, 0, sizeof src);
    memset(dst, 0, sizeof dst);
    memset(&info, 0, sizeof info);
    d.init_scale = below(2) ? 1024.0f : 3.0f;
    sprintf(what, "scaler, part %u, add %d:", which, add);
    for (i = 0; i < tensors; i++) {
        src[i].dtype = some_type(); dst[i].dtype = like(AMP_F32);
        src[i].count = dst[i].count = some_count() - 1;
        sprintf(what + strlen(what), " %lu type %d to %d", (unsigned long)src[i].count, src[i].dtype, dst[i].dtype);
        src[i].data = take(src[i].count, src[i].dtype, which == 1 ? OUTPUT : INPUT, 1)->now;
        if (which == 2) dst[i].data = out(dst[i].count, dst[i].dtype);
    }
    r = amp_scaler_init(&s, &d);
    (void)amp_scaler_scale_loss(&s, 1.0f);
    if (r == AMP_OK) r = which == 0 ? amp_scaler_check(&s, src, tensors, &info) : which == 1 ? amp_scaler_unscale(&s, src, tensors, &info)
                       : amp_scaler_unscale_into(&s, dst, src, tensors, add, &info);
    write_info(report, &info, s.state.inverse);
    return r;
}
static amp_result try_optimizer(void) {
    const int params = some_int(1, 3), scaled = (int)below(2), early = (int)below(2);
    double* report = (double*)out(10, AMP_F64);
    amp_optimizer_desc d;
    amp_optimizer o;
    amp_optimizer_info info;
    amp_scaler s;
    amp_param p[3];
    amp_result r;
    int i;
    memset(&d, 0, sizeof d);
    memset(p, 0, sizeof p);
    memset(&info, 0, sizeof info);
    d.kind = (amp_optimizer_kind)below(5);
    if ((d.kind == AMP_SGD || d.kind == AMP_RMSPROP) && below(2)) d.momentum = 0.9f;
    if (d.momentum > 0 && below(2)) d.nesterov = d.eps_in_root = 1;
    if (below(2)) d.weight_decay = 0.1f;
    if (below(2)) d.clip_norm = 1.5f;
    d.unchecked = (int)below(2);
    d.maximize = below(8) == 0;
    sprintf(what, "optimizer %d, momentum %g, decay %g, clip %g, scaled %d:", d.kind, (double)d.momentum, (double)d.weight_decay,
            (double)d.clip_norm, scaled);
    for (i = 0; i < params; i++) {
        const int low = (int)below(3);
        p[i].count = some_count();
        p[i].grad_dtype = some_type();
        p[i].low_dtype = below(2) ? AMP_F16 : AMP_BF16;
        sprintf(what + strlen(what), " %lu grad %d low %d%d", (unsigned long)p[i].count, p[i].grad_dtype, low, p[i].low_dtype);
        p[i].grad = out(p[i].count, p[i].grad_dtype);
        if (low) p[i].low = out(p[i].count, p[i].low_dtype);
        if (low != 1) p[i].master = out_f(p[i].count);
        p[i].m = out_f(p[i].count);
        p[i].v = (float*)positive(p[i].count, AMP_F32, OUTPUT);
    }
    r = amp_optimizer_init(&o, &d, p, params);
    if (r == AMP_OK) r = amp_scaler_init(&s, NULL);
    (void)amp_scaler_scale_loss(&s, 1.0f);
    if (r == AMP_OK && scaled && early) r = amp_optimizer_unscale(&o, &s);
    if (r == AMP_OK) r = amp_optimizer_step(&o, scaled ? &s : NULL, &info);
    write_info(report, &info.overflow, info.clip_coefficient);
    report[8] = info.grad_norm; report[9] = info.applied;
    return r;
}

/* --- rounds --------------------------------------------------------------------------------------------- */

/* The bits of an element, or of what lies behind the last one. */
static unsigned long bits_of(const struct array* a, const unsigned char* p, size_t k) {
    unsigned long bits = 0;
    size_t i = amp_dtype_size(a->t), each = i;
    while (k < a->n && i-- > 0) bits = bits << 8 | p[k * each + i];
    return bits;
}
/* Compares what this run has left with what it must be, or keeps it. */
static int settle(void) {
    int i, same = 1;
    size_t k;
    for (i = 0; i < next && same; i++) {
        const struct array* a = &arrays[i];
        unsigned char* must = (a->kind >= OUTPUT ? a->want : a->start) + MAX_GUARD;
        if (reference && a->kind >= OUTPUT) memcpy(must, a->now, a->bytes);
        if (a->kind == COVERED || (k = first_difference(a, must)) > a->n) continue;
        same = 0;
        sprintf(what + strlen(what), ": array %d, element %lu of %lu: %lx, not %lx", i, (unsigned long)k, (unsigned long)a->n,
                bits_of(a, a->now, k), bits_of(a, must, k));
    }
    for (i = 0; i < next; i++) free(arrays[i].room);
    for (k = 0; scratch.room && k < guard; k++) same &= scratch.now[k - guard] == MARK && scratch.now[scratch.bytes + k] == MARK;
    free(scratch.room);
    scratch.room = NULL;
    return same;
}
static void run(unsigned long seed, amp_isa isa, int threads) {
    static amp_result (*const parts[])(void) = {
        try_gemm, try_gemm, try_gemm, try_gemm, try_batched, try_linear, try_linear, try_conv, try_conv, try_conv, try_conv, try_pool,
        try_batch_norm, try_rows, try_rows, try_attention, try_elements, try_losses, try_convert, try_stats, try_scaler, try_optimizer
    };
    amp_result r;
    test_seed = seed * 0x9e3779b97f4a7c15ull;
    guard = below(4) ? MAX_GUARD : 0;
    next = 0;
    r = parts[below(sizeof parts / sizeof parts[0])]();
    CHECK_MSG(r == AMP_OK && upper_in_use() != 1, "seed %lu, %s: %d: %s", seed, amp_isa_name(isa), r, what);
    CHECK_MSG(settle(), "seed %lu, %s, %d threads: %s", seed, amp_isa_name(isa), threads, what);
}

int main(int argc, char** argv) {
    const unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 2000, first = argc > 2 ? strtoul(argv[2], NULL, 10) : 1;
    unsigned long seed;
    int isa, i;
    for (seed = first; seed < first + rounds; seed++) {
        places = ~(unsigned long long)seed;
        for (isa = AMP_ISA_AUTO; isa <= AMP_ISA_AVX512_BF16; isa++) {
            int threads = 1;
            reference = isa == AMP_ISA_AUTO;
            if (amp_cpu_force_isa(reference ? AMP_ISA_SCALAR : (amp_isa)isa) != AMP_OK) continue;
#ifdef _OPENMP
            threads = other_below(2) ? 3 : 1;
            omp_set_num_threads(threads);
#endif
            run(seed, (amp_isa)isa, threads);
        }
        for (i = 0; i < count; i++) { free(arrays[i].start); free(arrays[i].want); }
    }
    TEST_END();
}
