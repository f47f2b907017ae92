/* Optimizers on the device, against the CPU's: the same bits. */
#include "pair.h"

/* Parameters and their optimizer, twice. */
struct Nets {
    amp_exec exec;
    std::deque<Pair> all;
    std::vector<Pair*> grads, masters, lows;    /* of each parameter; NULL if it has none */
    std::vector<amp_param> here, there;
    amp_optimizer cpu;
    amp_optimizer_info last;                    /* of the CPU's last step */
    amp_cuda_optimizer* gpu;

    explicit Nets(cudaStream_t stream = 0) : exec(exec_on(stream)), cpu(), last(), gpu(nullptr) {}
    ~Nets() { amp_cuda_optimizer_destroy(gpu); }
    Nets(const Nets&) = delete;
    Nets& operator=(const Nets&) = delete;

    Pair* pair(amp_dtype t, size_t n, size_t skew, float scale) {
        all.emplace_back(t, n, skew);
        if (scale > 0) all.back().fill(scale);
        else all.back().send();
        return &all.back();
    }
    static void* at(Pair* t, bool host) { return !t || t->n == 0 ? nullptr : host ? t->here() : t->there(); }
    /* low, grad: 0 = none. Skews are digits: of master, low, grad, m and v. */
    void add(size_t n, bool master, int low, int grad, int moments, int group = 0, unsigned skews = 0,
             const char* name = nullptr, amp_dtype moment = AMP_F32, bool split = false) {
        Pair* w = master ? pair(AMP_F32, n, skews % 10, 1) : nullptr;
        Pair* h = low ? pair((amp_dtype)low, n, skews / 10 % 10, 1) : nullptr;
        Pair* g = grad ? pair((amp_dtype)grad, n, skews / 100 % 10, 0) : nullptr;
        Pair* m = moments > 0 ? pair(moment, n, skews / 1000 % 10, 0) : nullptr;
        Pair* v = moments > 0 ? pair(moment, n, skews / 10000 % 10, 0) : nullptr;
        Pair* r = split ? pair(AMP_BF16, n, skews % 10, 1e-6f) : nullptr;
        for (bool host : { true, false }) {
            amp_param p = { (float*)at(w, host), at(h, host), (amp_dtype)low, at(g, host), (amp_dtype)grad,
                            at(m, host), at(v, host), n, group, name, moment, (uint16_t*)at(r, host) };
            (host ? here : there).push_back(p);
        }
        masters.push_back(w);
        lows.push_back(h);
        grads.push_back(g);
    }
    void make(const amp_optimizer_desc* desc) {
        amp_optimizer_desc d = {};
        if (desc) d = *desc;
        d.logger = &CPU_EAR;
        CHECK(amp_optimizer_init(&cpu, &d, here.data(), (int)here.size()) == AMP_OK);
        d.logger = &GPU_EAR;
        CHECK(amp_cuda_optimizer_create(&gpu, &d, there.data(), (int)there.size(), &exec) == AMP_OK && gpu);
    }
    /* Gradients whose norm has the same bits in any order. */
    void renew(float scale) {
        for (Pair* g : grads) if (g) g->fill_exact(scale);
    }
    void spoil(size_t param, size_t i, unsigned kind) {
        grads[param]->set_bits(i, bad_bits(grads[param]->type, kind));
        grads[param]->send();
    }
    void step(Scalers* s) {
        SAME(amp_optimizer_step(&cpu, s ? &s->cpu : nullptr, &last),
             amp_cuda_optimizer_step(gpu, s ? s->gpu : nullptr, &exec));
    }
    void unscale(Scalers* s) {
        SAME(amp_optimizer_unscale(&cpu, &s->cpu),
             amp_cuda_scaler_unscale(s->gpu, amp_cuda_optimizer_grads(gpu), &exec));
    }
    void check(Scalers* s) {
        std::vector<amp_tensor> list;
        for (const amp_param& p : here) list.push_back({ p.grad, p.grad_dtype, p.grad ? p.count : 0, p.name });
        SAME(amp_scaler_check(&s->cpu, list.data(), (int)list.size(), nullptr),
             amp_cuda_scaler_check(s->gpu, amp_cuda_optimizer_grads(gpu), &exec));
    }
    bool memory_agrees(bool any_nan = false) const {
        bool same = true;
        for (const Pair& t : all) same = t.agree(any_nan) && same;
        return same;
    }
    /* Everything is the same; n: elements of all gradients. */
    void agree(size_t n = 0, bool any_nan = false) {
        amp_optimizer o;
        amp_optimizer_info i;
        CHECK(amp_cuda_optimizer_read(gpu, &o, &i, &exec) == AMP_OK);
        CHECK_MSG(memcmp(&o.state, &cpu.state, sizeof o.state) == 0, "step %ld %ld lr %g %g", (long)cpu.state.step,
                  (long)o.state.step, (double)cpu.state.lr, (double)o.state.lr);
        CHECK_MSG(
            i.applied == last.applied && memcmp(&i.lr, &last.lr, 4) == 0 && close_norm(last.grad_norm, i.grad_norm, n)
                && memcmp(&i.clip_coefficient, &last.clip_coefficient, 4) == 0,
            "applied %d %d lr %.9g %.9g norm %.17g %.17g clip %.9g %.9g", last.applied, i.applied, (double)last.lr,
            (double)i.lr, last.grad_norm, i.grad_norm, (double)last.clip_coefficient, (double)i.clip_coefficient);
        CHECK_MSG(same_info(last.overflow, i.overflow, n), INFO_FORMAT "; " INFO_FORMAT, INFO_ARGS(last.overflow),
                  INFO_ARGS(i.overflow));
        CHECK_MSG(i.update_overflows == last.update_overflows && i.saturated == last.saturated
                      && i.update_tensor == last.update_tensor && i.update_index == last.update_index
                      && strcmp(i.update_name, last.update_name) == 0,
                  "update: %ld %ld, saturated %ld %ld, tensor %d %d", (long)last.update_overflows,
                  (long)i.update_overflows, (long)last.saturated, (long)i.saturated, last.update_tensor,
                  i.update_tensor);
        CHECK(o.params == there.data() && o.count == (int)there.size() && o.desc.kind == cpu.desc.kind);
        CHECK(memory_agrees(any_nan));
    }
};

