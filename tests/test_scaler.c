/* test_scaler.c - the loss-scale machine against the rules of the systems it stands for, the checks of gradients, and
   every misuse. All expected values are formed here, without the library. */
#include "helpers.h"
#include <math.h>


static const uint32_t BITS_INF = 0x7f800000u, BITS_QNAN = 0x7fc00001u, BITS_SNAN = 0x7f800001u;

static amp_tensor tensor(void* data, amp_dtype t, size_t n, const char* name) {
    amp_tensor x;
    x.data = data; x.dtype = t; x.count = n; x.name = name;
    return x;
}

static amp_scaler_desc desc_of(amp_scaler_preset p) {
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = p;
    d.logger = &LISTENER;
    return d;
}

static amp_scaler scaler_of(amp_scaler_preset p, float init) {
    amp_scaler_desc d = desc_of(p);
    amp_scaler s;
    d.init_scale = init;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    return s;
}

/* One window as a training loop has it: one gradient, finite or not. */
static amp_result one_step(amp_scaler* s, int overflow) {
    float g = 1.0f;
    amp_tensor t = tensor(&g, AMP_F32, 1, "g");
    if (overflow) put_bits(&g, BITS_INF);
    amp_scaler_scale_loss(s, 1.0f);
    if (amp_scaler_check(s, &t, 1, NULL) != AMP_OK) return AMP_ERR_ARGUMENT;
    return amp_scaler_update(s);
}

/* --- worked sequences ---------------------------------------------------------------------------- */

#define MAX_STEPS 20
typedef struct sequence {
    const char* name;
    amp_scaler_preset preset;
    float init;
    int interval, hysteresis;
    const char* steps;              /* F clean, I overflow */
    double scale[MAX_STEPS];        /* after each step; -1 = update returns an error */
} sequence;

#define P127 1.7014118346046923e38
#define P126 8.507059173023462e37f
#define LARGEST 3.4028234663852886e38
#define OVER HUGE_VAL

#define SEQUENCE_A "FFFFIFFFIIFFFFFF"
#define A_PLAIN { 1024, 1024, 2048, 2048, 1024, 1024, 1024, 2048, 1024, 512, 512, 512, 1024, 1024, 1024, 2048 }
#define A_HYST  { 1024, 1024, 2048, 2048, 2048, 2048, 2048, 4096, 4096, 2048, 2048, 2048, 4096, 4096, 4096, 8192 }
#define B_FREE { 2, 1, .5, .25, .125, .0625 }
#define B_ONE  { 2, 1, 1, 1, 1, 1 }
#define E_PLAIN { 16, 8, 16, 8, 4, 8 }
#define E_HYST  { 16, 16, 32, 32, 16, 32 }
#define I_ONE { 1, 1, 1, 1, 1, 2, 2, 4 }

static const sequence sequences[] = {
    { "A pytorch",   AMP_SCALER_PYTORCH,   1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A mindspore", AMP_SCALER_MINDSPORE, 1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A manager",   AMP_SCALER_MINDSPORE_MANAGER, 1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A apex",      AMP_SCALER_APEX,      1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A oneflow",   AMP_SCALER_ONEFLOW,   1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A jmp",       AMP_SCALER_JMP,       1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A tf",        AMP_SCALER_TF_LEGACY, 1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A keras",     AMP_SCALER_KERAS,     1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A flax",      AMP_SCALER_FLAX,      1024, 3, 0, SEQUENCE_A,
      { 1024, 1024, 1024, 2048, 1024, 1024, 1024, 1024, 512, 256, 256, 256, 256, 512, 512, 512 } },
    { "A megatron",  AMP_SCALER_MEGATRON,  1024, 3, 2, SEQUENCE_A, A_HYST },
    { "A deepspeed 0.17.0", AMP_SCALER_DEEPSPEED_0_17_0, 1024, 3, 2, SEQUENCE_A, A_HYST },
    { "A deepspeed", AMP_SCALER_DEEPSPEED, 1024, 3, 2, SEQUENCE_A,
      { 1024, 1024, 1024, 2048, 2048, 2048, 2048, 2048, 1024, 512, 512, 512, 512, 1024, 1024, 1024 } },
    { "A deepspeed consecutive", AMP_SCALER_DEEPSPEED_CONSECUTIVE, 1024, 3, 2, SEQUENCE_A,
      { 1024, 1024, 1024, 2048, 2048, 2048, 2048, 2048, 2048, 1024, 1024, 1024, 1024, 2048, 2048, 2048 } },
    { "A paddle",    AMP_SCALER_PADDLE,    1024, 3, 2, SEQUENCE_A, A_HYST },
    { "A static",    AMP_SCALER_STATIC,    1024, 0, 0, SEQUENCE_A,
      { 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024 } },
    { "A fixed",     AMP_SCALER_MINDSPORE_FIXED, 0, 0, 0, "FFIIF", { 128, 128, 128, 128, 128 } },

    { "B pytorch",   AMP_SCALER_PYTORCH,   4, 0, 0, "IIIIII", B_FREE },
    { "B apex",      AMP_SCALER_APEX,      4, 0, 0, "IIIIII", B_FREE },
    { "B keras",     AMP_SCALER_KERAS,     4, 0, 0, "IIIIII", B_FREE },
    { "B flax",      AMP_SCALER_FLAX,      4, 0, 0, "IIIIII", B_FREE },
    { "B mindspore", AMP_SCALER_MINDSPORE, 4, 0, 0, "IIIIII", B_ONE },
    { "B oneflow",   AMP_SCALER_ONEFLOW,   4, 0, 0, "IIIIII", B_ONE },
    { "B jmp",       AMP_SCALER_JMP,       4, 0, 0, "IIIIII", B_ONE },
    { "B megatron",  AMP_SCALER_MEGATRON,  4, 0, 2, "IIIIII", { 4, 2, 1, 1, 1, 1 } },
    { "B deepspeed", AMP_SCALER_DEEPSPEED, 4, 0, 2, "IIII", { 4, 2, 1, -1 } },
    { "B deepspeed consecutive", AMP_SCALER_DEEPSPEED_CONSECUTIVE, 4, 0, 2, "IIII", { 4, 2, 1, -1 } },
    { "B paddle",    AMP_SCALER_PADDLE,    4, 0, 2, "IIIIII", { 4, 2, 2, 1, 1, 1 } },

    { "C pytorch",   AMP_SCALER_PYTORCH,   P126, 1, 0, "FFFF", { P127, P127, P127, P127 } },
    { "C mindspore", AMP_SCALER_MINDSPORE, P126, 1, 0, "FFFF", { P127, P127, P127, P127 } },
    { "C jmp",       AMP_SCALER_JMP,       P126, 1, 0, "FFFF", { P127, P127, P127, P127 } },
    { "C tf",        AMP_SCALER_TF_LEGACY, P126, 1, 0, "FFFF", { P127, P127, P127, P127 } },
    { "C paddle",    AMP_SCALER_PADDLE,    P126, 1, 0, "FFFF", { P127, P127, P127, P127 } },
    { "C oneflow",   AMP_SCALER_ONEFLOW,   P126, 1, 0, "FFFF", { P127, LARGEST, LARGEST, LARGEST } },
    { "C flax",      AMP_SCALER_FLAX,      P126, AMP_ZERO, 0, "FFFF", { P127, LARGEST, LARGEST, LARGEST } },
    { "C apex",      AMP_SCALER_APEX,      P126, 1, 0, "FIFF", { 16777216, 8388608, 16777216, 16777216 } },
    { "C keras",     AMP_SCALER_KERAS,     P126, 1, 0, "FFFF", { P127, OVER, OVER, OVER } },
    { "C megatron",  AMP_SCALER_MEGATRON,  P126, 1, 0, "FFFF", { P127, OVER, OVER, OVER } },

    { "E pytorch",   AMP_SCALER_PYTORCH,   8, 1, 0, "FIFIIF", E_PLAIN },
    { "E keras",     AMP_SCALER_KERAS,     8, 1, 0, "FIFIIF", E_PLAIN },
    { "E oneflow",   AMP_SCALER_ONEFLOW,   8, 1, 0, "FIFIIF", E_PLAIN },
    { "E megatron",  AMP_SCALER_MEGATRON,  8, 1, 2, "FIFIIF", E_HYST },
    { "E deepspeed 0.17.0", AMP_SCALER_DEEPSPEED_0_17_0, 8, 1, 2, "FIFIIF", E_HYST },
    { "E deepspeed", AMP_SCALER_DEEPSPEED, 8, 1, 2, "FFFIFIIF", { 8, 16, 32, 32, 32, 16, 8, 8 } },
    { "E paddle",    AMP_SCALER_PADDLE,    8, 1, 2, "FIFIIF", E_HYST },
    { "E flax",      AMP_SCALER_FLAX,      8, 1, 0, "FIFIIF", { 8, 4, 4, 2, 1, 1 } },

    { "I mindspore", AMP_SCALER_MINDSPORE, 2, 2, 0, "IIIIFFFF", I_ONE },
    { "I oneflow",   AMP_SCALER_ONEFLOW,   2, 2, 0, "IIIIFFFF", I_ONE },
    { "I jmp",       AMP_SCALER_JMP,       2, 2, 0, "IIIIFFFF", I_ONE },
    { "I pytorch",   AMP_SCALER_PYTORCH,   2, 2, 0, "IIIIFFFF", { 1, .5, .25, .125, .125, .25, .25, .5 } },
    { "I megatron",  AMP_SCALER_MEGATRON,  2, 2, 2, "IIIIFFFF", { 2, 1, 1, 1, 1, 2, 2, 4 } },

    { "A cell",      AMP_SCALER_MINDSPORE_CELL, 1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "A fairseq",   AMP_SCALER_FAIRSEQ,   1024, 3, 0, SEQUENCE_A, A_PLAIN },
    { "B cell",      AMP_SCALER_MINDSPORE_CELL, 4, 0, 0, "IIIIII", B_ONE },
    { "B fairseq",   AMP_SCALER_FAIRSEQ,   .00048828125f, 0, 0, "III", { .000244140625, .0001220703125, -1 } },
    { "C cell",      AMP_SCALER_MINDSPORE_CELL, P126, 1, 0, "FFFF", { P127, OVER, OVER, OVER } },
    { "NNabla",      AMP_SCALER_NNABLA,    8, 3, 0, "FFFFFFFFFFFFFF", { 8, 8, 8, 8, 16, 16, 16, 16, 32, 32, 32, 32, 64, 64 } },
};

static void worked_sequences(void) {
    int i, k;
    for (i = 0; i < COUNT(sequences); i++) {
        const sequence* q = &sequences[i];
        amp_scaler_desc d = desc_of(q->preset);
        amp_scaler s;
        d.init_scale = q->init;
        d.growth_interval = q->interval;
        d.hysteresis = q->hysteresis;
        CHECK_MSG(amp_scaler_init(&s, &d) == AMP_OK, "%s: %s", q->name, heard);
        for (k = 0; q->steps[k]; k++) {
            amp_result r = one_step(&s, q->steps[k] == 'I');
            int error = q->scale[k] < 0;
            CHECK_MSG(r == (error || q->scale[k] == OVER ? AMP_ERR_OVERFLOW : AMP_OK), "%s step %d: result %d", q->name, k, (int)r);
            CHECK_MSG(error || (double)s.state.scale == q->scale[k], "%s step %d: scale %g, not %g", q->name, k,
                      (double)s.state.scale, q->scale[k]);
        }
    }
}

/* Fairseq's tolerance by hand: 1/2 means that the scale falls where half of the windows since it last moved overflowed,
   all overflows since it last fell counted. */
static void tolerance_of_fairseq(void) {
    static const char steps[] = "FFIFIIFFFFI";
    static const double want[] = { 8, 8, 8, 8, 8, 4, 4, 4, 4, 8, 4 };
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    amp_scaler_desc d = desc_of(AMP_SCALER_FAIRSEQ);
    amp_scaler s, again;
    int k;
    d.init_scale = 8; d.growth_interval = 4; d.tolerance = 0.5;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && s.rule.tolerance == 0.5);
    for (k = 0; steps[k]; k++) {
        CHECK(one_step(&s, steps[k] == 'I') == AMP_OK);
        CHECK_MSG((double)s.state.scale == want[k], "step %d: %g", k, (double)s.state.scale);
        CHECK(s.state.hysteresis_left == (k == 2 || k == 3 ? 0 : k == 4 ? -1 : 1));
        CHECK(amp_scaler_save(&s, bytes, sizeof bytes) == AMP_OK && amp_scaler_init(&again, &d) == AMP_OK);
        CHECK(amp_scaler_load(&again, bytes, sizeof bytes) == AMP_OK);
        CHECK(again.state.hysteresis_left == s.state.hysteresis_left);
        CHECK(again.state.since_rescale == s.state.since_rescale);
    }
    s.state.since_rescale = -1;
    CHECK(amp_scaler_save(&s, bytes, sizeof bytes) == AMP_OK);
    CHECK(amp_scaler_load(&again, bytes, sizeof bytes) == AMP_ERR_FORMAT);
    d.init_scale = 0.00015f; d.tolerance = 0;   /* the floor would be reached: an error, and the scale stays */
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    CHECK(one_step(&s, 1) == AMP_ERR_OVERFLOW && s.state.scale == 0.00015f);
    CHECK_MSG(strstr(heard, "would bring the scale to its floor"), "%s", heard);
    d.at_min = AMP_LIMIT_CLAMP;                 /* threshold_loss_scale: a floor that holds */
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    CHECK(one_step(&s, 1) == AMP_OK && s.state.scale == 1e-4f);
}

/* A refill that is not the preset's: on clean steps, so that overflows with one between never reduce. */
static void refill_of_a_desc(void) {
    amp_scaler_desc d = desc_of(AMP_SCALER_PYTORCH);
    amp_scaler s;
    int i;
    d.hysteresis = 2;
    for (i = 0; i < 2; i++) {
        d.refill = i ? AMP_REFILL_CLEAN : (amp_scaler_refill)0;
        CHECK(amp_scaler_init(&s, &d) == AMP_OK && s.rule.refill == (i ? AMP_REFILL_CLEAN : AMP_REFILL_GROWTH));
        one_step(&s, 1); one_step(&s, 0); one_step(&s, 1);
        CHECK(s.state.scale == (i ? 65536.0f : 32768.0f));
    }
}

static void skip_limits(void) {
    amp_scaler s = scaler_of(AMP_SCALER_MINDSPORE_MANAGER, 0);
    amp_scaler_desc d;
    int i;
    for (i = 1; i <= 1000; i++) CHECK(one_step(&s, 1) == AMP_OK);
    CHECK(one_step(&s, 1) == AMP_ERR_OVERFLOW && s.state.skipped == 1001 && s.state.applied == 0);
    s = scaler_of(AMP_SCALER_NNABLA, 0);
    for (i = 1; i <= 100; i++) CHECK(one_step(&s, 1) == AMP_OK);
    CHECK(one_step(&s, 1) == AMP_ERR_OVERFLOW);
    s = scaler_of(AMP_SCALER_NNABLA, 0);        /* a clean step between begins the count again */
    for (i = 1; i <= 100; i++) one_step(&s, 1);
    CHECK(one_step(&s, 0) == AMP_OK && s.state.consecutive_skips == 0);
    for (i = 1; i <= 5; i++) CHECK(one_step(&s, 1) == AMP_OK);
    d = desc_of(AMP_SCALER_MINDSPORE_MANAGER);
    d.max_skips = AMP_ZERO;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    for (i = 1; i <= 1100; i++) CHECK(one_step(&s, 1) == AMP_OK);
    d = desc_of(AMP_SCALER_STATIC);             /* a static scale has the limit too */
    d.init_scale = 8; d.max_skips = 2;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    CHECK(one_step(&s, 1) == AMP_OK && one_step(&s, 1) == AMP_OK && one_step(&s, 1) == AMP_ERR_OVERFLOW);
    CHECK(s.state.scale == 8.0f);
}

