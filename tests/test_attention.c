/* test_attention.c - attention and the rotary embedding against plain references in double: random shapes with all
   options, each with a workspace, with some, and with none, and with each instruction set: all bits must be equal.
   Bounds. u = 2^-24 is the rounding of one FP32 operation; r and s that of weights and of gradients of scores, where these
   are rounded to 16 bits. A sum of n products may be off by n u times the sum of their magnitudes. */
#include "helpers.h"
#include <math.h>

static const double u = 1.0 / 16777216.0;
static unsigned long long hash;

/* --- operands: rows of `cols` elements, ld apart, between guards ---------------------------------------------------- */

enum { GUARD = 64, MARK = 0xA5 };
typedef struct rows { unsigned char* block; void* p; amp_dtype t; size_t rows, cols, ld; } rows;

static size_t reach(const rows* x) { return x->rows ? (x->rows - 1) * x->ld + x->cols : 0; }
static size_t whole(const rows* x) { return reach(x) * amp_dtype_size(x->t) + 2 * GUARD; }
static rows make(amp_dtype t, size_t n, size_t cols, size_t ld) {
    rows x = { NULL, NULL, t, n, cols, ld };
    x.block = (unsigned char*)malloc(whole(&x));
    memset(x.block, MARK, whole(&x));
    x.p = x.block + GUARD;
    return x;
}
static double get(const rows* x, size_t row, size_t col) { return value_at(x->p, x->t, row * x->ld + col); }
static rows random_rows(amp_dtype t, size_t n, size_t cols, size_t ld, double scale) {
    rows x = make(t, n, cols, ld);
    size_t i, c;
    for (i = 0; i < n; i++)
        for (c = 0; c < cols; c++) put_value(x.p, t, i * ld + c, scale * (double)(test_uniform() + test_uniform() + test_uniform()));
    return x;
}
static rows copy_of(const rows* x) {
    rows y = make(x->t, x->rows, x->cols, x->ld);
    memcpy(y.block, x->block, whole(x));
    return y;
}
/* What lies around rows and between them must be as it was. */
static void check_guards(const rows* x) {
    const size_t each = amp_dtype_size(x->t);
    size_t i, bad = 0, at = GUARD;
    for (i = 0; i < GUARD; i++) bad += x->block[i] != MARK || x->block[whole(x) - 1 - i] != MARK;
    for (i = 0; i + 1 < x->rows; i++, at += x->ld * each) {
        size_t k;
        for (k = x->cols * each; k < x->ld * each; k++) bad += x->block[at + k] != MARK;
    }
    CHECK_MSG(bad == 0, "%lu bytes overwritten around %lux%lu of %s", (unsigned long)bad, (unsigned long)x->rows,
              (unsigned long)x->cols, amp_dtype_name(x->t));
}
static void drop(rows* x) { free(x->block); x->block = NULL; }
static void add_hash(const rows* x) {
    size_t i;
    for (i = 0; i < whole(x); i++) hash = (hash ^ x->block[i]) * 1099511628211ull;
}
static amp_ref ref(const rows* x) { return amp_ref_of(x->p, x->t); }

static double rounding(amp_dtype t, double v) {
    const double unit = t == AMP_F16 ? ldexp(1, -11) : t == AMP_BF16 ? ldexp(1, -8) : u;
    const double least = t == AMP_F16 ? ldexp(1, -25) : t == AMP_BF16 ? ldexp(1, -134) : ldexp(1, -150);
    return fabs(v) * unit > least ? fabs(v) * unit : least;
}
/* The same of a type that intermediate results are rounded to: FP32 is no rounding. */
static double tile_rounding(amp_dtype t, double v) { return t == AMP_F32 ? 0 : rounding(t, v); }
static const char* what = "";
static void check_near(const char* name, const rows* x, size_t row, size_t col, double want, double error) {
    const double got = get(x, row, col);
    CHECK_MSG(fabs(got - want) <= error * (1 + 1e-6) + rounding(x->t, want) * (1 + ldexp(1, -7)),
              "%s: %s[%lu,%lu] of %s is %.9g, not %.9g +- %.3g", what, name, (unsigned long)row, (unsigned long)col,
              amp_dtype_name(x->t), got, want, error);
}

/* --- a call and its reference ----------------------------------------------------------------------------------------- */

enum { MAX_KEYS = 700, MAX_D = 272 };
typedef struct call {
    amp_attention_shape s;      /* as given */
    size_t keys, kv_heads, stride;
    rows q, k, v, y, dy, dq, dk, dv, lse;
    amp_dtype operands;
} call;

