/* test_optim.c - optimizers against the textbook in double precision, and everything around the step: low copies, skips,
   clipping, groups, schedules, the loss scale, misuse. */
#include "helpers.h"
#include <math.h>

#define N 1037                      /* more than a block of 1024, and a tail */


static amp_optimizer_desc desc_of(amp_optimizer_kind kind) {
    amp_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.logger = &LISTENER;
    return d;
}

/* All memory of one parameter. */
typedef struct block {
    float w[N], m[N], v[N], g[N];
    uint16_t low[N], g16[N];
} block;

static amp_param param_of(block* b, size_t count) {
    amp_param p;
    memset(&p, 0, sizeof p);
    p.master = b->w; p.grad = b->g; p.m = b->m; p.v = b->v; p.count = count; p.name = "p";
    return p;
}

static void fill_block(block* b) {
    int i;
    memset(b, 0, sizeof *b);
    for (i = 0; i < N; i++) { b->w[i] = test_uniform(); b->g[i] = test_uniform(); }
}

static amp_scaler static_scaler(float scale) {
    amp_scaler_desc d;
    amp_scaler s;
    memset(&d, 0, sizeof d);
    d.preset = AMP_SCALER_STATIC; d.init_scale = scale; d.logger = &LISTENER;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    return s;
}

static uint32_t crc_of(const void* data, size_t n) {
    const unsigned char* p = (const unsigned char*)data;
    uint32_t crc = 0xffffffffu;
    size_t i;
    int k;
    for (i = 0; i < n; i++)
        for (crc ^= p[i], k = 0; k < 8; k++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1u)));
    return ~crc;
}
/* The same on a big-endian machine. */
static uint32_t crc_of_floats(const float* x, size_t n) {
    static unsigned char bytes[4 * N];
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t u = to_bits(x[i]);
        bytes[4 * i] = (unsigned char)u; bytes[4 * i + 1] = (unsigned char)(u >> 8);
        bytes[4 * i + 2] = (unsigned char)(u >> 16); bytes[4 * i + 3] = (unsigned char)(u >> 24);
    }
    return crc_of(bytes, 4 * n);
}

/* --- the textbook, in double ----------------------------------------------------------------------------- */

typedef struct textbook { double w[N], m[N], v[N]; } textbook;

static void textbook_step(textbook* r, const double* grad, int n, int t, const amp_optimizer_desc* d) {
    double b1 = (double)d->beta1, b2 = (double)d->beta2, lr = (double)d->lr, wd = (double)d->weight_decay;
    double mu = (double)d->momentum, wnorm = 0, unorm = 0, u[N];
    int i;
    for (i = 0; i < n; i++) {
        double g = d->maximize ? -grad[i] : grad[i], mhat, vhat;
        if (d->kind == AMP_SGD || d->kind == AMP_ADAM || d->kind == AMP_RMSPROP) g += wd * r->w[i];
        if (d->kind == AMP_SGD) {
            r->m[i] = t == 1 ? g : mu * r->m[i] + (1 - (double)d->dampening) * g;
            r->w[i] -= lr * (d->nesterov ? g + mu * r->m[i] : mu > 0 ? r->m[i] : g);
            continue;
        }
        if (d->kind == AMP_RMSPROP) {
            r->v[i] = b2 * r->v[i] + (1 - b2) * g * g;
            u[i] = g / (d->eps_in_root ? sqrt(r->v[i] + (double)d->eps) : sqrt(r->v[i]) + (double)d->eps);
            r->m[i] = mu * r->m[i] + u[i];
            r->w[i] -= lr * r->m[i];
            continue;
        }
        r->m[i] = b1 * r->m[i] + (1 - b1) * g;
        r->v[i] = b2 * r->v[i] + (1 - b2) * g * g;
        mhat = r->m[i] / (1 - pow(b1, t));
        vhat = r->v[i] / (1 - pow(b2, t));
        u[i] = mhat / (sqrt(vhat) + (double)d->eps);
        if (d->kind == AMP_ADAMW) r->w[i] -= lr * wd * r->w[i];
        if (d->kind == AMP_LAMB) {
            u[i] += wd * r->w[i];
            wnorm += r->w[i] * r->w[i]; unorm += u[i] * u[i];
        } else r->w[i] -= lr * u[i];
    }
    if (d->kind != AMP_LAMB) return;
    for (i = 0; i < n; i++) r->w[i] -= lr * (wnorm > 0 && unorm > 0 ? sqrt(wnorm / unorm) : 1) * u[i];
}

typedef struct config {
    const char* name;
    amp_optimizer_kind kind;
    float lr, momentum, dampening, weight_decay, eps;
    int nesterov, maximize, eps_in_root;
} config;

static const config configs[] = {
    { "sgd",            AMP_SGD,   0.05f,  0,     0,    0,     0,     0, 0, 0 },
    { "sgd default",    AMP_SGD,   0,      0,     0,    0,     0,     0, 0, 0 },
    { "sgd decay",      AMP_SGD,   0.05f,  0,     0,    0.1f,  0,     0, 0, 0 },
    { "sgd ascend",     AMP_SGD,   0.05f,  0,     0,    0.1f,  0,     0, 1, 0 },
    { "momentum",       AMP_SGD,   0.02f,  0.9f,  0,    0,     0,     0, 0, 0 },
    { "dampening",      AMP_SGD,   0.02f,  0.9f,  0.3f, 0.01f, 0,     0, 0, 0 },
    { "nesterov",       AMP_SGD,   0.02f,  0.8f,  0,    0.01f, 0,     1, 0, 0 },
    { "nesterov up",    AMP_SGD,   0.02f,  0.8f,  0,    0.01f, 0,     1, 1, 0 },
    { "adam",           AMP_ADAM,  0,      0,     0,    0,     0,     0, 0, 0 },
    { "adam L2",        AMP_ADAM,  0.01f,  0,     0,    0.05f, 0,     0, 0, 0 },
    { "adam large eps", AMP_ADAM,  0.01f,  0,     0,    0,     0.25f, 0, 1, 0 },
    { "adamw",          AMP_ADAMW, 0.01f,  0,     0,    0.01f, 0,     0, 0, 0 },
    { "adamw decay",    AMP_ADAMW, 0.01f,  0,     0,    0.3f,  0.01f, 0, 0, 0 },
    { "lamb",           AMP_LAMB,  0.005f, 0,     0,    0.01f, 0,     0, 0, 0 },
    { "lamb no decay",  AMP_LAMB,  0.005f, 0,     0,    0,     0,     0, 0, 0 },
    { "rmsprop",        AMP_RMSPROP, 0,    0,     0,    0,     0,     0, 0, 0 },
    { "rmsprop decay",  AMP_RMSPROP, 0.01f, 0,    0,    0.05f, 1e-6f, 0, 1, 1 },
    { "rmsprop buffer", AMP_RMSPROP, 0.001f, 0.9f, 0,   0.01f, 1e-3f, 0, 0, 0 },
};

static amp_optimizer_desc desc_of_config(const config* c) {
    amp_optimizer_desc d = desc_of(c->kind);
    d.lr = c->lr; d.momentum = c->momentum; d.dampening = c->dampening; d.weight_decay = c->weight_decay;
    d.eps = c->eps; d.nesterov = c->nesterov; d.maximize = c->maximize; d.eps_in_root = c->eps_in_root;
    return d;
}

/* A new gradient that pulls to zero and shakes; as stored in the parameter's type, times the scale. */
static void make_gradients(block* b, amp_dtype t, float scale, double* exact) {
    float wide[N];
    int i;
    for (i = 0; i < N; i++) wide[i] = fmaf(0.3f, b->w[i], 0.5f * test_uniform()) * scale;   /* nothing for a compiler to fuse */
    amp_convert(amp_ref_of(t == AMP_F32 ? (void*)b->g : (void*)b->g16, t), amp_f32(wide), N);
    amp_convert(amp_f32(wide), amp_ref_of(t == AMP_F32 ? (void*)b->g : (void*)b->g16, t), N);
    for (i = 0; i < N; i++) exact[i] = (double)wide[i] / (double)scale;
}

/* 100 steps beside the textbook. Bound: each step rounds the weight once (2^-24 of |w| < 4), and its update errs by the
   relative error of the moments: these take at most four roundings a step, kept for at most 100 steps, so 400 * 2^-24 of
   an update, which is at most lr * D with D <= 4 for Adam, 20 for a momentum buffer. LAMB multiplies the direction
   by |w|/|u| <= 4 and adds the same error. The constants of both sides are the float values of the desc. */
static void textbook_agreement(void) {
    static const amp_dtype types[3] = { AMP_F32, AMP_F16, AMP_BF16 };
    static block b;
    static textbook r;
    static double exact[N];
    int c, k, t, i;
    for (c = 0; c < COUNT(configs); c++)
        for (k = 0; k < 3; k++) {
            amp_optimizer_desc d = desc_of_config(&configs[c]);
            float scale = k == 0 ? 3.7f : 1024.0f;
            amp_scaler s = static_scaler(scale);
            amp_optimizer o;
            amp_param p;
            double worst = 0, bound;
            fill_block(&b);
            for (i = 0; i < N; i++) { r.w[i] = (double)b.w[i]; r.m[i] = r.v[i] = 0; }
            p = param_of(&b, N);
            p.grad_dtype = types[k];
            if (k) p.grad = b.g16;
            CHECK_MSG(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK, "%s", heard);
            for (t = 1; t <= 100; t++) {
                make_gradients(&b, types[k], scale, exact);
                amp_scaler_scale_loss(&s, 1.0f);
                CHECK(amp_optimizer_step(&o, &s, NULL) == AMP_OK && amp_scaler_update(&s) == AMP_OK);
                textbook_step(&r, exact, N, t, &o.desc);
            }
            for (i = 0; i < N; i++) worst = fmax(worst, fabs((double)b.w[i] - r.w[i]));
            bound = 100 * ldexp(1, -24) * (4 + 400 * (double)o.desc.lr * (o.desc.kind == AMP_SGD ? 20 : 4) * (o.desc.kind == AMP_LAMB ? 4 : 1));
            CHECK_MSG(worst < bound && o.state.step == 100, "%s %s: error %g, bound %g", configs[c].name, amp_dtype_name(types[k]), worst, bound);
        }
}

/* kann's kann_RMSprop(n, lr, NULL, 0.9f, g, t, r) as one call, whose r is v. Each side rounds v, the root, the quotient
   and the sum a few times: 8 roundings of a step of at most lr / sqrt(0.1), one of the weight. */
static void rmsprop_of_kann(void) {
    static block b;
    static float t[N], r[N];
    amp_optimizer_desc d = desc_of(AMP_RMSPROP);
    amp_optimizer o;
    amp_param p;
    int i, step, wrong = 0;
    fill_block(&b);
    memcpy(t, b.w, sizeof t); memset(r, 0, sizeof r);
    p = param_of(&b, N);
    p.m = NULL;                                             /* no buffer without momentum */
    d.lr = 0.001f; d.beta2 = 0.9f; d.eps = 1e-6f; d.eps_in_root = 1;
    CHECK_MSG(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK, "%s", heard);
    for (step = 1; step <= 50; step++) {
        for (i = 0; i < N; i++) {
            b.g[i] = i % 7 ? test_uniform() : 1e-4f * test_uniform();
            r[i] = (1.0f - 0.9f) * b.g[i] * b.g[i] + 0.9f * r[i];
            t[i] -= 0.001f / sqrtf(1e-6f + r[i]) * b.g[i];
        }
        CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
        for (i = 0; i < N; i++) {
            wrong += fabs((double)b.w[i] - (double)t[i]) > step * ldexp(1, -24) * (1 + 8 * 0.001 / sqrt(0.1));
            wrong += fabs((double)b.v[i] / (double)r[i] - 1) > 4 * step * ldexp(1, -24);
        }
    }
    CHECK_MSG(wrong == 0, "%d differ", wrong);
    p.v = NULL;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_ERR_ARGUMENT && strstr(heard, "v is NULL"));
}

/* --- same bits ------------------------------------------------------------------------------------------- */

/* Weights and moments after 20 steps, as CRC-32; the same on each instruction set, compiler and machine. */
static const uint32_t golden[] = {
    0x7c1c213cu, 0x87fb2966u, 0xe8496711u, 0x0355ef18u, 0x0427f2afu,
    0xc6bf87ceu, 0xbf05e465u, 0x86c8a872u, 0x8f5ccb8du, 0xee84946au,
    0xf50ba325u, 0xd22fc39au, 0xd2ec1b50u, 0x6aca3e66u, 0x7d9f20adu,
    0x2e66c09cu, 0x2370d6e3u, 0x9e4d70d6u
};

static void same_bits(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    static block b;
    static double exact[N];
    int c, k, t;
    for (c = 0; c < COUNT(configs); c++)
        for (k = 0; k < COUNT(isas); k++) {
            amp_optimizer_desc d = desc_of_config(&configs[c]);
            amp_scaler s = static_scaler(48.7f);
            amp_optimizer o;
            amp_param p[2];
            uint32_t crc;
            if (amp_cpu_force_isa(isas[k]) != AMP_OK) continue;
            test_seed = 99;
            fill_block(&b);
            p[0] = param_of(&b, 1005);
            p[1] = param_of(&b, 32);
            p[1].master += 1005; p[1].m = b.m + 1005; p[1].v = b.v + 1005; p[1].grad = b.g16; p[1].grad_dtype = AMP_F16;
            p[1].low = b.low; p[1].low_dtype = AMP_BF16;
            d.clip_norm = 5.0f;
            d.schedule.kind = AMP_SCHEDULE_COSINE; d.schedule.warmup_steps = 3; d.schedule.total_steps = 20;
            CHECK(amp_optimizer_init(&o, &d, p, 2) == AMP_OK);
            for (t = 0; t < 20; t++) {
                make_gradients(&b, AMP_F32, 48.7f, exact);
                make_gradients(&b, AMP_F16, 48.7f, exact);
                amp_scaler_scale_loss(&s, 1.0f);
                CHECK(amp_optimizer_step(&o, &s, NULL) == AMP_OK && amp_scaler_update(&s) == AMP_OK);
            }
            crc = crc_of_floats(b.w, N) ^ crc_of_floats(b.m, N) ^ crc_of_floats(b.v, N);
#if !defined(__FAST_MATH__)
            CHECK_MSG(c < COUNT(golden) && crc == golden[c], "%s on %s: 0x%08x", configs[c].name, amp_isa_name(isas[k]), (unsigned)crc);
#endif
            (void)crc;
        }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK);
}