/* --- random traces: each system's rule written out from its own source ------------------------------- */

/* Factors are as given. Where a system keeps a float its scale is a float's value, and so are its factors but PyTorch's. */
typedef struct reference {
    double scale, growth, backoff, min, max, tolerance;
    int window, delay;              /* the system's interval and hysteresis */
    int counter, left, iteration, last_overflow, last_rescale, bad;
    int error;
} reference;

/* A product and a quotient of two floats, with one rounding each: -Ofast would join x * (1 / y). */
static double times(double a, double b) { volatile float p = (float)a * (float)b; return (double)p; }
static double over(double a, double b) { volatile float q = (float)a / (float)b; return (double)q; }
static int finite_product(double a, double b) { return a * b < 3.4028235677973366e38; }
static double largest(double a, double b) { return a > b ? a : b; }

static void step_pytorch(reference* r, int overflow) {
    int successful = r->counter + 1;
    if (overflow) { r->scale = (double)(float)(r->scale * r->backoff); r->counter = 0; return; }
    if (successful != r->window) { r->counter = successful; return; }
    if (finite_product(r->scale, r->growth)) r->scale = (double)(float)(r->scale * r->growth);
    r->counter = 0;
}
/* mindspore.amp.DynamicLossScaler.adjust, jmp and the TensorFlow 1 loss scale. */
static void step_mindspore(reference* r, int overflow) {
    if (overflow) { r->scale = largest(1.0, over(r->scale, r->growth)); r->counter = 0; return; }
    if (r->counter == r->window - 1) {
        if (finite_product(r->scale, (double)(float)r->growth)) r->scale = times(r->scale, r->growth);
        r->counter = 0;
    } else r->counter++;
}
static void step_manager(reference* r, int overflow) {
    if (overflow) {
        r->scale = largest(r->scale * (1.0 / r->growth), 1.0);
        r->last_overflow = r->iteration;
        r->bad++;
    } else {
        if ((r->iteration - r->last_overflow) % r->window == 0) r->scale *= r->growth;
        r->bad = 0;
    }
    if (r->bad > 1000) r->error = 1;
    r->iteration++;
}
/* mindspore.nn.DynamicLossScaleUpdateCell: floats, and a product with the float reciprocal. */
static void step_cell(reference* r, int overflow) {
    const int grows = !overflow && r->iteration - r->last_overflow >= r->window;
    if (overflow) r->scale = largest(times(r->scale, over(1.0, r->growth)), 1.0);
    if (grows) r->scale = times(r->scale, r->growth);
    if (overflow || grows) r->last_overflow = r->iteration;
    r->iteration++;
}
/* fairseq.optim.dynamic_loss_scaler.DynamicLossScaler. */
static void step_fairseq(reference* r, int overflow) {
    const double before = r->scale;
    if (!overflow) {
        if ((r->iteration - r->last_overflow) % r->window == 0) {
            r->scale *= r->growth;
            r->last_rescale = r->iteration;
        }
        r->iteration++;
        return;
    }
    r->last_overflow = r->iteration;
    r->bad++;
    if ((double)r->bad / (double)(r->iteration - r->last_rescale) >= r->tolerance) {
        r->scale /= r->growth;
        r->last_rescale = r->iteration;
        r->bad = 0;
    }
    if (r->scale <= r->min) { r->scale = before; r->error = 1; }
    r->iteration++;
}
static void step_apex(reference* r, int overflow) {
    if (overflow) { r->scale /= 2.0; r->counter = 0; }
    else r->counter++;
    if (r->counter != r->window) return;
    r->counter = 0;
    r->scale = r->scale * 2.0 < 16777216.0 ? r->scale * 2.0 : 16777216.0;
}
static void step_oneflow(reference* r, int overflow) {
    if (overflow) { r->scale = largest(over(r->scale, r->growth), 1.0); r->counter = 0; return; }
    if (++r->counter < r->window) return;
    r->counter = 0;
    r->scale = finite_product(r->scale, (double)(float)r->growth) ? times(r->scale, r->growth) : LARGEST;
}
static void step_keras(reference* r, int overflow) {
    if (overflow) { r->scale = times(r->scale, 0.5); r->counter = 0; return; }
    if (r->counter + 1 >= r->window) { r->scale = times(r->scale, 2.0); r->counter = 0; }
    else r->counter++;
}
static void step_flax(reference* r, int overflow) {
    int grow = r->counter == r->window;
    double grown = finite_product(r->scale, (double)(float)r->growth) ? times(r->scale, r->growth) : LARGEST;
    r->scale = overflow ? largest(times(r->scale, r->backoff), 1.1754943508222875e-38) : grow ? grown : r->scale;
    r->counter = grow || overflow ? 0 : r->counter + 1;
}
static void step_nnabla(reference* r, int overflow) {
    if (overflow) { r->scale /= r->growth; r->counter = 0; r->error = ++r->bad > 100; return; }
    r->bad = 0;
    if (r->counter > r->window) { r->scale *= r->growth; r->counter = 0; }
    r->counter++;
}
static void step_megatron(reference* r, int overflow) {
    if (overflow) {
        r->counter = 0;
        if (--r->left <= 0) r->scale = largest(times(r->scale, r->backoff), r->min);
    } else if (++r->counter == r->window) {
        r->counter = 0;
        r->left = r->delay;
        r->scale = times(r->scale, r->growth);
    }
}
static void step_deepspeed_any(reference* r, int overflow, int consecutive, int late) {
    if (overflow) {
        if (r->delay == 1 || r->left == 1) {
            if (r->scale == r->min) { r->error = 1; return; }
            r->scale = largest(r->scale / r->growth, r->min);
        } else r->left--;
        r->last_overflow = r->iteration;
    } else {
        int stable = r->iteration - r->last_overflow - late;
        if (consecutive) r->left = r->delay;
        if (stable > 0 && stable % r->window == 0) {
            if (!consecutive) r->left = r->delay;
            r->scale *= r->growth;
        }
    }
    r->iteration++;
}
static void step_deepspeed(reference* r, int overflow) { step_deepspeed_any(r, overflow, 0, 1); }
static void step_consecutive(reference* r, int overflow) { step_deepspeed_any(r, overflow, 1, 1); }
static void step_deepspeed_0_17_0(reference* r, int overflow) { step_deepspeed_any(r, overflow, 0, 0); }
static void step_paddle(reference* r, int overflow) {
    if (overflow) {
        r->counter = 0;
        if (++r->bad < r->delay) return;
        r->scale = largest(times(r->scale, r->backoff), 1.0);
        r->bad = 0;
    } else {
        r->bad = 0;
        if (++r->counter < r->window) return;
        if (finite_product(r->scale, (double)(float)r->growth)) r->scale = times(r->scale, r->growth);
        r->counter = 0;
    }
}
static void step_static(reference* r, int overflow) { (void)r; (void)overflow; }

enum { ANY, WHOLE, TWO, NONE };     /* what growth factors a system takes; NONE: it has none */
typedef struct machine {
    amp_scaler_preset preset;
    void (*step)(reference*, int);
    double least;                   /* smallest scale that may begin */
    int free_backoff;               /* a backoff of its own */
    int factors;
    int hysteresis;
} machine;

static const machine machines[] = {
    { AMP_SCALER_PYTORCH, step_pytorch, 1e-30, 1, ANY, 0 },
    { AMP_SCALER_MINDSPORE, step_mindspore, 1, 0, WHOLE, 0 },
    { AMP_SCALER_JMP, step_mindspore, 1, 0, ANY, 0 },
    { AMP_SCALER_TF_LEGACY, step_mindspore, 1, 0, ANY, 0 },
    { AMP_SCALER_MINDSPORE_MANAGER, step_manager, 1, 0, ANY, 0 },
    { AMP_SCALER_MINDSPORE_FIXED, step_static, 1e-30, 0, NONE, 0 },
    { AMP_SCALER_STATIC, step_static, 1e-30, 0, NONE, 0 },
    { AMP_SCALER_APEX, step_apex, 1e-30, 0, TWO, 0 },
    { AMP_SCALER_ONEFLOW, step_oneflow, 1, 0, ANY, 0 },
    { AMP_SCALER_KERAS, step_keras, 1e-30, 0, TWO, 0 },
    { AMP_SCALER_FLAX, step_flax, 1.2e-38, 1, ANY, 0 },
    { AMP_SCALER_NNABLA, step_nnabla, 1e-30, 0, ANY, 0 },
    { AMP_SCALER_MEGATRON, step_megatron, 1, 1, ANY, 1 },
    { AMP_SCALER_DEEPSPEED, step_deepspeed, 1, 0, ANY, 1 },
    { AMP_SCALER_DEEPSPEED_CONSECUTIVE, step_consecutive, 1, 0, ANY, 1 },
    { AMP_SCALER_DEEPSPEED_0_17_0, step_deepspeed_0_17_0, 1, 0, ANY, 1 },
    { AMP_SCALER_PADDLE, step_paddle, 1, 1, ANY, 1 },
    { AMP_SCALER_MINDSPORE_CELL, step_cell, 1, 0, ANY, 0 },
    { AMP_SCALER_FAIRSEQ, step_fairseq, 0.001, 0, ANY, 0 },
};

static float random_between(float low, float high) { return low + (high - low) * (test_uniform() * 0.5f + 0.5f); }

/* A double with all of its bits. */
static double random_double(double low, double high) {
    return low + (high - low) * ((double)(test_random() >> 4) / 268435456.0 + (double)(test_random() >> 4) / 268435456.0 / 268435456.0);
}

/* A scale, log-uniform between least and 1e38. */
static float random_scale(double least) {
    float s = (float)exp(random_double(log(least), log(1e38)));
    return (double)s < least ? (float)least : s;
}

static void make_pair(const machine* m, amp_scaler_desc* d, reference* r) {
    memset(r, 0, sizeof *r);
    *d = desc_of(m->preset);
    d->init_scale = random_scale(m->least);
    if (m->preset == AMP_SCALER_APEX && test_random() % 4) d->init_scale = (float)(1 + test_random() % 16777216u);
    r->scale = (double)d->init_scale;
    if (m->preset == AMP_SCALER_APEX && r->scale > 16777216.0) r->scale = 16777216.0;
    r->growth = m->factors == ANY ? random_double(1.01, 9) : m->factors == WHOLE ? (double)(2 + test_random() % 9) : 2.0;
    r->backoff = random_double(0.01, 0.99);
    r->window = 1 + (int)(test_random() % 6);
    r->left = r->delay = m->hysteresis ? 1 + (int)(test_random() % 4) : 1;
    r->iteration = m->step == step_manager || m->step == step_cell;
    r->last_overflow = r->iteration - 1;
    r->last_rescale = -1;
    r->min = 1;
    if (m->step == step_fairseq) {
        static const double shares[] = { 0, 0.05, 0.25, 0.5, 1 };
        const unsigned i = test_random() % 6;
        r->min = 1e-4;
        r->tolerance = d->tolerance = i < 5 ? shares[i] : random_double(0, 1);
    }
    if (m->factors == NONE) return;
    d->growth_factor = r->growth;
    if (m->free_backoff) d->backoff_factor = r->backoff;
    d->growth_interval = r->window;
    if (m->hysteresis) d->hysteresis = r->delay;
}

/* Bit for bit, also what a preset keeps as a double. */
static int same_scale(const amp_scaler* s, double want) {
    float narrow = want < 3.4028235677973366e38 ? (float)want : from_bits(BITS_INF);
    double exact = s->rule.is_double ? want : (double)narrow;
    return to_bits(s->state.scale) == to_bits(narrow) && memcmp(&s->state.exact_scale, &exact, sizeof exact) == 0;
}

static void random_traces(void) {
    int trace, i, k;
    for (i = 0; i < COUNT(machines); i++)
        for (trace = 0; trace < 500; trace++) {
            amp_scaler_desc d;
            reference r;
            amp_scaler s;
            unsigned rate = 1 + test_random() % 9;
            make_pair(&machines[i], &d, &r);
            CHECK_MSG(amp_scaler_init(&s, &d) == AMP_OK, "%s", heard);
            for (k = 0; k < 120 && !r.error; k++) {
                int overflow = test_random() % 10 < rate, hit;
                machines[i].step(&r, overflow);
                s.state.found_inf = overflow;
                hit = amp_scaler_advance(&s.rule, &s.state);
                if (!same_scale(&s, r.scale) || ((hit & 2) != 0 || (hit & 1 && s.rule.at_min != AMP_LIMIT_CLAMP)) != r.error) {
                    CHECK_MSG(0, "%s trace %d step %d: %.17g, not %.17g; hit %d, error %d", amp_scaler_preset_name(d.preset), trace, k,
                              s.state.exact_scale, r.scale, hit, r.error);
                    break;
                }
            }
            CHECK(s.state.applied + s.state.skipped == k);
        }
}

/* The same through the whole interface, within the range where no scale is refused. */
static void random_traces_through_the_interface(void) {
    int trace, i, k;
    for (i = 0; i < COUNT(machines); i++)
        for (trace = 0; trace < 40; trace++) {
            amp_scaler_desc d;
            reference r;
            amp_scaler s;
            make_pair(&machines[i], &d, &r);
            if (machines[i].factors != NONE) d.growth_factor = r.growth = 2.0;
            if (machines[i].free_backoff) d.backoff_factor = r.backoff = 0.5;
            d.init_scale = 65536.0f;
            r.scale = 65536.0;
            CHECK(amp_scaler_init(&s, &d) == AMP_OK);
            for (k = 0; k < 50 && !r.error; k++) {
                int overflow = test_random() % 2 == 0;
                amp_result result = one_step(&s, overflow);
                machines[i].step(&r, overflow);
                CHECK_MSG((result != AMP_OK) == r.error && same_scale(&s, r.scale), "%s: %g, not %g",
                          amp_scaler_preset_name(d.preset), (double)s.state.scale, r.scale);
            }
        }
}

/* --- the systems themselves: 200 random traces of 300 steps each, as a hash of all scales ------------------- */

/* Formed by the systems' own code: torch 2.15.0, jmp 0.0.4 (operator by operator, as jit makes its division a product) and flax
   0.12.8 on jax 0.10.2, MindSpore 2.10.0, paddlepaddle 3.3.1, megatron-core 0.16.1, DeepSpeed 0.17.1 and 0.17.0, fairseq 0.12.2.
   Of Apex, NNabla 1.39, OneFlow 0.9, TensorFlow 1 and Keras 3: by their rules in NumPy. */
typedef struct recorded {
    const char* name;
    amp_scaler_preset preset;
    uint32_t number;                /* seeds the traces */
    const double (*factors)[2];     /* growth and backoff, 0 = the preset's */
    int least;                      /* exponent of the smallest scale that begins */
    uint64_t hash;
} recorded;