static size_t length_of(const call* c, size_t b) { return c->s.lengths ? (size_t)c->s.lengths[b] : c->keys; }
static int sees(const call* c, size_t b, size_t i, size_t j) {
    const long long last = (long long)i + (long long)c->keys - (long long)c->s.queries, key = (long long)j;
    if (j >= length_of(c, b)) return 0;
    if (!c->s.causal) return 1;
    return key <= last && (c->s.window == 0 || key > last - (long long)c->s.window);
}
static double scale_of(const call* c) {
    return c->s.scale != 0 ? (double)c->s.scale : (double)(float)(1 / sqrt((double)c->s.head_size));
}
/* The score of query i with key j, and a bound of its error. */
static double score(const call* c, size_t b, size_t h, size_t i, size_t j, double* error) {
    const size_t d = c->s.head_size, g = h / (c->s.heads / c->kv_heads);
    double sum = 0, size = 0;
    size_t e;
    for (e = 0; e < d; e++) {
        const double x = get(&c->q, b * c->s.queries + i, h * d + e) * get(&c->k, b * c->stride + j, g * d + e);
        sum += x;
        size += fabs(x);
    }
    *error = fabs(scale_of(c)) * ((double)d * size * u + fabs(sum) * u);
    return scale_of(c) * sum;
}
/* Forward of one query: y, the lse, and bounds of their errors. Returns whether it sees a key. */
static int reference_query(const call* c, size_t b, size_t h, size_t i, double* y, double* y_error, double* lse,
                           double* lse_error) {
    static double s[MAX_KEYS];
    const size_t d = c->s.head_size, g = h / (c->s.heads / c->kv_heads);
    double max = -INFINITY, sum = 0, error = 0, e;
    size_t j, k;
    int seen = 0;
    for (j = 0; j < c->keys; j++) {
        if (!sees(c, b, i, j)) continue;
        s[j] = score(c, b, h, i, j, &e);
        if (e + 2 * fabs(s[j]) * u > error) error = e + 2 * fabs(s[j]) * u;
        max = fmax(max, s[j]);
        seen = 1;
    }
    if (!seen) return 0;
    /* of the difference from the maximum, twice; of exp and of a sum of 16 lanes of 16; of rescalings, one in 256 keys */
    error = 2 * error + (28 + 4 * (double)(c->keys / 256)) * u;
    for (j = 0; j < c->keys; j++) if (sees(c, b, i, j)) sum += exp(s[j] - max);
    *lse = max + log(sum);
    *lse_error = error + (fabs(max) + fabs(*lse) + 2 * fabs(log(sum))) * u;
    for (k = 0; k < d; k++) {
        double all = 0, size = 0, rounded = 0;
        for (j = 0; j < c->keys; j++) {
            const double p = sees(c, b, i, j) ? exp(s[j] - max) : 0, v = get(&c->v, b * c->stride + j, g * d + k);
            if (p == 0) continue;
            all += p * v;
            size += p * fabs(v);
            rounded += tile_rounding(c->operands ? c->operands : c->v.t, p) * fabs(v);
        }
        y[k] = all / sum;
        y_error[k] = ((2 * error + (double)c->keys * u) * size + rounded * (1 + 1e-3)) / sum;
    }
    return 1;
}
static void check_forward(const call* c) {
    static double y[MAX_D], y_error[MAX_D];
    double lse = 0, lse_error = 0;
    size_t b, h, i, k;
    for (b = 0; b < c->s.batch; b++)
        for (h = 0; h < c->s.heads; h++)
            for (i = 0; i < c->s.queries; i++) {
                const size_t row = b * c->s.queries + i;
                const int seen = reference_query(c, b, h, i, y, y_error, &lse, &lse_error);
                for (k = 0; k < c->s.head_size; k++)
                    if (seen) check_near("y", &c->y, row, h * c->s.head_size + k, y[k], y_error[k]);
                    else CHECK(get(&c->y, row, h * c->s.head_size + k) == 0);
                if (seen) check_near("lse", &c->lse, b * c->s.heads + h, i, lse, lse_error);
                else CHECK(to_bits(((float*)c->lse.p)[(b * c->s.heads + h) * c->s.queries + i]) == 0xff800000u);
            }
}

/* Gradients of one head, in double, with bounds: sums over queries and keys that see each other. */
typedef struct sums { double *dq, *dk, *dv, *dq_error, *dk_error, *dv_error; } sums;
static void reference_pair(const call* c, const sums* o, size_t b, size_t h, size_t i, size_t j, double dot, double dot_error) {
    const size_t d = c->s.head_size, g = h / (c->s.heads / c->kv_heads), qr = b * c->s.queries + i, kr = b * c->stride + j;
    const amp_dtype weight = c->operands ? c->operands : c->v.t, slope = c->operands ? c->operands : c->q.t;
    const double lse = get(&c->lse, b * c->s.heads + h, i), scale = scale_of(c);
    double e, dp = 0, size = 0, s = score(c, b, h, i, j, &e), p = exp(s - lse), p_error, ds, ds_error;
    size_t k;
    for (k = 0; k < d; k++) {
        const double x = get(&c->v, kr, g * d + k) * get(&c->dy, qr, h * d + k);
        dp += x;
        size += fabs(x);
    }
    p_error = p * (e + (fabs(s - lse) + 4) * u);
    ds = p * (dp - dot);
    ds_error = p_error * fabs(dp - dot) + p * ((double)d * size * u + dot_error + fabs(dp - dot) * 2 * u);
    /* each result's sum has at most 64 queries or 256 keys in a row, then one more addition for each such block */
    p_error += tile_rounding(weight, p) * (1 + 1e-3) + (64 + (double)c->s.queries) * u * p;
    ds_error += tile_rounding(slope, ds) * (1 + 1e-3) + (64 + (double)(c->s.queries + c->keys)) * u * fabs(ds);
    for (k = 0; k < d; k++) {
        const double q = get(&c->q, qr, h * d + k), key = get(&c->k, kr, g * d + k), dy = get(&c->dy, qr, h * d + k);
        o->dv[kr * c->kv_heads * d + g * d + k] += p * dy;
        o->dv_error[kr * c->kv_heads * d + g * d + k] += p_error * fabs(dy);
        o->dk[kr * c->kv_heads * d + g * d + k] += scale * ds * q;
        o->dk_error[kr * c->kv_heads * d + g * d + k] += fabs(scale) * ds_error * fabs(q);
        o->dq[qr * c->s.heads * d + h * d + k] += scale * ds * key;
        o->dq_error[qr * c->s.heads * d + h * d + k] += fabs(scale) * ds_error * fabs(key);
    }
}
/* old: what gradients held; NULL: they were not added to. */
static void check_sums(const char* name, const call* c, const rows* x, const rows* old, const double* want, const double* error) {
    const int keys = x->rows != c->q.rows || x->cols != c->q.cols || x->p == c->dk.p || x->p == c->dv.p;
    size_t i, k;
    for (i = 0; i < x->rows; i++) {
        const int unused = keys && i % c->stride >= c->keys;    /* room of a cache */
        for (k = 0; k < x->cols; k++) {
            const double was = old ? get(old, i, k) : 0;
            if (unused) continue;
            check_near(name, x, i, k, want[i * x->cols + k] + was,
                       error[i * x->cols + k] + (fabs(was) + fabs(want[i * x->cols + k])) * 8 * u);
        }
    }
}
static double* zeros(const rows* x) { return (double*)calloc(x->rows * x->cols + 1, sizeof(double)); }
static void check_backward(const call* c, const rows old[3]) {
    sums o = { zeros(&c->q), zeros(&c->k), zeros(&c->k), zeros(&c->q), zeros(&c->k), zeros(&c->k) };
    size_t b, h, i, j, k;
    for (b = 0; b < c->s.batch; b++)
        for (h = 0; h < c->s.heads; h++)
            for (i = 0; i < c->s.queries; i++) {
                double dot = 0, size = 0;
                for (k = 0; k < c->s.head_size; k++) {
                    const double x = get(&c->y, b * c->s.queries + i, h * c->s.head_size + k)
                        * get(&c->dy, b * c->s.queries + i, h * c->s.head_size + k);
                    dot += x;
                    size += fabs(x);
                }
                for (j = 0; j < c->keys; j++)
                    if (sees(c, b, i, j)) reference_pair(c, &o, b, h, i, j, dot, (double)(c->s.head_size / 16 + 6) * u * size);
            }
    check_sums("dq", c, &c->dq, old ? &old[0] : NULL, o.dq, o.dq_error);
    check_sums("dk", c, &c->dk, old ? &old[1] : NULL, o.dk, o.dk_error);
    check_sums("dv", c, &c->dv, old ? &old[2] : NULL, o.dv, o.dv_error);
    free(o.dq); free(o.dk); free(o.dv); free(o.dq_error); free(o.dk_error); free(o.dv_error);
}

