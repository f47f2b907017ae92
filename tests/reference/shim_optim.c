/* shim_optim.c - flat functions over the scaler and the optimizers for the Python checks: no structs to mirror. Compiled into
   one shared library with the implementation of amp.h. */
#include "../../amp.h"
#include <stdlib.h>
#include <string.h>

/* A scaler of a preset; zeros are defaults. NULL if the desc is refused. */
void* shim_scaler_new(int preset, float init, double growth, double backoff, int interval, int hysteresis, float min,
                      double tolerance) {
    amp_scaler* s = (amp_scaler*)malloc(sizeof *s);
    amp_scaler_desc d;
    memset(&d, 0, sizeof d);
    d.preset = (amp_scaler_preset)preset;
    d.init_scale = init; d.growth_factor = growth; d.backoff_factor = backoff;
    d.growth_interval = interval; d.hysteresis = hysteresis;
    d.min_scale = min; d.tolerance = tolerance;
    if (s && amp_scaler_init(s, &d) != AMP_OK) { free(s); s = NULL; }
    return s;
}
/* The rule alone. What the preset keeps, a float or a double, and the limits that were reached. */
double shim_scaler_advance(void* scaler, int overflow, int* hit) {
    amp_scaler* s = (amp_scaler*)scaler;
    s->state.found_inf = overflow;
    *hit = amp_scaler_advance(&s->rule, &s->state);
    return s->state.exact_scale;
}
void shim_scaler_free(void* s) { free(s); }
float shim_scaler_scale(const void* s) { return ((const amp_scaler*)s)->state.scale; }
int shim_scaler_tracker(const void* s) { return (int)((const amp_scaler*)s)->state.tracker; }
float shim_scaler_scale_loss(void* s, float loss) { return amp_scaler_scale_loss((amp_scaler*)s, loss); }
int shim_scaler_may_step(const void* s) { return amp_scaler_may_step((const amp_scaler*)s); }
int shim_scaler_update(void* s) { return (int)amp_scaler_update((amp_scaler*)s); }

/* Unscales n values in place; *norm and *bad receive the norm and the count of inf and NaN. */
int shim_scaler_unscale(void* s, void* data, int dtype, size_t n, double* norm, unsigned long long* bad) {
    amp_overflow_info info;
    amp_tensor t;
    amp_result r;
    memset(&t, 0, sizeof t);
    t.data = data; t.dtype = (amp_dtype)dtype; t.count = n;
    r = amp_scaler_unscale((amp_scaler*)s, &t, 1, &info);
    if (r == AMP_OK) { *norm = info.norm; *bad = info.inf_count + info.nan_count; }
    return (int)r;
}

typedef struct shim_optimizer { amp_optimizer o; amp_param p[2]; } shim_optimizer;

/* An optimizer of two parameters that lie one after the other, each in a group of its own: the first `first` of n elements,
   and the rest. */
void* shim_optimizer_new(int kind, const float* settings, int nesterov, int maximize, float* w, void* grad, int grad_dtype,
                         float* m, float* v, size_t first, size_t n) {
    shim_optimizer* x = (shim_optimizer*)calloc(1, sizeof *x);
    amp_param_group groups[2];
    amp_optimizer_desc d;
    int i;
    memset(&d, 0, sizeof d);
    d.kind = (amp_optimizer_kind)kind;
    d.lr = settings[0]; d.momentum = settings[1]; d.dampening = settings[2]; d.weight_decay = settings[3];
    d.beta1 = settings[4]; d.beta2 = settings[5]; d.eps = settings[6]; d.clip_norm = settings[7];
    d.nesterov = nesterov; d.maximize = maximize;
    memset(groups, 0, sizeof groups);
    d.groups = groups; d.group_count = 2;
    for (i = 0; x && i < 2; i++) {
        size_t from = i ? first : 0;
        x->p[i].master = w + from; x->p[i].m = m + from; x->p[i].v = v + from;
        x->p[i].grad = (char*)grad + from * amp_dtype_size((amp_dtype)grad_dtype);
        x->p[i].grad_dtype = (amp_dtype)grad_dtype;
        x->p[i].count = i ? n - first : first;
        x->p[i].group = i;
    }
    if (x && amp_optimizer_init(&x->o, &d, x->p, 2) != AMP_OK) { free(x); x = NULL; }
    return x;
}
void shim_optimizer_free(void* x) { free(x); }
/* Freezes the first parameter, or lets it move at the desc's rate. */
void shim_optimizer_freeze(void* x, int frozen) { ((shim_optimizer*)x)->o.groups[0].frozen = frozen; }
/* 1 applied, 0 skipped, negative an error. */
int shim_optimizer_step(void* x, void* scaler, double* norm) {
    amp_optimizer_info info;
    amp_result r = amp_optimizer_step(&((shim_optimizer*)x)->o, (amp_scaler*)scaler, &info);
    if (r != AMP_OK) return (int)r;
    *norm = info.grad_norm;
    return info.applied;
}
float shim_schedule_lr(int kind, long long warmup, long long total, long long step_size, float gamma, float lowest, float lr, long long t) {
    amp_schedule s;
    memset(&s, 0, sizeof s);
    s.kind = (amp_schedule_kind)kind;
    s.warmup_steps = warmup; s.total_steps = total; s.step_size = step_size; s.gamma = gamma; s.floor = lowest;
    return amp_schedule_lr(&s, lr, t);
}