/* --- every kind of optimizer, every kind of parameter ------------------------------------------------------ */

enum { RECIPES = 13 };
static amp_optimizer_desc recipe(int k) {
    amp_optimizer_desc d = {};
    d.lr = 0.05f;
    d.kind = k < 5 ? AMP_SGD : k < 8 ? AMP_ADAM : k < 10 ? AMP_ADAMW : k < 11 ? AMP_LAMB : AMP_RMSPROP;
    if ((k >= 1 && k < 5) || k == 12) d.momentum = 0.9f;
    if (k == 12) d.eps_in_root = 1;
    if (k == 2) d.dampening = 0.3f;
    if (k == 3) d.nesterov = 1;
    if (k == 4 || k == 6) d.maximize = 1;
    if (k % 2) d.weight_decay = 0.02f;
    if (k >= 7) d.beta1 = 0.8f;
    if (k == 7) d.beta2 = AMP_ZERO;
    if (k == 9) d.eps = 1e-3f;
    return d;
}

/* Masters or none, with or without 16-bit copies, gradients of each type, lengths about the sizes that a thread and a
   block take at a time, aligned or not. */
static void add_all_kinds(Nets& n, int moments) {
    static const size_t lengths[] = { 1027, 0, 1, 4096, 3, 2049, 4, 1028, 5, 2052, 31, 4099, 255, 2047, 900 };
    for (int k = 0; k < 15; k++) {
        int low = k / 3 % 5;
        unsigned skews = k % 4 == 0 ? 0 : k % 4 == 1 ? 44444 : test_random() % 55555;
        n.add(lengths[k], low != 3 && low != 4, low == 1 || low == 3 ? AMP_F16 : low == 2 || low == 4 ? AMP_BF16 : 0,
              (int)TYPES[k % 3], moments, 0, skews, k == 3 ? "the fourth" : nullptr);
    }
}

static void run_recipe(int k, bool scaled, bool clipped) {
    amp_optimizer_desc d = recipe(k);
    amp_scaler_desc sd = {};
    Nets n;
    if (clipped) d.clip_norm = 3;
    sd.init_scale = 256;
    sd.growth_interval = 2;
    Scalers s(&sd);
    add_all_kinds(n, amp_optimizer_moments(&d));
    n.make(&d);
    CHECK(n.memory_agrees());           /* the 16-bit copies were written */
    for (int step = 0; step < 4; step++) {
        n.renew(scaled ? s.cpu.state.scale : 1.0f);
        if (step == 2) n.spoil((size_t)k + 2, 0, (unsigned)k);
        if (scaled) s.scale_loss();
        if (scaled && step == 1) n.check(&s);
        n.step(scaled ? &s : nullptr);
        n.agree(20000);
        CHECK(n.last.applied == (step != 2) && (n.last.clip_coefficient < 1) == (clipped && step != 2));
        if (scaled) s.update();
    }
    CHECK(n.cpu.state.step == 3);
    s.agree(20000);
}

static void test_every_recipe() {
    for (int k = 0; k < RECIPES; k++) {
        set_schedule(k % ORDERS);
        run_recipe(k, k % 3 != 0, k % 2 == 0);
    }
    run_recipe(8, false, true);
    run_recipe(8, true, false);
}