static const double free_factors[8][2] = { { 2, .5 }, { 1.7, .6 }, { 1.001, .999 }, { 2.5, .3 }, { 8, .125 }, { 1.1, .9 }, { 3, .7 }, { 16, .01 } };
static const double inverse_factors[8][2] = { { 2, 0 }, { 1.7, 0 }, { 2.5, 0 }, { 3, 0 }, { 1.1, 0 }, { 7, 0 }, { 1.0001, 0 }, { 10, 0 } };
static const double whole_factors[8][2] = { { 2, 0 }, { 3, 0 }, { 5, 0 }, { 7, 0 }, { 4, 0 }, { 10, 0 }, { 6, 0 }, { 9, 0 } };
static const double twos[8][2] = { { 2, 0 }, { 2, 0 }, { 2, 0 }, { 2, 0 }, { 2, 0 }, { 2, 0 }, { 2, 0 }, { 2, 0 } };
static const recorded recordings[] = {
    { "PyTorch", AMP_SCALER_PYTORCH, 1, free_factors, 0, 0xa2e35647cd55a2a5u },
    { "Megatron-LM, hysteresis", AMP_SCALER_MEGATRON, 2, free_factors, 0, 0xdf354599ed55a2a5u },
    { "DeepSpeed 0.17.1, hysteresis", AMP_SCALER_DEEPSPEED, 3, twos, 0, 0x81b27e3369434075u },
    { "DeepSpeed 0.17.1, hysteresis, factors", AMP_SCALER_DEEPSPEED, 23, inverse_factors, 0, 0x250b2678a472e371u },
    { "DeepSpeed 0.17.1, consecutive hysteresis", AMP_SCALER_DEEPSPEED, 4, twos, 0, 0x620bad07182b912du },
    { "DeepSpeed 0.17.1, consecutive hysteresis, factors", AMP_SCALER_DEEPSPEED_CONSECUTIVE, 24, inverse_factors, 0, 0x28a947f11489f64u },
    { "DeepSpeed 0.17.0, hysteresis", AMP_SCALER_DEEPSPEED_0_17_0, 5, twos, 0, 0x8f851cf50d0fbdc7u },
    { "DeepSpeed 0.17.0, hysteresis, factors", AMP_SCALER_DEEPSPEED_0_17_0, 25, inverse_factors, 0, 0x506f2c47b3c138b8u },
    { "DeepSpeed 0.17.0, consecutive hysteresis", AMP_SCALER_DEEPSPEED_0_17_0, 6, twos, 0, 0x9b1f7bf0bf63be67u },
    { "DeepSpeed 0.17.0, consecutive hysteresis, factors", AMP_SCALER_DEEPSPEED_0_17_0, 26, inverse_factors, 0, 0x7de1deb57451186au },
    { "jmp", AMP_SCALER_JMP, 10, inverse_factors, 0, 0xafb05556d55a2a5u },
    { "Flax", AMP_SCALER_FLAX, 11, free_factors, -20, 0x36b437d08d55a2a5u },
    { "MindSpore", AMP_SCALER_MINDSPORE, 13, whole_factors, 0, 0x37333a0fad55a2a5u },
    { "MindSpore's manager", AMP_SCALER_MINDSPORE_MANAGER, 12, inverse_factors, 0, 0x6b5f28107684a42au },
    { "NNabla", AMP_SCALER_NNABLA, 16, inverse_factors, -20, 0x7ed8160cac015947u },
    { "Apex", AMP_SCALER_APEX, 17, twos, 2, 0x1bc9d01fed55a2a5u },
    { "OneFlow", AMP_SCALER_ONEFLOW, 18, inverse_factors, 0, 0xe2df721f0d55a2a5u },
    { "TensorFlow 1", AMP_SCALER_TF_LEGACY, 19, inverse_factors, 0, 0x81e9416a8d55a2a5u },
    { "Keras", AMP_SCALER_KERAS, 20, twos, -20, 0x381601fed55a2a5u },
    { "Paddle, dynamic graph, hysteresis", AMP_SCALER_PADDLE, 15, free_factors, 0, 0x1353a09b0d55a2a5u },
    { "Paddle, hysteresis", AMP_SCALER_PADDLE, 14, free_factors, 0, 0x8100a620cd55a2a5u },
    { "Fairseq, tolerance", AMP_SCALER_FAIRSEQ, 31, inverse_factors, -9, 0x616334c3e6497fb7u },
};

static uint32_t trace_next(uint64_t* x) {
    *x = *x * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*x >> 33);
}
static uint64_t trace_mix(uint64_t hash, double scale) {
    uint64_t u;
    memcpy(&u, &scale, sizeof u);
    return (hash ^ u) * 0x100000001b3u;
}
/* 1 = the last trace may have had subnormal scales, which a program built with -Ofast reads as zero. */
static int trace_sinks;
#if defined(__FAST_MATH__)
enum { FAST = 1 };
#else
enum { FAST = 0 };
#endif
static uint64_t trace_hash(const recorded* q) {
    static const double shares[] = { 0, 0.05, 0.25, 0.5 };
    uint64_t hash = 0xcbf29ce484222325u;
    uint32_t t, k;
    for (t = 0; t < 200; t++) {
        uint64_t x = q->number * 1000u + t;
        amp_scaler_desc d = desc_of(q->preset);
        amp_scaler s;
        const double* factor;
        uint32_t h, rate;
        trace_next(&x);
        factor = q->factors[trace_next(&x) % 8];
        d.growth_interval = 1 + (int)(trace_next(&x) % 6);
        h = 1 + trace_next(&x) % 4;
        d.init_scale = (float)ldexp(1.0, q->least + (int)(trace_next(&x) % 40));
        d.init_scale *= 1.0f + (float)(trace_next(&x) % 1024) / 1024.0f;
        rate = 1 + trace_next(&x) % 9;
        d.growth_factor = factor[0]; d.backoff_factor = factor[1];
        if (q->preset == AMP_SCALER_APEX) {
            d.max_scale = h > 2 ? 16777216.0f : 1024.0f;
            if (h % 2 == 0) d.min_scale = 2.0f;
        } else if (q->preset != AMP_SCALER_NNABLA) d.hysteresis = strstr(q->name, "hysteresis") ? (int)h : 0;
        if (strstr(q->name, "dynamic graph")) d.min_scale = AMP_ZERO;
        if (strstr(q->name, "consecutive")) d.refill = AMP_REFILL_CLEAN;
        if (q->preset == AMP_SCALER_FAIRSEQ) d.tolerance = shares[h - 1];
        CHECK_MSG(amp_scaler_init(&s, &d) == AMP_OK, "%s: %s", q->name, heard);
        if (strstr(q->name, "dynamic graph")) s.rule.guard = AMP_GUARD_NONE;
        trace_sinks = s.rule.min == 0.0f && !s.rule.is_double;
        for (k = 0; k < 300; k++) {
            int hit;
            s.state.found_inf = trace_next(&x) % 10 < rate;
            hit = amp_scaler_advance(&s.rule, &s.state);
            if ((hit & 2) || ((hit & 1) && s.rule.at_min != AMP_LIMIT_CLAMP)) { hash = trace_mix(hash, -1.0); break; }
            hash = trace_mix(hash, s.rule.is_double ? s.state.exact_scale : (double)s.state.scale);
        }
    }
    return hash;
}
static void recorded_traces(void) {
    int i;
    for (i = 0; i < COUNT(recordings); i++) {
        const uint64_t hash = trace_hash(&recordings[i]);
        if (FAST && trace_sinks) continue;
        CHECK_MSG(hash == recordings[i].hash, "%s: other scales than the system's", recordings[i].name);
    }
}

/* An interval lowered below the counter must not stop growth for ever. */
static void lowered_interval(void) {
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 8);
    int i;
    for (i = 0; i < 10; i++) one_step(&s, 0);
    s.rule.interval = 5;
    one_step(&s, 0);
    CHECK(s.state.scale == 16.0f);
}

static void preset_names(void) {
    CHECK(strcmp(amp_scaler_preset_name(AMP_SCALER_PYTORCH), "pytorch") == 0);
    CHECK(strcmp(amp_scaler_preset_name(AMP_SCALER_MINDSPORE_MANAGER), "mindspore_manager") == 0);
    CHECK(strcmp(amp_scaler_preset_name(AMP_SCALER_STATIC), "static") == 0);
    CHECK(strcmp(amp_scaler_preset_name((amp_scaler_preset)AMP_SCALER_PRESET_COUNT), "?") == 0);
    CHECK(strcmp(amp_scaler_preset_name((amp_scaler_preset)-1), "?") == 0);
}

/* --- descs ------------------------------------------------------------------------------------------- */

static void default_descs(void) {
    amp_scaler s, again;
    int p;
    CHECK(amp_scaler_init(&s, NULL) == AMP_OK);
    CHECK(s.state.scale == 65536.0f && s.rule.interval == 2000 && s.rule.growth == 2.0 && s.rule.backoff == 0.5);
    CHECK(s.rule.hysteresis == 1 && s.rule.min == 0.0f && s.rule.max == 0.0f && s.rule.max_unsound == 20);
    for (p = 0; p < AMP_SCALER_PRESET_COUNT; p++) {       /* the preset's numbers as a desc make the same scaler */
        amp_scaler_desc d = desc_of((amp_scaler_preset)p);
        d.init_scale = 4096;
        CHECK(amp_scaler_init(&s, &d) == AMP_OK);
        d.min_scale = s.rule.min > 0.0f ? s.rule.min : (float)AMP_ZERO;
        d.max_scale = s.rule.max > 0.0f ? s.rule.max : (float)AMP_ZERO;
        d.at_min = (amp_scaler_limit)s.rule.at_min;
        d.refill = s.rule.is_static ? (amp_scaler_refill)0 : (amp_scaler_refill)s.rule.refill;
        d.max_skips = s.rule.max_skips ? s.rule.max_skips : AMP_ZERO;
        d.max_unsound = s.rule.max_unsound;
        if (!s.rule.is_static) {
            const int late = p == AMP_SCALER_FLAX || p == AMP_SCALER_NNABLA;
            d.hysteresis = s.rule.hysteresis;
            d.growth_interval = s.rule.interval - late;
            d.growth_factor = s.rule.growth;
            d.backoff_factor = s.rule.backoff > 0.0 ? s.rule.backoff : 1.0 / s.rule.growth;
        }
        CHECK_MSG(amp_scaler_init(&again, &d) == AMP_OK, "preset %d: %s", p, heard);
        CHECK(memcmp(&s.rule, &again.rule, sizeof s.rule) == 0 && memcmp(&s.state, &again.state, sizeof s.state) == 0);
    }
}

/* Each is refused with AMP_ERR_DESC and a sentence that names the field; the scaler stays as it was. */
static void refuse_desc(const amp_scaler_desc* d, const char* field) {
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 32), before = s;
    int count = heard_count;
    heard[0] = 0;
    CHECK_MSG(amp_scaler_init(&s, d) == AMP_ERR_DESC, "%s", field);
    CHECK_MSG(heard_count == count + 1 && strstr(heard, field), "'%s' does not name %s", heard, field);
    CHECK(memcmp(&s, &before, sizeof s) == 0);
}
#define REFUSE(preset, member, value) \
    do { amp_scaler_desc d = desc_of(preset); d.member = value; refuse_desc(&d, #member); } while (0)

static void refused_descs(void) {
    float bad[5];
    int i;
    put_bits(&bad[0], BITS_INF); put_bits(&bad[1], BITS_QNAN); put_bits(&bad[2], BITS_INF | 0x80000000u);
    bad[3] = -2.0f; put_bits(&bad[4], 0xffc00000u);
    for (i = 0; i < 5; i++) {
        REFUSE(AMP_SCALER_PYTORCH, init_scale, bad[i]);
        REFUSE(AMP_SCALER_PYTORCH, growth_factor, (double)bad[i]);
        REFUSE(AMP_SCALER_PYTORCH, backoff_factor, (double)bad[i]);
        REFUSE(AMP_SCALER_PYTORCH, min_scale, bad[i]);
        REFUSE(AMP_SCALER_PYTORCH, max_scale, bad[i]);
    }
    REFUSE(AMP_SCALER_PYTORCH, init_scale, -1.0f);
    REFUSE(AMP_SCALER_PYTORCH, init_scale, from_bits(0x00200000u));     /* 2^-128 */
    REFUSE(AMP_SCALER_PYTORCH, growth_factor, 1.0);
    REFUSE(AMP_SCALER_PYTORCH, growth_factor, 0.5);
    REFUSE(AMP_SCALER_PYTORCH, backoff_factor, 1.0);
    REFUSE(AMP_SCALER_PYTORCH, backoff_factor, 1.5);
    REFUSE(AMP_SCALER_PYTORCH, backoff_factor, -0.5);
    REFUSE(AMP_SCALER_PYTORCH, backoff_factor, (double)AMP_ZERO);
    REFUSE(AMP_SCALER_ONEFLOW, backoff_factor, 0.25);
    REFUSE(AMP_SCALER_PYTORCH, growth_interval, -2);
    REFUSE(AMP_SCALER_PYTORCH, min_scale, 131072.0f);
    REFUSE(AMP_SCALER_MEGATRON, init_scale, 0.5f);                      /* its floor is 1 */
    REFUSE(AMP_SCALER_PYTORCH, max_scale, 1024.0f);
    REFUSE(AMP_SCALER_PYTORCH, hysteresis, -1);
    REFUSE(AMP_SCALER_PYTORCH, max_skips, -2);
    REFUSE(AMP_SCALER_PYTORCH, max_unsound, -2);
    REFUSE(AMP_SCALER_PYTORCH, at_min, (amp_scaler_limit)5);
    REFUSE(AMP_SCALER_PYTORCH, refill, (amp_scaler_refill)5);
    REFUSE(AMP_SCALER_PYTORCH, refill, (amp_scaler_refill)-1);
    REFUSE(AMP_SCALER_STATIC, refill, AMP_REFILL_CLEAN);
    REFUSE(AMP_SCALER_FAIRSEQ, tolerance, 1.5);
    REFUSE(AMP_SCALER_FAIRSEQ, tolerance, -0.5);
    REFUSE(AMP_SCALER_PYTORCH, tolerance, 0.5);                         /* its refill counts no overflows */
    REFUSE(AMP_SCALER_STATIC, tolerance, 0.5);
    REFUSE(AMP_SCALER_PYTORCH, ignore_overflow, 1);
    REFUSE(AMP_SCALER_PYTORCH, preset, (amp_scaler_preset)77);
    REFUSE(AMP_SCALER_STATIC, growth_interval, 100);
    REFUSE(AMP_SCALER_MINDSPORE_FIXED, growth_factor, 2.0);
    REFUSE(AMP_SCALER_MINDSPORE_FIXED, backoff_factor, 0.5);
    REFUSE(AMP_SCALER_MINDSPORE_FIXED, hysteresis, 2);
    {   /* Apex starts at its ceiling of 2^24 at most, and so may have no floor above */
        amp_scaler_desc d = desc_of(AMP_SCALER_APEX);
        d.init_scale = 33554432.0f;
        d.min_scale = 33554432.0f;
        refuse_desc(&d, "min_scale 3.35544e+07 is greater than init_scale 1.67772e+07");
    }
    REFUSE(AMP_SCALER_MEGATRON, growth_factor, 1.00000000001);          /* 1 as the float that it is there */
    REFUSE(AMP_SCALER_PYTORCH, growth_factor, 1e-60);
    REFUSE(AMP_SCALER_MEGATRON, growth_factor, 1e39);
    { amp_scaler_desc d = desc_of(AMP_SCALER_MINDSPORE); refuse_desc(&d, "init_scale"); }
    { amp_scaler_desc d = desc_of(AMP_SCALER_STATIC); refuse_desc(&d, "init_scale"); }
    { amp_scaler_desc d = desc_of(AMP_SCALER_PYTORCH); d.at_min = AMP_LIMIT_CALLBACK; refuse_desc(&d, "on_limit"); }
    CHECK(amp_scaler_init(NULL, NULL) == AMP_ERR_ARGUMENT);
}

static int asked, answer;
static int on_limit(const amp_scaler* s, void* user_data) {
    asked++;
    CHECK(user_data == &asked && amp_scaler_may_step(s) == 0);
    return answer;
}

static void limits(void) {
    amp_scaler_desc d = desc_of(AMP_SCALER_PYTORCH);
    amp_scaler s;
    d.init_scale = 2; d.min_scale = 1; d.at_min = AMP_LIMIT_CALLBACK; d.on_limit = on_limit; d.user_data = &asked;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    asked = 0; answer = 0;
    CHECK(one_step(&s, 1) == AMP_OK && asked == 0 && s.state.scale == 1.0f);
    CHECK(one_step(&s, 1) == AMP_OK && asked == 1 && s.state.scale == 1.0f);
    answer = 1;
    CHECK(one_step(&s, 1) == AMP_ERR_OVERFLOW && asked == 2 && s.state.skipped == 3);
    CHECK(one_step(&s, 0) == AMP_OK && s.state.applied == 1);           /* the window had ended */
    d = desc_of(AMP_SCALER_PYTORCH);
    d.init_scale = 8; d.max_scale = 16; d.growth_interval = 1;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);                           /* a ceiling under the guard "keep" */
    one_step(&s, 0); one_step(&s, 0); one_step(&s, 0);
    CHECK(s.state.scale == 16.0f);
    d.growth_interval = AMP_ZERO;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    one_step(&s, 0); one_step(&s, 0);
    CHECK(s.state.scale == 8.0f);                                       /* never grows, but still comes down */
    one_step(&s, 1);
    CHECK(s.state.scale == 4.0f);
}

/* --- checks -------------------------------------------------------------------------------------------- */

static int is_bad_bits(uint32_t magnitude, amp_dtype t) {
    return magnitude >= (t == AMP_F32 ? 0x7f800000u : t == AMP_F16 ? 0x7c00u : 0x7f80u);
}

static amp_overflow_info check_once(float scale, const amp_tensor* t, int n) {
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, scale);
    amp_overflow_info info;
    memset(&info, 0xee, sizeof info);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, t, n, &info) == AMP_OK);
    CHECK(amp_scaler_may_step(&s) == !info.found_inf && s.state.found_inf == info.found_inf);
    return info;
}