/* Arrays that begin anywhere in a cache line, of any length and type: the bits of scalar code on arrays that begin a
   line, and nothing is written beside them. */
enum { PLACE = 2096 };               /* two blocks, and what is left before and behind; whole lines of both types */
typedef struct place {
    float f[4][PLACE];               /* weights, moments, gradient */
    uint16_t h[2][PLACE];            /* low copy, gradient */
} place;

static place* place_at(int k) {
    static unsigned char memory[2][sizeof(place) + 64];
    return (place*)(void*)(memory[k] + (64 - (size_t)((uintptr_t)memory[k] % 64)) % 64);
}
static void step_in_place(place* p, const place* values, int off, int n, const config* c, amp_dtype type, int with_low) {
    amp_optimizer_desc d = desc_of_config(c);
    amp_optimizer o;
    amp_param q;
    int k;
    memset(p, 0xab, sizeof *p);
    memset(&q, 0, sizeof q);
    for (k = 0; k < 4; k++) memcpy(p->f[k] + off, values->f[k], (size_t)n * sizeof(float));
    if (type != AMP_F32) amp_convert(amp_ref_of(p->h[1] + off, type), amp_f32(values->f[3]),
        (size_t)n);
    q.master = p->f[0] + off; q.m = p->f[1] + off; q.v = p->f[2] + off; q.count = (size_t)n;
    q.grad = type == AMP_F32 ? (void*)(p->f[3] + off) : p->h[1] + off; q.grad_dtype = type;
    if (with_low) { q.low = p->h[0] + off; q.low_dtype = AMP_BF16; }
    d.unchecked = 1;
    CHECK(amp_optimizer_init(&o, &d, &q, 1) == AMP_OK && amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
}
/* Every array holds what step_in_place wrote first in all but [off, off + n). */
static int alone(const place* p, int off, int n) {
    static unsigned char fill[sizeof(float) * PLACE];
    const size_t before = (size_t)off, behind = (size_t)(PLACE - off - n);
    int k, same = 1;
    memset(fill, 0xab, sizeof fill);
    for (k = 0; k < 4; k++)
        same &= !memcmp(p->f[k], fill, before * sizeof(float))
                && !memcmp(p->f[k] + off + n, fill, behind * sizeof(float));
    for (k = 0; k < 2; k++)
        same &= !memcmp(p->h[k], fill, before * sizeof(uint16_t))
                && !memcmp(p->h[k] + off + n, fill, behind * sizeof(uint16_t));
    return same;
}
static int moved_by(const place* moved, int off, const place* at_line, int n) {
    int k, same = alone(moved, off, n) && alone(at_line, 0, n);
    for (k = 0; k < 4; k++) same &= !memcmp(moved->f[k] + off, at_line->f[k], (size_t)n * sizeof(float));
    for (k = 0; k < 2; k++) same &= !memcmp(moved->h[k] + off, at_line->h[k], (size_t)n * sizeof(uint16_t));
    return same;
}
static void arrays_begin_anywhere(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    static const amp_dtype types[3] = { AMP_F32, AMP_F16, AMP_BF16 };
    static const int which[] = { 2, 7, 9, 12, 13, 15, 17 };
    static const uint32_t odd[] = { 0x80000000u, 1u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x80000123u, 0x7f7fffffu };
    static place values, finite;     /* LAMB's norms should be those of numbers */
    int c, k, off, n, i;
    for (i = 0; i < PLACE; i++) {
        for (k = 0; k < 4; k++) values.f[k][i] = test_uniform();
        values.f[2][i] = fabsf(values.f[2][i]);
    }
    finite = values;
    for (i = 0; i < PLACE; i++) {
        if (i % 11 == 5) put_bits(&values.f[3][i], odd[i % COUNT(odd)]);
        if (i % 13 == 7) put_bits(&values.f[1][i], odd[i % COUNT(odd)]);
    }
    for (n = 1; n < 2080; n += n < 200 ? 1 : n < 254 ? 27 : n < 275 ? 1 : 151)
        for (c = 0; c < COUNT(which); c++) {
            const config* setting = &configs[which[c]];
            const amp_dtype type = types[(n + c) % 3];
            const place* from = setting->kind == AMP_LAMB ? &finite : &values;
            const int with_low = n / 2 % 2;
            CHECK(amp_cpu_force_isa(AMP_ISA_SCALAR) == AMP_OK);
            step_in_place(place_at(0), from, 0, n, setting, type, with_low);
            for (k = 0; k < COUNT(isas); k++)
                for (off = 0; off < 16; off++) {
                    if (off == 0 && amp_cpu_force_isa(isas[k]) != AMP_OK) break;
                    if ((n + off) % 16 > 4 && isas[k] == AMP_ISA_SCALAR) continue;
                    step_in_place(place_at(1), from, off, n, setting, type, with_low);
                    CHECK_MSG(moved_by(place_at(1), off, place_at(0), n), "%s: %d elements, %d behind a line, on %s",
                              setting->name, n, off, amp_isa_name(isas[k]));
                }
        }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK);
}

/* Many chunks, for the threads: Adam and LAMB with clipping on 200,000 parameters. */
static void same_bits_in_many_chunks(void) {
    static float w[200000], m[200000], v[200000];
    static uint16_t g[200000];
    static const uint32_t want[2] = { 0x407f87ccu, 0x28389556u };
    int kind, i, t;
    for (kind = 0; kind < 2; kind++) {
        amp_optimizer_desc d = desc_of(kind ? AMP_LAMB : AMP_ADAM);
        amp_optimizer o;
        amp_param p;
        uint32_t crc = 0;
        memset(&p, 0, sizeof p);
        memset(m, 0, sizeof m); memset(v, 0, sizeof v);
        test_seed = 5;
        for (i = 0; i < 200000; i++) w[i] = test_uniform();
        p.master = w; p.m = m; p.v = v; p.grad = g; p.grad_dtype = AMP_BF16; p.count = 200000;
        d.clip_norm = 10; d.weight_decay = 0.01f;
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
        for (t = 0; t < 3; t++) {
            for (i = 0; i < 200000; i++) g[i] = amp_bfloat16_from_float(test_uniform()).bits;
            CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
        }
        for (i = 0; i < 200; i++) crc = crc * 31u + crc_of_floats(w + 1000 * i, 1000);
#if !defined(__FAST_MATH__)
        CHECK_MSG(crc == want[kind], "kind %d: 0x%08x", kind, (unsigned)crc);
#endif
        CHECK(o.state.step == 3 && crc != 0);
    }
}

/* --- low copies -------------------------------------------------------------------------------------------- */

static void low_is_rounded_master(void) {
    static block b;
    static double exact[N];
    static uint16_t want[N];
    int c, k, t;
    for (c = 0; c < COUNT(configs); c++)
        for (k = 0; k < 2; k++) {
            amp_optimizer_desc d = desc_of_config(&configs[c]);
            amp_dtype type = k ? AMP_BF16 : AMP_F16;
            amp_optimizer o;
            amp_param p;
            fill_block(&b);
            p = param_of(&b, N);
            p.low = b.low; p.low_dtype = type;
            CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
            for (t = 0; t <= 5; t++) {
                amp_convert(amp_ref_of(want, type), amp_f32(b.w), N);
                CHECK(memcmp(want, b.low, sizeof want) == 0);
                make_gradients(&b, AMP_F32, 1.0f, exact);
                CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
            }
        }
}

/* O3: without masters the low weights are widened, updated and rounded: as a master would be that is rounded after
   each step. */
static void low_weights_trained(void) {
    static block b, full;
    static double exact[N];
    int c, k, t;
    for (c = 0; c < COUNT(configs); c++)
        for (k = 0; k < 2; k++) {
            amp_optimizer_desc d = desc_of_config(&configs[c]);
            amp_dtype type = k ? AMP_BF16 : AMP_F16;
            amp_optimizer o, of;
            amp_param p, pf;
            fill_block(&full);
            p = param_of(&b, N); pf = param_of(&full, N);
            p.master = NULL; p.low = b.low; p.low_dtype = type; p.grad = full.g;
            memset(&b, 0, sizeof b);
            amp_convert(amp_ref_of(b.low, type), amp_f32(full.w), N);
            CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_init(&of, &d, &pf, 1) == AMP_OK);
            for (t = 0; t < 5; t++) {
                amp_convert(amp_f32(full.w), amp_ref_of(b.low, type), N);
                make_gradients(&full, AMP_F32, 1.0f, exact);
                CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK && amp_optimizer_step(&of, NULL, NULL) == AMP_OK);
                amp_convert(amp_ref_of(full.low, type), amp_f32(full.w), N);
                CHECK(memcmp(full.low, b.low, sizeof b.low) == 0 && memcmp(full.m, b.m, sizeof b.m) == 0);
            }
        }
}

/* --- fewer bits: split masters, and moments in 16 bits --- */

static uint16_t half_away(uint32_t u) { return (uint16_t)(u / 65536 + (u % 65536 >= 0x8000)); }

/* Every low half of some upper ones comes back as it was, beside the nearest bfloat16; of a tie, the one further from
   zero. What is beyond becomes the largest, a NaN the usual one; inf stays. */
static void masters_split_and_join(void) {
    enum { HALVES = 65536 };
    static const uint16_t upper[] = { 0, 0x8000, 0x3f80, 0xbf81, 0x007f, 0x7f7e, 0x4049, 0xff7e, 0x0001 };
    static const uint32_t odd[][3] = {      /* a value, its halves, what comes back */
        { 0x7f7f7fffu, 0x7f7f7fffu, 0x7f7f7fffu }, { 0x7f7f8000u, 0x7f7f7fffu, 0x7f7f7fffu },
        { 0xff7fffffu, 0xff7f7fffu, 0xff7f7fffu }, { 0x7f800000u, 0x7f800000u, 0x7f800000u },
        { 0xff800001u, 0x7fc00000u, 0x7fc00000u }, { 0x7fffffffu, 0x7fc00000u, 0x7fc00000u } };
    static float w[HALVES], back[HALVES];
    static uint16_t low[HALVES], rest[HALVES], nearest[HALVES];
    int i, k, wrong;
    for (k = 0; k < COUNT(upper); k++) {
        for (i = 0; i < HALVES; i++) put_bits(&w[i], (uint32_t)upper[k] << 16 | (uint32_t)i);
        amp_master_split(low, rest, w, HALVES);
        amp_master_join(back, low, rest, HALVES);
        amp_convert(amp_ref_of(nearest, AMP_BF16), amp_f32(w), HALVES);
        for (i = wrong = 0; i < HALVES; i++) {
            wrong += to_bits(back[i]) != to_bits(w[i]) || low[i] != half_away(to_bits(w[i]));
            wrong += low[i] != nearest[i] && i != 0x8000;
        }
        CHECK_MSG(wrong == 0 && low[0x8000] == upper[k] + 1, "%04x: %d wrong", upper[k], wrong);
    }
    for (k = 0; k < COUNT(odd); k++) {
        put_bits(&w[0], odd[k][0]);
        amp_master_split(low, rest, w, 1);
        amp_master_join(back, low, rest, 1);
        CHECK_MSG(low[0] == half_away(odd[k][1]) && rest[0] == (uint16_t)odd[k][1] && to_bits(back[0]) == odd[k][2],
                  "%08x: %04x %04x %08x", odd[k][0], low[0], rest[0], to_bits(back[0]));
    }
}

/* Beside an optimizer with FP32 masters that gets the same gradients: the same bits after each of many steps. */
static void split_masters_train_alike(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    static block whole, split;
    static uint16_t rest[N];
    static float joined[N];
    static double exact[N];
    int c, k, t, i;
    for (c = 0; c < COUNT(configs); c++)
        for (k = 0; k < COUNT(isas); k++) {
            amp_optimizer_desc d = desc_of_config(&configs[c]);
            amp_optimizer o[2];
            amp_param p[2];
            if (amp_cpu_force_isa(isas[k]) != AMP_OK) continue;
            test_seed = 77;
            fill_block(&whole);
            split = whole;
            amp_master_split(split.low, rest, whole.w, N);
            p[0] = param_of(&whole, N); p[1] = param_of(&split, N);
            p[0].low = whole.low; p[0].low_dtype = p[1].low_dtype = AMP_BF16;
            p[1].master = NULL; p[1].low = split.low; p[1].rest = rest;
            d.clip_norm = 5.0f;
            for (i = 0; i < 2; i++) CHECK_MSG(amp_optimizer_init(&o[i], &d, &p[i], 1) == AMP_OK, "%s", heard);
            for (t = 0; t < 60; t++) {
                int wrong = 0;
                make_gradients(&whole, AMP_F32, 1.0f, exact);
                memcpy(split.g, whole.g, sizeof whole.g);
                for (i = 0; i < 2; i++) CHECK(amp_optimizer_step(&o[i], NULL, NULL) == AMP_OK);
                amp_master_join(joined, split.low, rest, N);
                for (i = 0; i < N; i++) wrong += split.low[i] != half_away(to_bits(whole.w[i]));
                CHECK_MSG(wrong == 0 && !memcmp(joined, whole.w, sizeof joined) && !memcmp(split.m, whole.m, sizeof whole.m)
                              && !memcmp(split.v, whole.v, sizeof whole.v),
                          "%s on %s, step %d: %d wrong", configs[c].name, amp_isa_name(isas[k]), t, wrong);
            }
        }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK);
}

