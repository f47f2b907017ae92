/* soak_scaler.c [MILLIONS] - random windows of the whole scaler interface against a model of it that was written apart, from the
   systems' published rules and the sentences of the header: every preset, every field of a desc, calls in any order, states
   saved and loaded on the way. Default: ten million windows. Run by check.sh. */
#include "../../amp.h"
#include "../test.h"

enum { KEEP, CLAMP, FREE };                                    /* what growth out of range does */
enum { ON_GROWTH, ON_CLEAN, ON_CLEAN_AND_CUT, ON_CUT };        /* when the patience comes back */
enum { GO_ON, REFUSE, ASK, STOP_ABOVE };                       /* at a limit */

/* What a scale is: a float whose factors are floats, the same but an overflow divides, a float with factors that are doubles, a
   double, a double that an overflow divides. */
enum { FLOATS, FLOATS_DIV, MIXED, DOUBLES, DOUBLES_DIV };

/* The systems' own figures. init 0: none. window 0: the scale never moves. cut 0: 1/growth. */
typedef struct system_row {
    amp_scaler_preset preset;
    int kind;
    double init, growth, cut, least, most;
    long window, first, patience, allowed;
    int out_of_range, comes_back, at_floor;
} system_row;
#define NEVER 0
#define TOP 3.4028234663852886e38
static const system_row systems[] = {
    { AMP_SCALER_PYTORCH, MIXED,    65536,      2, 0.5, 0, 0,        2000,  0, 1, 0,    KEEP,  ON_GROWTH, GO_ON },
    { AMP_SCALER_MINDSPORE, FLOATS_DIV, 0,          2, 0,   1, 0,        2000,  0, 1, 0,    KEEP,  ON_GROWTH, GO_ON },
    { AMP_SCALER_MINDSPORE_MANAGER, DOUBLES, 16777216,   2, 0,   1, 0,        2000,  0, 1, 1000, FREE,  ON_GROWTH, GO_ON },
    { AMP_SCALER_MINDSPORE_FIXED, FLOATS, 128,        2, 0,   0, 0,        NEVER, 0, 1, 0,    KEEP,  ON_GROWTH, GO_ON },
    { AMP_SCALER_APEX, DOUBLES_DIV, 65536,      2, 0,   0, 16777216, 2000,  0, 1, 0,    CLAMP, ON_GROWTH, GO_ON },
    { AMP_SCALER_ONEFLOW, FLOATS_DIV, 65536,      2, 0,   1, TOP,      2000,  0, 1, 0,    CLAMP, ON_GROWTH, GO_ON },
    { AMP_SCALER_KERAS, FLOATS,     32768,      2, 0,   0, 0,        2000,  0, 1, 0,    FREE,  ON_GROWTH, GO_ON },
    { AMP_SCALER_FLAX, FLOATS,      65536,      2, 0.5, 1.1754943508222875e-38, TOP, 2001, 0, 1, 0, CLAMP, ON_GROWTH, GO_ON },
    { AMP_SCALER_NNABLA, DOUBLES_DIV, 8,          2, 0,   0, 0,        2001, -1, 1, 100,  FREE,  ON_GROWTH, GO_ON },
    { AMP_SCALER_MEGATRON, FLOATS,  4294967296.0, 2, 0.5, 1, 0,      1000,  0, 2, 0,    FREE,  ON_GROWTH, GO_ON },
    { AMP_SCALER_DEEPSPEED, DOUBLES_DIV, 65536,      2, 0,   1, 0,        1000, -1, 2, 0,    FREE,  ON_GROWTH, REFUSE },
    { AMP_SCALER_DEEPSPEED_CONSECUTIVE, DOUBLES_DIV, 65536,  2, 0,   1, 0,        1000, -1, 2, 0,    FREE,  ON_CLEAN,  REFUSE },
    { AMP_SCALER_DEEPSPEED_0_17_0, DOUBLES_DIV, 65536,  2, 0,   1, 0,        1000,  0, 2, 0,    FREE,  ON_GROWTH, REFUSE },
    { AMP_SCALER_PADDLE, FLOATS,    65536,      2, 0.5, 1, 0,        1000,  0, 1, 0,    KEEP,  ON_CLEAN_AND_CUT, GO_ON },
    { AMP_SCALER_JMP, FLOATS_DIV,   0,          2, 0,   1, 0,        2000,  0, 1, 0,    KEEP,  ON_GROWTH, GO_ON },
    { AMP_SCALER_TF_LEGACY, FLOATS_DIV, 0,          2, 0,   1, 0,        2000,  0, 1, 0,    KEEP,  ON_GROWTH, GO_ON },
    { AMP_SCALER_STATIC, FLOATS,    0,          2, 0,   0, 0,        NEVER, 0, 1, 0,    KEEP,  ON_GROWTH, GO_ON },
    { AMP_SCALER_MINDSPORE_CELL, FLOATS, 16777216, 2, 0, 1, 0,       2000,  0, 1, 0,    FREE,  ON_GROWTH, GO_ON },
    { AMP_SCALER_FAIRSEQ, DOUBLES_DIV, 32768,   2, 0,   9.9999997473787516e-05, 0, 2000, 0, 1, 0, FREE, ON_CUT, STOP_ABOVE },
};
enum { SYSTEMS = sizeof systems / sizeof systems[0] };