/* --- random calls ------------------------------------------------------------------------------------------------------ */

static unsigned below(unsigned n) { return test_random() % n; }
static amp_dtype some_type(void) { return TYPES[below(3)]; }
static amp_dtype like(amp_dtype t) { return below(4) ? t : some_type(); }
static size_t some_ld(size_t cols) { return cols + (below(3) ? 0 : 1 + below(20)); }
static size_t some_count(void) {
    static const size_t list[] = { 1, 2, 15, 16, 17, 33, 63, 64, 65, 70, 100, 128, 130 };
    return list[below(COUNT(list))];
}

/* Operands of a shape whose fields but for ld's are set. */
static void make_operands(call* c, amp_dtype t, double size) {
    amp_attention_shape* s = &c->s;
    const size_t group = below(2) ? 1 : 1 + below(3), d = s->head_size;
    size_t kv_rows;
    c->kv_heads = 1 + below(2);
    s->heads = c->kv_heads * group;
    s->kv_heads = group == 1 && below(2) ? 0 : c->kv_heads;
    c->keys = s->keys ? s->keys : s->queries;
    c->stride = s->key_stride ? s->key_stride : c->keys;
    kv_rows = (s->batch - 1) * c->stride + c->keys;
    s->ldq = some_ld(s->heads * d); s->ldy = some_ld(s->heads * d);
    s->ldk = some_ld(c->kv_heads * d); s->ldv = some_ld(c->kv_heads * d);
    c->q = random_rows(t, s->batch * s->queries, s->heads * d, s->ldq, size);
    c->k = random_rows(like(t), kv_rows, c->kv_heads * d, s->ldk, size);
    c->v = random_rows(like(t), kv_rows, c->kv_heads * d, s->ldv, 1);
    c->dy = random_rows(like(t), s->batch * s->queries, s->heads * d, s->ldy, 1);
    c->y = make(like(t), c->q.rows, c->q.cols, s->ldy);
    c->lse = make(AMP_F32, s->batch * s->heads, s->queries, s->queries);
    c->dq = make(like(t), c->q.rows, c->q.cols, s->ldq);
    c->dk = make(like(t), kv_rows, c->k.cols, s->ldk);
    c->dv = make(like(t), kv_rows, c->v.cols, s->ldv);
    if (s->ldq == s->heads * d && below(2)) s->ldq = 0;
    if (s->ldk == c->kv_heads * d && below(2)) s->ldk = 0;
    if (s->ldv == c->kv_heads * d && below(2)) s->ldv = 0;
    if (s->ldy == s->heads * d && below(2)) s->ldy = 0;
}
static void drop_call(call* c) {
    drop(&c->q); drop(&c->k); drop(&c->v); drop(&c->y); drop(&c->dy);
    drop(&c->dq); drop(&c->dk); drop(&c->dv); drop(&c->lse);
}
/* A workspace: none, all, or some of what is asked for; filled with NaNs. */
static amp_exec exec_of(const call* c, int how, unsigned char** memory) {
    amp_exec e;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    e.operands = c->operands;
    e.workspace_size = how == 0 ? 0 : amp_attention_workspace(&c->s);
    if (how == 2) e.workspace_size -= e.workspace_size / 3;
    *memory = (unsigned char*)malloc(e.workspace_size + 8);
    memset(*memory, 0xff, e.workspace_size);
    e.workspace = e.workspace_size ? *memory + 4 : NULL;
    return e;
}
static void run_forward(call* c, int how) {
    unsigned char* memory;
    const amp_exec e = exec_of(c, how, &memory);
    CHECK_MSG(amp_attention_forward(&c->s, ref(&c->q), ref(&c->k), ref(&c->v), ref(&c->y), (float*)c->lse.p, &e) == AMP_OK,
              "%s", heard);
    free(memory);
}
static void run_backward(call* c, int how, int accumulate) {
    unsigned char* memory;
    const amp_exec e = exec_of(c, how, &memory);
    CHECK_MSG(amp_attention_backward(&c->s, ref(&c->dy), ref(&c->q), ref(&c->k), ref(&c->v), ref(&c->y),
              (const float*)c->lse.p, ref(&c->dq), ref(&c->dk), ref(&c->dv), accumulate, &e) == AMP_OK, "%s", heard);
    free(memory);
}
static int same(const rows* x, const rows* y) { return memcmp(x->block, y->block, whole(x)) == 0; }