/* A split weight that would pass the largest bfloat16 stays, with its moments. */
static void split_masters_overflow(void) {
    static block b;
    static uint16_t rest[N];
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_param p;
    uint16_t before;
    fill_block(&b);
    b.w[700] = 3.38e38f; b.g[700] = -3e37f;
    amp_master_split(b.low, rest, b.w, N);
    before = b.low[700];
    p = param_of(&b, N);
    p.master = NULL; p.low = b.low; p.low_dtype = AMP_BF16; p.rest = rest;
    d.lr = 1; d.momentum = 0.5f;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_step(&o, NULL, &info) == AMP_OK);
    CHECK(info.update_overflows == 1 && info.saturated == 0 && info.update_index == 700);
    CHECK(b.low[700] == before && b.m[700] == 0 && b.m[699] != 0);
}

/* As with moments in FP32 that are rounded after each step. F16 is for a momentum alone. */
static void moments_in_16_bits(void) {
    static block b, full;
    static uint16_t m[N], v[N], want[N];
    static double exact[N];
    int c, k, t;
    for (c = 0; c < COUNT(configs); c++)
        for (k = AMP_F16; k <= AMP_BF16; k++) {
            amp_optimizer_desc d = desc_of_config(&configs[c]);
            const int moments = amp_optimizer_moments(&d), with_v = d.kind != AMP_SGD, with_m = moments > with_v;
            const amp_dtype type = (amp_dtype)k;
            amp_optimizer o, of;
            amp_param p, pf;
            if (moments == 0 || (with_v && type == AMP_F16)) continue;
            fill_block(&full);
            b = full;
            memset(m, 0, sizeof m); memset(v, 0, sizeof v);
            p = param_of(&b, N); pf = param_of(&full, N);
            p.m = with_m ? m : NULL; p.v = with_v ? v : NULL; p.moment_dtype = type;
            CHECK_MSG(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK, "%s", heard);
            CHECK(amp_optimizer_init(&of, &d, &pf, 1) == AMP_OK);
            for (t = 0; t < 20; t++) {
                make_gradients(&full, AMP_F32, 1.0f, exact);
                memcpy(b.g, full.g, sizeof b.g);
                CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK && amp_optimizer_step(&of, NULL, NULL) == AMP_OK);
                CHECK_MSG(memcmp(full.w, b.w, sizeof b.w) == 0, "%s, step %d", configs[c].name, t);
                amp_convert(amp_ref_of(want, type), amp_f32(full.m), N);
                CHECK(!with_m || memcmp(want, m, sizeof m) == 0);
                amp_convert(amp_f32(full.m), amp_ref_of(want, type), N);
                amp_convert(amp_ref_of(want, type), amp_f32(full.v), N);
                CHECK(!with_v || memcmp(want, v, sizeof v) == 0);
                amp_convert(amp_f32(full.v), amp_ref_of(want, type), N);
            }
        }
}

/* A moment beyond its type becomes the largest finite one, and the weights go on. */
static void moments_stay_finite(void) {
    static const amp_dtype types[2] = { AMP_F16, AMP_BF16 };
    static const uint16_t largest[2] = { 0x7bffu, 0x7f7fu };
    static block b;
    static uint16_t m[N];
    int k, t;
    for (k = 0; k < 2; k++) {
        amp_optimizer_desc d = desc_of(AMP_SGD);
        amp_optimizer_info info;
        amp_optimizer o;
        amp_param p;
        fill_block(&b);
        memset(m, 0, sizeof m);
        p = param_of(&b, N);
        p.m = m; p.moment_dtype = types[k];
        d.momentum = 0.5f; d.lr = 1e-30f;
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
        for (t = 0; t < 3; t++) {
            b.g[5] = k ? 3.4e38f : 7e4f; b.g[6] = -b.g[5];
            if (t) b.g[5] = b.g[6] = 0;
            CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.update_overflows == 0);
            if (t == 0) CHECK_MSG(m[5] == largest[k] && m[6] == (largest[k] | 0x8000), "%04x %04x", m[5], m[6]);
        }
        CHECK(m[5] < largest[k] && m[7] != 0);
    }
}

/* What a parameter with fewer bits must have; v in bfloat16 and a beta2 that leaves it where it is are told, once. */
static void fewer_bits_refused(void) {
    static const float beta2[] = { 0, 0.99f };
    static block b;
    static uint16_t rest[N], m[N], v[N];
    int k;
    for (k = 0; k < 8; k++) {
        amp_optimizer_desc d = desc_of(k == 7 ? AMP_SGD : AMP_ADAM);
        amp_optimizer o;
        amp_param p;
        fill_block(&b);
        p = param_of(&b, N);
        p.master = NULL; p.low = b.low; p.low_dtype = AMP_BF16; p.rest = rest;
        if (k == 0) p.master = b.w;
        if (k == 1) p.low_dtype = AMP_F16;
        if (k == 2) p.low = NULL;
        if (k == 3) p.moment_dtype = AMP_F16;
        if (k == 4) p.moment_dtype = (amp_dtype)9;
        if (k == 5) p.rest = (uint16_t*)(void*)b.g;
        if (k == 6) { p.moment_dtype = AMP_BF16; p.v = (uint16_t*)p.m + N - 1; }
        if (k == 7) { p.moment_dtype = AMP_F16; d.momentum = 0.5f; }
        heard[0] = 0;
        CHECK_MSG((amp_optimizer_init(&o, &d, &p, 1) == AMP_OK) == (k == 7) && (k == 7 || heard[0]), "%d: %s", k, heard);
    }
    for (k = 0; k < 2; k++) {
        amp_optimizer_desc d = desc_of(AMP_ADAMW);
        amp_optimizer o;
        amp_param p[2];
        p[0] = param_of(&b, 10);
        p[0].m = m; p[0].v = v; p[0].moment_dtype = AMP_BF16;
        p[1] = p[0];
        p[1].master += 10; p[1].m = m + 10; p[1].v = v + 10; p[1].grad = b.g + 10;
        d.beta2 = beta2[k];
        heard_count = 0;
        CHECK(amp_optimizer_init(&o, &d, p, 2) == AMP_OK && heard_count == !k);
        CHECK(k || strstr(heard, "v in bf16 hardly moves with beta2 0.999"));
    }
}

/* --- skips --------------------------------------------------------------------------------------------------- */

static void a_skipped_step_changes_nothing(void) {
    static block b, before;
    static double exact[N];
    static const uint32_t bad[3] = { 0x7f800000u, 0xff800000u, 0x7f800001u };
    int c, k, scaled;
    for (c = 0; c < COUNT(configs); c++)
        for (k = 0; k < 3; k++)
            for (scaled = 0; scaled < 2; scaled++) {
                amp_optimizer_desc d = desc_of_config(&configs[c]);
                amp_scaler s = static_scaler(8.0f);
                amp_optimizer o, old;
                amp_optimizer_info info;
                amp_param p;
                fill_block(&b);
                p = param_of(&b, N);
                p.low = b.low; p.low_dtype = AMP_F16;
                d.schedule.kind = AMP_SCHEDULE_STEP; d.schedule.step_size = 1;
                CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
                make_gradients(&b, AMP_F32, 8.0f, exact);
                amp_scaler_scale_loss(&s, 1.0f);
                CHECK(amp_optimizer_step(&o, scaled ? &s : NULL, &info) == AMP_OK && info.applied == 1 && info.overflow.found_inf == 0);
                if (scaled) amp_scaler_update(&s);
                put_bits(&b.g[N - 1 - k], bad[k]);
                before = b; old = o;
                amp_scaler_scale_loss(&s, 1.0f);
                CHECK(amp_optimizer_step(&o, scaled ? &s : NULL, &info) == AMP_OK && info.applied == 0);
                CHECK(memcmp(&b, &before, sizeof b) == 0 && memcmp(&o, &old, sizeof o) == 0 && o.state.step == 1);
                CHECK(info.overflow.found_inf == 1 && info.overflow.first_index == (uint64_t)(N - 1 - k));
                CHECK(info.lr == amp_schedule_lr(&o.desc.schedule, o.desc.lr, 1));
                CHECK(is_infinite(&info.grad_norm) && strcmp(info.overflow.first_name, "p") == 0);
                if (scaled) CHECK(amp_scaler_update(&s) == AMP_OK && s.state.skipped == 1);
            }
}

static void unchecked(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_optimizer_info info;
    amp_optimizer o;
    float old;
    amp_param p;
    fill_block(&b);
    p = param_of(&b, 3);
    d.unchecked = 1; d.lr = 1;
    put_bits(&b.g[1], 0x7f800000u);
    b.w[0] = 1; b.g[0] = 2;
    old = b.w[1];
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.applied == 1 && b.w[0] == -1.0f && o.state.step == 1);
    CHECK(to_bits(b.w[1]) == to_bits(old) && info.grad_norm == 0.0);
    CHECK(info.update_overflows == 1 && info.update_tensor == 0 && info.update_index == 1);
}

/* --- overflows that arise in the update ---------------------------------------------------------------------- */

typedef struct overflow_case {
    const char* name;
    amp_optimizer_kind kind;
    float momentum, lr;
    int nesterov;
    float w, m, v, g;               /* of the element that overflows */
} overflow_case;

static const overflow_case overflow_cases[] = {
    { "v of adam",          AMP_ADAM,  0,    0.01f, 0, 0.5f,   0.1f,   0.2f, 1e22f },
    { "v of adamw",         AMP_ADAMW, 0,    0.01f, 0, 0.5f,   0.1f,   0.2f, -1e22f },
    { "v of lamb",          AMP_LAMB,  0,    0.01f, 0, 0.5f,   0.1f,   0.2f, 1e22f },
    { "m of adam",          AMP_ADAM,  0,    0,     0, 0.5f,   3e38f,  0.2f, 3.4e38f },
    { "direction of lamb",  AMP_LAMB,  0,    0.01f, 0, 0.5f,   3e38f,  0,    0.1f },
    { "w of sgd",           AMP_SGD,   0,    2.0f,  0, 0.5f,   0.1f,   0.2f, 3e38f },
    { "buffer of momentum", AMP_SGD,   0.9f, 0.01f, 0, 0.5f,   3e38f,  0.2f, 3e38f },
    { "w of momentum",      AMP_SGD,   0.9f, 2.0f,  0, -3e38f, 0.1f,   0.2f, 1e38f },
    { "nesterov",           AMP_SGD,   0.9f, 0.01f, 1, 0.5f,   -2e38f, 0.2f, -3e38f },
    { "w of adam",          AMP_ADAM,  0,    1e37f, 0, -3e38f, 1.0f,   1e-6f, 1.0f },
    { "v of rmsprop",       AMP_RMSPROP, 0,    0.01f, 0, 0.5f,  0,     0.2f, 1e22f },
    { "rmsprop's buffer",   AMP_RMSPROP, 0.9f, 2.0f,  0, 0.5f,  3e38f, 0.2f, 0.1f },
};

/* Every element but one moves as if that one were not there; that one, all of it, stays. The second step finds buffers
   that are in use, where a first one of SGD starts its own. */
static void an_overflow_of_the_update_stays_out(void) {
    static block b, twin, before;
    int c, at, step, low;
    for (c = 0; c < COUNT(overflow_cases); c++)
        for (low = 0; low < (overflow_cases[c].lr > 1e30f ? 1 : 3); low++)
            for (at = 0; at < N; at += at < 40 ? 1 : at == 997 ? N - 998 : 319) {       /* 40, 359, 678, 997, and the last */
                const size_t n = low == 1 && at < 1000 ? 1000 : N;      /* 997 is in a tail behind whole vectors */
                const overflow_case* k = &overflow_cases[c];
                amp_optimizer_desc d = desc_of(k->kind);
                amp_optimizer_info info;
                amp_optimizer o, other;
                amp_param p, q;
                test_seed = 7;
                fill_block(&b);
                d.momentum = k->momentum; d.nesterov = k->nesterov; d.lr = k->lr;
                b.w[at] = b.g[at] = 0;                              /* nothing for the norms of LAMB */
                twin = b;
                p = param_of(&b, n); q = param_of(&twin, n);
                if (low) { p.low = b.low; q.low = twin.low; p.low_dtype = q.low_dtype = low == 1 ? AMP_F16 : AMP_BF16; }
                CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_init(&other, &d, &q, 1) == AMP_OK);
                for (step = 0; step < 2; step++) {
                    CHECK(amp_optimizer_step(&other, NULL, NULL) == AMP_OK);
                    if (step == 1) {
                        b.w[at] = k->w; b.m[at] = k->m; b.v[at] = k->v; b.g[at] = k->g;
                        if (k->kind == AMP_LAMB) b.w[at] = 0;
                    }
                    before = b;
                    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.applied == 1);
                }
                CHECK_MSG(info.update_overflows == 1 && info.update_tensor == 0 && info.update_index == (uint64_t)at
                              && strcmp(info.update_name, "p") == 0,
                          "%s at %d: %d overflows", k->name, at, (int)info.update_overflows);
                CHECK_MSG(to_bits(b.w[at]) == to_bits(before.w[at]) && to_bits(b.m[at]) == to_bits(before.m[at])
                              && to_bits(b.v[at]) == to_bits(before.v[at]), "%s at %d moved", k->name, at);
                b.w[at] = twin.w[at]; b.m[at] = twin.m[at]; b.v[at] = twin.v[at]; b.g[at] = twin.g[at];
                b.low[at] = twin.low[at];
#if !defined(__FAST_MATH__)
                CHECK_MSG(memcmp(&b, &twin, sizeof b) == 0, "%s at %d: another element differs", k->name, at);
#endif
                CHECK(o.state.step == 2);
            }
}