/* The model. */
typedef struct shadow {
    system_row rule;
    int ignores;
    double scale, used;             /* the scale now, and the one of this window */
    long streak, patience, in_a_row, applied, skipped, windows;     /* windows: since the scale moved */
    double tolerated;               /* share of overflows */
    int open, seen, bad, ill;       /* loss scaled, something recorded, overflow known, a loss was not finite */
    int floor_hit, too_many;
    long ill_in_a_row, ill_allowed;
    int done_a, done_b;             /* these lists were unscaled */
} shadow;

static int verdict, asked;          /* of the callback */
static int on_limit(const amp_scaler* s, void* user_data) { (void)s; (void)user_data; asked++; return verdict; }

static int one_in(unsigned n) { return test_random() % n == 0; }
static double uniform(double low, double high) { return low + (high - low) * (double)(test_random() & 0xffffffu) / 16777216.0; }
static double as_float(double x) { float f = (float)x; return (double)f; }      /* rounds */
static int is_usable(double scale) { return scale > 2.938735877055719e-39 && scale <= TOP; }     /* 2^-128 */

/* A desc with random fields, and what the documentation says about them. */
static void draw(amp_scaler_desc* d, shadow* m) {
    const system_row* row = &systems[test_random() % SYSTEMS];
    system_row* r = &m->rule;
    memset(d, 0, sizeof *d);
    memset(m, 0, sizeof *m);
    *r = *row;
    d->preset = row->preset;
    d->on_limit = on_limit;
    if (r->init == 0 || one_in(2)) d->init_scale = (float)(r->init = as_float(uniform(1, 1e6)));
    if (row->window == NEVER) {
        d->ignore_overflow = m->ignores = one_in(3);
    } else {
        if (!one_in(8)) { d->growth_interval = 1 + (int)(test_random() % 6); r->window = d->growth_interval + row->window % 10; }
        if (one_in(2)) d->growth_factor = r->growth = uniform(1.01, 8) + uniform(0, 1e-9);
        if (r->kind <= FLOATS_DIV) r->growth = as_float(r->growth);
        if (one_in(2) && row->preset != AMP_SCALER_ONEFLOW) {
            d->backoff_factor = r->cut = uniform(0.1, 0.95) + uniform(0, 1e-9);
            if (r->kind == FLOATS_DIV) r->kind = FLOATS;
            if (r->kind == DOUBLES_DIV) r->kind = DOUBLES;
        }
        if (one_in(2)) d->hysteresis = (int)(r->patience = 1 + (long)(test_random() % 4));
        if (one_in(3)) { r->comes_back = (int)(test_random() % 4); d->refill = (amp_scaler_refill)(r->comes_back + 1); }
        if (r->comes_back == ON_CUT && one_in(2)) d->tolerance = m->tolerated = uniform(0.01, 1);
    }
    if (r->cut == 0) r->cut = 1.0 / r->growth;
    if (r->kind <= FLOATS_DIV) r->cut = as_float(r->cut);
    if (one_in(4)) { d->min_scale = AMP_ZERO; r->least = 0; }
    else if (one_in(4)) d->min_scale = (float)(r->least = as_float(uniform(0.001, 1)));
    if (one_in(3)) r->out_of_range = (int)(test_random() % 3);
    if (r->most > 0 && r->init > r->most) r->init = r->most;            /* Apex */
    if (one_in(4)) d->max_scale = (float)(r->most = as_float(uniform(1, 3) * (r->most < 1e30 && r->most > 0 ? r->most : r->init)));
    else if (one_in(4)) { d->max_scale = AMP_ZERO; r->most = 0; }
    if (r->most == 0 && r->out_of_range == CLAMP) r->most = TOP;
    if (one_in(3)) { r->at_floor = (int)(test_random() % 4); d->at_min = (amp_scaler_limit)(r->at_floor + 1); }
    if (one_in(4)) { d->max_skips = AMP_ZERO; r->allowed = 0; }
    else if (one_in(3)) d->max_skips = (int)(r->allowed = 1 + (long)(test_random() % 5));
    m->ill_allowed = 20;
    if (one_in(4)) { d->max_unsound = AMP_ZERO; m->ill_allowed = 0; }
    else if (one_in(2)) d->max_unsound = (int)(m->ill_allowed = 1 + (long)(test_random() % 3));
    m->scale = m->used = r->init;
    m->streak = r->first;
    m->patience = r->patience;
}