/* Split masters, and moments in 16 bits, of the lengths and places that add_all_kinds takes. */
static void test_fewer_bits() {
    for (int k = 0; k < RECIPES; k++) {
        amp_optimizer_desc d = recipe(k);
        int moments = amp_optimizer_moments(&d);
        Nets n;
        for (int i = 0; i < 9; i++) {
            static const size_t lengths[] = { 1027, 1, 4096, 3, 2049, 4, 1028, 31, 4099 };
            bool split = i % 3 != 0;
            n.add(lengths[i], !split, AMP_BF16, (int)TYPES[i % 3], moments, 0, i % 2 ? 0 : test_random() % 55555,
                  i ? nullptr : "the first", i % 3 == 1 ? AMP_F32 : d.kind == AMP_SGD && i % 2 ? AMP_F16 : AMP_BF16, split);
        }
        n.make(&d);
        for (int step = 0; step < 5; step++) {
            n.renew(1.0f);
            if (step == 2) {        /* beyond F16, and what overflows */
                n.grads[0]->set_bits(7, 0x7f61b1e6u);
                n.grads[0]->send();
                n.grads[6]->set_bits(1000, 0x48000000u);
                n.grads[6]->send();
            }
            if (step == 3) n.spoil(2, 4000, (unsigned)k);
            n.step(nullptr);
            n.agree(20000);
            CHECK(n.last.applied == (step != 3));
        }
    }
}

/* Random data, many steps: nothing but the order of sums may differ, and it does not show without clipping. */
/* Gradients of 1e22 and 3e38, which are finite, weights near the end of half, and masters beyond it. */
static void test_update_overflows() {
    for (int k = 0; k < RECIPES; k++) {
        amp_optimizer_desc d = recipe(k);
        Nets n;
        uint16_t low;
        if (k < 5) d.lr = 2;
        add_all_kinds(n, amp_optimizer_moments(&d));
        n.masters[3]->set_bits(1000, 0x4788b800u);      /* 70000 */
        n.masters[3]->send();
        n.make(&d);
        memcpy(&low, &n.lows[3]->host[2000], sizeof low);
        CHECK(n.memory_agrees() && low == 0x7bffu);
        for (int step = 0; step < 4; step++) {
            n.renew(1.0f);
            if (step == 1 || step == 2) {
                n.grads[0]->set_bits(step == 1 ? 7 : 1026, 0x7f61b1e6u);                  /* 3e38 */
                n.grads[12]->set_bits(step == 1 ? 3 : 254, 0xff61b1e6u);
                n.masters[5]->set_bits(1500, 0xc788b800u);
                n.masters[5]->send();
                if (n.grads[9]->n) n.grads[9]->set_bits(5, 0x7f61b1e6u);
                for (Pair* g : n.grads) if (g) g->send();
            }
            n.step(nullptr);
            n.agree();
            CHECK(n.last.applied && (step == 0 || step == 3 || n.last.update_overflows > 1));
            CHECK(step > 0 || n.last.saturated == (k != 3));   /* nesterov's weight decay takes it below 65504 at once */
        }
    }
}

static void test_many_steps() {
    for (int k = 0; k < RECIPES; k++) {
        amp_optimizer_desc d = recipe(k);
        d.schedule.kind = (amp_schedule_kind)(k % 4);
        d.schedule.warmup_steps = k % 3 * 4;
        d.schedule.total_steps = 25;
        d.schedule.step_size = 5;
        d.schedule.floor = 0.1f;
        d.unchecked = k % 2;
        Nets n;
        n.add(33, true, AMP_F16, AMP_F16, amp_optimizer_moments(&d));
        n.add(70, true, 0, AMP_BF16, amp_optimizer_moments(&d));
        n.make(&d);
        for (int step = 0; step < 30; step++) {
            for (Pair* g : n.grads) g->fill(step % 7 ? 0.1f : 1e-20f);
            n.step(nullptr);
            n.agree(103);
        }
    }
}

/* Zero gradients for long: moments go to zero, not to subnormals. */
static void test_idle_moments() {
    amp_optimizer_desc d = recipe(6);
    Nets n;
    d.beta1 = d.beta2 = 0.8f;
    n.add(40, true, AMP_BF16, AMP_F32, 2);
    n.add(40, true, AMP_BF16, AMP_F32, 2);
    n.make(&d);
    n.grads[0]->fill(1e-18f);
    n.grads[1]->fill(1e-36f);
    for (int step = 0; step < 60; step++) {
        n.step(nullptr);
        n.agree(80);
        float largest = 0, size = 0;                /* the gradient of a single element may be too small */
        for (int i = 0; i < 40; i++) {
            largest = fmaxf(largest, ((float*)n.here[0].v)[i]);
            size = fmaxf(size, fabsf(((float*)n.here[1].m)[i]));
        }
        CHECK(step > 3 || (largest > 0 && size > 0));
        if (step == 3) n.grads[0]->fill(0.0f), n.grads[1]->fill(0.0f);
    }
    for (int i = 0; i < 40; i++) CHECK(((float*)n.here[0].v)[i] == 0 && ((float*)n.here[1].m)[i] == 0);
}

/* --- groups ------------------------------------------------------------------------------------------------ */