/* A half copy of a large master saturates; a half weight without a master that would become infinite stays. */
static void low_copies_saturate(void) {
    static const amp_dtype types[2] = { AMP_F16, AMP_BF16 };
    static const uint16_t largest[2] = { 0x7bffu, 0x7f7fu };
    static block b;
    int t, moments;
    for (t = 0; t < 2; t++)
        for (moments = 0; moments < 2; moments++) {
            const float big = t == 0 ? 66000.0f : 3.4e38f, last = from_bits(t == 0 ? 0x477fefffu : 0x7f7f7fffu);
            amp_optimizer_desc d = desc_of(moments ? AMP_ADAM : AMP_SGD);
            amp_optimizer_info info;
            amp_optimizer o;
            amp_param p;
            uint16_t stored;
            fill_block(&b);
            d.lr = 1;
            p = param_of(&b, 100);
            p.low = b.low; p.low_dtype = types[t];
            b.w[3] = big; b.w[50] = -big; b.w[70] = last;
            b.g[3] = b.g[50] = b.g[70] = 0;
            CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
            CHECK(b.low[3] == largest[t] && b.low[50] == (largest[t] | 0x8000u));
            CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.applied == 1);
            CHECK(info.saturated == 2 && info.update_overflows == 0 && info.update_tensor == 0 && info.update_index == 3);
            CHECK(b.low[3] == largest[t] && b.low[50] == (largest[t] | 0x8000u) && b.low[70] == largest[t]);
            CHECK(b.w[3] == big && b.w[50] == -big);
            p.master = NULL;
            b.low[3] = largest[t]; stored = b.low[4];
            b.g[3] = -big; b.g[4] = 1;
            CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
            CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.saturated == 0);
            if (!moments) CHECK(b.low[3] == largest[t] && info.update_overflows == 1 && info.update_index == 3);
            CHECK(b.low[4] != stored);
            CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.applied == 1);
        }
}

/* The first of several, and all of them, in many chunks. */
static void overflows_of_many_parameters(void) {
    enum { COUNT_OF_ONE = 40000 };
    static float w[3][COUNT_OF_ONE], g[3][COUNT_OF_ONE];
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_param p[3];
    int i;
    memset(w, 0, sizeof w); memset(g, 0, sizeof g); memset(p, 0, sizeof p);
    for (i = 0; i < 3; i++) { p[i].master = w[i]; p[i].grad = g[i]; p[i].count = COUNT_OF_ONE; p[i].name = i ? "b" : "a"; }
    d.lr = 3; d.unchecked = 1;
    put_bits(&g[1][39999], 0x7fc00000u); put_bits(&g[1][20000], 0x7f800000u); g[2][0] = g[2][1] = 3e38f;
    CHECK(amp_optimizer_init(&o, &d, p, 3) == AMP_OK && amp_optimizer_step(&o, NULL, &info) == AMP_OK);
    CHECK(info.update_overflows == 4 && info.update_tensor == 1 && info.update_index == 20000);
    CHECK(strcmp(info.update_name, "b") == 0);
    memset(g, 0, sizeof g);
    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.update_overflows == 0 && info.update_tensor == -1);
}

/* --- clip ---------------------------------------------------------------------------------------------------- */

/* Plain SGD with lr 1 shows the multiplier itself. */
static void clipping(void) {
    static block b, old;
    static double exact[N];
    float max_norm = 0.25f;
    int k, i;
    for (k = 0; k < 5; k++) {       /* fresh; checked before; unscaled before; another list in between; not reached */
        amp_optimizer_desc d = desc_of(AMP_SGD);
        amp_scaler s = static_scaler(12.0f);
        amp_optimizer_info info;
        amp_optimizer o;
        amp_tensor t, other;
        amp_param p;
        double norm = 0, coefficient;
        float mult, x = 3.0f;
        fill_block(&b);
        make_gradients(&b, AMP_F32, 12.0f, exact);
        p = param_of(&b, N);
        d.lr = 1; d.clip_norm = k == 4 ? 1e6f : max_norm;
        memset(&t, 0, sizeof t);
        t.data = b.g; t.count = N;
        other = t; other.data = &x; other.count = 1;
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
        amp_scaler_scale_loss(&s, 1.0f);
        if (k == 1 || k == 3) CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);
        if (k == 3) CHECK(amp_scaler_check(&s, &other, 1, NULL) == AMP_OK);
        if (k == 2) CHECK(amp_optimizer_unscale(&o, &s) == AMP_OK);
        old = b;
        CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied == 1);
        for (i = 0; i < N; i++) norm += exact[i] * exact[i];
        norm = sqrt(norm);
        /* Unscaling rounds each element, by 2^-24 at most, and the inverse once more. */
        CHECK_MSG(fabs(info.grad_norm / norm - 1) < ldexp(1, -22), "%d: %.9g %.9g", k, info.grad_norm, norm);
        coefficient = (double)d.clip_norm / (info.grad_norm + 1e-6);
        if (coefficient > 1) coefficient = 1;
        CHECK(info.clip_coefficient == (float)coefficient && (k == 4) == (coefficient == 1));
        mult = (float)((k == 2 ? 1.0 : (double)(float)(1.0 / 12.0)) * coefficient);
        for (i = 0; i < N; i++) CHECK(b.w[i] == fmaf(-1.0f, old.g[i] * mult, old.w[i]));
    }
}

/* --- groups and schedules ---------------------------------------------------------------------------------------- */

static void groups(void) {
    static block b[4];
    amp_param_group g[3];
    amp_param p[4];
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_optimizer o;
    int i, kind;
    memset(g, 0, sizeof g);
    g[1].lr = 0.5f; g[1].weight_decay = AMP_ZERO;
    g[2].frozen = 1;
    for (kind = 0; kind < 5; kind++) {
        static block before;
        d.kind = (amp_optimizer_kind)kind;
        d.lr = 0.25f; d.weight_decay = 1.0f; d.groups = g; d.group_count = 3; d.momentum = kind == 0 ? 0.5f : 0;
        for (i = 0; i < 4; i++) {
            fill_block(&b[i]);
            p[i] = param_of(&b[i], 20);
            p[i].group = i % 3;
        }
        b[0].w[0] = b[1].w[0] = 2; b[0].g[0] = b[1].g[0] = 1;
        before = b[2];
        CHECK(amp_optimizer_init(&o, &d, p, 4) == AMP_OK && o.groups[1].lr == 0.5f);
        CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK && amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
        CHECK(memcmp(&before, &b[2], sizeof before) == 0);                  /* frozen: weights and moments alone */
        CHECK(memcmp(b[0].w, before.w, 80) != 0 && (b[0].m[5] != 0.0f || b[0].v[5] != 0.0f));
        if (kind == 0) {        /* w=2: g=1+2=3, w=1.25; buf = .5*3 + 2.25 = 3.75, w = .3125. Without decay: 1.5, then .75 */
            CHECK(b[0].w[0] == 0.3125f && b[1].w[0] == 0.75f);
        }
        p[2].grad = NULL; p[2].m = p[2].v = NULL;                          /* a frozen parameter needs no gradient */
        CHECK(amp_optimizer_init(&o, &d, p, 4) == AMP_OK && amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
        CHECK(memcmp(&before, &b[2], sizeof before) == 0);
        CHECK(amp_optimizer_zero_grad(&o) == AMP_OK && b[0].g[3] == 0.0f);
    }
}

/* A group for each kind, in one optimizer: the bits of as many optimizers, and one inf skips them all. */
static void groups_with_optimizers(void) {
    enum { GROUPS = 6 };
    static const int which[GROUPS] = { 8, 6, 13, 12, 16, 17 };  /* adam is the desc's; LAMB */
    static block one[GROUPS], alone[GROUPS];
    static double exact[N];
    amp_optimizer_desc own[GROUPS], d;
    amp_param_group g[GROUPS];
    amp_optimizer together, apart[GROUPS];
    amp_optimizer_info info;
    amp_param p[GROUPS], q[GROUPS];
    int k, t;
    memset(g, 0, sizeof g);
    for (k = 0; k < GROUPS; k++) {
        own[k] = desc_of_config(&configs[which[k]]);
        own[k].maximize = 0;
        own[k].schedule.kind = AMP_SCHEDULE_LINEAR; own[k].schedule.total_steps = 50;
        fill_block(&one[k]);
        alone[k] = one[k];
        p[k] = param_of(&one[k], N); q[k] = param_of(&alone[k], N);
        p[k].group = k;
        CHECK(amp_optimizer_init(&apart[k], &own[k], &q[k], 1) == AMP_OK);
    }
    d = own[0];
    for (k = 1; k < GROUPS; k++) {
        memset(&own[k].schedule, 0, sizeof own[k].schedule);
        own[k].logger = NULL;
        g[k].optimizer = &own[k];
    }
    d.groups = g; d.group_count = GROUPS;
    CHECK(amp_optimizer_moments(&d) == 2);
    CHECK_MSG(amp_optimizer_init(&together, &d, p, GROUPS) == AMP_OK, "%s", heard);
    memset(own, 0, sizeof own);                                         /* what a group points at is copied */
    for (t = 0; t < 20; t++) {
        for (k = 0; k < GROUPS; k++) {
            make_gradients(&alone[k], AMP_F32, 1.0f, exact);
            if (t == 3 && k == 4) put_bits(&alone[k].g[9], 0x7f800000u);
            if (t == 5 && k >= 2) alone[k].g[7 * k] = 1e38f;            /* v overflows, first in LAMB */
            memcpy(one[k].g, alone[k].g, sizeof one[k].g);
        }
        CHECK(amp_optimizer_step(&together, NULL, &info) == AMP_OK && info.applied == (t != 3));
        for (k = 0; k < GROUPS; k++) {
            if (t != 3) CHECK(amp_optimizer_step(&apart[k], NULL, NULL) == AMP_OK);
            CHECK_MSG(memcmp(&one[k], &alone[k], sizeof one[k]) == 0, "group %d, step %d", k, t);
        }
        if (t == 5) CHECK_MSG(info.update_overflows == 4 && info.update_tensor == 2 && info.update_index == 14, "%d in %d",
            (int)info.update_overflows, info.update_tensor);
    }
    together.groups[1].optimizer = &d;                                  /* between steps is too late */
    CHECK(amp_optimizer_step(&together, NULL, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "groups[1].optimizer"));
    together.groups[1].optimizer = NULL;
    CHECK(amp_optimizer_step(&together, NULL, NULL) == AMP_OK);
    p[2].v = NULL;
    CHECK(amp_optimizer_step(&together, NULL, NULL) == AMP_ERR_ARGUMENT && strstr(heard, "v is NULL"));
}

/* What a group's own optimizer may not have, and what its numbers become: its rate, or the group's. */
static void group_optimizers_refused(void) {
    static block b;
    int k;
    fill_block(&b);
    for (k = 0; k < 8; k++) {
        amp_optimizer_desc d = desc_of(AMP_ADAMW), own = desc_of(AMP_SGD);
        amp_param_group g[2];
        amp_optimizer o;
        amp_param p = param_of(&b, 10);
        memset(g, 0, sizeof g);
        d.groups = g; d.group_count = 2;
        d.weight_decay = 0.5f;
        g[1].optimizer = &own;
        p.group = 1;
        p.m = p.v = NULL;                                               /* SGD needs none */
        own.clip_norm = k == 1; own.maximize = k == 2; own.unchecked = k == 3; own.group_count = k == 4;
        if (k == 5) own.schedule.kind = AMP_SCHEDULE_STEP;
        if (k == 6) own.kind = (amp_optimizer_kind)9;
        if (k == 7) own.momentum = 1.0f;
        heard[0] = 0;
        CHECK_MSG(amp_optimizer_init(&o, &d, &p, 1) == (k ? AMP_ERR_DESC : AMP_OK), "%d: %s", k, heard);
        CHECK(k == 0 || (heard[0] && amp_optimizer_moments(&d) == -1));
        if (k) continue;
        CHECK(o.groups[1].lr == 0.01f && o.groups[1].weight_decay == (float)AMP_ZERO && o.groups[0].lr == 0);
        own.lr = 0.5f; own.weight_decay = 0.25f; g[1].lr = 2;
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && o.groups[1].lr == 2 && o.groups[1].weight_decay == 0.25f);
    }
}

static double furthest(const float* w, const double* exact, int n) {
    double worst = 0;
    int i;
    for (i = 0; i < n; i++) {
        const double error = fabs((double)w[i] - exact[i]);
        if (error > worst) worst = error;
    }
    return worst;
}
/* Two parameters, of which one is frozen in steps 0..299 and 320..349: each beside a textbook of its own, whose t counts the
   steps that moved it. The schedule is everybody's, and a skipped step counts for nobody. Bound: as for
   textbook_agreement; Adam's constants at small t are as exact as later. */
static void frozen_and_thawed(void) {
    enum { FEW = 40, STEPS = 380 };
    static block b[2];
    static textbook r[2];
    static double exact[N];
    int c, i, k, step;
    for (c = 0; c < COUNT(configs); c++) {
        amp_optimizer_desc d = desc_of_config(&configs[c]);
        amp_param_group g[2];
        amp_optimizer o;
        amp_param p[2];
        int own[2] = { 0, 0 }, applied = 0;
        double worst, bound;
        memset(g, 0, sizeof g);
        d.groups = g; d.group_count = 2;
        d.schedule.kind = AMP_SCHEDULE_LINEAR; d.schedule.total_steps = 2 * STEPS;
        for (k = 0; k < 2; k++) {
            fill_block(&b[k]);
            p[k] = param_of(&b[k], FEW);
            p[k].group = k;
            for (i = 0; i < FEW; i++) { r[k].w[i] = (double)b[k].w[i]; r[k].m[i] = r[k].v[i] = 0; }
        }
        CHECK_MSG(amp_optimizer_init(&o, &d, p, 2) == AMP_OK, "%s", heard);
        for (step = 0; step < STEPS; step++) {
            int frozen = step < 300 || (step >= 320 && step < 350), skipped = step % 50 == 30 || step == 301;
            amp_optimizer_desc now = o.desc;
            now.lr = amp_schedule_lr(&d.schedule, o.state.lr, applied);
            o.groups[0].frozen = frozen;
            for (k = 0; k < 2; k++) {
                make_gradients(&b[k], AMP_F32, 1.0f, exact);
                if (!skipped && !(frozen && k == 0)) textbook_step(&r[k], exact, FEW, ++own[k], &now);
            }
            p[0].grad = frozen && step % 2 ? NULL : b[0].g;
            if (skipped) put_bits(&b[1].g[3], 0x7f800000u);
            CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
            applied += !skipped;
            CHECK(o.state.step == applied && o.state.frozen_steps[0] == applied - own[0] && o.state.frozen_steps[1] == 0);
        }
        worst = fmax(furthest(b[0].w, r[0].w, FEW), furthest(b[1].w, r[1].w, FEW));
        bound = STEPS * ldexp(1, -24) * (4 + 4 * STEPS * (double)o.desc.lr * (o.desc.kind == AMP_SGD ? 20 : 4) * (o.desc.kind == AMP_LAMB ? 4 : 1));
        CHECK_MSG(worst < bound && own[0] == 49 && o.state.frozen_steps[0] == 323, "%s: error %g, bound %g, %d steps", configs[c].name, worst, bound, own[0]);
    }
}