/* A desc's scaler, with the guard of this rule. */
static amp_result begin(amp_scaler* s, const shadow* m, const amp_scaler_desc* d) {
    const amp_result r = amp_scaler_init(s, d);
    s->rule.guard = m->rule.out_of_range + 1;
    s->rule.max = (float)m->rule.most;
    return r;
}

/* --- what each call should do ----------------------------------------------------------------------- */

static int refuses(int what) {
    if (what == ASK) { asked++; return verdict != 0; }
    return what == REFUSE || what == STOP_ABOVE;
}

static void shadow_grow(shadow* m) {
    const system_row* r = &m->rule;
    double next = m->scale * r->growth;
    int out = next >= 3.4028235677973366e38;                /* would round to infinity */
    if (r->most > 0 && next > r->most) m->scale = r->most;
    else if (!out || r->out_of_range == FREE) m->scale = r->kind >= DOUBLES ? next : as_float(next);
    m->streak = m->windows = 0;
    if (r->comes_back != ON_CUT) m->patience = r->patience;
}

static void shadow_overflow(shadow* m) {
    const system_row* r = &m->rule;
    double before = m->scale;
    m->skipped++;
    m->in_a_row++;
    m->too_many = r->allowed > 0 && m->in_a_row > r->allowed;
    if (m->ill) return;
    m->streak = r->first;
    if (m->patience > 0 || m->tolerated > 0) m->patience--;
    if (r->window == NEVER || m->patience > 0) return;
    if (m->tolerated > 0 && (double)(r->patience - m->patience) / (double)m->windows < m->tolerated) return;
    m->floor_hit = m->scale <= r->least;
    m->scale = r->kind == FLOATS_DIV || r->kind == DOUBLES_DIV ? m->scale / r->growth : m->scale * r->cut;
    if (r->kind < DOUBLES) m->scale = as_float(m->scale);
    if (r->at_floor == STOP_ABOVE) {
        m->floor_hit = m->scale <= r->least;
        if (m->floor_hit) { m->scale = before; return; }
    }
    if (m->scale < r->least) m->scale = r->least;
    m->windows = 0;
    if (r->comes_back == ON_CLEAN_AND_CUT || r->comes_back == ON_CUT) m->patience = r->patience;
}

static amp_result shadow_update(shadow* m) {
    int too_ill, useless;
    if (!m->seen) return AMP_ERR_STATE;
    m->floor_hit = m->too_many = 0;
    if (!m->ill) m->windows++;
    if (m->bad) shadow_overflow(m);
    else {
        m->applied++;
        m->in_a_row = 0;
        if (m->rule.comes_back == ON_CLEAN || m->rule.comes_back == ON_CLEAN_AND_CUT) m->patience = m->rule.patience;
        m->streak++;
        if (m->rule.window != NEVER && m->streak >= m->rule.window) shadow_grow(m);
    }
    m->ill_in_a_row = m->ill ? m->ill_in_a_row + 1 : 0;
    too_ill = m->ill_allowed > 0 && m->ill_in_a_row > m->ill_allowed;
    useless = !is_usable(as_float(m->scale)) && !(m->rule.kind >= DOUBLES && m->scale > 3.4028235677973366e38 && m->scale < 1e308);
    m->open = m->seen = m->bad = m->ill = m->done_a = m->done_b = 0;
    if ((m->floor_hit || useless) && refuses(m->rule.at_floor)) return AMP_ERR_OVERFLOW;
    if (m->too_many) return AMP_ERR_OVERFLOW;
    return too_ill || useless ? AMP_ERR_OVERFLOW : AMP_OK;
}