static void try_call(call* c, int exact) {
    rows y, lse, g[3], old[3];
    const int accumulate = below(3) == 0 ? AMP_ACCUMULATE_INPUT : below(2) ? AMP_ACCUMULATE_PARAMS : 0;
    int how, i;
    for (how = 0; how < 3; how++) {
        run_forward(c, how);
        if (how == 0) { y = copy_of(&c->y); lse = copy_of(&c->lse); }
        CHECK_MSG(same(&y, &c->y) && same(&lse, &c->lse), "%s: forward, workspace %d", what, how);
    }
    check_guards(&c->y); check_guards(&c->lse);
    if (exact) check_forward(c);

    for (i = 0; i < 3; i++) {
        rows* x = i == 0 ? &c->dq : i == 1 ? &c->dk : &c->dv;
        if (accumulate & AMP_ACCUMULATE_INPUT) {
            rows was = random_rows(x->t, x->rows, x->cols, x->ld, 0.2);
            drop(x);
            *x = was;
        }
        old[i] = copy_of(x);
    }
    for (how = 0; how < 3; how++) {
        for (i = 0; i < 3; i++) {
            rows* x = i == 0 ? &c->dq : i == 1 ? &c->dk : &c->dv;
            memcpy(x->block, old[i].block, whole(x));
        }
        run_backward(c, how, accumulate);
        for (i = 0; i < 3; i++) {
            const rows* x = i == 0 ? &c->dq : i == 1 ? &c->dk : &c->dv;
            if (how == 0) g[i] = copy_of(x);
            CHECK_MSG(same(&g[i], x), "%s: gradient %d, workspace %d", what, i, how);
        }
    }
    check_guards(&c->dq); check_guards(&c->dk); check_guards(&c->dv);
    if (exact) check_backward(c, accumulate & AMP_ACCUMULATE_INPUT ? old : NULL);
    add_hash(&c->y); add_hash(&c->lse);
    for (i = 0; i < 3; i++) { add_hash(&g[i]); drop(&g[i]); drop(&old[i]); }
    drop(&y); drop(&lse);
}

/* The n-th random call; exact: the references too. */
static void random_call(int n, int exact) {
    static char text[300];
    int32_t lengths[4];
    call c;
    size_t b;
    amp_dtype t;
    test_seed = (unsigned long long)n * 7919 + 5;
    memset(&c, 0, sizeof c);
    t = some_type();
    c.s.batch = 1 + below(3);
    c.s.queries = some_count();
    c.s.keys = below(2) ? 0 : n % 8 == 7 ? 257 + below(400) : some_count();
    c.s.head_size = n % 16 == 5 ? 260 + below(12) : below(2) ? 16 * (1 + below(4)) : 1 + below(70);
    c.s.causal = (int)below(2);
    c.s.window = c.s.causal && below(2) ? 1 + below(100) : 0;
    c.s.scale = below(3) ? 0.0f : -0.3f;
    if (below(3) == 0) c.s.key_stride = (c.s.keys ? c.s.keys : c.s.queries) + 1 + below(9);
    make_operands(&c, t, n % 5 == 0 ? 3 : 0.7);
    for (b = 0; b < c.s.batch; b++) lengths[b] = (int32_t)below((unsigned)c.keys + 1);
    if (below(3) == 0) c.s.lengths = lengths;
    sprintf(text, "call %d: %lux%lux%lu heads %lu/%lu of %lu, causal %d, window %lu, scale %g, stride %lu%s", n,
            (unsigned long)c.s.batch, (unsigned long)c.s.queries, (unsigned long)c.keys, (unsigned long)c.s.heads,
            (unsigned long)c.kv_heads, (unsigned long)c.s.head_size, c.s.causal, (unsigned long)c.s.window, (double)c.s.scale,
            (unsigned long)c.stride, c.s.lengths ? ", lengths" : "");
    what = text;
    try_call(&c, exact);
    drop_call(&c);
}
enum { CALLS = 64 };
static void test_random_calls(void) {
    int n;
    for (n = 0; n < CALLS; n++) if (test_due()) random_call(n, 1);
}
static void test_instruction_sets(void) {
    unsigned long long first = 0;
    int i, n;
    for (i = 0; i < COUNT(ISAS); i++) {
        if (amp_cpu_force_isa(ISAS[i]) != AMP_OK) continue;
        hash = 14695981039346656037u;
        for (n = 0; n < CALLS; n += 3) random_call(n, 0);
        if (first == 0) first = hash;
        CHECK_MSG(hash == first, "%s has other bits", amp_isa_name(ISAS[i]));
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}


/* Queries that see no key, beside ones that see some: in sequences of length 0, or before the first key of a causal mask.
   y and dq are 0, lse is -inf, and keys that nobody sees are not read and have no gradient, or keep it where one is added. */
static void test_no_key(void) {
    static const struct { size_t queries, keys; int causal; int32_t lengths[3]; } cases[] = {
        { 5, 7, 0, { 0, 4, 0 } }, { 70, 65, 0, { 0, 65, 1 } }, { 1, 1, 0, { 0, 0, 0 } }, { 9, 3, 1, { 3, 3, 3 } },
        { 130, 66, 1, { 0, 66, 40 } }, { 20, 90, 1, { 1, 0, 90 } } };
    int n, t, how, add;
    for (n = 0; n < COUNT(cases); n++) for (t = 0; t < 3; t++) for (how = 0; how < 3; how++) for (add = 0; add < 2; add++) {
        rows old[3], *g[3];
        call c;
        size_t b, h, i, j, k;
        int m;
        test_seed = (unsigned long long)n * 31 + (unsigned)t;
        memset(&c, 0, sizeof c);
        c.s.batch = 3; c.s.queries = cases[n].queries; c.s.keys = cases[n].keys; c.s.head_size = t ? 16 : 7;
        c.s.causal = cases[n].causal; c.s.lengths = cases[n].lengths;
        make_operands(&c, TYPES[t], 0.7);
        what = "no key";
        for (b = 0; b < 3; b++) for (j = length_of(&c, b); j < c.keys; j++) for (k = 0; k < c.k.cols; k++) {
            put_value(c.k.p, c.k.t, (b * c.stride + j) * c.k.ld + k, (double)from_bits(0x7fc00000u));
            put_value(c.v.p, c.v.t, (b * c.stride + j) * c.v.ld + k, (double)from_bits(0x7f800000u));
        }
        g[0] = &c.dq; g[1] = &c.dk; g[2] = &c.dv;
        for (m = 0; m < 3; m++) {
            rows was = random_rows(g[m]->t, g[m]->rows, g[m]->cols, g[m]->ld, 0.2);
            drop(g[m]);
            *g[m] = was;
            old[m] = copy_of(g[m]);
        }
        run_forward(&c, how);
        check_forward(&c);
        run_backward(&c, how, add ? AMP_ACCUMULATE_INPUT : 0);
        check_backward(&c, add ? old : NULL);
        for (m = 0; m < 3; m++) for (i = 0; i < g[m]->rows; i++) {
            const size_t sequence = i / (m ? c.stride : c.s.queries), at = i % (m ? c.stride : c.s.queries);
            int seen = 0;
            if (m == 0) for (j = 0; j < c.keys; j++) seen |= sees(&c, sequence, at, j);
            else for (h = 0; h < c.s.queries; h++) seen |= sees(&c, sequence, h, at);
            for (k = 0; k < g[m]->cols && !seen; k++) {
                const double x = get(g[m], i, k), want = add ? get(&old[m], i, k) : 0.0;
                CHECK_MSG(memcmp(&x, &want, sizeof x) == 0, "case %d, %s, gradient %d, row %d: %g, not %g", n, amp_dtype_name(TYPES[t]),
                          m, (int)i, x, want);
            }
        }
        check_guards(&c.y); check_guards(&c.dq); check_guards(&c.dk); check_guards(&c.dv);
        for (m = 0; m < 3; m++) drop(&old[m]);
        drop_call(&c);
    }
}

/* --- single properties ------------------------------------------------------------------------------------------------ */

/* A fused row [q|k|v], and gradients in one such row: the bits of separate operands. */
static void test_fused_rows(void) {
    enum { B = 2, T = 70, H = 4, G = 2, D = 24, LD = (H + 2 * G) * D };
    static float x[B * T * LD], y[2][B * T * H * D], dy[B * T * H * D], lse[2][B * H * T], dx[B * T * LD];
    static float q[B * T * H * D], k[B * T * G * D], v[B * T * G * D], dq[B * T * H * D], dk[B * T * G * D], dv[B * T * G * D];
    amp_attention_shape s;
    size_t i, bad = 0;
    memset(&s, 0, sizeof s);
    s.batch = B; s.queries = T; s.heads = H; s.kv_heads = G; s.head_size = D; s.causal = 1;
    for (i = 0; i < B * T * LD; i++) x[i] = test_uniform();
    for (i = 0; i < B * T * H * D; i++) dy[i] = test_uniform();
    for (i = 0; i < B * T; i++) {
        memcpy(q + i * H * D, x + i * LD, H * D * sizeof *q);
        memcpy(k + i * G * D, x + i * LD + H * D, G * D * sizeof *q);
        memcpy(v + i * G * D, x + i * LD + (H + G) * D, G * D * sizeof *q);
    }
    CHECK(amp_attention_forward(&s, amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(y[0]), lse[0], NULL) == AMP_OK);
    CHECK(amp_attention_backward(&s, amp_f32(dy), amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(y[0]), lse[0], amp_f32(dq),
                                 amp_f32(dk), amp_f32(dv), 0, NULL) == AMP_OK);
    s.ldq = s.ldk = s.ldv = LD;
    CHECK(amp_attention_forward(&s, amp_f32(x), amp_f32(x + H * D), amp_f32(x + (H + G) * D), amp_f32(y[1]), lse[1], NULL) == AMP_OK);
    CHECK(amp_attention_backward(&s, amp_f32(dy), amp_f32(x), amp_f32(x + H * D), amp_f32(x + (H + G) * D), amp_f32(y[1]), lse[1],
                                 amp_f32(dx), amp_f32(dx + H * D), amp_f32(dx + (H + G) * D), 0, NULL) == AMP_OK);
    CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0 && memcmp(lse[0], lse[1], sizeof lse[0]) == 0);
    for (i = 0; i < B * T; i++) {
        bad += memcmp(dq + i * H * D, dx + i * LD, H * D * sizeof *q) != 0;
        bad += memcmp(dk + i * G * D, dx + i * LD + H * D, G * D * sizeof *q) != 0;
        bad += memcmp(dv + i * G * D, dx + i * LD + (H + G) * D, G * D * sizeof *q) != 0;
    }
    CHECK(bad == 0);
}