/* A state that no training leads to. */
static void states_written_by_hand(void) {
    static block b, before;
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_optimizer o;
    amp_param p;
    int k;
    fill_block(&b);
    p = param_of(&b, 20);
    before = b;
    for (k = 0; k < 7; k++) {
        static const char* const words[] = {
            "state.step -1 must lie in 0..2^62-1", "state.step 4611686018427387904 must", "state.step 9223372036854775807 must",
            "state.frozen_steps[0] 11 must lie in 0..10", "state.frozen_steps[15] -1"
        };
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
        o.state.step = k == 0 ? -1 : k == 1 ? INT64_C(1) << 62 : k == 2 ? INT64_MAX : k == 6 ? (INT64_C(1) << 62) - 1 : 10;
        if (k == 3) o.state.frozen_steps[0] = 11;
        if (k == 4) o.state.frozen_steps[AMP_MAX_GROUPS - 1] = -1;
        if (k == 5) o.state.frozen_steps[0] = 10;
        heard_count = 0;
        CHECK(amp_optimizer_step(&o, NULL, NULL) == (k < 5 ? AMP_ERR_ARGUMENT : AMP_OK) && heard_count == (k < 5));
        CHECK_MSG(k > 4 || strstr(heard, words[k]), "%s", heard);
        CHECK((memcmp(&b, &before, sizeof b) == 0) == (k < 5));
        b = before;
    }
}

/* Rates written by hand are looked at by the next step: what no desc may say is refused, and nothing changes. */
static void rates_written_by_hand(void) {
    static const uint32_t bad[] = { 0x7fc00000u, 0x7f800000u, 0xff800000u, 0xc0000000u };
    static block b, before;
    amp_param_group g[2];
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_optimizer o;
    amp_param p;
    int i, k, last;
    memset(g, 0, sizeof g);
    g[1].lr = 0.5f;
    for (last = 0; last < 2; last++) {                                     /* without groups in the desc, and with two */
        d.groups = last ? g : NULL; d.group_count = 2 * last;
        fill_block(&b);
        p = param_of(&b, 20);
        p.group = last;
        before = b;
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
        for (i = 0; i < COUNT(bad); i++)
            for (k = 0; k < 3; k++) {
                float* rate = k == 0 ? &o.state.lr : k == 1 ? &o.groups[last].lr : &o.groups[last].weight_decay, good = *rate;
                char name[32];
                snprintf(name, sizeof name, "groups[%d].%s", last, k == 1 ? "lr " : "weight_decay ");
                put_bits(rate, bad[i]);
                heard_count = 0;
                CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_ERR_ARGUMENT && heard_count == 1);
                CHECK_MSG(strstr(heard, k ? name : "state.lr"), "%s", heard);
                *rate = good;
            }
        CHECK(memcmp(&b, &before, sizeof b) == 0 && o.state.step == 0);
        o.groups[last].frozen = 1;                                         /* frozen, and then not, at a rate of 0 */
        CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK && memcmp(&b, &before, sizeof b) == 0);
        o.groups[last].frozen = 0;
        o.groups[last].lr = (float)AMP_ZERO;
        CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK && memcmp(b.w, before.w, sizeof b.w) == 0);
        CHECK(memcmp(b.m, before.m, sizeof b.m) != 0 && o.state.step == 2 && o.state.frozen_steps[last] == 1);
        o.groups[last].lr = 0;
        o.groups[last].weight_decay = (float)AMP_ZERO;
        CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK && memcmp(&b, &before, sizeof b) != 0);
    }
}

static void schedules(void) {
    amp_schedule s;
    uint32_t crc = 0;
    float values[1000];
    int t;
    memset(&s, 0, sizeof s);
    CHECK(amp_schedule_lr(NULL, 0.3f, 5) == 0.3f && amp_schedule_lr(&s, 0.3f, 1000000) == 0.3f);
    s.warmup_steps = 4;
    CHECK(amp_schedule_lr(&s, 1, 0) == 0.2f && amp_schedule_lr(&s, 1, 3) == 0.8f && amp_schedule_lr(&s, 1, 4) == 1.0f);
    CHECK(amp_schedule_lr(&s, 1, -7) == 0.2f);
    s.kind = AMP_SCHEDULE_STEP; s.step_size = 10; s.gamma = 0.5f;
    CHECK(amp_schedule_lr(&s, 8, 13) == 8.0f && amp_schedule_lr(&s, 8, 14) == 4.0f && amp_schedule_lr(&s, 8, 34) == 1.0f);
    CHECK(amp_schedule_lr(&s, 8, INT64_MAX) == 0.0f);
    s.kind = AMP_SCHEDULE_LINEAR; s.total_steps = 12; s.floor = 0.25f;
    CHECK(amp_schedule_lr(&s, 4, 4) == 4.0f && amp_schedule_lr(&s, 4, 8) == 2.5f && amp_schedule_lr(&s, 4, 12) == 1.0f);
    CHECK(amp_schedule_lr(&s, 4, 1000) == 1.0f);
    s.kind = AMP_SCHEDULE_COSINE; s.warmup_steps = 0; s.total_steps = 1000; s.floor = 0;
    for (t = 0; t < 1000; t++) {    /* (1+cos)/2 as a square, where the library's cos has no cancellation */
        double half = t <= 500 ? cos(3.14159265358979323846 / 2 * t / 1000) : sin(3.14159265358979323846 / 2 * (1000 - t) / 1000);
        values[t] = amp_schedule_lr(&s, 0.1f, t);
        CHECK_MSG(fabs((double)values[t] / ((double)0.1f * half * half) - 1) <= ldexp(1, -24) * 1.0001, "t %d: %.9g", t, (double)values[t]);
    }
    CHECK(amp_schedule_lr(&s, 0.1f, 1000) == 0.0f && values[0] == 0.1f && values[500] == 0.05f);
    crc = crc_of_floats(values, 1000);
#if !defined(__FAST_MATH__)
    CHECK_MSG(crc == 0xedfa93d0u, "0x%08x", (unsigned)crc);
#endif
    s.floor = 0.5f;
    CHECK(amp_schedule_lr(&s, 1, 500) == 0.75f && amp_schedule_lr(&s, 1, 2000) == 0.5f);
}

static void schedule_in_the_step(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_param p;
    fill_block(&b);
    p = param_of(&b, 1);
    b.w[0] = 0; b.g[0] = 1;
    d.lr = 1; d.schedule.kind = AMP_SCHEDULE_LINEAR; d.schedule.total_steps = 4;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.lr == 1.0f && b.w[0] == -1.0f);
    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.lr == 0.75f && b.w[0] == -1.75f);
    CHECK(amp_optimizer_set_lr(&o, 8) == AMP_OK);
    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.lr == 4.0f && b.w[0] == -5.75f);
    CHECK(amp_optimizer_set_lr(&o, 0) == AMP_OK && amp_optimizer_step(&o, NULL, &info) == AMP_OK && b.w[0] == -5.75f);
    CHECK(amp_optimizer_set_lr(&o, -1) == AMP_ERR_ARGUMENT && amp_optimizer_set_lr(&o, from_bits(0x7fc00000u)) == AMP_ERR_ARGUMENT);
    CHECK(o.state.lr == 0.0f && o.state.step == 4);
    heard_count = 0;
    CHECK(amp_optimizer_set_lr(&o, 0) == AMP_OK && heard_count == 0);
    CHECK(amp_optimizer_set_lr(&o, 2) == AMP_OK && heard_count == 1 && strstr(heard, "the schedule has ended") != NULL);
    CHECK(amp_optimizer_step(&o, NULL, &info) == AMP_OK && info.lr == 0.0f && b.w[0] == -5.75f);
}

/* --- moments -------------------------------------------------------------------------------------------------------- */

/* With gradients of zero the moments decay, and end at zero instead of as subnormals, in every kind. */
static void moments_are_flushed(void) {
    static block b;
    int c, t, i, subnormal = 0;
    for (c = 0; c < COUNT(configs); c++) {
        amp_optimizer_desc d = desc_of_config(&configs[c]);
        amp_optimizer o;
        amp_param p;
        if (amp_optimizer_moments(&d) == 0) continue;
        d.weight_decay = AMP_ZERO; d.beta2 = 0.9f; d.eps = 1e-3f;
        fill_block(&b);
        p = param_of(&b, N);
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
        CHECK(b.m[7] != 0.0f || b.v[7] != 0.0f);
        amp_optimizer_zero_grad(&o);
        for (t = 0; t < 1000; t++) {
            CHECK(amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
            for (i = 0; i < N; i += 31) {
                uint32_t m = to_bits(b.m[i]) & 0x7fffffffu, v = to_bits(b.v[i]) & 0x7fffffffu;
                subnormal += (m > 0 && m < 0x00800000u) || (v > 0 && v < 0x00800000u);
            }
        }
        for (i = 0; i < N; i++) CHECK(to_bits(b.m[i]) == 0 && to_bits(b.v[i]) == 0);
    }
    CHECK(subnormal == 0);
}

/* --- with a scaler ------------------------------------------------------------------------------------------------------ */

/* The call is refused with this code and a sentence, and optimizer, scaler and memory stay as they are. */
#define REFUSED(code, call)                                                                                 \
    do {                                                                                                    \
        static block b_before;                                                                              \
        amp_scaler s_before = s;                                                                            \
        amp_optimizer o_before = o;                                                                         \
        int logs = heard_count;                                                                               \
        b_before = b;                                                                                       \
        CHECK((call) == (code));                                                                            \
        CHECK(!memcmp(&s, &s_before, sizeof s) && !memcmp(&o, &o_before, sizeof o) && !memcmp(&b, &b_before, sizeof b)); \
        CHECK(heard_count == logs + 1);                                                                       \
    } while (0)

static void order_of_calls(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_tensor t;
    amp_param p;
    float w;
    fill_block(&b);
    p = param_of(&b, 3);
    memset(&t, 0, sizeof t);
    t.data = b.g; t.count = 3;
    d.lr = 1;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));           /* before any scale_loss */
    REFUSED(AMP_ERR_STATE, amp_optimizer_unscale(&o, &s));
    amp_scaler_scale_loss(&s, 1.0f);
    b.g[0] = 4; w = b.w[0];
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && b.w[0] == w - 1.0f && info.applied == 1);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));           /* twice */
    REFUSED(AMP_ERR_STATE, amp_optimizer_unscale(&o, &s));              /* after the step */
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &t, 1, NULL));
    CHECK(amp_scaler_update(&s) == AMP_OK && s.state.applied == 1);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_optimizer_unscale(&o, &s) == AMP_OK && b.g[0] == 1.0f);
    REFUSED(AMP_ERR_STATE, amp_optimizer_unscale(&o, &s));              /* twice */
    CHECK(amp_optimizer_step(&o, &s, NULL) == AMP_OK && b.w[0] == w - 2.0f);
    CHECK(amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);                                    /* the caller's own unscale is known too */
    b.g[0] = 4;
    CHECK(amp_scaler_unscale(&s, &t, 1, NULL) == AMP_OK && amp_optimizer_step(&o, &s, NULL) == AMP_OK && b.w[0] == w - 3.0f);
    CHECK(amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);                                    /* and unscale_into; and an own overflow report */
    t.data = b.v; b.v[0] = 4; b.v[1] = b.v[2] = 0;
    { amp_tensor to = t; to.data = b.g; CHECK(amp_scaler_unscale_into(&s, &to, &t, 1, 0, NULL) == AMP_OK); }
    CHECK(amp_optimizer_step(&o, &s, NULL) == AMP_OK && b.w[0] == w - 4.0f && amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_report_overflow(&s) == AMP_OK && amp_optimizer_step(&o, &s, &info) == AMP_OK);
    CHECK(info.applied == 0 && b.w[0] == w - 4.0f && amp_scaler_update(&s) == AMP_OK);
}

/* What the caller does to unscaled gradients is looked at. */
static void nan_made_by_hand(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_param p;
    float w;
    fill_block(&b);
    p = param_of(&b, 40);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_optimizer_unscale(&o, &s) == AMP_OK);
    put_bits(&b.g[39], 0x7fc00000u);
    w = b.w[0];
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied == 0 && info.overflow.nan_count == 1 && b.w[0] == w);
    CHECK(amp_scaler_update(&s) == AMP_OK && s.state.skipped == 1);
}

/* A check may be reused only as long as no new loss was scaled, and only for the whole list. */
static void stale_checks(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_tensor t;
    amp_param p[2];
    fill_block(&b);
    p[0] = param_of(&b, 3);
    p[1] = p[0]; p[1].grad = b.g + 3; p[1].master = b.w + 3;
    memset(&t, 0, sizeof t);
    t.data = b.g; t.count = 3;
    CHECK(amp_optimizer_init(&o, &d, p, 2) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);
    put_bits(&b.g[5], 0x7f800000u);                         /* in the second tensor, which nobody has seen */
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied == 0 && amp_scaler_update(&s) == AMP_OK);
    b.g[5] = 0;
    t.count = 6;
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);                        /* the next micro-batch adds an overflow */
    put_bits(&b.g[0], 0x7f800000u);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied == 0 && amp_scaler_update(&s) == AMP_OK);
    b.g[0] = 0;
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);
    put_bits(&b.g[0], 0x7f800000u);                         /* after a check: to be checked again */
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied == 0 && amp_scaler_update(&s) == AMP_OK);
}