/* A group for each kind of optimizer. */
static void test_groups_with_optimizers() {
    static const int which[6] = { 6, 2, 8, 10, 11, 12 };
    amp_optimizer_desc own[6], d;
    amp_param_group groups[6] = {};
    Nets n;
    for (int k = 0; k < 6; k++) {
        own[k] = recipe(which[k]);
        own[k].maximize = 0;
        if (k) groups[k].optimizer = &own[k];
    }
    d = own[0];
    d.groups = groups;
    d.group_count = 6;
    d.clip_norm = 2;
    for (int k = 5; k >= 0; k--) n.add((size_t)(900 + 300 * k), true, k % 2 ? AMP_BF16 : 0, AMP_F32, 2, k);
    n.make(&d);
    for (int step = 0; step < 6; step++) {
        n.renew(1);
        if (step == 2) n.spoil(3, 3, 0);
        if (step == 4) {
            n.grads[1]->set_bits(5, 0x7f61b1e6u);
            n.grads[1]->send();
        }
        n.step(nullptr);
        n.agree(10000);
        CHECK(n.last.applied == (step != 2));
    }
}

static void test_groups() {
    const amp_param_group groups[5] = { { 0, 0, 0, nullptr }, { 0.2f, AMP_ZERO, 0, nullptr }, { 0, 0, 1, nullptr },
                                        { 0, 0.3f, 0, nullptr }, { 1e-3f, 0.1f, 0, nullptr } };
    for (int k = 0; k < RECIPES; k++) {
        amp_optimizer_desc d = recipe(k);
        d.groups = groups;
        d.group_count = 5;
        d.schedule.kind = AMP_SCHEDULE_COSINE;
        d.schedule.total_steps = 9;
        d.clip_norm = 1;
        int moments = amp_optimizer_moments(&d);
        Nets n;
        for (int g = 0; g < 5; g++) n.add((size_t)(50 + g), true, g % 3 ? (int)TYPES[g % 3] : 0, AMP_F16, moments, g);
        n.add(7, true, AMP_F16, 0, 0, 2);       /* frozen, without gradients */
        n.add(9, false, AMP_BF16, AMP_F32, 0, 2);
        n.make(&d);
        for (int step = 0; step < 9; step++) {
            n.renew(1);
            if (step == 5) n.spoil(0, 3, 0);    /* counts for no group */
            n.step(nullptr);
            n.agree(300);
            if (step != 6) continue;
            CHECK(n.cpu.state.frozen_steps[2] == 6 && n.cpu.state.frozen_steps[1] == 0);
            n.cpu.state.frozen_steps[1] = 6;    /* as if these two had been frozen before: a first step, and a third */
            n.cpu.state.frozen_steps[3] = 4;
            CHECK(amp_cuda_optimizer_write(n.gpu, &n.cpu.state, &n.exec) == AMP_OK);
        }
    }
}

/* --- numbers that are none ---------------------------------------------------------------------------------- */

/* Nobody looks: inf and NaN go where the formulas take them. */
static void test_unchecked() {
    for (int k = 0; k < RECIPES; k++) {
        amp_optimizer_desc d = recipe(k);
        d.unchecked = 1;
        Nets n;
        n.add(100, true, AMP_F16, AMP_F32, amp_optimizer_moments(&d));
        n.add(100, false, AMP_BF16, AMP_F16, amp_optimizer_moments(&d));
        n.make(&d);
        for (int step = 0; step < 3; step++) {
            n.renew(1);
            n.spoil(0, 3, 0);
            n.spoil(0, 50, 2);
            n.spoil(1, 99, 1);
            for (size_t i = 60; i < 70; i++) n.grads[0]->set_bits(i, (uint32_t)i);          /* subnormals */
            n.grads[0]->send();
            n.step(nullptr);
            n.agree(0, true);
            CHECK(n.last.applied && n.last.grad_norm == 0);
        }
    }
}

/* A skipped step leaves every byte, whoever has seen the overflow. */
static void test_skip() {
    for (int k = 0; k < RECIPES; k++)
        for (int who = 0; who < 4; who++) {
            amp_optimizer_desc d = recipe(k);
            int moments = amp_optimizer_moments(&d);
            Scalers s(nullptr);
            Nets n;
            n.add(5000, true, AMP_F16, AMP_F16, moments);
            n.add(3, true, AMP_BF16, AMP_F32, moments);
            n.make(&d);
            n.renew(1);
            std::vector<std::vector<unsigned char>> before;
            if (who != 3) n.spoil(who ? 0 : 1, 2, (unsigned)who);
            for (Pair& t : n.all) before.push_back(t.host);
            if (who == 0) {
                n.step(nullptr);
            } else {
                s.scale_loss();
                if (who == 1) n.check(&s);
                if (who == 3) s.report();
                n.step(&s);
                s.agree(5003);
            }
            n.agree(5003);
            CHECK(!n.last.applied && n.cpu.state.step == 0);
            for (size_t i = 0; i < before.size(); i++) CHECK(n.all[i].host == before[i]);
        }
}