/* One query at a time, with a cache of keys and values: the bits of all queries at once. */
static void test_cache(void) {
    enum { B = 2, T = 300, ROOM = 310, H = 2, D = 20 };
    static float q[B * T * H * D], k[B * ROOM * H * D], v[B * ROOM * H * D], y[B * T * H * D], one[B * H * D], in[B * H * D];
    amp_attention_shape s;
    size_t i, t, b, window;
    for (i = 0; i < B * T * H * D; i++) q[i] = test_uniform();
    for (i = 0; i < B * ROOM * H * D; i++) { k[i] = test_uniform(); v[i] = test_uniform(); }
    for (window = 0; window < 100; window += 90) {
        memset(&s, 0, sizeof s);
        s.batch = B; s.queries = T; s.heads = H; s.head_size = D; s.causal = 1; s.key_stride = ROOM; s.window = window;
        CHECK(amp_attention_forward(&s, amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(y), NULL, NULL) == AMP_OK);
        s.queries = 1;
        for (t = 0; t < T; t += t < 60 ? 1 : 13) {
            s.keys = t + 1;
            for (b = 0; b < B; b++) memcpy(in + b * H * D, q + (b * T + t) * H * D, H * D * sizeof *q);
            CHECK(amp_attention_forward(&s, amp_f32(in), amp_f32(k), amp_f32(v), amp_f32(one), NULL, NULL) == AMP_OK);
            for (b = 0; b < B; b++)
                CHECK_MSG(memcmp(one + b * H * D, y + (b * T + t) * H * D, H * D * sizeof *q) == 0, "position %lu", (unsigned long)t);
        }
    }
}