/* The logger of a desc may be gone after init. */
static void loggers_are_copied(void) {
    static block b;
    amp_logger own = { listen, NULL };
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler_desc sd;
    amp_scaler s;
    amp_optimizer o;
    amp_param p;
    fill_block(&b);
    p = param_of(&b, 5);
    memset(&sd, 0, sizeof sd);
    d.logger = sd.logger = &own;
    CHECK(amp_scaler_init(&s, &sd) == AMP_OK && amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    own.log = NULL;
    heard_count = 0;
    CHECK(amp_scaler_update(&s) == AMP_ERR_STATE && heard_count == 1);
    CHECK(amp_optimizer_set_lr(&o, -1.0f) == AMP_ERR_ARGUMENT && heard_count == 2);
    CHECK(o.desc.logger == NULL);
}

/* A scaler without a logger tells the optimizer's what is wrong with the window, and stays without one. */
static void window_is_told_to_the_optimizer(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s;
    amp_optimizer o;
    amp_param p;
    fill_block(&b);
    p = param_of(&b, 5);
    CHECK(amp_scaler_init(&s, NULL) == AMP_OK);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));           /* before any scale_loss */
    REFUSED(AMP_ERR_STATE, amp_optimizer_unscale(&o, &s));
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_optimizer_unscale(&o, &s) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_unscale(&o, &s));              /* twice */
    CHECK(amp_optimizer_step(&o, &s, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));
    CHECK(s.logger.log == NULL && s.logger.user_data == NULL);
}

/* The norm of a step that is skipped, whatever skips it: here an inf that unscale_into saw and did not pass on. */
static void norm_of_a_skipped_step(void) {
    static block b;
    static float from[5];
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o;
    amp_tensor to, src;
    amp_param p;
    fill_block(&b);
    p = param_of(&b, 5);
    memset(&to, 0, sizeof to);
    to.count = 5;
    src = to;
    to.data = b.g; src.data = from;
    put_bits(&from[3], 0x7f800000u);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale_into(&s, &to, &src, 1, 0, NULL) == AMP_OK);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && !info.applied && is_infinite(&info.grad_norm));
}

/* Several optimizers on one scaler, and lists that are split otherwise than the optimizers. */
static void several_optimizers(void) {
    static block b, c;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o, o2;
    amp_param p, p2[2];
    amp_tensor t[3];
    float w, w2;
    fill_block(&b); fill_block(&c);
    p = param_of(&b, 5); p2[0] = param_of(&c, 5); p2[1] = p2[0]; p2[1].grad = c.g + 5; p2[1].master = c.w + 5;
    memset(t, 0, sizeof t);
    t[0].data = b.g; t[1].data = c.g; t[2].data = c.g + 5; t[0].count = t[1].count = t[2].count = 5;
    d.lr = 1;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_init(&o2, &d, p2, 2) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f); amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied && amp_optimizer_step(&o2, &s, &info) == AMP_OK && info.applied);
    CHECK(amp_scaler_update(&s) == AMP_OK && s.state.applied == 1);
    amp_scaler_scale_loss(&s, 1.0f);                        /* checked together: both skip */
    put_bits(&c.g[9], 0x7fc00000u);
    w = b.w[0]; w2 = c.w[0];
    CHECK(amp_scaler_check(&s, t, 3, NULL) == AMP_OK && amp_scaler_may_step(&s) == 0);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && !info.applied && b.w[0] == w && info.overflow.first_tensor == 2);
    CHECK(amp_optimizer_step(&o2, &s, &info) == AMP_OK && !info.applied && c.w[0] == w2 && amp_scaler_update(&s) == AMP_OK);
    c.g[9] = 4; b.g[0] = c.g[0] = 4;
    amp_scaler_scale_loss(&s, 1.0f);                        /* unscaled tensor by tensor: known for all */
    CHECK(amp_scaler_unscale(&s, t + 1, 1, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o2, &s, NULL));      /* half of it: refused */
    CHECK(amp_scaler_unscale(&s, t + 2, 1, NULL) == AMP_OK && amp_optimizer_step(&o2, &s, NULL) == AMP_OK);
    CHECK(c.g[0] == 1.0f && c.w[0] == w2 - 1.0f);
    CHECK(amp_scaler_check(&s, t + 1, 2, NULL) == AMP_OK);         /* looking is allowed after the step, too */
    CHECK(amp_optimizer_step(&o, &s, NULL) == AMP_OK && b.g[0] == 4.0f && b.w[0] == w - 1.0f);     /* this one was not */
    CHECK(amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, t, 3, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));       /* one list over two optimizers */
}

/* Three parameters of 5 elements, so far apart in the block, and their gradients. */
static void three_parts(block* b, int apart, amp_param p[3], amp_tensor t[3]) {
    int i;
    fill_block(b);
    memset(t, 0, 3 * sizeof *t);
    for (i = 0; i < 3; i++) {
        p[i] = param_of(b, 5);
        p[i].grad = b->g + apart * i; p[i].master = b->w + apart * i;
        t[i].data = p[i].grad; t[i].count = 5;
    }
}
/* Lists that begin alike and have as many elements, and parts of a list: nothing is stepped scaled, unseen or twice. */
static void lists_that_share(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o, o2;
    amp_param p[3], ac[2];
    amp_tensor t[3];
    float w;
    three_parts(&b, 10, p, t);
    ac[0] = p[0]; ac[1] = p[2];
    d.lr = 1;
    CHECK(amp_optimizer_init(&o, &d, ac, 2) == AMP_OK && amp_optimizer_init(&o2, &d, p + 2, 1) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, t, 2, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));       /* a and b were unscaled, not c */
    CHECK(amp_optimizer_step(&o2, &s, NULL) == AMP_OK && amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, t, 2, NULL) == AMP_OK);
    put_bits(&b.g[24], 0x7fc00000u);                                /* in c, which no check has seen */
    w = b.w[0];
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && !info.applied && info.overflow.nan_count == 1 && b.w[0] == w);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o2, &s, NULL));      /* a part of what was stepped */
    CHECK(amp_scaler_update(&s) == AMP_OK);
    b.g[24] = 0;
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, t, 3, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o2, &s, NULL));      /* a part of what was unscaled */
    CHECK(amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, t + 2, 1, NULL) == AMP_OK && amp_scaler_unscale(&s, t, 1, NULL) == AMP_OK);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o2, &s, NULL));      /* unscaled alone, stepped with another */
}

/* Other lists that were only checked keep no optimizer from its step; and gradients that are one array may be unscaled
   as one tensor. */
static void lists_that_may_meet(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o, o2;
    amp_param p[3];
    amp_tensor t[3];
    float w;
    three_parts(&b, 5, p, t);
    d.lr = 1;
    CHECK(amp_optimizer_init(&o, &d, p, 1) == AMP_OK && amp_optimizer_init(&o2, &d, p + 1, 2) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, t, 3, NULL) == AMP_OK && amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied);
    CHECK(amp_scaler_check(&s, t, 3, NULL) == AMP_OK && amp_optimizer_step(&o2, &s, &info) == AMP_OK && info.applied);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));
    CHECK(amp_scaler_update(&s) == AMP_OK);
    CHECK(amp_optimizer_init(&o, &d, p, 2) == AMP_OK && amp_optimizer_init(&o2, &d, p + 2, 1) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, t + 1, 2, NULL) == AMP_OK && amp_optimizer_step(&o, &s, NULL) == AMP_OK);
    CHECK(amp_optimizer_step(&o2, &s, &info) == AMP_OK && info.applied && amp_scaler_update(&s) == AMP_OK);
    CHECK(amp_optimizer_init(&o, &d, p, 3) == AMP_OK);
    t[0].count = 15;
    b.g[12] = 4; w = b.w[12];
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, t, 1, NULL) == AMP_OK && amp_optimizer_step(&o, &s, NULL) == AMP_OK && b.w[12] == w - 1.0f);
}

/* One clip over two optimizers by hand is the clip of one that has all parameters. */
static void one_clip_over_two(void) {
    static block one, two;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer_info info;
    amp_optimizer o[2], all;
    amp_overflow_info found;
    amp_param p[2], q[2];
    amp_tensor t[2];
    int i;
    fill_block(&one);
    memset(t, 0, sizeof t);
    for (i = 0; i < 10; i++) one.g[i] = 0;
    one.g[1] = 12; one.g[7] = 16;                                   /* unscaled 3 and 4 */
    two = one;
    for (i = 0; i < 2; i++) {
        p[i] = param_of(&one, 5); p[i].grad = one.g + 5 * i; p[i].master = one.w + 5 * i;
        q[i] = param_of(&two, 5); q[i].grad = two.g + 5 * i; q[i].master = two.w + 5 * i;
        t[i].data = p[i].grad; t[i].count = 5;
    }
    d.lr = 1;
    for (i = 0; i < 2; i++) CHECK(amp_optimizer_init(&o[i], &d, p + i, 1) == AMP_OK);
    d.clip_norm = 0.5f;
    CHECK(amp_optimizer_init(&all, &d, q, 2) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, t, 2, &found) == AMP_OK && found.norm == 5);
    for (i = 0; i < 10; i++) one.g[i] *= (float)(0.5 / (found.norm + 1e-6));
    for (i = 0; i < 2; i++) CHECK(amp_optimizer_step(&o[i], &s, &info) == AMP_OK && info.applied);
    CHECK(info.grad_norm > 0.3999 && info.grad_norm < 0.4001);      /* as it is after the clip */
    CHECK(amp_optimizer_step(&all, &s, &info) == AMP_OK && info.grad_norm == 5);
    for (i = 0; i < 10; i++) CHECK(fabs((double)one.w[i] - (double)two.w[i]) < 1e-6);
}

/* --- misuse --------------------------------------------------------------------------------------------------------------- */

static void refuse(const amp_optimizer_desc* d, amp_param* p, int count, amp_result code, const char* word) {
    amp_optimizer o, before;
    int logs = heard_count;
    memset(&o, 0x5a, sizeof o);
    before = o;
    CHECK_MSG(amp_optimizer_init(&o, d, p, count) == code, "%s: %s", word, heard);
    CHECK_MSG(heard_count == logs + 1 && strstr(heard, word), "'%s' does not name %s", heard, word);
    CHECK(memcmp(&o, &before, sizeof o) == 0);
}
#define REFUSE_DESC(of_kind, member, value, word) \
    do { amp_optimizer_desc d = desc_of(of_kind); d.member = value; refuse(&d, &p, 1, AMP_ERR_DESC, word); \
         CHECK(amp_optimizer_moments(&d) == -1); } while (0)
#define REFUSE_PARAM(member, value, code, word) \
    do { amp_optimizer_desc d = desc_of(AMP_ADAM); amp_param q = p; q.member = value; refuse(&d, &q, 1, code, word); } while (0)