static void every_16_bit_pattern(void) {
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 0);
    amp_dtype types[2] = { AMP_F16, AMP_BF16 };
    amp_overflow_info info;
    uint32_t u, inf;
    int k, wrong = 0;
    for (k = 0; k < 2; k++)
        for (u = 0; u < 65536; u++) {
            uint16_t h = (uint16_t)u;
            amp_tensor t = tensor(&h, types[k], 1, NULL);
            inf = k ? 0x7f80u : 0x7c00u;
            amp_scaler_scale_loss(&s, 1.0f);
            if (amp_scaler_check(&s, &t, 1, &info) != AMP_OK) wrong++;
            if (info.found_inf != is_bad_bits(u & 0x7fffu, types[k])) wrong++;
            if (info.inf_count != ((u & 0x7fffu) == inf) || info.nan_count != ((u & 0x7fffu) > inf)) wrong++;
            amp_scaler_update(&s);
            s.state.scale = 65536.0f;
        }
    CHECK_MSG(wrong == 0, "%d wrong", wrong);
}

static void float_patterns(void) {
    static const struct { uint32_t bits; int inf, nan; } cases[] = {
        { 0x7f800000u, 1, 0 }, { 0xff800000u, 1, 0 }, { 0x7fc00000u, 0, 1 }, { 0xffc00000u, 0, 1 }, { 0x7f800001u, 0, 1 },
        { 0xff800001u, 0, 1 }, { 0x7fffffffu, 0, 1 }, { 0x7f7fffffu, 0, 0 }, { 0xff7fffffu, 0, 0 }, { 0x00000001u, 0, 0 },
        { 0x807fffffu, 0, 0 }, { 0x80000000u, 0, 0 }, { 0, 0, 0 }, { 0x477fe000u, 0, 0 }, { 0x3f800000u, 0, 0 },
    };
    float g[70];
    int i, k;
    for (i = 0; i < COUNT(cases); i++)
        for (k = 0; k < 70; k++) {                              /* at every position of blocks and tails */
            amp_tensor t = tensor(g, AMP_F32, 70, "g");
            amp_overflow_info info;
            memset(g, 0, sizeof g);
            put_bits(&g[k], cases[i].bits);
            info = check_once(65536.0f, &t, 1);
            CHECK(info.inf_count == (uint64_t)cases[i].inf && info.nan_count == (uint64_t)cases[i].nan);
            CHECK(info.found_inf == cases[i].inf + cases[i].nan);
            CHECK(!info.found_inf || (info.first_tensor == 0 && info.first_index == (uint64_t)k && !strcmp(info.first_name, "g")));
            CHECK(info.found_inf || (info.first_tensor == -1 && info.first_name[0] == 0));
        }
}

/* Sums must not be what is tested. */
static void large_but_finite(void) {
    static float g[100000];
    float two[2] = { 3e38f, 3e38f };
    amp_tensor t = tensor(two, AMP_F32, 2, NULL);
    amp_overflow_info info = check_once(1.0f, &t, 1);
    int i;
    CHECK(!info.found_inf && fabs(info.norm / (3e38 * sqrt(2.0)) - 1) < 1e-6);
    for (i = 0; i < COUNT(g); i++) g[i] = 1e30f;
    t = tensor(g, AMP_F32, (size_t)COUNT(g), NULL);
    info = check_once(1.0f, &t, 1);
    CHECK(!info.found_inf && fabs(info.norm / ((double)1e30f * sqrt(1e5)) - 1) < 1e-12);
}

/* Scales below one: an unscaled value that would leave FP32 counts as an overflow, and not one bit earlier. */
static void inverse_above_one(void) {
    int i;
    for (i = 0; i < 400; i++) {
        float scale = (float)exp(-80.0 * (double)random_between(0.001f, 1)), g[3] = { 1e-30f, 0, 1e-30f };
        float inverse = (float)(1.0 / (double)scale);
        uint32_t low = 0, high = 0x7f800000u, mid;
        amp_tensor t = tensor(g, AMP_F32, 3, NULL);
        while (high - low > 1) {
            mid = low + (high - low) / 2;
            if ((double)from_bits(mid) * (double)inverse >= 3.4028235677973366e38) high = mid;
            else low = mid;
        }
        put_bits(&g[1], low | (i & 1 ? 0x80000000u : 0));
        CHECK(check_once(scale, &t, 1).found_inf == 0);
        put_bits(&g[1], (low + 1) | (i & 1 ? 0x80000000u : 0));
        CHECK(check_once(scale, &t, 1).inf_count == 1);
    }
}

/* In place, the unscaled value must fit the 16-bit type; for a fused step FP32 is enough. */
static void inverse_above_one_in_halves(void) {
    amp_half h[2] = { amp_half_from_float(40000.0f), amp_half_from_float(1.0f) }, before[2];
    amp_bfloat16 b[1] = { amp_bfloat16_from_float(2e38f) };
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 0.5f);
    amp_tensor t = tensor(h, AMP_F16, 2, "h"), tb = tensor(b, AMP_BF16, 1, "b");
    amp_overflow_info info;
    memcpy(before, h, sizeof h);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, &t, 1, &info) == AMP_OK && info.found_inf == 0);
    CHECK(amp_scaler_unscale(&s, &t, 1, &info) == AMP_OK && info.found_inf == 1 && info.inf_count == 1 && info.first_index == 0);
    CHECK(memcmp(h, before, sizeof h) == 0 && amp_scaler_may_step(&s) == 0);
    CHECK(amp_scaler_check(&s, &tb, 1, &info) == AMP_OK && info.inf_count == 1);
    CHECK(amp_scaler_update(&s) == AMP_OK);
    s = scaler_of(AMP_SCALER_PYTORCH, 0.5f);
    h[0] = amp_half_from_float(32752.0f);               /* twice that is the largest half */
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, &t, 1, &info) == AMP_OK && !info.found_inf && amp_half_to_float(h[0]) == 65504.0f);
}

static void unusable_scales(void) {
    float g = 1.0f;
    amp_tensor t = tensor(&g, AMP_F32, 1, NULL);
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 65536.0f);
    amp_result r = AMP_OK;
    uint32_t bits[4];
    int i, count;
    for (i = 0; i < 144; i++) {                         /* PyTorch's way to 2^-128 */
        amp_scaler_scale_loss(&s, 1.0f);
        amp_scaler_report_overflow(&s);
        r = amp_scaler_update(&s);
        CHECK(r == (to_bits(s.state.scale) > 0x00200000u ? AMP_OK : AMP_ERR_OVERFLOW));
    }
    CHECK(r == AMP_ERR_OVERFLOW && strstr(heard, "amp_scaler_set_scale brings it back"));
#if !defined(__FAST_MATH__)
    CHECK(to_bits(s.state.scale) == 0x00200000u);
#endif
    CHECK(one_step(&s, 0) == AMP_ERR_OVERFLOW && s.state.applied == 0 && s.state.skipped == 145);
    bits[0] = BITS_INF; bits[1] = BITS_QNAN; bits[2] = 0; bits[3] = 0x00200000u;
    for (i = 0; i < 4; i++) {
        amp_overflow_info info;
        put_bits(&s.state.scale, bits[i]);
        amp_scaler_scale_loss(&s, 1.0f);
        count = heard_count;
        CHECK(amp_scaler_unscale(&s, &t, 1, &info) == AMP_OK && info.found_inf == 1 && heard_count == count);     /* told already */
        CHECK(g == 1.0f && amp_scaler_may_step(&s) == 0 && info.first_tensor == -1);
        CHECK(amp_scaler_update(&s) == AMP_ERR_OVERFLOW);
    }
    CHECK(scaler_of(AMP_SCALER_PYTORCH, from_bits(0x00200001u)).state.inverse > 3.4e38f);
}

/* Counts and the first place over several tensors of several types, larger than a chunk. */
static void counts_and_places(void) {
    static float a[40000], c[100];
    static uint16_t h[50000], b[1100];
    amp_tensor list[5];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 0);
    amp_overflow_info info;
    int i;
    memset(a, 0, sizeof a); memset(c, 0, sizeof c); memset(h, 0, sizeof h); memset(b, 0, sizeof b);
    list[0] = tensor(a, AMP_DTYPE_DEFAULT, 40000, "first");
    list[1] = tensor(NULL, AMP_F16, 0, "empty");
    list[2] = tensor(h, AMP_F16, 50000, "a name that is longer than the forty-eight bytes kept of it");
    list[3] = tensor(b, AMP_BF16, 1100, NULL);
    list[4] = tensor(c, AMP_F32, 100, "last");
    h[49999] = 0xfc00u; h[20001] = 0x7c01u; h[20000] = 0x7c00u; b[1099] = 0x7f80u; b[3] = 0xffffu; put_bits(&c[99], BITS_SNAN);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, list, 5, &info) == AMP_OK);
    CHECK(info.found_inf == 1 && info.inf_count == 3 && info.nan_count == 3 && info.first_tensor == 2 && info.first_index == 20000);
    CHECK(strlen(info.first_name) == 47 && strncmp(info.first_name, list[2].name, 47) == 0);
    CHECK(info.last_tensor == 4 && strcmp(info.last_name, "last") == 0);
    CHECK(is_infinite(&info.norm));
    CHECK(amp_scaler_check(&s, list, 4, &info) == AMP_OK && info.last_tensor == 3 && info.last_name[0] == 0);
    CHECK(amp_scaler_check(&s, list, 3, &info) == AMP_OK && info.last_tensor == 2 && !strcmp(info.last_name, info.first_name));
    CHECK(s.info.last_tensor == 4);                             /* the window's is that of the first list */
    CHECK(amp_scaler_update(&s) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_check(&s, list, 5, &info) == AMP_OK);
    CHECK(amp_scaler_check(&s, list, 1, &info) == AMP_OK);      /* sticky; this call's own findings; the window's sum */
    CHECK(info.found_inf == 0 && info.inf_count == 0 && info.norm == 0.0 && info.last_tensor == -1);
    CHECK(s.state.found_inf == 1 && s.info.inf_count == 3 && s.info.first_index == 20000 && amp_scaler_may_step(&s) == 0);
    CHECK(amp_scaler_check(&s, list + 4, 1, &info) == AMP_OK && s.info.nan_count == 4 && s.info.first_tensor == 2);
    for (i = 0; i < 2; i++) {                                   /* empty lists change nothing */
        amp_scaler before = s;
        CHECK(amp_scaler_check(&s, i ? list + 1 : NULL, i, &info) == AMP_OK && !info.found_inf);
        CHECK(amp_scaler_unscale(&s, i ? list + 1 : NULL, i, &info) == AMP_OK);
        CHECK(memcmp(&s, &before, sizeof s) == 0);
    }
    CHECK(amp_scaler_update(&s) == AMP_OK && s.info.nan_count == 4 && s.state.found_inf == 0);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(s.info.found_inf == 0 && s.info.nan_count == 0 && s.info.first_tensor == -1);     /* a new window */
    CHECK(amp_scaler_check(&s, list, 1, NULL) == AMP_OK && amp_scaler_may_step(&s) == 1);
}

/* Squares are exact in double; a sum of n terms in 32 lanes and chunks errs by at most (n/32 + 10) roundings, halved by
   the root, and the inverse adds one: with n = 90000 less than 1500 * 2^-53 = 1.7e-13. */
static void norm_against_long_double(void) {
    static float a[60000];
    static uint16_t h[30000];
    amp_tensor list[2];
    amp_overflow_info info;
    long double sum = 0;
    int i, type;
    for (type = 0; type < 2; type++) {
        list[0] = tensor(a, AMP_F32, 60000, NULL);
        list[1] = tensor(h, type ? AMP_BF16 : AMP_F16, 30000, NULL);
        for (i = 0, sum = 0; i < 60000; i++) {
            a[i] = test_uniform() * (i % 7 ? 1.0f : 1e6f);
            sum += (long double)a[i] * (long double)a[i];
        }
        for (i = 0; i < 30000; i++) {
            float x = test_uniform() * 1000.0f;
            amp_half half = amp_half_from_float(x);
            amp_bfloat16 bf = amp_bfloat16_from_float(x);
            h[i] = type ? bf.bits : half.bits;
            x = type ? amp_bfloat16_to_float(bf) : amp_half_to_float(half);
            sum += (long double)x * (long double)x;
        }
        info = check_once(3.0f, list, 2);
        sum = sqrtl(sum) * (long double)(float)(1.0 / 3.0);
        CHECK_MSG(fabs((double)((long double)info.norm / sum) - 1) < 1.7e-13, "%.17g %.17g", info.norm, (double)sum);
    }
#if !defined(__FAST_MATH__)         /* which reads subnormals as zero */
    for (i = 0; i < 60000; i++) a[i] = from_bits(1u + (uint32_t)i);       /* subnormal: no underflow on the way */
    info = check_once(1.0f, list, 1);
    for (i = 0, sum = 0; i < 60000; i++) sum += (long double)(i + 1) * (long double)(i + 1);
    CHECK(fabs((double)((long double)info.norm / (sqrtl(sum) * 1.4012984643248171e-45L)) - 1) < 1.7e-13);
#endif
}