/* With FP32 operands that the exec has rounded, the bits are those of 16-bit ones. */
static void test_rounded_operands(void) {
    int t, i;
    for (t = 1; t < 3; t++) {
        call c, low;
        rows *of[] = { &c.q, &c.k, &c.v, &c.dy }, *to[] = { &low.q, &low.k, &low.v, &low.dy };
        memset(&c, 0, sizeof c);
        test_seed = 77;
        c.s.batch = 2; c.s.queries = 40; c.s.keys = 90; c.s.head_size = 33;
        make_operands(&c, AMP_F32, 1);
        for (i = 0; i < 4; i++) {
            rows x = random_rows(TYPES[t], of[i]->rows, of[i]->cols, of[i]->ld, 1);
            drop(of[i]);
            *of[i] = make(AMP_F32, x.rows, x.cols, x.ld);
            CHECK(amp_convert(ref(of[i]), ref(&x), reach(&x)) == AMP_OK);
            low = c;
            drop(&x);
        }
        for (i = 0; i < 4; i++) {
            *to[i] = make(TYPES[t], of[i]->rows, of[i]->cols, of[i]->ld);
            CHECK(amp_convert(ref(to[i]), ref(of[i]), reach(of[i])) == AMP_OK);
        }
        low.y = copy_of(&c.y); low.lse = copy_of(&c.lse);
        low.dq = copy_of(&c.dq); low.dk = copy_of(&c.dk); low.dv = copy_of(&c.dv);
        c.operands = TYPES[t];
        run_forward(&c, 1); run_forward(&low, 1);
        run_backward(&c, 1, 0); run_backward(&low, 1, 0);
        CHECK(same(&c.y, &low.y) && same(&c.lse, &low.lse));
        CHECK(same(&c.dq, &low.dq) && same(&c.dk, &low.dk) && same(&c.dv, &low.dv));
        drop_call(&c); drop_call(&low);
    }
}