static void refused_descs_and_params(void) {
    static block b;
    amp_param p;
    amp_optimizer_desc none = desc_of(AMP_SGD);
    amp_optimizer unmade;
    amp_param_group group[1];
    float bad[3];
    int i;
    fill_block(&b);
    p = param_of(&b, 5);
    put_bits(&bad[0], 0x7f800000u); put_bits(&bad[1], 0x7fc00000u); bad[2] = -0.5f;
    for (i = 0; i < 3; i++) {
        REFUSE_DESC(AMP_SGD, lr, bad[i], "lr");
        REFUSE_DESC(AMP_SGD, momentum, bad[i], "momentum");
        REFUSE_DESC(AMP_SGD, dampening, bad[i], "dampening");
        REFUSE_DESC(AMP_ADAM, beta1, bad[i], "beta1");
        REFUSE_DESC(AMP_ADAM, beta2, bad[i], "beta2");
        REFUSE_DESC(AMP_ADAM, eps, bad[i], "eps");
        REFUSE_DESC(AMP_ADAMW, weight_decay, bad[i], "weight_decay");
        REFUSE_DESC(AMP_ADAMW, clip_norm, bad[i], "clip_norm");
        REFUSE_DESC(AMP_SGD, schedule.gamma, bad[i], "gamma");
        REFUSE_DESC(AMP_SGD, schedule.floor, bad[i], "floor");
    }
    REFUSE_DESC((amp_optimizer_kind)7, lr, 1, "kind");
    REFUSE_DESC(AMP_SGD, momentum, 1.0f, "momentum");
    REFUSE_DESC(AMP_SGD, dampening, 1.5f, "dampening");
    REFUSE_DESC(AMP_SGD, nesterov, 1, "nesterov");
    REFUSE_DESC(AMP_ADAM, beta1, 1.0f, "beta1");
    REFUSE_DESC(AMP_ADAM, beta2, 1.0f, "beta2");
    REFUSE_DESC(AMP_ADAM, eps, (float)AMP_ZERO, "eps");
    REFUSE_DESC(AMP_SGD, group_count, AMP_MAX_GROUPS + 1, "group_count");
    REFUSE_DESC(AMP_SGD, group_count, 1, "group_count");
    REFUSE_DESC(AMP_SGD, schedule.kind, (amp_schedule_kind)4, "schedule.kind");
    REFUSE_DESC(AMP_SGD, schedule.kind, AMP_SCHEDULE_LINEAR, "total_steps");
    REFUSE_DESC(AMP_SGD, schedule.kind, AMP_SCHEDULE_STEP, "step_size");
    REFUSE_DESC(AMP_SGD, schedule.warmup_steps, -1, "warmup_steps");
    REFUSE_PARAM(master, NULL, AMP_ERR_ARGUMENT, "master");
    REFUSE_PARAM(grad, NULL, AMP_ERR_ARGUMENT, "grad");
    REFUSE_PARAM(m, NULL, AMP_ERR_ARGUMENT, "m is NULL");
    REFUSE_PARAM(v, NULL, AMP_ERR_ARGUMENT, "v is NULL");
    REFUSE_PARAM(group, 1, AMP_ERR_ARGUMENT, "group");
    REFUSE_PARAM(group, -1, AMP_ERR_ARGUMENT, "group");
    REFUSE_PARAM(grad_dtype, AMP_F64, AMP_ERR_DTYPE, "grad_dtype");
    REFUSE_PARAM(low, b.low, AMP_ERR_DTYPE, "low_dtype");
    refuse(&none, NULL, 1, AMP_ERR_ARGUMENT, "params is NULL");
    refuse(&none, &p, 0, AMP_ERR_ARGUMENT, "count is 0");
    memset(group, 0, sizeof group);
    group[0].lr = -3;
    none.groups = group; none.group_count = 1;
    refuse(&none, &p, 1, AMP_ERR_DESC, "groups[0].lr");
    CHECK(amp_optimizer_moments(&none) == -1);
    group[0].lr = 1;
    group[0].weight_decay = bad[1];
    CHECK(amp_optimizer_moments(&none) == -1);
    group[0].weight_decay = 1;
    CHECK(amp_optimizer_moments(&none) == 0);
    CHECK(amp_optimizer_init(NULL, NULL, &p, 1) == AMP_ERR_ARGUMENT);
    CHECK(amp_optimizer_step(NULL, NULL, NULL) == AMP_ERR_ARGUMENT && amp_optimizer_zero_grad(NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_optimizer_set_lr(NULL, 1) == AMP_ERR_ARGUMENT && amp_optimizer_unscale(NULL, NULL) == AMP_ERR_ARGUMENT);
    memset(&unmade, 0, sizeof unmade);
    CHECK(amp_optimizer_set_lr(&unmade, 1) == AMP_ERR_ARGUMENT && unmade.state.lr == 0);
}

/* One array with two duties in a parameter, which a copied line easily has. */
static void two_duties(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_optimizer o;
    amp_param p;
    int k;
    for (k = 0; k < 6; k++) {
        fill_block(&b);
        p = param_of(&b, 5);
        d.kind = k < 4 ? AMP_ADAM : AMP_SGD;
        if (k == 0) p.v = p.m;
        if (k == 1) p.grad = p.master;
        if (k == 2) p.m = p.master;
        if (k == 3) p.v = p.master;
        if (k == 4) p.v = p.m;                              /* plain SGD looks at neither */
        if (k == 5) { p.count = 0; p.grad = p.master; }
        heard_count = 0;
        CHECK(amp_optimizer_init(&o, &d, &p, 1) == (k < 4 ? AMP_ERR_ARGUMENT : AMP_OK) && heard_count == (k < 4));
        CHECK_MSG(k > 3 || strstr(heard, k == 0 ? "m of parameter 0 (p) and v of parameter 0 (p) overlap in memory"
                                         : k == 1 ? "master of parameter 0 (p) and grad of"
                                         : k == 2 ? "master of parameter 0 (p) and m of" : "master of parameter 0 (p) and v of"),
                  "%s", heard);
    }
}

/* The same weights, gradient or moment in two places of the list; empty parameters do not count. */
static void listed_twice(void) {
    static block b[3];
    static amp_half low[5];
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_optimizer o;
    amp_param p[3];
    int k;
    amp_param_group frozen[2];
    memset(frozen, 0, sizeof frozen);
    frozen[1].frozen = 1;
    d.groups = frozen;
    d.group_count = 2;
    for (k = 0; k < 9; k++) {
        int i;
        for (i = 0; i < 3; i++) { fill_block(&b[i]); p[i] = param_of(&b[i], 5); }
        p[2].name = NULL;
        if (k == 0) p[2].master = b[0].w;
        if (k == 1) p[2].grad = b[1].g;
        if (k == 2) p[2] = p[1];
        if (k == 3) for (i = 0; i < 3; i += 2) { p[i].master = NULL; p[i].low = low; p[i].low_dtype = AMP_F16; }
        if (k == 4) { p[0].count = 0; p[2].master = b[0].w; p[2].grad = b[0].g; }
        if (k == 5) { p[2] = p[1]; p[2].count = 0; }
        if (k == 6) p[2].m = b[1].m;
        if (k == 7) p[2].v = b[1].m;
        if (k == 8) { p[2].m = b[1].m; p[2].group = 1; }     /* a frozen one writes none */
        heard_count = 0;
        if (k == 4 || k == 5 || k == 8) { CHECK(amp_optimizer_init(&o, &d, p, 3) == AMP_OK); continue; }
        CHECK(amp_optimizer_init(&o, &d, p, 3) == AMP_ERR_ARGUMENT && heard_count == 1);
        CHECK_MSG(strstr(heard, k == 0 ? "master of parameter 0 (p) and master of parameter 2 (no name) overlap"
                                 : k == 1 ? "grad of parameter 1 (p) and grad of parameter 2 (no name) overlap"
                                 : k == 6 ? "m of parameter 1 (p) and m of parameter 2 (no name) overlap"
                                 : k == 7 ? "m of parameter 1 (p) and v of parameter 2 (no name) overlap"
                                 : k == 2 ? "of parameter 1 (p) and" : "low of parameter 0 (p) and low of parameter 2 (no name)"),
                  "%s", heard);
    }
}

/* Array k of a parameter, and its bytes. */
static char* array_of(const amp_param* p, int k) {
    return (char*)(k == 0 ? (void*)p->master : k == 1 ? p->low : k == 2 ? p->grad : k == 3 ? (void*)p->m : (void*)p->v);
}
static size_t bytes_of(const amp_param* p, int k) { return p->count * (k == 1 || (k == 2 && p->grad_dtype == AMP_F16) ? 2 : 4); }
static void place_array(amp_param* p, int k, char* at) {
    if (k == 0) p->master = (float*)(void*)at;
    if (k == 1) p->low = at;
    if (k == 2) p->grad = at;
    if (k == 3) p->m = (float*)(void*)at;
    if (k == 4) p->v = (float*)(void*)at;
}

/* Every array of one parameter against every one of another and its own, moved until they just touch and just meet. */
static void arrays_that_touch_or_meet(void) {
    static float memory[10][16], before[10][16];
    amp_param p[2];
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_optimizer o;
    int a, b, end, touch, i;
    for (a = 0; a < 10; a++)
        for (b = 0; b < 10; b++)
            for (end = 0; end < 2 && a != b; end++)
                for (touch = 0; touch < 2; touch++) {
                    static const char* const names[5] = { "master", "low", "grad", "m", "v" };
                    int first = a < b ? a : b, second = a < b ? b : a;
                    char text[96], *at;
                    memset(p, 0, sizeof p);
                    for (i = 0; i < 2; i++) {
                        p[i].count = 4; p[i].low_dtype = AMP_F16; p[i].grad_dtype = i ? AMP_F32 : AMP_F16; p[i].name = i ? "b" : "a";
                    }
                    for (i = 0; i < 10; i++) place_array(&p[i / 5], i % 5, (char*)memory[i]);
                    for (i = 0; i < 160; i++) memory[i / 16][i % 16] = 1;
                    memcpy(before, memory, sizeof before);
                    at = (char*)(memory[b] + 6) + (end ? (int)bytes_of(&p[b / 5], b % 5) : -(int)bytes_of(&p[a / 5], a % 5));
                    place_array(&p[b / 5], b % 5, (char*)(memory[b] + 6));
                    place_array(&p[a / 5], a % 5, at + (touch ? 0 : end ? -4 : 4));
                    heard_count = 0;
                    CHECK(amp_optimizer_init(&o, &d, p, 2) == (touch ? AMP_OK : AMP_ERR_ARGUMENT) && heard_count == !touch);
                    if (touch) continue;
                    snprintf(text, sizeof text, "optimizer: %s of parameter %d (%s) and %s of parameter %d (%s) overlap in memory",
                             names[first % 5], first / 5, p[first / 5].name, names[second % 5], second / 5, p[second / 5].name);
                    CHECK_MSG(strcmp(heard, text) == 0 && !memcmp(memory, before, sizeof memory), "%s", heard);
                }
}

/* Many arrays in any order: one that meets another is found wherever the two are. */
static void one_of_many_arrays_meets_another(void) {
    enum { MANY = 1300, ARRAYS = 5 * MANY };
    static float memory[2 * ARRAYS + 2];
    static int order[ARRAYS];
    static amp_param p[MANY];
    amp_optimizer_desc d = desc_of(AMP_ADAM);
    amp_optimizer o;
    int round, i, count, n;
    for (round = 0; round < 60; round++) {
        if (round > 2 && !test_due()) continue;
        count = round < 2 ? MANY : round % 3 ? 400 + round : 1 + (int)(test_random() % MANY);
        n = 5 * count;
        memset(p, 0, sizeof p);
        for (i = 0; i < n; i++) order[i] = round == 1 ? n - 1 - i : i;
        for (i = n - 1; i > 0 && round > 1; i--) {
            int k = (int)(test_random() % (unsigned)(i + 1)), t = order[i];
            order[i] = order[k]; order[k] = t;
        }
        for (i = 0; i < n; i++) {
            p[i / 5].count = 2; p[i / 5].low_dtype = AMP_BF16;
            place_array(&p[i / 5], i % 5, (char*)(memory + 2 * order[i]));
        }
        CHECK_MSG(amp_optimizer_init(&o, &d, p, count) == AMP_OK, "%s", heard);
        i = (int)(test_random() % (unsigned)n);
        if (i % 5 == 1) i++;                               /* a low copy fills half of its place */
        place_array(&p[i / 5], i % 5, array_of(&p[i / 5], i % 5) + (order[i] ? -2 - 2 * (i % 2) : 4));
        heard_count = 0;
        if (order[i] && order[i] < n) {
            int left = 0;
            while (order[left] != order[i] - 1) left++;
            if (left % 5 == 1) continue;
        }
        CHECK_MSG(amp_optimizer_init(&o, &d, p, count) == AMP_ERR_ARGUMENT && heard_count == 1, "round %d, array %d", round, i);
    }
}

static void no_gradient(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_scaler s = static_scaler(4.0f);
    amp_optimizer o;
    amp_param p;
    amp_param_group frozen[1];
    fill_block(&b);
    p = param_of(&b, 5);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    p.grad = NULL;                                          /* taken away after init */
    amp_scaler_scale_loss(&s, 1.0f);
    REFUSED(AMP_ERR_ARGUMENT, amp_optimizer_step(&o, &s, NULL));
    memset(frozen, 0, sizeof frozen);
    frozen[0].frozen = 1; d.groups = frozen; d.group_count = 1;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_optimizer_step(&o, &s, NULL));
    CHECK(amp_optimizer_unscale(&o, NULL) == AMP_ERR_STATE);
}

static void defaults(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_SGD);
    amp_optimizer o;
    amp_param p;
    fill_block(&b);
    p = param_of(&b, 5);
    CHECK(amp_optimizer_moments(NULL) == 0 && amp_optimizer_moments(&d) == 0);
    d.momentum = 0.9f;
    CHECK(amp_optimizer_moments(&d) == 1);
    d = desc_of(AMP_RMSPROP);
    CHECK(amp_optimizer_moments(&d) == 1);
    d.momentum = 0.9f;
    CHECK(amp_optimizer_moments(&d) == 2);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && o.desc.lr == 0.01f && o.desc.beta2 == 0.99f && o.desc.eps == 1e-8f);
    d = desc_of(AMP_LAMB);
    CHECK(amp_optimizer_moments(&d) == 2);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && o.desc.lr == 0.001f && o.desc.eps == 1e-6f && o.desc.weight_decay == 0.0f);
    d = desc_of(AMP_ADAMW);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && o.desc.beta1 == 0.9f && o.desc.beta2 == 0.999f && o.desc.eps == 1e-8f);
    CHECK(o.desc.weight_decay == 0.0f);
    d.weight_decay = AMP_ZERO; d.lr = AMP_ZERO; d.beta1 = AMP_ZERO;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && o.desc.weight_decay == 0.0f && o.desc.lr == 0.0f && o.desc.beta1 == 0.0f);
    CHECK(amp_optimizer_init(&o, NULL, &p, 1) == AMP_OK && o.desc.lr == 0.01f && o.state.lr == 0.01f);
}

/* LAMB where a norm is 0: the ratio is 1, so zero weights move and zero directions give no NaN. */
static void lamb_zero_norms(void) {
    static block b;
    amp_optimizer_desc d = desc_of(AMP_LAMB);
    amp_optimizer o;
    amp_param p;
    int i;
    fill_block(&b);
    memset(b.w, 0, sizeof b.w);
    for (i = 0; i < N; i++) b.g[i] = 1.0f;
    d.lr = 0.5f;
    p = param_of(&b, N);
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
    for (i = 0; i < N; i++) CHECK_MSG(fabs((double)b.w[i] + 0.5) < 1e-5, "%g", (double)b.w[i]);   /* -lr * g/|g| */
    memset(&b, 0, sizeof b);
    for (i = 0; i < N; i++) b.w[i] = 2.0f;
    CHECK(amp_optimizer_init(&o, &d, &p, 1) == AMP_OK && amp_optimizer_step(&o, NULL, NULL) == AMP_OK);
    for (i = 0; i < N; i++) CHECK(b.w[i] == 2.0f);
}

static void zero_grad_over_nan(void) {
    static block b;
    amp_optimizer o;
    amp_param p[2];
    int i;
    fill_block(&b);
    p[0] = param_of(&b, N); p[1] = p[0];
    p[1].master = b.v;
    p[1].grad = b.g16; p[1].grad_dtype = AMP_F16;
    put_bits(&b.g[5], 0x7fc00000u); put_bits(&b.g[N - 1], 0xff800000u); b.g16[N - 1] = 0x7c00u;
    CHECK(amp_optimizer_init(&o, NULL, p, 2) == AMP_OK && amp_optimizer_zero_grad(&o) == AMP_OK);
    for (i = 0; i < N; i++) CHECK(to_bits(b.g[i]) == 0 && b.g16[i] == 0);
}

/* --- mixed precision in one object ------------------------------------------------------------------ */

/* Weights of three kinds: FP32 with a low copy, FP32 alone, 16-bit with a master; and their gradients. */
enum { MIXED = 3, MIXED_COUNT = 70 };
typedef struct mixed_arrays {
    float w[2][MIXED_COUNT], g[MIXED][MIXED_COUNT];
    amp_half low[MIXED_COUNT];
} mixed_arrays;