/* Every instruction set gives the same bits: findings, norm, unscaled values. */
static void same_bits_on_every_isa(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    static float a[20011], into[20011], first_a[20011], first_into[20011];
    static uint16_t h[5003], first_h[5003];
    double first_norm[3] = { 0, 0, 0 };
    amp_overflow_info info[3];
    int i, k, known = 0;
    for (k = 0; k < COUNT(isas); k++) {
        amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 48.7f);
        amp_tensor list[2], to = tensor(into, AMP_F32, 20011, NULL);
        if (amp_cpu_force_isa(isas[k]) != AMP_OK) continue;
        test_seed = 12345;
        for (i = 0; i < 20011; i++) { a[i] = test_uniform() * 1e-3f; into[i] = test_uniform(); }
        for (i = 0; i < 5003; i++) h[i] = amp_half_from_float(test_uniform()).bits;
        list[0] = tensor(a, AMP_F32, 20011, NULL); list[1] = tensor(h, AMP_F16, 5003, NULL);
        amp_scaler_scale_loss(&s, 1.0f);
        CHECK(amp_scaler_unscale_into(&s, &to, list, 1, 1, &info[2]) == AMP_OK);
        CHECK(amp_scaler_check(&s, list, 2, &info[0]) == AMP_OK && amp_scaler_unscale(&s, list, 2, &info[1]) == AMP_OK);
        for (i = 0; i < 3 && !known; i++) first_norm[i] = info[i].norm;
        if (!known) { memcpy(first_a, a, sizeof a); memcpy(first_into, into, sizeof into); memcpy(first_h, h, sizeof h); }
        known = 1;
#if defined(__FAST_MATH__)         /* which sums in another order where the compiler may choose it */
        for (i = 0; i < 3; i++) CHECK(fabs(info[i].norm - first_norm[i]) <= 1e-12 * first_norm[i]);
#else
        for (i = 0; i < 3; i++) CHECK(memcmp(&first_norm[i], &info[i].norm, sizeof(double)) == 0);
#endif
        CHECK(!memcmp(first_a, a, sizeof a) && !memcmp(first_into, into, sizeof into) && !memcmp(first_h, h, sizeof h));
    }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK && known);
}

/* Products of gradients that begin anywhere in a cache line, of any length; nothing is written beside them. */
static void unscale_begins_anywhere(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    static unsigned char memory[4 * 1400 + 64];
    static float values[1400], want[1400];
    float* line = (float*)(void*)(memory + (64 - (size_t)((uintptr_t)memory % 64)) % 64);
    int n, off, k, i;
    for (i = 0; i < 1400; i++) values[i] = test_uniform();
    for (n = 1; n < 1360; n += n < 200 ? 1 : n < 254 ? 27 : n < 275 ? 1 : 151)
        for (off = 0; off < 16; off++)
            for (k = 0; k < COUNT(isas); k++) {
                amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 48.7f);
                amp_tensor t = tensor(line + 16 + off, AMP_F32, (size_t)n, NULL);
                if (amp_cpu_force_isa(isas[k]) != AMP_OK) continue;
                memcpy(line, values, sizeof values);
                memcpy(want, values, sizeof values);
                for (i = 16 + off; i < 16 + off + n; i++) want[i] *= (float)(1.0 / (double)48.7f);
                amp_scaler_scale_loss(&s, 1.0f);
                CHECK(amp_scaler_unscale(&s, &t, 1, NULL) == AMP_OK);
                CHECK_MSG(!memcmp(line, want, sizeof want), "%d elements, %d behind a line, on %s", n, off,
                          amp_isa_name(isas[k]));
            }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK);
}

/* Many chunks: the bits of the norm are the same for any number of threads, instruction set and compiler. */
static void norm_of_many_chunks(void) {
    static float a[300007];
    amp_tensor t = tensor(a, AMP_F32, 300007, NULL);
    amp_overflow_info info;
    uint64_t bits;
    int i;
    test_seed = 4711;
    for (i = 0; i < 300007; i++) a[i] = test_uniform();
    info = check_once(65536.0f, &t, 1);
    memcpy(&bits, &info.norm, sizeof bits);
#if !defined(__FAST_MATH__)
    CHECK_MSG(bits == 0x3f73c4dde4c91bffull, "0x%llx", (unsigned long long)bits);
#endif
    put_bits(&a[250000], BITS_INF); put_bits(&a[100000], BITS_QNAN); put_bits(&a[300006], BITS_SNAN);
    info = check_once(65536.0f, &t, 1);
    CHECK(info.inf_count == 1 && info.nan_count == 2 && info.first_index == 100000);
}

/* Whole chunks, of which a processor may check several together, beside others of the same or the next tensor: counts,
   places and norms are those of the scalar code. Element `bad` of the second tensor is inf, NaN, or too large for the
   scale. Behind the first lies what belongs to neither. */
enum { CHUNKS_BEFORE = 3 * 16384 + 32, CHUNKS = 9 * 16384 + 100 };
static amp_overflow_info check_chunks(amp_dtype t, const float* values, int bad, uint32_t bits, float scale) {
    static float a[CHUNKS_BEFORE + CHUNKS];
    static uint16_t h[CHUNKS_BEFORE + CHUNKS];
    amp_tensor list[2];
    if (t == AMP_F32) memcpy(a, values, sizeof a);
    else amp_convert(amp_ref_of(h, t), amp_f32(values), CHUNKS_BEFORE + CHUNKS);
    if (bad >= 0 && t == AMP_F32) put_bits(&a[CHUNKS_BEFORE + bad], bits);
    else if (bad >= 0) h[CHUNKS_BEFORE + bad] = (uint16_t)(t == AMP_F16 && bits == BITS_INF ? 0x7c00u : bits >> 16);
    list[0] = tensor(t == AMP_F32 ? (void*)a : h, t, CHUNKS_BEFORE - 32, NULL);
    list[1] = tensor(t == AMP_F32 ? (void*)(a + CHUNKS_BEFORE) : h + CHUNKS_BEFORE, t, CHUNKS, NULL);
    return check_once(scale, list, 2);
}
static int same_norm(double a, double b) {
#if defined(__FAST_MATH__)
    return fabs(a - b) <= 1e-12 * a;
#else
    return memcmp(&a, &b, sizeof a) == 0;
#endif
}
static void chunks_together(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    static const int places[] = { -1, 0, 16383, 16384, 5 * 16384 + 77, 6 * 16384 + 1, 9 * 16384 + 99 };
    static float values[CHUNKS_BEFORE + CHUNKS];
    static double first[3][COUNT(places)][2];
    int k, p, t, i, known = 0;
    test_seed = 99;
    for (i = 0; i < CHUNKS_BEFORE + CHUNKS; i++) values[i] = ldexpf(test_uniform(), (int)(test_random() % 25) - 12);
    for (i = CHUNKS_BEFORE - 32; i < CHUNKS_BEFORE; i++) put_bits(&values[i], BITS_INF);
    for (k = 0; k < COUNT(isas); k++) {
        if (amp_cpu_force_isa(isas[k]) != AMP_OK) continue;
        for (t = 0; t < 3; t++)
            for (p = 0; p < COUNT(places); p++) {
                const amp_dtype types[3] = { AMP_F32, AMP_F16, AMP_BF16 };
                amp_overflow_info info = check_chunks(types[t], values, places[p], BITS_INF, 1024.0f);
                CHECK(info.inf_count == (p > 0) && info.nan_count == 0 && info.found_inf == (p > 0));
                CHECK(p == 0 || (info.first_tensor == 1 && info.first_index == (size_t)places[p]));
                if (p == 0 && known) CHECK(same_norm(first[t][p][0], info.norm));
                first[t][p][0] = info.norm;
                info = check_chunks(types[t], values, places[p], 0x7f000000u, 0.25f);   /* 2^127, or a NaN in F16 */
                CHECK(info.inf_count + info.nan_count == (p > 0) && info.nan_count == (p > 0 && t == 1));
                CHECK(p == 0 || info.first_index == (size_t)places[p]);
                if (p == 0 && known) CHECK(same_norm(first[t][p][1], info.norm));
                first[t][p][1] = info.norm;
            }
        known = 1;
    }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK && known);
}

/* --- unscale ---------------------------------------------------------------------------------------------- */

static void unscale_in_place(void) {
    float a[37];
    uint16_t h[37], b[37], want_h[37], want_b[37];
    float want[37], inverse = (float)(1.0 / (double)700.0f);
    amp_tensor list[3];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 700.0f);
    int i;
    for (i = 0; i < 37; i++) {
        amp_half x = amp_half_from_float(test_uniform() * 1000.0f);
        amp_bfloat16 y = amp_bfloat16_from_float(test_uniform());
        a[i] = test_uniform(); h[i] = x.bits; b[i] = y.bits;
        want[i] = a[i] * inverse;
        want_h[i] = amp_half_from_float(amp_half_to_float(x) * inverse).bits;
        want_b[i] = amp_bfloat16_from_float(amp_bfloat16_to_float(y) * inverse).bits;
    }
    list[0] = tensor(a, AMP_F32, 37, NULL); list[1] = tensor(h, AMP_F16, 37, NULL); list[2] = tensor(b, AMP_BF16, 37, NULL);
    CHECK(amp_scaler_scale_loss(&s, 2.0f) == 1400.0f);
    CHECK(amp_scaler_unscale(&s, list, 3, NULL) == AMP_OK);
    CHECK(!memcmp(a, want, sizeof a) && !memcmp(h, want_h, sizeof h) && !memcmp(b, want_b, sizeof b));
    CHECK(amp_scaler_may_step(&s) == 1 && amp_scaler_update(&s) == AMP_OK && s.state.applied == 1);
}

static void unscale_keeps_bad_gradients(void) {
    float a[5] = { 1, 2, 3, 4, 5 }, b[5] = { 1, 2, 3, 4, 5 }, dst[10] = { 9, 9, 9, 9, 9, 9, 9, 9, 9, 9 };
    amp_tensor list[2], to[2];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 4.0f);
    put_bits(&b[4], BITS_QNAN);
    list[0] = tensor(a, AMP_F32, 5, "a"); list[1] = tensor(b, AMP_F32, 5, "b");
    to[0] = tensor(dst, AMP_F32, 5, "dst"); to[1] = tensor(dst + 5, AMP_F32, 5, "dst");
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale_into(&s, to, list, 2, 0, NULL) == AMP_OK && dst[0] == 9.0f);
    CHECK(amp_scaler_unscale_into(&s, to, list, 2, 1, NULL) == AMP_OK && dst[0] == 9.0f);
    CHECK(amp_scaler_unscale(&s, list, 2, NULL) == AMP_OK && a[0] == 1.0f);
    CHECK(s.info.nan_count == 3 && s.info.first_tensor == 1 && s.info.first_index == 4 && !strcmp(s.info.first_name, "b"));
    CHECK(amp_scaler_update(&s) == AMP_OK && s.state.skipped == 1 && s.state.scale == 2.0f);
}

/* Sums that leave the type of dst are overflows too: FP32, half, bfloat16. */
/* Nothing may lie where dst is written; sources may share. Of 3000 tensors src[0] is so long that it holds all the others
   of src, and the one dst that it reaches comes last of all. */
/* In place, no tensor may share memory with another: it would be unscaled twice. */
static void unscale_shared_memory(void) {
    static float g[20];
    int k, i;
    for (k = 0; k < 4; k++) {
        amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
        amp_tensor list[3];
        for (i = 0; i < 20; i++) g[i] = 4;
        list[0] = tensor(g, AMP_F32, 10, NULL);
        list[1] = tensor(g + 10, AMP_F32, 5, NULL);
        list[2] = tensor(g + (k == 0 ? 15 : k == 1 ? 0 : 14), AMP_F32, k == 3 ? 0 : 5, NULL);
        heard_count = 0;
        amp_scaler_scale_loss(&s, 1.0f);
        CHECK(amp_scaler_unscale(&s, list, 3, NULL) == (k % 3 ? AMP_ERR_ARGUMENT : AMP_OK) && heard_count == (k % 3 > 0));
        CHECK_MSG(k != 1 || strstr(heard, "tensor 0 and tensor 2 overlap in memory"), "%s", heard);
        for (i = 0; i < 20; i++) CHECK(g[i] == (k % 3 || (k == 3 && i > 14) ? 4.0f : 2.0f));
    }
}
static void unscale_into_shared_memory(void) {
    enum { MANY = 3000 };
    static float source[2 * MANY], target[2 * MANY];
    static amp_tensor src[MANY], dst[MANY];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    int i, k;
    for (k = 0; k < 8; k++) {
        amp_result want = k < 2 ? AMP_OK : AMP_ERR_ARGUMENT;
        for (i = 0; i < MANY; i++) {
            src[i] = tensor(source + i, AMP_F32, 1, NULL);
            dst[i] = tensor(target + i, AMP_F32, 1, NULL);
        }
        for (i = 0; i < 2 * MANY; i++) { source[i] = 4; target[i] = 9; }
        if (k == 1) { src[0].count = dst[0].count = MANY; dst[0].data = target + MANY; }
        if (k == 2) { src[0].count = dst[0].count = MANY + 1; dst[0].data = target + MANY; dst[7].data = source + MANY; }
        if (k == 3) dst[MANY - 1].data = target + 5;                        /* one dst twice */
        if (k == 4) dst[5].data = source + 6;                               /* the dst of one, the src of another */
        if (k == 5) { dst[5].dtype = AMP_F16; dst[5].data = (char*)(void*)target + 4 * 9 + 2; }     /* half of it */
        if (k == 6) { src[2].count = dst[2].count = 2; }                    /* into the next one */
        if (k == 7) src[MANY - 1].data = target + 17;
        heard_count = 0;
        amp_scaler_scale_loss(&s, 1.0f);
        CHECK(amp_scaler_unscale_into(&s, dst, src, MANY, 0, NULL) == want && heard_count == (k > 1));
        for (i = 0; i < 2 * MANY && k > 1; i++) CHECK(source[i] == 4.0f && target[i] == 9.0f);
        CHECK_MSG(k != 2 || strstr(heard, "tensor 7 of dst and tensor 0 of src overlap in memory"), "%s", heard);
        CHECK_MSG(k != 3 || strstr(heard, "tensor 5 of dst and tensor 2999 of dst overlap in memory"), "%s", heard);
        if (k < 2) CHECK(amp_scaler_update(&s) == AMP_OK);
    }
    for (i = 0; i < MANY; i++) { src[i] = tensor(source + i, AMP_F32, 1, NULL); dst[i] = tensor(source + i + 1, AMP_F32, 0, NULL); }
    for (i = 0; i < MANY; i++) src[i].count = 0;                            /* what is empty shares nothing */
    CHECK(amp_scaler_unscale_into(&s, dst, src, MANY, 0, NULL) == AMP_OK);
}