/* An overflow that is ignored: the CPU's bits, with one NaN as good as another. */
static void test_ignored_overflow() {
    amp_scaler_desc sd = {};
    amp_optimizer_desc d = recipe(8);
    sd.preset = AMP_SCALER_MINDSPORE_FIXED;
    sd.ignore_overflow = 1;
    d.clip_norm = 2;
    Scalers s(&sd);
    Nets n;
    n.add(300, true, AMP_F16, AMP_F16, 2);
    n.make(&d);
    for (int step = 0; step < 3; step++) {
        n.renew(128);
        if (step == 1) n.spoil(0, 17, 0);
        s.scale_loss();
        n.step(&s);
        CHECK(n.last.applied);
        n.agree(300, true);
        s.update();
    }
    s.agree(300);
}

/* --- windows -------------------------------------------------------------------------------------------------- */

/* Gradients that were unscaled before: by the optimizer's list, or by lists of one's own from other buffers. */
static void test_unscaled_before() {
    amp_optimizer_desc d = recipe(5);
    amp_scaler_desc sd = {};
    sd.init_scale = 64;
    d.clip_norm = 1;
    Scalers s(&sd);
    Nets n;
    n.add(1000, true, 0, AMP_F32, 2);
    n.add(70, true, AMP_F16, AMP_F32, 2);
    n.make(&d);
    Pairs half[2];
    for (size_t i = 0; i < 2; i++) {
        half[i].add(AMP_F16, n.grads[i]->n, 0);
        half[i].make(&s.exec);
    }
    for (int how = 0; how < 4; how++) {
        n.renew(how < 2 ? 64 : 1);
        s.scale_loss();
        if (how < 2) n.unscale(&s);
        if (how == 0) n.unscale(&s);        /* twice */
        if (how == 1) n.check(&s);
        if (how >= 2)
            for (size_t i = 0; i < 2; i++) {
                amp_tensor a = { n.grads[i]->here(), AMP_F32, n.grads[i]->n, nullptr }, b = a;
                amp_cuda_tensors* list;
                b.data = n.grads[i]->there();
                for (Pair& t : half[i].all) t.fill_exact(64);
                CHECK(amp_cuda_tensors_create(&list, &b, 1, &s.exec) == AMP_OK);
                SAME(amp_scaler_unscale_into(&s.cpu, &a, half[i].here.data(), 1, how == 3, nullptr),
                     amp_cuda_scaler_unscale_into(s.gpu, list, half[i].list, how == 3, &s.exec));
                if (how == 2 && i == 0) n.step(&s);         /* a part of them only */
                amp_cuda_tensors_destroy(list);
            }
        n.step(&s);
        n.agree(1070);
        CHECK(n.last.applied && n.last.clip_coefficient < 1);
        n.step(&s);                         /* twice */
        n.unscale(&s);
        s.update();
        n.agree(1070);
        s.agree(1070);
    }
    CHECK(n.cpu.state.step == 4);
}

/* Micro-batches: a check before the last loss is not the last word. */
static void test_new_gradients() {
    amp_optimizer_desc d = recipe(0);
    Scalers s(nullptr);
    Nets n;
    n.add(20, true, 0, AMP_F32, 0);
    n.make(&d);
    n.renew(1);
    s.scale_loss();
    n.check(&s);
    s.scale_loss();
    n.spoil(0, 19, 0);
    n.step(&s);
    CHECK(!n.last.applied);
    n.agree(20);
    s.update();
    s.agree(20);
}

/* Two optimizers on one scaler: what one has seen stops the one that follows. */
static void test_two_optimizers() {
    amp_optimizer_desc d = recipe(8);
    Scalers s(nullptr);
    Nets a, b;
    a.add(40, true, AMP_F16, AMP_F16, 2);
    b.add(50, true, AMP_F16, AMP_F16, 2);
    a.make(&d);
    b.make(&d);
    for (int step = 0; step < 4; step++) {
        a.renew(1);
        b.renew(1);
        if (step == 1) a.spoil(0, 0, 1);
        if (step == 2) b.spoil(0, 0, 1);
        s.scale_loss();
        if (step == 2) b.check(&s);
        a.step(&s);
        b.step(&s);
        a.agree(90);
        b.agree(90);
        s.update();
    }
    CHECK(a.cpu.state.step == 2 && b.cpu.state.step == 2);
    s.agree(90);
}

/* --- state ------------------------------------------------------------------------------------------------- */