/* A list was looked at: `found` an inf or NaN in it. */
static void shadow_look(shadow* m, int found) {
    m->seen = 1;
    if ((found || !is_usable(m->used)) && !m->ignores) m->bad = 1;
}

/* --- one random call on both -------------------------------------------------------------------------- */

static float list_a[3], list_b[2];
/* Not finite, or not once it is unscaled. */
static int list_is_bad(const float* x, int n, double factor) {
    int i, bad = 0;
    for (i = 0; i < n; i++) {
        uint32_t u;
        memcpy(&u, &x[i], sizeof u);
        bad |= (u & 0x7f800000u) == 0x7f800000u || (double)x[i] * factor >= 3.4028235677973366e38;
    }
    return bad;
}
static void fill(float* x, int n, int overflow) {
    static const uint32_t kinds[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u };
    int i;
    for (i = 0; i < n; i++) x[i] = 1.0f + (float)(test_random() % 8);
    if (overflow) memcpy(&x[test_random() % (unsigned)n], &kinds[test_random() % 4], 4);
}

static int look(amp_scaler* s, shadow* m, int unscale) {
    int b = one_in(2), n = b ? 2 : 3, *done = b ? &m->done_b : &m->done_a, bad, i;
    float *x = b ? list_b : list_a, before[3];
    amp_tensor t;
    amp_result got, want = AMP_OK;
    t.data = x; t.dtype = AMP_F32; t.count = (size_t)n; t.name = NULL;
    memcpy(before, x, (size_t)n * sizeof *x);
    bad = list_is_bad(x, n, *done ? 1 : is_usable(m->used) ? as_float(1.0 / m->used) : 0);
    if (!m->open || (unscale && *done)) want = AMP_ERR_STATE;
    got = unscale ? amp_scaler_unscale(s, &t, 1, NULL) : amp_scaler_check(s, &t, 1, NULL);
    if (got != want) return 0;
    if (want == AMP_OK) {
        shadow_look(m, bad);
        if (unscale) {
            double factor = is_usable(m->used) ? as_float(1.0 / m->used) : 0;
            int kept = !m->ignores && (bad || !is_usable(m->used));
            *done = 1;
            for (i = 0; i < n && !kept; i++) before[i] = (float)((double)before[i] * factor);
        }
    }
    return bad || memcmp(x, before, (size_t)n * sizeof *x) == 0;
}

static int set_scale(amp_scaler* s, shadow* m) {
    static const double values[] = { 0, -1, 2.938735877055719e-39, 2.938736e-39, 1e-30, 1, 3, 65536, 1e38 };
    double v = values[test_random() % (sizeof values / sizeof values[0])];
    int inside = m->open || m->seen, good = is_usable(as_float(v));
    if (amp_scaler_set_scale(s, (float)v) != (inside ? AMP_ERR_STATE : good ? AMP_OK : AMP_ERR_ARGUMENT)) return 0;
    if (!inside && good) m->scale = m->used = as_float(v);
    return 1;
}

/* The state moves to a new scaler of the same desc. */
static int save_and_load(amp_scaler* s, shadow* m, const amp_scaler_desc* d) {
    unsigned char bytes[AMP_SCALER_STATE_BYTES];
    amp_scaler other;
    int inside = m->open || m->seen;
    if (amp_scaler_save(s, bytes, sizeof bytes) != (inside ? AMP_ERR_STATE : AMP_OK)) return 0;
    if (inside) return 1;
    if (begin(&other, m, d) != AMP_OK || amp_scaler_load(&other, bytes, sizeof bytes) != AMP_OK) return 0;
    *s = other;
    m->used = as_float(m->scale);
    return 1;
}