static void unscale_into_overflow(void) {
    float src = 3e38f, dst32 = 3e38f;
    amp_half dst16 = amp_half_from_float(60000.0f);
    amp_bfloat16 dstb = amp_bfloat16_from_float(3.3e38f);
    float src16 = 6000.0f, srcb = 3e37f;
    amp_scaler s = scaler_of(AMP_SCALER_STATIC, 1.0f);
    amp_tensor from = tensor(&src, AMP_F32, 1, NULL), to = tensor(&dst32, AMP_F32, 1, NULL);
    amp_overflow_info info;
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 1, &info) == AMP_OK && info.inf_count == 1 && dst32 == 3e38f);
    from = tensor(&src16, AMP_F32, 1, NULL); to = tensor(&dst16, AMP_F16, 1, NULL);
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 1, &info) == AMP_OK && info.inf_count == 1);
    src16 = 5500.0f;                                    /* 65500 rounds to 65504 */
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 1, &info) == AMP_OK && info.inf_count == 0);
    CHECK(amp_half_to_float(dst16) == 65504.0f);
    src16 = 65520.0f;
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 0, &info) == AMP_OK && info.inf_count == 1 && amp_half_to_float(dst16) == 65504.0f);
    src16 = 65519.99f;
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 0, &info) == AMP_OK && info.inf_count == 0 && amp_half_to_float(dst16) == 65504.0f);
    from = tensor(&srcb, AMP_F32, 1, NULL); to = tensor(&dstb, AMP_BF16, 1, NULL);
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 1, &info) == AMP_OK && info.inf_count == 1);
    srcb = from_bits(0x7f7f8000u);
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 0, &info) == AMP_OK && info.inf_count == 1);
    srcb = from_bits(0x7f7f7fffu);
    CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, 0, &info) == AMP_OK && info.inf_count == 0 && dstb.bits == 0x7f7fu);
}

/* Every pair of types, with and without accumulation, bigger than a block, against the formula. */
static void unscale_into_types(void) {
    static const amp_dtype types[3] = { AMP_F32, AMP_F16, AMP_BF16 };
    static float x[3000], y[3000], sx[3000], sy[3000];
    volatile float inverse = (float)(1.0 / (double)37.0f);
    int a, b, acc, i, wrong;
    for (a = 0; a < 3; a++)
        for (b = 0; b < 3; b++)
            for (acc = 0; acc < 2; acc++) {
                amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 37.0f);
                amp_tensor from = tensor(sx, types[a], 3000, NULL), to = tensor(sy, types[b], 3000, NULL);
                for (i = 0; i < 3000; i++) { x[i] = test_uniform() * 100.0f; y[i] = test_uniform(); }
                amp_convert(amp_ref_of(sx, types[a]), amp_f32(x), 3000); amp_convert(amp_f32(x),
                    amp_ref_of(sx, types[a]), 3000);
                amp_convert(amp_ref_of(sy, types[b]), amp_f32(y), 3000); amp_convert(amp_f32(y),
                    amp_ref_of(sy, types[b]), 3000);
                for (i = 0; i < 3000; i++) y[i] = acc ? fmaf(x[i], inverse, y[i]) : x[i] * inverse;
                amp_convert(amp_ref_of(x, types[b]), amp_f32(y), 3000);
                amp_scaler_scale_loss(&s, 1.0f);
                CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, acc, NULL) == AMP_OK);
                wrong = memcmp(x, sy, 3000 * amp_dtype_size(types[b])) != 0;
#if defined(__FAST_MATH__)          /* which need not fuse what is written as fused */
                wrong = wrong && !acc;
#endif
                CHECK_MSG(!wrong, "%s into %s, accumulate %d", amp_dtype_name(types[a]), amp_dtype_name(types[b]), acc);
            }
}

/* 50 unit gradients under momentum 0.9 travel 410. The buffer of the gradients holds the momentum: unscaled in place
   at scale 128 they would travel 50; into another buffer they travel 410. */
static void momentum_in_the_buffer(void) {
    float buffer = 0, position = 0, scaled = 0;
    amp_scaler s = scaler_of(AMP_SCALER_STATIC, 128.0f);
    amp_tensor g = tensor(&scaled, AMP_F32, 1, NULL), b = tensor(&buffer, AMP_F32, 1, NULL);
    int i;
    for (i = 0; i < 50; i++) {
        buffer *= 0.9f;
        scaled = amp_scaler_scale_loss(&s, 1.0f);
        CHECK(amp_scaler_unscale_into(&s, &b, &g, 1, 1, NULL) == AMP_OK && amp_scaler_may_step(&s) == 1);
        position += buffer;
        CHECK(amp_scaler_update(&s) == AMP_OK);
    }
    CHECK_MSG(fabs((double)position - 410.46) < 0.01, "%g", (double)position);
    for (i = 0, buffer = 0, position = 0; i < 50; i++) {        /* the trap itself */
        buffer = 0.9f * buffer + amp_scaler_scale_loss(&s, 1.0f);
        CHECK(amp_scaler_unscale(&s, &b, 1, NULL) == AMP_OK);
        position += buffer;
        CHECK(amp_scaler_update(&s) == AMP_OK);
    }
    CHECK(fabs((double)position - 50.0) < 1.0);
}

/* Four micro-batches in one window: the scale stands still, and an overflow in the first is not forgotten. */
static void accumulation(void) {
    float src[3], dst[3] = { 0, 0, 0 };
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 1024.0f);
    amp_tensor from = tensor(src, AMP_F32, 3, NULL), to = tensor(dst, AMP_F32, 3, NULL);
    int i, round;
    for (round = 0; round < 2; round++) {
        for (i = 0; i < 4; i++) {
            CHECK(amp_scaler_scale_loss(&s, 0.25f) == 256.0f);
            src[0] = 256; src[1] = 512; src[2] = -1024;
            if (round && i == 0) put_bits(&src[1], BITS_INF);
            CHECK(amp_scaler_unscale_into(&s, &to, &from, 1, i > 0, NULL) == AMP_OK);
            CHECK(amp_scaler_set_scale(&s, 2.0f) == AMP_ERR_STATE);
        }
        if (!round) CHECK(dst[0] == 1.0f && dst[1] == 2.0f && dst[2] == -4.0f && s.info.norm == sqrt(21.0));
        CHECK(amp_scaler_may_step(&s) == !round && amp_scaler_update(&s) == AMP_OK);
    }
    CHECK(s.state.scale == 512.0f && s.state.applied == 1 && s.state.skipped == 1);
}

/* --- misuse ------------------------------------------------------------------------------------------------ */

/* The call is refused with this code and a sentence, and the scaler and g stay as they are. */
#define REFUSED(code, call)                                                                          \
    do {                                                                                             \
        amp_scaler before = s;                                                                       \
        float g_before = g;                                                                          \
        int logs = heard_count;                                                                        \
        CHECK((int)(call) == (int)(code));                                                           \
        CHECK(memcmp(&before, &s, sizeof s) == 0 && g == g_before && heard_count == logs + 1);         \
    } while (0)

static void misuse(void) {
    float g = 2.0f, other = 3.0f;
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    amp_tensor t = tensor(&g, AMP_F32, 1, "g"), o = tensor(&other, AMP_F32, 1, "other"), bad;
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, &t, 1, NULL));              /* before any scale_loss */
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &t, 1, NULL));
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale_into(&s, &o, &t, 1, 0, NULL));
    REFUSED(AMP_ERR_STATE, amp_scaler_update(&s));                          /* nothing recorded */
    REFUSED(0, amp_scaler_may_step(&s));
    amp_scaler_scale_loss(&s, 1.0f);
    REFUSED(AMP_ERR_STATE, amp_scaler_update(&s));
    CHECK(amp_scaler_check(&s, &t, 0, NULL) == AMP_OK);                     /* an empty list records nothing */
    REFUSED(AMP_ERR_STATE, amp_scaler_update(&s));
    REFUSED(AMP_ERR_STATE, amp_scaler_save(&s, bytes, sizeof bytes));       /* in the middle of a step */
    REFUSED(AMP_ERR_STATE, amp_scaler_load(&s, bytes, sizeof bytes));
    REFUSED(AMP_ERR_STATE, amp_scaler_set_scale(&s, 4.0f));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_check(&s, NULL, 1, NULL));
    CHECK_MSG(strstr(heard, "the list is NULL") && !strstr(heard, "negative"), "%s", heard);
    CHECK(amp_scaler_advance(NULL, &s.state) == 0 && amp_scaler_advance(&s.rule, NULL) == 0);
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_check(&s, &t, -1, NULL));
    bad = tensor(NULL, AMP_F32, 1, "bad");
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_check(&s, &bad, 1, NULL));
    CHECK(strstr(heard, "bad") != NULL);
    bad = tensor(&g, AMP_F64, 1, NULL);
    REFUSED(AMP_ERR_DTYPE, amp_scaler_check(&s, &bad, 1, NULL));
    bad = tensor(&g, (amp_dtype)99, 1, NULL);
    REFUSED(AMP_ERR_DTYPE, amp_scaler_unscale(&s, &bad, 1, NULL));
    bad = tensor(&other, AMP_F16, 2, NULL);
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_unscale_into(&s, &bad, &t, 1, 0, NULL));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_unscale_into(&s, &t, &t, 1, 0, NULL));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_unscale_into(&s, NULL, &t, 1, 0, NULL));
    CHECK(amp_scaler_unscale(&s, &t, 1, NULL) == AMP_OK && g == 1.0f);
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &t, 1, NULL));            /* twice */
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale_into(&s, &o, &t, 1, 0, NULL));
    CHECK(amp_scaler_unscale_into(&s, &t, &o, 1, 1, NULL) == AMP_OK && g == 2.5f);   /* adding to it is fine */
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK && s.info.norm == 2.5);        /* known as unscaled */
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &t, 1, NULL));
    CHECK(amp_scaler_update(&s) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_scaler_update(&s));                          /* twice */
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &t, 1, NULL));            /* the window has ended */
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_set_scale(&s, 0.0f));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_set_scale(&s, -1.0f));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_set_scale(&s, from_bits(BITS_INF)));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_set_scale(&s, from_bits(BITS_QNAN)));
    CHECK(amp_scaler_set_scale(&s, 32.0f) == AMP_OK && amp_scaler_scale_loss(&s, 1.0f) == 32.0f);
}

#define MANY 100
/* A list of the tensors first, first + 1, ..., two floats each; after every third an empty one. Returns its length. */
static int run_of(amp_tensor* list, float (*memory)[2], int first, int count) {
    int i, n = 0;
    for (i = first; i < first + count; i++) {
        list[n++] = tensor(memory[i], AMP_F32, 2, NULL);
        if (i % 3 == 0) list[n++] = tensor(memory[0], AMP_F32, 0, NULL);
    }
    return n;
}

/* A list is not known by its first tensor and size alone, and a part of it is known for one. */
static void lists_that_share(void) {
    static float memory[2 * MANY][2], fresh[2][2];
    amp_tensor list[2 * MANY], part[2 * MANY], ab[2], ac[2], spare[2];
    amp_scaler s;
    float g = 0;
    int n, i, count;
    ab[0] = ac[0] = tensor(memory[0], AMP_F32, 2, NULL);
    ab[1] = tensor(memory[2], AMP_F32, 2, NULL); ac[1] = tensor(memory[4], AMP_F32, 2, NULL);
    spare[0] = tensor(fresh[0], AMP_F32, 2, NULL); spare[1] = tensor(fresh[1], AMP_F32, 2, NULL);
    s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, ab, 2, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, ac, 2, NULL));
    CHECK_MSG(strstr(heard, "unscaled in this window, but not all, or together with others"), "%s", heard);
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, ab + 1, 1, NULL));
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, ab + 1, 1, NULL));
    ab[0].dtype = ab[1].dtype = AMP_F16;                            /* the same memory with another meaning */
    ab[0].count = ab[1].count = 4;
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, ab, 2, NULL));
    for (count = 1; count <= MANY; count++) {                       /* any part, be it one tensor or a piece of one */
        const int least = 1 + count / 5;
        s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
        n = run_of(list, memory, 0, count);
        amp_scaler_scale_loss(&s, 1.0f);
        CHECK(amp_scaler_unscale(&s, list, n, NULL) == AMP_OK);
        for (i = 0; i + least <= count; i++) {
            const int k = run_of(part, memory, i, least);
            REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, part, k, NULL));
            if (k < n) REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, part, k, NULL));
        }
        for (i = 0; i < count; i++) {
            part[0] = tensor(&memory[i][1], AMP_F32, 1, NULL);
            REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, part, 1, NULL));
            part[1] = tensor(memory[i], AMP_F32, 2, NULL);
            if (count > 1) REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, part + 1, 1, NULL));
            part[0] = tensor(memory[MANY + i], AMP_F32, 2, NULL);   /* together with one that is new */
            REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, part, 2, NULL));
            REFUSED(AMP_ERR_STATE, amp_scaler_unscale_into(&s, part, spare, 2, 1, NULL));
        }
        for (i = 0; i < n; i++) part[i] = list[n - 1 - i];           /* another order, and the array as a whole */
        CHECK(amp_scaler_check(&s, part, n, NULL) == AMP_OK);
        list[0].count = 2 * (size_t)count;
        CHECK(amp_scaler_check(&s, list, 1, NULL) == AMP_OK);
    }
}

/* Half of a list unscaled, then the whole checked: neither factor would be right. */
static void partly_unscaled(void) {
    float g = 4.0f, h = 4.0f;
    amp_tensor list[2];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    list[0] = tensor(&g, AMP_F32, 1, "g"); list[1] = tensor(&h, AMP_F32, 1, "h");
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, list, 1, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, list, 2, NULL));
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, list, 2, NULL));
    CHECK(amp_scaler_unscale(&s, list + 1, 1, NULL) == AMP_OK);
    CHECK(amp_scaler_check(&s, list, 2, NULL) == AMP_OK && s.info.norm == sqrt(8.0));
    CHECK(amp_scaler_check(&s, list, 2, NULL) == AMP_OK && s.info.norm == sqrt(8.0));    /* and again */
}

/* Lists whose tensors alternate in memory are told apart, in any order of their tensors. */
static void lists_that_alternate(void) {
    static float memory[5 * MANY][2];           /* one element of each is in use: nothing lies side by side */
    amp_tensor list[4][MANY], all[4 * MANY];
    amp_scaler s;
    float g = 0;
    int order, i, k;
    for (order = 0; order < 3; order++) {
        s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
        for (k = 0; k < 4; k++)
            for (i = 0; i < MANY; i++) {
                int at = order == 0 ? i : order == 1 ? MANY - 1 - i : i * 37 % MANY;
                all[MANY * k + i] = list[k][i] = tensor(memory[4 * at + k], AMP_F32, 1, NULL);
                memory[4 * at + k][0] = 4.0f;
            }
        amp_scaler_scale_loss(&s, 1.0f);
        for (k = 0; k < 4; k++) CHECK(amp_scaler_unscale(&s, list[k], MANY, NULL) == AMP_OK);
        CHECK(s.span_count == 4 * MANY);
        for (i = 0; i < 4 * MANY; i++) {
            CHECK(memory[i][0] == 2.0f && s.spans[i][1] - s.spans[i][0] == sizeof memory[i][0]);
            REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &all[i], 1, NULL));
        }
        for (k = 0; k < 4; k++) {
            CHECK(amp_scaler_check(&s, list[k], MANY, NULL) == AMP_OK && s.info.norm == sqrt(4.0 * MANY));
            list[k][7] = tensor(memory[4 * MANY], AMP_F32, 1, NULL);
            REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, list[k], MANY, NULL));
        }
        CHECK(amp_scaler_check(&s, all, 4 * MANY, NULL) == AMP_OK && s.info.norm == sqrt(16.0 * MANY));
        CHECK(amp_scaler_update(&s) == AMP_OK);
        amp_scaler_scale_loss(&s, 1.0f);        /* the next window knows nothing of them */
        CHECK(amp_scaler_unscale(&s, all, 4 * MANY, NULL) == AMP_OK && memory[5][0] == 1.0f);
    }
}