static void test_state() {
    amp_optimizer_desc d = recipe(5);
    Nets n, other;
    d.schedule.warmup_steps = 5;
    for (Nets* x : { &n, &other }) {
        x->add(20, true, 0, AMP_F32, 2);
        x->make(&d);
    }
    for (int step = 0; step < 3; step++) {
        n.renew(1);
        n.step(nullptr);
    }
    SAME(amp_optimizer_set_lr(&n.cpu, 0.25f), amp_cuda_optimizer_set_lr(n.gpu, 0.25f, &n.exec));
    n.step(nullptr);
    n.agree(20);
    amp_optimizer o;
    CHECK(amp_cuda_optimizer_read(n.gpu, &o, nullptr, &n.exec) == AMP_OK && o.state.step == 4 && o.state.lr == 0.25f);
    CHECK(amp_cuda_optimizer_read(n.gpu, nullptr, nullptr, &n.exec) == AMP_OK);
    CHECK(amp_cuda_optimizer_write(other.gpu, &o.state, &other.exec) == AMP_OK);
    other.cpu.state = o.state;
    other.renew(1);
    other.step(nullptr);
    other.agree(20);
    SAME(amp_optimizer_set_lr(&n.cpu, 0.0f), amp_cuda_optimizer_set_lr(n.gpu, 0.0f, &n.exec));
    n.step(nullptr);
    n.agree(20);
    for (float lr : { -1.0f, INFINITY, NAN })
        REFUSED(amp_cuda_optimizer_set_lr(n.gpu, lr, &n.exec), AMP_ERR_ARGUMENT, "amp_cuda_optimizer_set_lr:");
    o.state.step = -1;
    REFUSED(amp_cuda_optimizer_write(n.gpu, &o.state, &n.exec), AMP_ERR_ARGUMENT, "amp_cuda_optimizer_write: state.step -1");
    o.state.step = INT64_MAX;
    REFUSED(amp_cuda_optimizer_write(n.gpu, &o.state, &n.exec), AMP_ERR_ARGUMENT, "write: state.step 9223372036854775807 must");
    o.state.step = 4;
    o.state.frozen_steps[3] = 5;
    REFUSED(amp_cuda_optimizer_write(n.gpu, &o.state, &n.exec), AMP_ERR_ARGUMENT, "write: state.frozen_steps[3] 5");
    n.agree(20);
    REFUSED(amp_cuda_optimizer_write(nullptr, &o.state, &n.exec), AMP_ERR_ARGUMENT, "write: the optimizer is NULL");
    REFUSED(amp_cuda_optimizer_write(n.gpu, nullptr, &n.exec), AMP_ERR_ARGUMENT, "write: state is NULL");
    REFUSED(amp_cuda_optimizer_set_lr(nullptr, 1, &n.exec), AMP_ERR_ARGUMENT, "set_lr: the optimizer is NULL");
    REFUSED(amp_cuda_optimizer_read(nullptr, &o, nullptr, &n.exec), AMP_ERR_ARGUMENT, "read: the optimizer is NULL");
    REFUSED(amp_cuda_optimizer_step(nullptr, nullptr, &n.exec), AMP_ERR_ARGUMENT, "step: the optimizer is NULL");
    REFUSED(amp_cuda_optimizer_zero_grad(nullptr, &n.exec), AMP_ERR_ARGUMENT, "zero_grad: the optimizer is NULL");
    CHECK(amp_cuda_optimizer_grads(nullptr) == nullptr);
    amp_cuda_optimizer_destroy(nullptr);
}

static void test_zero_grad() {
    amp_optimizer_desc d = {};
    const amp_param_group groups[2] = { { 0, 0, 0, nullptr }, { 0, 0, 1, nullptr } };
    d.groups = groups;
    d.group_count = 2;
    Nets n;
    add_all_kinds(n, 0);
    n.add(10, true, 0, 0, 0, 1);
    n.make(&d);
    n.renew(1);
    for (size_t k = 2; k < 15; k++) n.spoil(k, 0, (unsigned)k);
    SAME(amp_optimizer_zero_grad(&n.cpu), amp_cuda_optimizer_zero_grad(n.gpu, &n.exec));
    CHECK(n.memory_agrees());
}

/* --- misuse ---------------------------------------------------------------------------------------------------- */