static void mixed_fill(mixed_arrays* a, amp_param* p) {
    int i, k;
    memset(a, 0, sizeof *a);
    memset(p, 0, MIXED * sizeof *p);
    for (i = 0; i < MIXED_COUNT; i++) {
        for (k = 0; k < 2; k++) a->w[k][i] = amp_random_uniform(1, (uint64_t)(i + 100 * k)) - 0.5f;
        a->low[i] = amp_half_from_float(amp_random_uniform(2, (uint64_t)i) - 0.5f);
    }
    for (i = 0; i < MIXED; i++) { p[i].grad = a->g[i]; p[i].count = MIXED_COUNT; }
    p[0].master = a->w[0]; p[0].low_dtype = AMP_BF16;
    p[1].master = a->w[1];
    p[2].low = a->low; p[2].low_dtype = AMP_F16;
}
/* A gradient of step t, times the scale; every seventh step one is infinite. */
static void mixed_gradients(mixed_arrays* a, int t, float scale) {
    int i, k;
    for (k = 0; k < MIXED; k++)
        for (i = 0; i < MIXED_COUNT; i++)
            a->g[k][i] = scale * (amp_random_uniform((uint64_t)t, (uint64_t)(i + k * MIXED_COUNT)) - 0.5f);
    if (t % 7 == 3) put_bits(&a->g[1][5], 0x7f800000u);
}
static amp_mixed_desc mixed_desc(const amp_param* p, amp_optimizer_kind kind) {
    amp_mixed_desc d;
    memset(&d, 0, sizeof d);
    d.params = p; d.count = MIXED; d.optimizer.kind = kind; d.optimizer.momentum = kind == AMP_SGD ? 0.9f : 0.0f;
    d.scaler.growth_interval = 3;
    d.logger = &LISTENER;
    d.allocator.alloc = failing_alloc; d.allocator.free = failing_free;
    return d;
}

/* The object does what a loop by hand does with a scaler and an optimizer, bit for bit. */
static void mixed_same_bits(void) {
    static mixed_arrays by_hand, in_one;
    static float master[MIXED_COUNT], m[MIXED][MIXED_COUNT], v[MIXED][MIXED_COUNT];
    static amp_bfloat16 low[MIXED_COUNT];
    int kind, t, i;
    for (kind = AMP_SGD; kind <= AMP_RMSPROP; kind++) {
        amp_param p[MIXED], q[MIXED];
        amp_mixed mixed;
        amp_mixed_desc d;
        amp_optimizer o;
        amp_scaler s;
        mixed_fill(&by_hand, p);
        mixed_fill(&in_one, q);
        d = mixed_desc(q, (amp_optimizer_kind)kind);
        CHECK_MSG(amp_mixed_init(&mixed, &d) == AMP_OK, "%s", heard);
        memset(m, 0, sizeof m); memset(v, 0, sizeof v);
        amp_convert(amp_f32(master), amp_f16(by_hand.low), MIXED_COUNT);
        for (i = 0; i < MIXED; i++) { p[i].m = m[i]; p[i].v = v[i]; }
        p[0].low = low; p[2].master = master;
        CHECK(amp_optimizer_init(&o, &d.optimizer, p, MIXED) == AMP_OK && amp_scaler_init(&s, &d.scaler) == AMP_OK);
        for (t = 0; t < 30; t++) {
            const float scale = amp_scaler_scale_loss(&s, 0.5f), seed = amp_mixed_scale(&mixed, 1.0f, 0.5f);
            amp_optimizer_info info, other;
            CHECK(to_bits(scale) == to_bits(seed));
            mixed_gradients(&by_hand, t, scale);
            mixed_gradients(&in_one, t, seed);
            CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && amp_scaler_update(&s) == AMP_OK);
            CHECK(amp_mixed_step(&mixed, &other) == AMP_OK);
            CHECK(other.applied == (t % 7 != 3) && memcmp(&info, &other, offsetof(amp_optimizer_info, overflow)) == 0);
            CHECK(memcmp(by_hand.w, in_one.w, sizeof in_one.w) == 0);
            CHECK(memcmp(by_hand.low, in_one.low, sizeof in_one.low) == 0);
            CHECK(memcmp(low, mixed.optimizer.params[0].low, sizeof low) == 0);
            CHECK(memcmp(master, mixed.optimizer.params[2].master, sizeof master) == 0);
            CHECK(memcmp(&s.state, &mixed.scaler.state, sizeof s.state) == 0);
        }
        CHECK(mixed.scaler.state.skipped == 4 && mixed.optimizer.params[1].low == NULL);
        CHECK((mixed.optimizer.params[0].m != NULL) == (kind != AMP_RMSPROP));
        CHECK((mixed.optimizer.params[0].v != NULL) == (kind != AMP_SGD));
        amp_mixed_free(&mixed);
        CHECK(alloc_live == 0 && mixed.memory == NULL);
    }
}

/* An address among the masters gives the element of the low copy; any other one itself. */
static void mixed_low_copies(void) {
    static mixed_arrays a;
    amp_param p[MIXED];
    amp_mixed mixed;
    amp_mixed_desc d;
    amp_ref x;
    mixed_fill(&a, p);
    d = mixed_desc(p, AMP_SGD);
    CHECK(amp_mixed_init(&mixed, &d) == AMP_OK);
    x = amp_mixed_low(&mixed, a.w[0] + 7);
    CHECK(x.dtype == AMP_BF16 && value_at(x.data, x.dtype, 0) == (double)amp_bfloat16_to_float(amp_bfloat16_from_float(a.w[0][7])));
    x = amp_mixed_low(&mixed, a.w[0] + MIXED_COUNT - 1);
    CHECK(x.dtype == AMP_BF16 && (char*)x.data == (char*)mixed.optimizer.params[0].low + 2 * (MIXED_COUNT - 1));
    x = amp_mixed_low(&mixed, a.w[1]);
    CHECK(x.dtype == AMP_F32 && x.data == a.w[1]);
    x = amp_mixed_low(&mixed, a.g[0]);
    CHECK(x.dtype == AMP_F32 && x.data == a.g[0]);
    x = amp_mixed_low(NULL, a.g[0]);
    CHECK(x.dtype == AMP_F32 && x.data == a.g[0]);
    CHECK(strcmp(mixed.optimizer.params[2].name, "param2") == 0);
    amp_mixed_free(&mixed);
}

/* Split masters of the caller's and moments in 16 bits: the object adds the moments alone. */
static void mixed_fewer_bits(void) {
    static mixed_arrays a;
    static uint16_t low[MIXED_COUNT], rest[MIXED_COUNT], before[MIXED_COUNT];
    amp_param p[MIXED];
    amp_mixed mixed;
    amp_mixed_desc d;
    mixed_fill(&a, p);
    amp_master_split(low, rest, a.w[0], MIXED_COUNT);
    memcpy(before, rest, sizeof rest);
    p[0].master = NULL; p[0].low = low; p[0].low_dtype = AMP_BF16; p[0].rest = rest;
    p[0].moment_dtype = AMP_BF16;
    d = mixed_desc(p, AMP_ADAM);
    d.count = 1;
    CHECK_MSG(amp_mixed_init(&mixed, &d) == AMP_OK, "%s", heard);
    p[0] = mixed.optimizer.params[0];
    CHECK(!p[0].master && (char*)p[0].v - (char*)p[0].m == (2 * MIXED_COUNT + 63) / 64 * 64);
    mixed_gradients(&a, 1, amp_mixed_scale(&mixed, 1.0f, 1.0f));
    CHECK(amp_mixed_step(&mixed, NULL) == AMP_OK && memcmp(before, rest, sizeof rest) != 0);
    amp_mixed_free(&mixed);
}

/* A loss of NaN skips the step and leaves the scale; a call in the wrong order is refused. */
static void mixed_windows(void) {
    static mixed_arrays a;
    static const mixed_arrays zeros;
    amp_param p[MIXED];
    amp_mixed mixed;
    amp_mixed_desc d;
    amp_optimizer_info info;
    mixed_fill(&a, p);
    d = mixed_desc(p, AMP_SGD);
    CHECK(amp_mixed_init(&mixed, &d) == AMP_OK);
    check_refused(amp_mixed_step(&mixed, NULL), AMP_ERR_STATE,
                  "amp_mixed_step: no loss was scaled since the last update");
    CHECK(amp_mixed_scale(&mixed, from_bits(0x7fc00000u), 2.0f) == 131072.0f);
    CHECK(amp_mixed_step(&mixed, &info) == AMP_OK && !info.applied && info.overflow.unsound);
    CHECK(mixed.scaler.state.scale == 65536.0f && mixed.scaler.state.skipped == 1);
    amp_mixed_free(&mixed);
    amp_mixed_free(&mixed);
    amp_mixed_free(NULL);
    CHECK(amp_mixed_step(&mixed, NULL) == AMP_ERR_ARGUMENT && amp_mixed_step(NULL, NULL) == AMP_ERR_ARGUMENT);
    CHECK(to_bits(amp_mixed_scale(&mixed, 1.0f, 1.0f)) == 0x7fc00000u && to_bits(amp_mixed_scale(NULL, 1.0f, 1.0f)) == 0x7fc00000u);
    CHECK(memcmp(a.g, zeros.g, sizeof a.g) == 0);
}

/* What init refuses: a sentence, nothing allocated, the object as it was. */
static void mixed_refusals(void) {
    static mixed_arrays a;
    amp_param p[MIXED];
    amp_mixed mixed, before;
    amp_mixed_desc d;
    long k;
    mixed_fill(&a, p);
    memset(&mixed, 0x5a, sizeof mixed);
    before = mixed;
#define REFUSE(change, code, sentence) \
    do { \
        mixed_fill(&a, p); \
        d = mixed_desc(p, AMP_ADAM); \
        change; \
        check_refused(amp_mixed_init(&mixed, &d), code, sentence); \
        CHECK(alloc_live == 0 && memcmp(&mixed, &before, sizeof mixed) == 0); \
    } while (0)
    REFUSE(d.params = NULL, AMP_ERR_ARGUMENT, "amp_mixed_init: there are no parameters");
    REFUSE(d.count = 0, AMP_ERR_ARGUMENT, "amp_mixed_init: there are no parameters");
    REFUSE(d.allocator.free = NULL, AMP_ERR_DESC, "amp_mixed_init: allocator needs both alloc and free, or neither");
    REFUSE(p[1].grad = NULL, AMP_ERR_ARGUMENT, "optimizer: parameter 1 (param1): grad is NULL");
    REFUSE(p[1].master = NULL, AMP_ERR_ARGUMENT, "optimizer: parameter 1 (param1): neither master nor low is given");
    REFUSE(p[0].low_dtype = AMP_F64, AMP_ERR_DTYPE, "optimizer: parameter 0 (param0): low_dtype must be F16 or BF16");
    REFUSE(p[2].low_dtype = AMP_F32, AMP_ERR_DTYPE, "optimizer: parameter 2 (param2): low_dtype must be F16 or BF16");
    REFUSE(p[1].count = SIZE_MAX / 8, AMP_ERR_ARGUMENT,
           "optimizer: parameter 1 (param1): no memory holds that many elements");
    REFUSE(p[1].master = a.g[0], AMP_ERR_ARGUMENT,
           "optimizer: grad of parameter 0 (param0) and master of parameter 1 (param1) overlap in memory");
    REFUSE(d.optimizer.lr = -2.0f, AMP_ERR_DESC, "optimizer: lr -2 must be finite and not negative");
    REFUSE(d.scaler.init_scale = -1.0f, AMP_ERR_DESC, "scaler: init_scale -1 must be finite and greater than 2^-128");
    mixed_fill(&a, p);
    d = mixed_desc(p, AMP_ADAM);
    fail_at_call(1);
    CHECK(amp_mixed_init(&mixed, &d) == AMP_ERR_MEMORY && strstr(heard, "amp_mixed_init: out of memory, ") == heard);
    fail_at_call(0);
    for (k = 0; k < MIXED; k++) p[k].count = SIZE_MAX / 16;
    CHECK(amp_mixed_init(&mixed, &d) == AMP_ERR_MEMORY && strstr(heard, "amp_mixed_init: ") == heard);
    CHECK(amp_mixed_init(NULL, &d) == AMP_ERR_ARGUMENT && amp_mixed_init(&mixed, NULL) == AMP_ERR_ARGUMENT);
    CHECK(alloc_live == 0 && memcmp(&mixed, &before, sizeof mixed) == 0);
#undef REFUSE
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(textbook_agreement);
    TEST(rmsprop_of_kann);
    TEST(same_bits);
    TEST(arrays_begin_anywhere);
    TEST(same_bits_in_many_chunks);
    TEST(low_is_rounded_master);
    TEST(low_weights_trained);
    TEST(masters_split_and_join);
    TEST(split_masters_train_alike);
    TEST(split_masters_overflow);
    TEST(moments_in_16_bits);
    TEST(moments_stay_finite);
    TEST(fewer_bits_refused);
    TEST(a_skipped_step_changes_nothing);
    TEST(unchecked);
    TEST(an_overflow_of_the_update_stays_out);
    TEST(low_copies_saturate);
    TEST(overflows_of_many_parameters);
    TEST(clipping);
    TEST(groups);
    TEST(groups_with_optimizers);
    TEST(group_optimizers_refused);
    TEST(rates_written_by_hand);
    TEST(frozen_and_thawed);
    TEST(states_written_by_hand);
    TEST(schedules);
    TEST(schedule_in_the_step);
    TEST(moments_are_flushed);
    TEST(order_of_calls);
    TEST(nan_made_by_hand);
    TEST(stale_checks);
    TEST(loggers_are_copied);
    TEST(window_is_told_to_the_optimizer);
    TEST(norm_of_a_skipped_step);
    TEST(several_optimizers);
    TEST(lists_that_share);
    TEST(lists_that_may_meet);
    TEST(one_clip_over_two);
    TEST(refused_descs_and_params);
    TEST(two_duties);
    TEST(listed_twice);
    TEST(arrays_that_touch_or_meet);
    TEST(one_of_many_arrays_meets_another);
    TEST(no_gradient);
    TEST(defaults);
    TEST(lamb_zero_norms);
    TEST(zero_grad_over_nan);
    TEST(mixed_same_bits);
    TEST(mixed_low_copies);
    TEST(mixed_fewer_bits);
    TEST(mixed_windows);
    TEST(mixed_refusals);
    TEST_END();
}