/* A tensor right below the one before it is remembered with that. */
static void tensors_downwards(void) {
    static float memory[4];
    amp_tensor list[2];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    float g = 0;
    list[0] = tensor(memory + 2, AMP_F32, 2, NULL); list[1] = tensor(memory, AMP_F32, 2, NULL);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, list, 2, NULL) == AMP_OK && s.span_count == 1);
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &list[1], 1, NULL));
}

/* More tensors than spans: within the memory of the list everything else is refused, beyond it nothing. */
static void more_tensors_than_spans(void) {
    enum { TENSORS = AMP_SCALER_MAX_SPANS + 10 };
    static float memory[TENSORS + 2][2];
    amp_tensor list[TENSORS + 2];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    float g = 0;
    int i;
    for (i = 0; i < TENSORS + 2; i++) list[i] = tensor(memory[i], AMP_F32, 1, NULL);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, list, TENSORS, NULL) == AMP_OK);
    for (i = 0; i < TENSORS; i++) REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &list[i], 1, NULL));
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, list, TENSORS - 1, NULL));
    REFUSED(AMP_ERR_STATE, amp_scaler_check(&s, list, TENSORS + 1, NULL));
    CHECK(amp_scaler_check(&s, list, TENSORS, NULL) == AMP_OK);
    CHECK(amp_scaler_unscale(&s, list + TENSORS, 2, NULL) == AMP_OK);
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, list + TENSORS + 1, 1, NULL));
    CHECK(amp_scaler_check(&s, list, TENSORS + 2, NULL) == AMP_OK);
}

/* A check of all is not trusted by a step any more once a part was accumulated into. */
static void check_before_a_change(void) {
    float w[2] = { 0, 0 }, grad[2] = { 8, 8 }, more[1] = { 8 };
    amp_tensor all[2], src;
    amp_param p[2];
    amp_optimizer_desc d;
    amp_optimizer o;
    amp_optimizer_info info;
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    int i;
    memset(p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    d.kind = AMP_SGD; d.lr = 1; d.momentum = AMP_ZERO;
    for (i = 0; i < 2; i++) {
        p[i].master = &w[i]; p[i].grad = &grad[i]; p[i].count = 1;
        all[i] = tensor(&grad[i], AMP_F32, 1, NULL);
    }
    src = tensor(more, AMP_F32, 1, NULL);
    CHECK(amp_optimizer_init(&o, &d, p, 2) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, &all[0], 1, NULL) == AMP_OK && amp_scaler_unscale(&s, &all[1], 1, NULL) == AMP_OK);
    CHECK(amp_scaler_check(&s, all, 2, NULL) == AMP_OK && s.info.norm == sqrt(32.0));
    CHECK(amp_scaler_unscale_into(&s, &all[0], &src, 1, 1, NULL) == AMP_OK && grad[0] == 8.0f);
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_OK && info.applied && info.grad_norm == sqrt(80.0));
    CHECK(amp_optimizer_step(&o, &s, &info) == AMP_ERR_STATE);
}

static void too_many_lists(void) {
    static float buffer[AMP_SCALER_MAX_LISTS + 1];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 2.0f);
    amp_tensor t;
    float g = 0;
    int i;
    amp_scaler_scale_loss(&s, 1.0f);
    for (i = 0; i < AMP_SCALER_MAX_LISTS; i++) {
        t = tensor(&buffer[i], AMP_F32, 1, NULL);
        CHECK(amp_scaler_unscale(&s, &t, 1, NULL) == AMP_OK);
    }
    t = tensor(&buffer[i], AMP_F32, 1, NULL);
    REFUSED(AMP_ERR_STATE, amp_scaler_unscale(&s, &t, 1, NULL));
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_OK);         /* reading is always possible */
}

static void null_scaler(void) {
    float g = 1;
    amp_tensor t = tensor(&g, AMP_F32, 1, NULL);
    CHECK((to_bits(amp_scaler_scale_loss(NULL, 1.0f)) & 0x7fffffffu) > 0x7f800000u);
    CHECK(amp_scaler_check(NULL, &t, 1, NULL) == AMP_ERR_ARGUMENT && amp_scaler_unscale(NULL, &t, 1, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_scaler_unscale_into(NULL, &t, &t, 1, 0, NULL) == AMP_ERR_ARGUMENT && amp_scaler_update(NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_scaler_report_overflow(NULL) == AMP_ERR_ARGUMENT && amp_scaler_may_step(NULL) == 0);
    CHECK(amp_scaler_set_scale(NULL, 1) == AMP_ERR_ARGUMENT && amp_scaler_save(NULL, &g, 128) == AMP_ERR_ARGUMENT);
    CHECK(amp_scaler_load(NULL, &g, 128) == AMP_ERR_ARGUMENT);
}

/* Zeroed memory that was never initialised: no loss of 0, but NaN, and AMP_ERR_STATE from everything after it. */
static void zeroed_scaler(void) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES] = { 0 };
    float g = 1, w = 1;
    amp_tensor t = tensor(&g, AMP_F32, 1, NULL);
    amp_param p;
    amp_optimizer o;
    amp_scaler s, before;
    memset(&s, 0, sizeof s);
    memset(&before, 0, sizeof before);
    memset(&p, 0, sizeof p);
    p.master = &w;
    p.grad = &g;
    p.count = 1;
    CHECK(amp_optimizer_init(&o, NULL, &p, 1) == AMP_OK);
    CHECK((to_bits(amp_scaler_scale_loss(&s, 1.0f)) & 0x7fffffffu) > 0x7f800000u);
    CHECK(amp_scaler_check(&s, &t, 1, NULL) == AMP_ERR_STATE && amp_scaler_unscale(&s, &t, 1, NULL) == AMP_ERR_STATE);
    CHECK(amp_scaler_unscale_into(&s, &t, &t, 1, 0, NULL) == AMP_ERR_STATE && amp_scaler_update(&s) == AMP_ERR_STATE);
    CHECK(amp_scaler_report_overflow(&s) == AMP_ERR_STATE && amp_scaler_may_step(&s) == 0);
    CHECK(amp_scaler_set_scale(&s, 1) == AMP_ERR_STATE && amp_scaler_save(&s, bytes, sizeof bytes) == AMP_ERR_STATE);
    CHECK(amp_scaler_load(&s, bytes, sizeof bytes) == AMP_ERR_STATE);
    CHECK(amp_optimizer_unscale(&o, &s) == AMP_ERR_STATE && amp_optimizer_step(&o, &s, NULL) == AMP_ERR_STATE);
    CHECK(memcmp(&s, &before, sizeof s) == 0 && w == 1.0f && g == 1.0f);
}

/* MindSpore's drop_overflow_update=false: counted, but the step is taken. */
static void ignored_overflow(void) {
    amp_scaler_desc d = desc_of(AMP_SCALER_MINDSPORE_FIXED);
    amp_scaler s;
    float g[2] = { 256, 0 };
    amp_tensor t = tensor(g, AMP_F32, 2, NULL);
    d.ignore_overflow = 1;
    put_bits(&g[1], BITS_INF);
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    amp_scaler_scale_loss(&s, 1.0f);
    CHECK(amp_scaler_unscale(&s, &t, 1, NULL) == AMP_OK && g[0] == 2.0f && s.info.inf_count == 1);
    CHECK(amp_scaler_may_step(&s) == 1 && amp_scaler_update(&s) == AMP_OK && s.state.applied == 1);
}

/* Two losses, each with a scaler of its own, in one loop: they move apart. */
static void several_scalers(void) {
    amp_scaler a = scaler_of(AMP_SCALER_PYTORCH, 64.0f), b = scaler_of(AMP_SCALER_MEGATRON, 64.0f);
    int i;
    for (i = 0; i < 4; i++) {
        float ga = amp_scaler_scale_loss(&a, 1.0f), gb = amp_scaler_scale_loss(&b, 1.0f);
        amp_tensor ta = tensor(&ga, AMP_F32, 1, NULL), tb = tensor(&gb, AMP_F32, 1, NULL);
        if (i % 2) put_bits(&ga, BITS_INF);
        CHECK(amp_scaler_unscale(&a, &ta, 1, NULL) == AMP_OK && amp_scaler_unscale(&b, &tb, 1, NULL) == AMP_OK);
        CHECK(gb == 1.0f && amp_scaler_may_step(&b) == 1 && amp_scaler_may_step(&a) == (i % 2 == 0));
        CHECK(amp_scaler_update(&a) == AMP_OK && amp_scaler_update(&b) == AMP_OK);
    }
    CHECK(a.state.scale == 16.0f && b.state.scale == 64.0f && a.state.skipped == 2 && b.state.applied == 4);
}

/* The scale in use stays the one of this window. */
static void report_and_scale_in_use(void) {
    float g[4] = { 1, 1, 1, 1 };
    amp_tensor t[2];
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 16.0f);
    t[0] = tensor(g, AMP_F32, 2, "a"); t[1] = tensor(g + 2, AMP_F32, 2, "b");
    CHECK(amp_scaler_report_overflow(&s) == AMP_OK && amp_scaler_may_step(&s) == 0);     /* the forward pass overflowed */
    CHECK(s.info.found_inf == 1 && s.info.first_tensor == -1);
    CHECK(amp_scaler_update(&s) == AMP_OK && s.state.scale == 8.0f);
    CHECK(s.state.scale_in_use == 16.0f);
    CHECK(amp_scaler_scale_loss(&s, 1.0f) == 8.0f && s.state.scale_in_use == 8.0f && s.state.inverse == 0.125f);
    CHECK(amp_scaler_report_overflow(&s) == AMP_OK);                /* names nothing: the first check that finds one does */
    put_bits(&g[1], BITS_INF);
    CHECK(amp_scaler_check(&s, &t[1], 1, NULL) == AMP_OK && s.info.first_tensor == -1);
    CHECK(amp_scaler_check(&s, t, 2, NULL) == AMP_OK && s.info.inf_count == 1 && s.info.first_tensor == 0);
    CHECK(s.info.first_index == 1 && !strcmp(s.info.first_name, "a") && !strcmp(s.info.last_name, "a") && s.info.found_inf == 1);
}

/* A loss that is inf or NaN: no step, and nothing of the rule moves, whatever the preset. */
static amp_result unsound_step(amp_scaler* s, uint32_t bits) {
    float loss, g = 1.0f;
    amp_tensor t = tensor(&g, AMP_F32, 1, NULL);
    put_bits(&loss, bits);
    amp_scaler_scale_loss(s, loss);
    CHECK(amp_scaler_check(s, &t, 1, NULL) == AMP_OK && s->info.unsound == 1 && s->info.found_inf == 1);
    CHECK(amp_scaler_may_step(s) == 0 && s->state.unsound == 1);
    return amp_scaler_update(s);
}
static void unsound_windows(void) {
    static const uint32_t losses[] = { BITS_INF, BITS_QNAN, BITS_INF | 0x80000000u, 0x7f800001u };
    int p, i;
    for (p = 0; p < AMP_SCALER_PRESET_COUNT; p++) {
        amp_scaler s = scaler_of((amp_scaler_preset)p, 4096.0f);
        amp_scaler_state before;
        one_step(&s, 0);
        amp_scaler_scale_loss(&s, LARGEST);                 /* finite, though not when scaled */
        CHECK(s.state.unsound == 0 && s.state.found_inf == 0 && !s.recorded && one_step(&s, 0) == AMP_OK);
        before = s.state;
        for (i = 1; i <= 25; i++) {
            amp_result r = unsound_step(&s, losses[i % 4]);
            CHECK_MSG(r == (i <= 20 ? AMP_OK : AMP_ERR_OVERFLOW), "preset %d, window %d", p, i);
            CHECK(i <= 20 || strstr(heard, "max_unsound is 20"));
            CHECK(s.state.scale == before.scale && s.state.tracker == before.tracker && s.state.skipped == i);
            CHECK(s.state.hysteresis_left == before.hysteresis_left && s.state.applied == before.applied);
            CHECK(s.state.consecutive_skips == i && s.state.consecutive_unsound == i && !s.state.unsound && !s.state.found_inf);
        }
        CHECK(one_step(&s, 0) == AMP_OK && s.state.consecutive_unsound == 0);
        CHECK(unsound_step(&s, BITS_INF) == AMP_OK);
        one_step(&s, 1);                                    /* an overflow at a sound forward pass breaks the row */
        CHECK(s.state.consecutive_unsound == 0);
    }
}
static void unsound_limits(void) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    amp_scaler_desc d = desc_of(AMP_SCALER_PYTORCH);
    amp_scaler s, copy;
    int i;
    d.max_unsound = 2;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && unsound_step(&s, BITS_INF) == AMP_OK && unsound_step(&s, BITS_INF) == AMP_OK);
    CHECK(amp_scaler_save(&s, bytes, sizeof bytes) == AMP_OK && amp_scaler_init(&copy, &d) == AMP_OK);
    CHECK(amp_scaler_load(&copy, bytes, sizeof bytes) == AMP_OK && unsound_step(&copy, BITS_INF) == AMP_ERR_OVERFLOW);
    CHECK(amp_scaler_init(&copy, NULL) == AMP_OK && amp_scaler_load(&copy, bytes, sizeof bytes) == AMP_OK);
    d.max_unsound = AMP_ZERO;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    for (i = 0; i < 100; i++) CHECK(unsound_step(&s, BITS_QNAN) == AMP_OK);
    d = desc_of(AMP_SCALER_MINDSPORE_FIXED);                /* asked to step all the same, it does, but not for ever */
    d.ignore_overflow = 1;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    for (i = 1; i <= 21; i++) {
        float loss;
        put_bits(&loss, BITS_INF);
        amp_scaler_scale_loss(&s, loss);
        CHECK(amp_scaler_may_step(&s) == 1 && amp_scaler_update(&s) == (i <= 20 ? AMP_OK : AMP_ERR_OVERFLOW));
    }
    CHECK(s.state.applied == 21);
}