static void test_refused() {
    static float host[8];
    static const char* const names[] = { "master", "low", "grad", "m", "v" };
    Nets n;
    Scalers s(nullptr);
    amp_optimizer_desc d = recipe(8);
    amp_optimizer cpu;
    amp_cuda_optimizer* gpu;
    n.add(8, true, AMP_F16, AMP_F16, 2);
    n.make(&d);
    for (int k = 0; k < 5; k++) {
        amp_param p = n.there[0];
        if (k == 0) p.master = host;
        if (k == 1) p.low = host;
        if (k == 2) p.grad = host;
        if (k == 3) p.m = host;
        if (k == 4) p.v = host;
        gpu = n.gpu;
        REFUSED(amp_cuda_optimizer_create(&gpu, &d, &p, 1, &n.exec), AMP_ERR_ARGUMENT,
                std::string(names[k]) + " is host memory");
        CHECK(gpu == nullptr);
    }
    for (int k = 0; k < 10; k++) {
        amp_optimizer_desc c = d, e;
        amp_param a = n.here[0], b = n.there[0];
        if (k == 0) c.lr = NAN;
        if (k == 1) c.beta1 = 1;
        if (k == 2) c.kind = (amp_optimizer_kind)7;
        if (k == 3) c.group_count = 3;
        if (k == 4) a.m = b.m = nullptr;
        if (k == 5) a.grad = b.grad = nullptr;
        if (k == 6) a.low_dtype = b.low_dtype = AMP_F32;
        if (k == 7) a.grad_dtype = b.grad_dtype = AMP_F64;
        if (k == 8) a.group = b.group = 2;
        e = c;
        c.logger = &CPU_EAR;
        SAME(amp_optimizer_init(&cpu, &c, &a, k == 9 ? 0 : 1),
             amp_cuda_optimizer_create(&gpu, &e, &b, k == 9 ? 0 : 1, &n.exec));
        CHECK(gpu == nullptr);
    }
    REFUSED(amp_cuda_optimizer_create(nullptr, &d, n.there.data(), 1, &n.exec), AMP_ERR_ARGUMENT, "out is NULL");
    n.step(&s);                                     /* before any loss */
    CHECK(n.memory_agrees());
    amp_cuda_scaler* quiet = nullptr;               /* a scaler without a logger tells the optimizer's */
    amp_exec silent = n.exec;
    silent.logger = nullptr;
    CHECK(amp_cuda_scaler_create(&quiet, nullptr, &silent) == AMP_OK);
    REFUSED(amp_cuda_optimizer_step(n.gpu, quiet, &n.exec), AMP_ERR_STATE, "amp_cuda_optimizer_step: no loss was scaled");
    amp_cuda_scaler_destroy(quiet);
    amp_param_group frozen = { 0, 0, 1, nullptr };
    Nets none;
    d.groups = &frozen;
    d.group_count = 1;
    none.add(8, true, 0, 0, 0);
    none.make(&d);
    none.step(nullptr);                             /* no parameter has a gradient */
    CHECK(amp_cuda_optimizer_zero_grad(none.gpu, &none.exec) == AMP_OK);
}

/* --- cost, capture, failures ----------------------------------------------------- */

static void test_cost() {
#if defined(AMP_CUDA_EMU)
    for (int k : { 0, 3, 8, 10 }) {
        amp_optimizer_desc d = recipe(k);
        long update = d.kind == AMP_LAMB ? 4 : 2;
        Scalers s(nullptr);
        Nets n, blind;
        for (int i = 0; i < 300; i++)
            n.add((size_t)(i % 20), true, AMP_F16, (int)TYPES[i % 3], amp_optimizer_moments(&d));
        n.make(&d);
        n.renew(1);
        d.unchecked = 1;
        blind.add(9, true, 0, AMP_F32, amp_optimizer_moments(&d));
        blind.make(&d);
        amp_cuda_scaler_loss_scale(s.gpu);
        long launched, waited = emu_sync_count(), allocated = emu_alloc_count();
        auto costs = [&](amp_result r, long launches_wanted) {
            CHECK_MSG(r == AMP_OK && emu_launch_count() - launched == launches_wanted, "recipe %d: %d, %ld launches",
                      k, (int)r, emu_launch_count() - launched);
            launched = emu_launch_count();
        };
        launched = emu_launch_count();
        costs(amp_cuda_optimizer_step(n.gpu, s.gpu, &n.exec), update + 1);
        costs(amp_cuda_scaler_update(s.gpu, &n.exec), 1);
        costs(amp_cuda_scaler_check(s.gpu, amp_cuda_optimizer_grads(n.gpu), &n.exec), 1);
        costs(amp_cuda_optimizer_step(n.gpu, s.gpu, &n.exec), update);
        costs(amp_cuda_scaler_update(s.gpu, &n.exec), 1);
        costs(amp_cuda_optimizer_step(n.gpu, nullptr, &n.exec), update + 1);
        costs(amp_cuda_optimizer_step(blind.gpu, nullptr, &n.exec), update);
        costs(amp_cuda_optimizer_zero_grad(n.gpu, &n.exec), 1);
        costs(amp_cuda_optimizer_set_lr(n.gpu, 0.1f, &n.exec), 1);
        CHECK(emu_sync_count() == waited && emu_alloc_count() == allocated);
    }
#else
    TEST_SKIP("a GPU does not count launches");
#endif
}

/* More tensors than a grid has blocks: 512 for the check, 4096 for LAMB's ratios (most of those are empty: quicker). */
static void test_many_small() {
    for (int k : { 8, 10 }) {
        amp_optimizer_desc d = recipe(k);
        Scalers s(nullptr);
        Nets n;
        int many = k == 8 ? 1100 : 4201;
        for (int i = 0; i < many; i++)
            n.add(k == 8 || i % 100 == 0 ? (size_t)(1 + i % 9) : 0, true, i % 2 ? AMP_F16 : 0, (int)TYPES[i % 3], amp_optimizer_moments(&d));
        n.make(&d);
        for (int step = 0; step < (k == 8 ? 2 : 1); step++) {
            n.renew(65536.0f / 512);
            if (step == 1) n.spoil((size_t)many - 1, 0, 1);
            s.scale_loss();
            n.step(&s);
            CHECK(n.last.overflow.first_tensor == (step ? many - 1 : -1));
            n.agree(22000);
            s.update();
        }
    }
}