/* A NaN reaches what is computed from it as 0x7fc00000, and keys behind a sequence's length are not read. */
static void test_nan(void) {
    enum { T = 100, H = 2, D = 16, ALL = T * H * D };
    static float x[4][ALL], y[ALL], g[3][ALL], lse[H * T];
    static const uint32_t nans[2] = { 0x7fa00001u, 0xffc12345u };
    const int32_t length = 80;
    amp_attention_shape s;
    int which, isa, d;
    size_t i, p;
    memset(&s, 0, sizeof s);
    s.batch = 1; s.queries = T; s.heads = H; s.head_size = D; s.lengths = &length;
    for (isa = 0; isa < COUNT(ISAS); isa++) {
        if (amp_cpu_force_isa(ISAS[isa]) != AMP_OK) continue;
        for (which = 0; which < 6; which++) {
            size_t numbers = 0;
            for (d = 0; d < 4; d++) for (i = 0; i < ALL; i++) x[d][i] = test_uniform();
            for (i = (size_t)length * H * D; i < ALL; i++) { put_bits(&x[1][i], nans[0]); put_bits(&x[2][i], nans[1]); }
            if (which < 4) put_bits(&x[which][5 * H * D + 3], nans[which % 2]);    /* position 5, head 0 */
            else if (which < 5) x[0][5 * H * D + 3] = from_bits(0x7f800000u);
            CHECK(amp_attention_forward(&s, amp_f32(x[0]), amp_f32(x[1]), amp_f32(x[2]), amp_f32(y), lse, NULL) == AMP_OK);
            CHECK(amp_attention_backward(&s, amp_f32(x[3]), amp_f32(x[0]), amp_f32(x[1]), amp_f32(x[2]), amp_f32(y), lse,
                                         amp_f32(g[0]), amp_f32(g[1]), amp_f32(g[2]), 0, NULL) == AMP_OK);
            for (i = 0; i < ALL; i++) {
                const int head0 = i / D % H == 0, row5 = i / (H * D) == 5;
                const int wanted = head0 && (which == 0 || which == 4 ? row5 : which == 1 ? 1 : which == 2 ? i % D == 3 : 0);
                const uint32_t bits = to_bits(y[i]);
                CHECK_MSG(wanted ? bits == 0x7fc00000u : (bits & 0x7fffffffu) < 0x7f800000u, "NaN in %d: y[%lu] is %08x", which,
                          (unsigned long)i, (unsigned)bits);
                for (d = 0; d < 3; d++) {
                    const uint32_t b = to_bits(g[d][i]);
                    const int nan = (b & 0x7fffffffu) > 0x7f800000u;
                    numbers += (size_t)nan;
                    CHECK(!nan || (b == 0x7fc00000u && head0 && which < 5));
                    if (d > 0 && i / (H * D) >= (size_t)length) CHECK(b == 0);
                }
            }
            for (p = 0; p < H * T; p++) {
                const uint32_t bits = to_bits(lse[p]);
                const int nan = p < T && (which == 1 || ((which == 0 || which == 4) && p == 5));
                CHECK_MSG(nan ? bits == 0x7fc00000u : (bits & 0x7fffffffu) < 0x7f800000u, "NaN in %d: lse %08x", which, (unsigned)bits);
            }
            CHECK((numbers > 0) == (which < 5));
        }
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}

/* Large scores neither overflow nor lose the largest. */
static void test_large_scores(void) {
    static float q[2] = { 3e19f, -3e19f }, k[600], v[600], y[2], lse[2];
    amp_attention_shape s;
    int i;
    memset(&s, 0, sizeof s);
    s.batch = 1; s.queries = 2; s.keys = 600; s.heads = 1; s.head_size = 1; s.scale = 1;
    for (i = 0; i < 600; i++) { k[i] = -1e18f + (float)i * 1e15f; v[i] = (float)i; }
    CHECK(amp_attention_forward(&s, amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(y), lse, NULL) == AMP_OK);
    CHECK(y[0] == 599 && y[1] == 0 && lse[0] == q[0] * k[599] && lse[1] == q[1] * k[0]);
    /* the first tile has scores of -inf only */
    q[0] = 3e38f;
    for (i = 0; i < 600; i++) k[i] = i < 256 ? -10 : 0;
    CHECK(amp_attention_forward(&s, amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(y), lse, NULL) == AMP_OK);
    CHECK_MSG(fabs((double)y[0] - 427.5) < 1e-3, "%g", (double)y[0]);
    /* all have: as in softmax, which has no answer */
    for (i = 0; i < 600; i++) k[i] = -10;
    CHECK(amp_attention_forward(&s, amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(y), lse, NULL) == AMP_OK);
    CHECK(to_bits(y[0]) == 0x7fc00000u && to_bits(lse[0]) == 0xff800000u);
}

#define REFUSED(call, code, sentence) check_refused(call, code, sentence)
static void test_refusals(void) {
    static float x[4][64], lse[16];
    const int32_t lengths[2] = { 2, 5 };
    const amp_attention_shape good = { 2, 2, 4, 2, 1, 4, 0, 0, 0, 0, 0, 1, 0, 0.0f, NULL };
    amp_attention_shape s = good;
    amp_exec e;
    amp_ref q = amp_f32(x[0]), k = amp_f32(x[1]), v = amp_f32(x[2]), y = amp_f32(x[3]);
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    x[3][0] = 42;
#define FORWARD amp_attention_forward(&s, q, k, v, y, NULL, &e)
    REFUSED(amp_attention_forward(NULL, q, k, v, y, NULL, &e), AMP_ERR_ARGUMENT, "attention: the shape is NULL");
    s.queries = 0;
    REFUSED(FORWARD, AMP_ERR_SHAPE, "attention: 0 queries, 2 heads of 4 elements; each must be 1 or more");
    CHECK(amp_attention_workspace(&s) == 0 && amp_attention_workspace(NULL) == 0);
    s = good; s.heads = 0;
    REFUSED(FORWARD, AMP_ERR_SHAPE, "attention: 2 queries, 0 heads of 4 elements; each must be 1 or more");
    s = good; s.head_size = 0;
    REFUSED(FORWARD, AMP_ERR_SHAPE, "attention: 2 queries, 2 heads of 0 elements; each must be 1 or more");
    s = good; s.kv_heads = 3;
    REFUSED(FORWARD, AMP_ERR_SHAPE, "attention: 2 heads are not whole groups for 3 kv_heads");
    s = good; s.causal = 0; s.window = 2;
    REFUSED(FORWARD, AMP_ERR_SHAPE, "attention: the window is 2, but only causal attention has one");
    s = good; s.key_stride = 3;
    REFUSED(FORWARD, AMP_ERR_SHAPE, "attention: key_stride is 3, but a sequence has 4 keys");
    s = good; put_bits(&s.scale, 0x7f800000u);
    REFUSED(FORWARD, AMP_ERR_DESC, "attention: the scale is not finite");
    s = good; s.batch = (size_t)-1;
    REFUSED(FORWARD, AMP_ERR_ARGUMENT, "attention: an operand has more elements than memory can hold, or a negative size");
    s = good; s.ldq = 7;
    REFUSED(FORWARD, AMP_ERR_ARGUMENT, "attention: ldq is 7, but a row of q has 8 elements");
    s = good; s.lengths = lengths;
    REFUSED(FORWARD, AMP_ERR_ARGUMENT, "attention: lengths[1] is 5, outside of 0 to 4 keys");
    s = good;
    k.dtype = AMP_F64;
    REFUSED(FORWARD, AMP_ERR_DTYPE, "attention: k has type f64 (4); it must be f32, f16 or bf16");
    k = AMP_NONE;
    REFUSED(FORWARD, AMP_ERR_ARGUMENT, "attention: k is NULL, but it has 8 x 4 elements");
    k = amp_f32(x[1]);
    y = amp_f32(x[1] + 30);
    REFUSED(FORWARD, AMP_ERR_ARGUMENT, "attention: y would be written over k: their memory overlaps");
    y = amp_f32(x[3]);
    e.operands = AMP_F64;
    REFUSED(FORWARD, AMP_ERR_DTYPE, "attention: the exec's operands are f64 (4); they must be f16, bf16 or 0");
    e.operands = AMP_DTYPE_DEFAULT;
    REFUSED(amp_attention_backward(&s, q, q, k, v, q, NULL, y, AMP_NONE, AMP_NONE, 0, &e), AMP_ERR_ARGUMENT,
            "attention backward: lse is NULL, but it has 1 x 8 elements");
    REFUSED(amp_attention_backward(&s, q, q, k, v, q, lse, k, AMP_NONE, AMP_NONE, 0, &e), AMP_ERR_ARGUMENT,
            "attention backward: dq would be written over k: their memory overlaps");
    REFUSED(amp_attention_backward(&s, q, q, k, v, q, lse, y, y, AMP_NONE, 0, &e), AMP_ERR_ARGUMENT,
            "attention backward: dq would be written over dk: their memory overlaps");
    CHECK(x[3][0] == 42);
    s.batch = 0;
    CHECK(FORWARD == AMP_OK && x[3][0] == 42);
    s = good;
    CHECK(FORWARD == AMP_OK && x[3][0] == 0);
    CHECK(amp_attention_backward(&s, q, q, k, v, q, lse, AMP_NONE, AMP_NONE, AMP_NONE, 0, &e) == AMP_OK);
}

/* --- rope ------------------------------------------------------------------------------------------------------------- */

typedef struct turn { amp_rope_shape s; rows x, y; } turn;
/* The element e of row t of a sequence in double, turned forward or back. */
static double turned(const amp_rope_shape* s, const rows* x, size_t row, size_t e, size_t position, int direction, double* error) {
    const size_t d = s->head_size, i = e % d, pair = s->interleaved ? i / 2 : i % (d / 2);
    const int second = s->interleaved ? (int)(i % 2) : i >= d / 2;
    const size_t other = s->interleaved ? e ^ 1 : second ? e - d / 2 : e + d / 2;
    const double theta = s->theta > 0 ? (double)s->theta : 10000;
    const double angle = fmod((double)position * pow(theta, -2.0 * (double)pair / (double)d), 6.28318530717958647692);
    const double a = get(x, row, e), sine = direction * (second ? sin(angle) : -sin(angle));
    double b;
    *error = 0;
    if (e >= s->heads * d) return a;    /* behind the heads, where a row may end */
    b = get(x, row, other);
    *error = (fabs(a) + fabs(b)) * (4 * u + (double)position * 1e-13);
    return a * cos(angle) + b * sine;
}
static void check_turn(const turn* c, const rows* old, int direction) {
    size_t row, e;
    for (row = 0; row < c->x.rows; row++)
        for (e = 0; e < c->x.cols; e++) {
            double error;
            const double want = turned(&c->s, &c->x, row, e, c->s.offset + row % c->s.positions, direction, &error);
            const double was = old ? get(old, row, e) : 0;
            check_near("rope", &c->y, row, e, want + was, error + (fabs(want) + fabs(was)) * u);
        }
}
static void test_rope(void) {
    unsigned long long first = 0;
    int i, n, back;
    for (i = 0; i < COUNT(ISAS); i++) {
        if (amp_cpu_force_isa(ISAS[i]) != AMP_OK) continue;
        hash = 14695981039346656037u;
        for (n = 0; n < 40; n++) {
            static char text[200];
            turn c;
            amp_dtype t;
            memset(&c, 0, sizeof c);
            test_seed = (unsigned long long)n * 31 + 1;
            t = some_type();
            c.s.batch = 1 + below(3); c.s.positions = 1 + below(40); c.s.heads = 1 + below(5);
            c.s.head_size = n == 7 ? 1024 : 2 * (1 + below(40));
            c.s.interleaved = (int)below(2);
            c.s.width = below(2) ? 0 : c.s.heads * c.s.head_size + below(3000);
            c.s.theta = below(2) ? 0.0f : n == 9 ? 1.0f : 500000.0f;
            c.s.offset = below(3) ? 0 : below(2) ? below(2000) : 1000000;
            sprintf(text, "rope %d: %lux%lu, heads %lu of %lu, width %lu, offset %lu, theta %g, interleaved %d", n,
                    (unsigned long)c.s.batch, (unsigned long)c.s.positions, (unsigned long)c.s.heads,
                    (unsigned long)c.s.head_size, (unsigned long)c.s.width, (unsigned long)c.s.offset, (double)c.s.theta, c.s.interleaved);
            what = text;
            c.x = random_rows(t, c.s.batch * c.s.positions, c.s.width ? c.s.width : c.s.heads * c.s.head_size,
                              c.s.width ? c.s.width : c.s.heads * c.s.head_size, 1);
            c.y = make(like(t), c.x.rows, c.x.cols, c.x.ld);
            for (back = 0; back < 2; back++) {
                rows old = random_rows(c.y.t, c.y.rows, c.y.cols, c.y.ld, 1), place = copy_of(&c.x);
                CHECK((back ? amp_rope_backward(&c.s, ref(&c.x), ref(&c.y), AMP_ACCUMULATE_PARAMS, NULL)
                       : amp_rope_forward(&c.s, ref(&c.x), ref(&c.y), NULL)) == AMP_OK);
                check_turn(&c, NULL, back ? -1 : 1);
                check_guards(&c.y);
                add_hash(&c.y);
                CHECK((back ? amp_rope_backward(&c.s, ref(&place), ref(&place), 0, NULL)
                       : amp_rope_forward(&c.s, ref(&place), ref(&place), NULL)) == AMP_OK);
                if (c.x.t == c.y.t) CHECK_MSG(same(&place, &c.y), "%s: in place", what);
                if (back) {
                    rows sum = copy_of(&old);
                    CHECK(amp_rope_backward(&c.s, ref(&c.x), ref(&sum), AMP_ACCUMULATE_INPUT, NULL) == AMP_OK);
                    drop(&c.y);
                    c.y = sum;
                    check_turn(&c, &old, -1);
                    add_hash(&c.y);
                }
                drop(&old); drop(&place);
            }
            drop(&c.x); drop(&c.y);
        }
        if (first == 0) first = hash;
        CHECK_MSG(hash == first, "%s has other bits", amp_isa_name(ISAS[i]));
    }
    amp_cpu_force_isa(AMP_ISA_AUTO);
}
static void test_rope_refusals(void) {
    static float x[64], y[64];
    const amp_rope_shape good = { 1, 2, 2, 4, 0, 0.0f, 0, 0 };
    amp_rope_shape s = good;
    amp_exec e;
    memset(&e, 0, sizeof e);
    e.logger = &LISTENER;
    y[0] = 42;
#define ROPE amp_rope_forward(&s, amp_f32(x), amp_f32(y), &e)
    REFUSED(amp_rope_forward(NULL, amp_f32(x), amp_f32(y), &e), AMP_ERR_ARGUMENT, "rope: the shape is NULL");
    s.head_size = 5;
    REFUSED(ROPE, AMP_ERR_SHAPE, "rope: head_size is 5; it must be even, from 2 to 1024");
    s.head_size = 1026;
    REFUSED(ROPE, AMP_ERR_SHAPE, "rope: head_size is 1026; it must be even, from 2 to 1024");
    s.head_size = 0;
    REFUSED(amp_rope_backward(&s, amp_f32(x), amp_f32(y), 0, &e), AMP_ERR_SHAPE,
            "rope backward: head_size is 0; it must be even, from 2 to 1024");
    s = good; s.width = 7;
    REFUSED(ROPE, AMP_ERR_SHAPE, "rope: the width is 7, but a row has 2 heads of 4 elements");
    s = good; s.theta = 0.5f;
    REFUSED(ROPE, AMP_ERR_DESC, "rope: theta must be finite and at least 1");
    s = good; s.positions = (size_t)-1;
    REFUSED(ROPE, AMP_ERR_ARGUMENT, "rope: an operand has more elements than memory can hold, or a negative size");
    s = good;
    REFUSED(amp_rope_forward(&s, amp_f32(x), amp_f32(x + 1), &e), AMP_ERR_ARGUMENT,
            "rope: y would be written over x: their memory overlaps");
    REFUSED(amp_rope_backward(&s, amp_f32(x), amp_f32(x), AMP_ACCUMULATE_INPUT, &e), AMP_ERR_ARGUMENT,
            "rope backward: dx would be written over dy: their memory overlaps");
    CHECK(y[0] == 42);
    CHECK(ROPE == AMP_OK && y[0] == 0);
    CHECK(amp_rope_backward(&s, amp_f32(x), AMP_NONE, 0, &e) == AMP_OK);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_random_calls);
    TEST(test_instruction_sets);
    TEST(test_no_key);
    TEST(test_fused_rows);
    TEST(test_cache);
    TEST(test_rounded_operands);
    TEST(test_nan);
    TEST(test_large_scores);
    TEST(test_refusals);
    TEST(test_rope);
    TEST(test_rope_refusals);
    TEST_END();
}