/* Overflows in every tenth window and nothing else that the rule counts: the way to a scale of no use is told. */
static void scale_runs_out(void) {
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 0);
    int i, told = 0;
    for (i = 0; i < 2400 && !told; i++) told = one_step(&s, i % 10 == 0) == AMP_ERR_OVERFLOW;
    CHECK_MSG(told && s.state.skipped >= 142 && s.state.skipped <= 144, "after %d windows, scale %g", i, (double)s.state.scale);
    CHECK(one_step(&s, 0) == AMP_ERR_OVERFLOW && amp_scaler_set_scale(&s, 8.0f) == AMP_OK && one_step(&s, 0) == AMP_OK);
}
/* The checks of a window with this scale, and what the logger hears of them; then the update. */
static int sentences_of_checks(amp_scaler* s, float scale) {
    const int count = heard_count;
    float g = 1.0f;
    amp_tensor t = tensor(&g, AMP_F32, 1, NULL);
    int i, told;
    s->state.scale = scale;
    amp_scaler_scale_loss(s, 1.0f);
    for (i = 0; i < 3; i++) CHECK(amp_scaler_check(s, &t, 1, NULL) == AMP_OK);
    told = heard_count - count;
    CHECK(amp_scaler_update(s) == (told > 0 || scale < 1.0f ? AMP_ERR_OVERFLOW : AMP_OK));
    return told;
}
static void useless_scale_is_told_once(void) {
    const float tiny = from_bits(0x00080000u);
    amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 0);
    int turn;
    for (turn = 0; turn < 2; turn++) {
        CHECK(sentences_of_checks(&s, 8.0f) == 0);
        CHECK(sentences_of_checks(&s, tiny) == 1 && sentences_of_checks(&s, tiny) == 0 && sentences_of_checks(&s, tiny) == 0);
    }
}
static int rescue(const amp_scaler* s, void* user_data) {
    (void)user_data;
    asked++;
    return answer ? 1 : amp_scaler_set_scale((amp_scaler*)(uintptr_t)s, 2.0f) != AMP_OK;
}
static void scale_is_rescued(void) {
    amp_scaler_desc d = desc_of(AMP_SCALER_PYTORCH);
    amp_scaler s;
    d.init_scale = from_bits(0x00200001u); d.at_min = AMP_LIMIT_CALLBACK; d.on_limit = rescue;
    asked = answer = 0;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && one_step(&s, 1) == AMP_OK && asked == 1 && s.state.scale == 2.0f);
    answer = 1;
    CHECK(amp_scaler_set_scale(&s, d.init_scale) == AMP_OK && one_step(&s, 1) == AMP_ERR_OVERFLOW && asked == 2);
}

/* --- save and load ------------------------------------------------------------------------------------------ */

static void save_and_load(void) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES + 1], again[AMP_SCALER_STATE_BYTES];
    amp_scaler s, copy, fresh;
    float g = 0;
    int p, i, bit;
    for (p = 0; p < AMP_SCALER_PRESET_COUNT; p++) {
        s = scaler_of((amp_scaler_preset)p, 4096.0f);
        for (i = 0; i < 37; i++) one_step(&s, i % 5 == 4);
        CHECK(amp_scaler_save(&s, bytes, AMP_SCALER_STATE_BYTES) == AMP_OK);
        copy = scaler_of((amp_scaler_preset)p, 4096.0f);
        CHECK(amp_scaler_load(&copy, bytes, AMP_SCALER_STATE_BYTES) == AMP_OK);
        CHECK(copy.state.applied == s.state.applied && copy.state.skipped == s.state.skipped);
        for (i = 0; i < 4000; i++) {                            /* goes on alike */
            one_step(&s, i % 997 == 4); one_step(&copy, i % 997 == 4);
            if (memcmp(&s.state, &copy.state, sizeof s.state)) break;
        }
        CHECK(i == 4000);
    }
    s = scaler_of(AMP_SCALER_DEEPSPEED, 2048.0f);
    one_step(&s, 1); one_step(&s, 0);
    CHECK(amp_scaler_save(&s, bytes, AMP_SCALER_STATE_BYTES) == AMP_OK && memcmp(bytes, "AMPS\3\0\0\0", 8) == 0);
    CHECK(bytes[64] == 0 && bytes[65] == 0 && bytes[66] == 0 && bytes[67] == 0x45);     /* 2048.0f, little-endian */
    fresh = s = scaler_of(AMP_SCALER_DEEPSPEED, 2048.0f);
    for (i = 0; i < AMP_SCALER_STATE_BYTES; i++)
        for (bit = 0; bit < 8; bit++) {
            bytes[i] ^= (unsigned char)(1 << bit);
            CHECK_MSG(amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES) == AMP_ERR_FORMAT, "byte %d", i);
            bytes[i] ^= (unsigned char)(1 << bit);
        }
    for (i = 0; i < AMP_SCALER_STATE_BYTES; i++) CHECK(amp_scaler_load(&s, bytes, (size_t)i) == AMP_ERR_FORMAT);
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES + 1));
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, NULL, 0));
    memset(again, 0, sizeof again);
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, again, sizeof again));
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_save(&s, NULL, sizeof again));
    CHECK_MSG(strstr(heard, "bytes is NULL, or its size below 128"), "%s", heard);
    REFUSED(AMP_ERR_ARGUMENT, amp_scaler_save(&s, again, AMP_SCALER_STATE_BYTES - 1));
    CHECK(memcmp(&s, &fresh, sizeof s) == 0);
    CHECK(amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES) == AMP_OK && s.state.hysteresis_left == 1 && s.state.skipped == 1);
    s = scaler_of(AMP_SCALER_MEGATRON, 2048.0f);                /* another rule: its first difference is told */
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES));
    CHECK_MSG(strstr(heard, "the tracker's start is -1 there, but 0 here"), "%s", heard);
    s.rule.growth = 4.0;
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES));
    CHECK_MSG(strstr(heard, "growth_factor is 2 there, but 4 here"), "%s", heard);
    s = scaler_of(AMP_SCALER_DEEPSPEED, 2048.0f);
    s.rule.interval = 7;                                        /* the first integer */
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES));
    CHECK_MSG(strstr(heard, "growth_interval is 1000 there, but 7 here"), "%s", heard);
    s = scaler_of(AMP_SCALER_DEEPSPEED, 2048.0f);
    s.rule.is_static = 1;                                       /* the last word */
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES));
    CHECK_MSG(strstr(heard, "static is 0 there, but 1 here"), "%s", heard);
    s = scaler_of(AMP_SCALER_DEEPSPEED, 2048.0f);
    s.state.hysteresis_left = s.rule.hysteresis + 1;            /* a count that no scaler has */
    CHECK(amp_scaler_save(&s, bytes, AMP_SCALER_STATE_BYTES) == AMP_OK);
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, AMP_SCALER_STATE_BYTES));
}

/* What a double holds beyond a float is kept, and a rule that differs there is told. */
static void save_exact_scale(void) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    amp_scaler_desc d = desc_of(AMP_SCALER_NNABLA);
    amp_scaler s, other;
    float g = 0;
    d.growth_factor = 1.7;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && amp_scaler_init(&other, &d) == AMP_OK);
    one_step(&s, 1); one_step(&s, 1); one_step(&s, 0);
    CHECK(s.state.exact_scale == 8.0 / 1.7 / 1.7 && s.state.scale == (float)(8.0 / 1.7 / 1.7));
    CHECK(amp_scaler_save(&s, bytes, sizeof bytes) == AMP_OK && amp_scaler_load(&other, bytes, sizeof bytes) == AMP_OK);
    CHECK(memcmp(&s.state, &other.state, sizeof s.state) == 0);
    d.growth_factor = 1.7 + 1e-15;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, bytes, sizeof bytes));
    CHECK_MSG(strstr(heard, "exact growth_factor is 1.7 there, but 1.7000000000000011 here"), "%s", heard);
    CHECK(amp_scaler_set_scale(&s, 3.0f) == AMP_OK && s.state.exact_scale == 3.0);
}

/* A double may leave the range of floats: the window after that is skipped, and the scale is back, as in the original. */
static void exact_scale_above_floats(void) {
    amp_scaler_desc d = desc_of(AMP_SCALER_MINDSPORE_MANAGER);
    amp_scaler s;
    d.init_scale = 1.5e38f; d.growth_factor = 3; d.growth_interval = 1;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    CHECK(one_step(&s, 0) == AMP_OK && to_bits(s.state.scale) == BITS_INF && s.state.exact_scale == 3.0 * (double)1.5e38f);
    CHECK(one_step(&s, 0) == AMP_OK && s.state.skipped == 1 && s.state.scale == 1.5e38f);
    CHECK(one_step(&s, 1) == AMP_OK && s.state.scale < 1e38f);
    d.preset = AMP_SCALER_KERAS;                /* a float stays infinite */
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && one_step(&s, 0) == AMP_ERR_OVERFLOW);
}

/* States that version 1 of the format has written: of NNabla and of DeepSpeed as it was then. */
static void load_version_1(void) {
    static const unsigned char nnabla[AMP_SCALER_STATE_BYTES] = {
        65, 77, 80, 83, 1, 0, 0, 0, 154, 153, 217, 63, 150, 150, 22, 63, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 255, 255, 255, 255,
        1, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 100, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        255, 255, 121, 68, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 180, 110, 40, 66 };
    static const unsigned char deepspeed[AMP_SCALER_STATE_BYTES] = {
        65, 77, 80, 83, 1, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 63, 0, 0, 128, 63, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0,
        2, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 122, 69, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 195, 196, 200 };
    amp_scaler_desc d = desc_of(AMP_SCALER_NNABLA);
    amp_scaler s;
    float g = 0;
    d.growth_interval = 3; d.growth_factor = 1.7;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && amp_scaler_load(&s, nnabla, sizeof nnabla) == AMP_OK);
    CHECK(s.state.scale == 999.999939f && s.state.exact_scale == (double)s.state.scale && s.state.applied == 9);
    d = desc_of(AMP_SCALER_DEEPSPEED_0_17_0);
    d.growth_interval = 3;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && amp_scaler_load(&s, deepspeed, sizeof deepspeed) == AMP_OK);
    CHECK(s.state.scale == 4000.0f && s.state.tracker == 2 && s.state.skipped == 1);
    d.preset = AMP_SCALER_DEEPSPEED;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK);
    REFUSED(AMP_ERR_FORMAT, amp_scaler_load(&s, deepspeed, sizeof deepspeed));
    CHECK_MSG(strstr(heard, "the tracker's start is 0 there, but -1 here"), "%s", heard);
}

/* A state of NNabla that version 2 of the format has written, which had a constant where now windows are counted. */
static void load_version_2(void) {
    static const unsigned char nnabla[AMP_SCALER_STATE_BYTES] = {
        65, 77, 80, 83, 2, 0, 0, 0, 154, 153, 217, 63, 150, 150, 22, 63, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 255, 255, 255, 255,
        1, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 100, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        162, 41, 49, 64, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
        51, 51, 51, 51, 51, 51, 251, 63, 0, 0, 0, 0, 0, 0, 0, 0, 113, 97, 82, 67, 52, 37, 6, 64, 0, 0, 0, 0, 39, 19, 97, 74 };
    amp_scaler_desc d = desc_of(AMP_SCALER_NNABLA);
    amp_scaler s;
    d.growth_interval = 3; d.growth_factor = 1.7;
    CHECK(amp_scaler_init(&s, &d) == AMP_OK && amp_scaler_load(&s, nnabla, sizeof nnabla) == AMP_OK);
    CHECK(s.state.exact_scale == 2.7681660899653981 && s.state.since_rescale == 0 && s.state.applied == 8 && s.state.skipped == 2);
}

/* A few elements behind whole vectors: each length has its own masks. The last element counts in the norm, and what
   lies behind it does not; it is found where it is infinite. */
static void rests_of_every_length(void) {
    static const amp_dtype types[] = { AMP_F32, AMP_F16, AMP_BF16 };
    double want[72];
    float f[72], block[72];
    int t, n, i;
    for (i = 0; i < 72; i++) want[i] = (i ? want[i - 1] : 0.0) + (double)((i % 5 + 1) * (i % 5 + 1));
    for (t = 0; t < COUNT(types); t++)
        for (n = 1; n <= 70; n++) {
            amp_scaler s = scaler_of(AMP_SCALER_PYTORCH, 1.0f);
            amp_tensor list = tensor(block, types[t], (size_t)n, NULL);
            amp_overflow_info info;
            amp_scaler_scale_loss(&s, 1.0f);
            for (i = 0; i < 72; i++) f[i] = (float)(i % 5 + 1);
            CHECK(amp_convert(amp_ref_of(block, types[t]), amp_f32(f), 72) == AMP_OK);
            CHECK(amp_scaler_check(&s, &list, 1, &info) == AMP_OK && !info.found_inf);
            CHECK_MSG(fabs(info.norm / sqrt(want[n - 1]) - 1.0) < 1e-15, "%s, %d elements", amp_dtype_name(types[t]), n);
            f[n - 1] = (float)INFINITY;
            CHECK(amp_convert(amp_ref_of(block, types[t]), amp_f32(f), 72) == AMP_OK);
            CHECK(amp_scaler_check(&s, &list, 1, &info) == AMP_OK && info.inf_count == 1 && info.nan_count == 0);
            CHECK(info.first_index == (uint64_t)n - 1);
            f[n - 1] = 1.0f; f[n] = (float)INFINITY;
            CHECK(amp_convert(amp_ref_of(block, types[t]), amp_f32(f), 72) == AMP_OK);
            CHECK(amp_scaler_check(&s, &list, 1, &info) == AMP_OK && !info.found_inf);
        }
}

/* The tests of the kernels, on each instruction set that this processor has. */
static void checks_on_every_isa(void) {
    static const amp_isa isas[] = { AMP_ISA_SCALAR, AMP_ISA_NEON, AMP_ISA_AVX2, AMP_ISA_AVX512 };
    int k;
    for (k = 0; k < COUNT(isas); k++) {
        if (amp_cpu_force_isa(isas[k]) != AMP_OK) continue;
        every_16_bit_pattern();
        float_patterns();
        large_but_finite();
        rests_of_every_length();
        counts_and_places();
        norm_against_long_double();
        norm_of_many_chunks();
        unscale_in_place();
        unscale_into_overflow();
        unscale_shared_memory();
        unscale_into_shared_memory();
        unscale_into_types();
    }
    CHECK(amp_cpu_force_isa(AMP_ISA_AUTO) == AMP_OK);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(worked_sequences);
    TEST(tolerance_of_fairseq);
    TEST(refill_of_a_desc);
    TEST(skip_limits);
    TEST(random_traces);
    TEST(random_traces_through_the_interface);
    TEST(recorded_traces);
    TEST(lowered_interval);
    TEST(preset_names);
    TEST(default_descs);
    TEST(refused_descs);
    TEST(limits);
    TEST(checks_on_every_isa);
    TEST(inverse_above_one);
    TEST(inverse_above_one_in_halves);
    TEST(unusable_scales);
    TEST(same_bits_on_every_isa);
    TEST(unscale_begins_anywhere);
    TEST(chunks_together);
    TEST(unscale_keeps_bad_gradients);
    TEST(momentum_in_the_buffer);
    TEST(accumulation);
    TEST(misuse);
    TEST(lists_that_share);
    TEST(partly_unscaled);
    TEST(lists_that_alternate);
    TEST(tensors_downwards);
    TEST(more_tensors_than_spans);
    TEST(check_before_a_change);
    TEST(too_many_lists);
    TEST(null_scaler);
    TEST(zeroed_scaler);
    TEST(ignored_overflow);
    TEST(several_scalers);
    TEST(report_and_scale_in_use);
    TEST(unsound_windows);
    TEST(unsound_limits);
    TEST(scale_runs_out);
    TEST(useless_scale_is_told_once);
    TEST(scale_is_rescued);
    TEST(save_and_load);
    TEST(save_exact_scale);
    TEST(exact_scale_above_floats);
    TEST(load_version_1);
    TEST(load_version_2);
    TEST_END();
}