/* The captured window does on each replay what the CPU does: growth, skips, schedule and all. */
static void test_graph() {
    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    for (int k : { 3, 8, 10 }) {
        cudaGraph_t graph;
        cudaGraphExec_t ready;
        amp_optimizer_desc d = recipe(k);
        amp_scaler_desc sd = {};
        sd.init_scale = 16;
        sd.growth_interval = 2;
        d.clip_norm = 0.5f;
        d.schedule.kind = AMP_SCHEDULE_LINEAR;
        d.schedule.total_steps = 8;
        Scalers s(&sd, stream);
        Nets n(stream);
        n.add(4100, true, AMP_F16, AMP_F16, amp_optimizer_moments(&d));
        n.add(77, true, AMP_BF16, AMP_F32, amp_optimizer_moments(&d));
        n.make(&d);
        amp_cuda_scaler_loss_scale(s.gpu);
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        CHECK(amp_cuda_scaler_check(s.gpu, amp_cuda_optimizer_grads(n.gpu), &n.exec) == AMP_OK);
        CHECK(amp_cuda_optimizer_step(n.gpu, s.gpu, &n.exec) == AMP_OK);
        CHECK(amp_cuda_scaler_update(s.gpu, &s.exec) == AMP_OK);
        CHECK(amp_cuda_optimizer_zero_grad(n.gpu, &n.exec) == AMP_OK);
        OK(cudaStreamEndCapture(stream, &graph));
        OK(cudaGraphInstantiate(&ready, graph, 0));
        for (int step = 0; step < 8; step++) {
            n.renew(s.cpu.state.scale);
            if (step % 3 == 1) n.spoil(step % 2, 50, (unsigned)step);
            amp_scaler_scale_loss(&s.cpu, 1.0f);
            CHECK(amp_optimizer_step(&n.cpu, &s.cpu, &n.last) == AMP_OK && amp_scaler_update(&s.cpu) == AMP_OK);
            amp_optimizer_zero_grad(&n.cpu);
            OK(cudaGraphLaunch(ready, stream));
            n.agree(4177);
            s.agree(4177);
        }
        CHECK(n.cpu.state.step == 5);
        OK(cudaGraphExecDestroy(ready));
        OK(cudaGraphDestroy(graph));
    }
    OK(cudaStreamDestroy(stream));
}

static void test_failures() {
#if defined(AMP_CUDA_EMU)
    amp_optimizer_desc d = recipe(10);
    Scalers s(nullptr);
    Nets n;
    n.add(500, true, AMP_F16, AMP_F16, 2);
    n.make(&d);
    each_failure([&] {
        amp_cuda_optimizer* gpu;
        amp_result r = amp_cuda_optimizer_create(&gpu, &d, n.there.data(), 1, &n.exec);
        emu_fail_any_call_at(0);
        CHECK((r == AMP_OK) == (gpu != nullptr));
        amp_cuda_optimizer_destroy(gpu);
        return r;
    }, 2);
    CHECK(n.memory_agrees());
    for (long k = 1; k <= 4; k++) {                 /* whichever launch fails, no weight moves */
        n.renew(1);
        s.scale_loss();
        gpu_said.clear();
        emu_fail_launch_at(k == 4 ? 1 : k);
        if (k == 4) CHECK(amp_cuda_optimizer_zero_grad(n.gpu, &n.exec) == AMP_ERR_DEVICE);
        else CHECK(amp_cuda_optimizer_step(n.gpu, s.gpu, &n.exec) == AMP_ERR_DEVICE);
        CHECK(!gpu_said.empty() && n.memory_agrees());
    }
    emu_set_device_count(0);
    amp_cuda_optimizer* gpu;
    CHECK(amp_cuda_optimizer_create(&gpu, &d, n.there.data(), 1, &n.exec) == AMP_ERR_UNSUPPORTED && !gpu);
    emu_set_device_count(1);
#else
    TEST_SKIP("no launch of a GPU can be made to fail");
#endif
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { TEST_SKIP("no GPU"); TEST_END(); }
    TEST(test_every_recipe);
    TEST(test_update_overflows);
    TEST(test_many_steps);
    TEST(test_fewer_bits);
    TEST(test_idle_moments);
    TEST(test_groups_with_optimizers);
    TEST(test_groups);
    TEST(test_unchecked);
    TEST(test_skip);
    TEST(test_ignored_overflow);
    TEST(test_unscaled_before);
    TEST(test_new_gradients);
    TEST(test_two_optimizers);
    TEST(test_state);
    TEST(test_zero_grad);
    TEST(test_refused);
    TEST(test_cost);
    TEST(test_many_small);
    TEST(test_graph);
    TEST(test_failures);
#if defined(AMP_CUDA_EMU)
    CHECK(emu_live_bytes() == 0 && emu_live_objects() == 0);
#endif
    TEST_END();
}