static int scale_loss(amp_scaler* s, shadow* m) {
    float got = amp_scaler_scale_loss(s, 3.0f), want;
    if (!m->open) m->used = as_float(m->scale);
    m->open = 1;
    want = 3.0f * (float)m->used;
    return memcmp(&got, &want, sizeof got) == 0;
}
static int scale_ill_loss(amp_scaler* s, shadow* m) {
    static const uint32_t losses[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u };
    float loss;
    memcpy(&loss, &losses[test_random() % 4], sizeof loss);
    amp_scaler_scale_loss(s, loss);
    if (!m->open) m->used = as_float(m->scale);
    m->open = m->seen = m->ill = 1;
    if (!m->ignores) m->bad = 1;
    return s->state.unsound == 1 && s->info.unsound == 1;
}

static int update(amp_scaler* s, shadow* m) {
    int mine;
    amp_result got, want;
    verdict = one_in(2);
    asked = 0;
    want = shadow_update(m);
    mine = asked;
    asked = 0;
    got = amp_scaler_update(s);
    return got == want && asked == mine;
}

static int agree(const amp_scaler* s, const shadow* m) {
    float scale = (float)m->scale;
    int may = m->seen && !m->bad;
    return memcmp(&s->state.scale, &scale, sizeof scale) == 0 && s->state.tracker == m->streak
           && s->state.hysteresis_left == m->patience && s->state.since_rescale == m->windows && s->state.consecutive_skips == m->in_a_row
           && (m->rule.kind < DOUBLES || memcmp(&s->state.exact_scale, &m->scale, sizeof m->scale) == 0)
           && s->state.consecutive_unsound == m->ill_in_a_row && s->state.applied == m->applied && s->state.skipped == m->skipped && amp_scaler_may_step(s) == may;
}

/* A window as a loop has it nine times of ten, anything in any order otherwise. */
static int window(amp_scaler* s, shadow* m, const amp_scaler_desc* d, unsigned rate, unsigned ill_rate) {
    int ok = 1, calls = (int)(test_random() % 6);
    fill(list_a, 3, test_random() % 16 < rate);
    fill(list_b, 2, one_in(50));
    if (one_in(ill_rate)) return scale_loss(s, m) && scale_ill_loss(s, m) && look(s, m, one_in(2)) && agree(s, m) && update(s, m) && agree(s, m);
    if (!one_in(10)) return scale_loss(s, m) && look(s, m, one_in(2)) && agree(s, m) && update(s, m) && agree(s, m);
    while (ok && calls-- > 0) {
        switch (test_random() % 8) {
            case 0: ok = one_in(4) ? scale_ill_loss(s, m) : scale_loss(s, m); break;
            case 1: ok = scale_loss(s, m); break;
            case 2: ok = look(s, m, 0); break;
            case 3: ok = look(s, m, 1); break;
            case 4: ok = amp_scaler_report_overflow(s) == AMP_OK; m->seen = 1; if (!m->ignores) m->bad = 1; break;
            case 5: ok = set_scale(s, m); break;
            case 6: ok = save_and_load(s, m, d); break;
            default: ok = update(s, m); break;
        }
        ok = ok && agree(s, m);
    }
    return ok && (!m->seen || update(s, m)) && agree(s, m);
}

int main(int argc, char** argv) {
    long windows = (argc > 1 ? atol(argv[1]) : 10) * 1000000, k = 0;
    while (k < windows && test_failed < TEST_MAX_PRINTED) {
        amp_scaler_desc d;
        shadow m;
        amp_scaler s;
        long end = k + 500;
        unsigned rate = 1 + test_random() % 12, ill_rate = 1 + test_random() % 40;
        draw(&d, &m);
        CHECK_MSG(begin(&s, &m, &d) == AMP_OK, "preset %s", amp_scaler_preset_name(d.preset));
        for (; k < end && window(&s, &m, &d, rate, ill_rate); k++) test_passed++;
        CHECK_MSG(k == end, "preset %s, window %ld: scale %.9g and %.9g, tracker %ld and %ld, left %ld and %ld, in a row %ld and %ld",
                  amp_scaler_preset_name(d.preset), k, (double)s.state.scale, m.scale, (long)s.state.tracker, m.streak,
                  (long)s.state.hysteresis_left, m.patience, (long)s.state.consecutive_skips, m.in_a_row);
        k = end;
    }
    TEST_END();
}
