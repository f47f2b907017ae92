/* Lists of tensors and the loss scale on the device, against the CPU's amp_scaler. */
#include "pair.h"

/* Every length about a multiple of what a thread, a warp or a block takes at a time, at every skew, in each type. */
static void add_all_kinds(Pairs& t) {
    static const size_t lengths[] = { 1, 0, 7, 8, 9, 255, 2048, 2049, 4095, 4096, 4097, 9000 };
    for (int type = 0; type < 3; type++)
        for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
            t.add(TYPES[type], lengths[i], (i + (size_t)type) % 5, i % 4 == 3 ? nullptr : "a layer's weights");
}

/* --- one call ------------------------------------------------------------------------------------------ */

static void test_clean_check() {
    amp_scaler_desc d = {};
    d.init_scale = 1024;
    for (int order = 0; order < ORDERS; order++) {
        set_schedule(order);
        Scalers s(&d);
        Pairs t;
        add_all_kinds(t);
        t.make(&s.exec);
        t.fill(3.0f);
        s.scale_loss();
        s.check(t);
        s.agree(t.elements());
        CHECK(s.cpu.info.norm > 0 && t.agree());
        s.update();
        s.agree(t.elements());
    }
}

/* One bad element at a time, at each end of what somebody takes at a time; then another behind it, which the same
   thread sees. */
static void test_each_place() {
    static const size_t places[] = { 0, 1, 7, 8, 2047, 2048, 4095, 4096, 4100, 8191, 8192, 8999 };
    Scalers s(nullptr);
    Pairs t;
    t.add(AMP_F32, 9000, 1, "first");
    t.add(AMP_F16, 9000, 3, "a name that is longer than the forty-seven letters that a report keeps of it");
    t.add(AMP_BF16, 9000, 0, nullptr);
    t.make(&s.exec);
    t.fill(1.0f);
    for (size_t tensor = 0; tensor < 3; tensor++)
        for (size_t i = 0; i < 2 * (sizeof places / sizeof places[0]); i++) {
            std::vector<unsigned char> before = t.all[tensor].host;
            const size_t place = places[i / 2], next = place + (place % 8 < 7 ? 1 : 2048);
            t.spoil(tensor, place, bad_bits(t.all[tensor].type, (unsigned)i / 2));
            if (i % 2 && next < 9000) t.spoil(tensor, next, bad_bits(t.all[tensor].type, (unsigned)i));
            s.scale_loss();
            s.check(t);
            CHECK(s.cpu.info.first_tensor == (int)tensor && s.cpu.info.first_index == place);
            s.agree(0);
            s.update();
            t.all[tensor].host = before;
            t.all[tensor].send();
        }
}

/* Many of them, everywhere: counted, and the first of the list is named in every order of blocks. */
static void test_many_bad() {
    for (int order = 0; order < ORDERS; order++) {
        set_schedule(order);
        Scalers s(nullptr);
        Pairs t;
        add_all_kinds(t);
        t.make(&s.exec);
        t.fill(1.0f);
        for (int k = 0; k < 300; k++) {
            size_t tensor = test_random() % t.all.size();
            if (t.all[tensor].n)
                t.all[tensor].set_bits(test_random() % t.all[tensor].n, bad_bits(t.all[tensor].type, test_random()));
        }
        for (Pair& x : t.all) x.send();
        s.scale_loss();
        s.check(t);
        CHECK(s.cpu.info.inf_count > 100 && s.cpu.info.nan_count > 100);
        s.agree(0);
        s.unscale(t);
        CHECK(t.agree());
        s.agree(0);
    }
}

/* The largest magnitude of type `from` that is finite when multiplied by `factor` and stored as `to`. */
static uint32_t last_finite(amp_dtype from, amp_dtype to, float factor) {
    uint32_t good = 0, bad = bad_bits(from, 0);
    while (bad - good > 1) {
        uint32_t mid = good + (bad - good) / 2;
        Pair x(from, 1);
        float v;
        unsigned char stored[4];
        x.set_bits(0, mid);
        amp_convert(amp_f32(&v), amp_ref_of(x.here(), from), 1);
        v *= factor;
        amp_convert(amp_ref_of(stored, to), amp_f32(&v), 1);
        amp_convert(amp_f32(&v), amp_ref_of(stored, to), 1);
        (std::isinf(v) ? bad : good) = mid;
    }
    return good;
}

/* Scales below 1, from the start or set later: what is finite may not be so unscaled, to the last bit of the limit. */
static void test_limit_of_range() {
    static const float scales[] = { 0.5f, 0.25f, 0.7f, 1e-4f, 1e-30f, 3e-39f, 1.0f };
    for (size_t k = 0; k < 2 * (sizeof scales / sizeof scales[0]); k++)
        for (int to = 0; to < 3; to++) {
            amp_scaler_desc d = {};
            d.preset = AMP_SCALER_STATIC;
            d.init_scale = k % 2 ? 64.0f : scales[k / 2];
            Scalers s(&d);
            if (k % 2) {
                CHECK(amp_scaler_set_scale(&s.cpu, scales[k / 2]) == AMP_OK);
                CHECK(amp_cuda_scaler_write(s.gpu, &s.cpu, &s.exec) == AMP_OK);
            }
            Pairs src, dst;
            for (int from = 0; from < 3; from++) {
                uint32_t last = last_finite(TYPES[from], TYPES[to], s.cpu.state.inverse);
                src.add(TYPES[from], 20, 0);
                dst.add(TYPES[to], 20, 0);
                src.all[(size_t)from].set_bits(5, last);
                if (one_in(2)) src.all[(size_t)from].set_bits(6 + (size_t)from, last + 1);
                src.all[(size_t)from].send();
            }
            src.make(&s.exec);
            dst.make(&s.exec);
            dst.fill(1.0f);
            s.scale_loss();
            s.into(dst, src, 0);
            s.agree(60);
            s.check(src);
            s.agree(60);
            s.unscale(src);
            s.agree(60);
            CHECK(src.agree() && dst.agree());
        }
}

/* A norm is right to the last digits where a sum in FP32 would be infinite or zero. */
static void test_norm() {
    static const float sizes[] = { 3e38f, 1e-30f, 1e-42f, 65504.0f };
    for (size_t k = 0; k < 4; k++) {
        amp_scaler_desc d = {};
        d.init_scale = 1;
        Scalers s(&d);
        Pairs t;
        double sum = 0;
        t.add(AMP_F32, 5000, 0);
        t.make(&s.exec);
        for (size_t i = 0; i < 5000; i++) {
            float v = sizes[k] * (i % 3 ? 1.0f : -0.5f);
            t.all[0].set(i, v);
            sum += (double)v * (double)v;
        }
        t.all[0].send();
        s.scale_loss();
        s.check(t);
        amp_scaler seen;
        CHECK(amp_cuda_scaler_read(s.gpu, &seen, &s.exec) == AMP_OK);
        CHECK_MSG(!seen.info.found_inf && close_norm(std::sqrt(sum), seen.info.norm, 5000), "%.17g %.17g",
                  std::sqrt(sum), seen.info.norm);
    }
}

/* Where the elements lie and in which order threads run does not change a bit of the norm. */
static void test_same_norm() {
    std::vector<double> norms;
    for (int order = 0; order < ORDERS; order++)
        for (size_t skew = 0; skew < 4; skew++) {
            set_schedule(order);
            Scalers s(nullptr);
            Pairs t;
            for (int type = 0; type < 3; type++) t.add(TYPES[type], 5001, skew);
            t.make(&s.exec);
            test_seed = 77;
            t.fill(1.0f);
            s.scale_loss();
            s.check(t);
            amp_scaler seen;
            CHECK(amp_cuda_scaler_read(s.gpu, &seen, &s.exec) == AMP_OK);
            norms.push_back(seen.info.norm);
        }
    for (double n : norms) CHECK(n == norms[0]);
}

/* Unscaled in place and into another list, from and to each type: the CPU's bits. */
static void test_unscale_bits() {
    static const float scales[] = { 1024.0f, 65536.0f, 1.0f, 3.0f, 0.375f, 1e30f };
    for (size_t k = 0; k < sizeof scales / sizeof scales[0]; k++) {
        amp_scaler_desc d = {};
        d.init_scale = scales[k];
        Scalers s(&d);
        Pairs src, dst, sums;
        for (int from = 0; from < 3; from++)
            for (int to = 0; to < 3; to++) {
                src.add(TYPES[from], 4099, (size_t)from);
                dst.add(TYPES[to], 4099, (size_t)to * 3);
                sums.add(TYPES[to], 4099, 1);
            }
        src.make(&s.exec);
        dst.make(&s.exec);
        sums.make(&s.exec);
        src.fill(scales[k] < 60000.0f ? scales[k] : 60000.0f);
        for (size_t i = 0; i < 9; i++)
            for (size_t j = 0; j < 30; j++)
                src.all[i].set_bits(j, j % 2 ? (uint32_t)j : (j + 0x80000000u) >> (src.all[i].size == 2 ? 16 : 0));
        for (Pair& x : src.all) x.send();
        sums.fill(1.0f);
        s.scale_loss();
        s.into(dst, src, 0);
        s.into(sums, src, 1);
        s.into(sums, src, 1);
        s.agree(src.elements());
        s.unscale(src);
        s.agree(src.elements());
        CHECK(dst.agree() && sums.agree() && src.agree());
    }
}

static float value_of(amp_dtype t, uint32_t bits) {
    const uint16_t half = (uint16_t)bits;
    float v;
    amp_convert(amp_f32(&v), amp_ref_of(t == AMP_F32 ? (const void*)&bits : &half, t), 1);
    return v;
}

/* The least normal magnitude that stays normal when divided by the scale. */
static uint32_t least_normal(amp_dtype t, float scale) {
    const double limit = std::ldexp(1, t == AMP_F16 ? -14 : -126);
    uint32_t bad = (t == AMP_F32 ? 0x800000u : t == AMP_F16 ? 0x400u : 0x80u) - 1, good = bad_bits(t, 0);
    while (good - bad > 1) {
        uint32_t mid = good - (good - bad) / 2;
        ((double)value_of(t, mid) / (double)scale >= limit ? good : bad) = mid;
    }
    return good;
}
static uint32_t sign_of(amp_dtype t) { return t == AMP_F32 ? 0x80000000u : 0x8000u; }

/* Elements that can be unscaled and scaled again, of both signs, and zeros; here and there one at or beyond the ends of
   that range, or one that is not finite: one of so many. */
static void fill_range(Pair& x, const amp_scaler_state& state, unsigned odd, unsigned bad) {
    const uint32_t low = least_normal(x.type, state.scale), high = last_finite(x.type, x.type, state.inverse);
    const uint32_t ends[] = { low, low - 1, high, 1, low > high ? 1 : low + (high - low) / 2 };
    for (size_t i = 0; i < x.n; i++) {
        uint32_t bits = low > high || one_in(8) ? 0 : low + test_random() % (high - low + 1);
        if (one_in(odd)) bits = ends[test_random() % 5];
        if (one_in(bad)) bits = one_in(4) ? high + 1 : bad_bits(x.type, test_random());
        x.set_bits(i, bits ^ (one_in(2) ? sign_of(x.type) : 0));
    }
    x.send();
}

static const float RANGE_SCALES[] = { 1024.0f, 65536.0f, 0.25f, 16.0f, 3.0f,  0.7f,  1.0f,   2.0f,  0.5f,
                                      3e38f,   1.7e38f,  1e-6f, 1e30f, 1e-38f, 6e-39f, 65537.0f };
static const size_t RANGE_LENGTHS[] = { 4096, 255, 256, 257, 2047, 2048, 2049, 2303, 2304, 4095, 8192, 4097, 8191, 1 };
enum { RANGE_SCALE_COUNT = sizeof RANGE_SCALES / sizeof RANGE_SCALES[0],
       RANGE_LENGTH_COUNT = sizeof RANGE_LENGTHS / sizeof RANGE_LENGTHS[0] };

/* Every second scale a power of two, also the greatest and the least that a float holds. */
static amp_scaler_desc range_desc(size_t k) {
    amp_scaler_desc d = {};
    d.preset = AMP_SCALER_STATIC;
    d.init_scale = RANGE_SCALES[k % RANGE_SCALE_COUNT];
    if (k % 4 != 3) d.init_scale = (float)std::ldexp(1, std::ilogb(d.init_scale));
    return d;
}

/* Unscaled in place, window after window: what is not finite may be found before or after other parts were unscaled
   already, in the same tensor or another. */
static void test_unscale_range() {
    for (size_t k = 0; k < 3 * RANGE_SCALE_COUNT; k++) {
        set_schedule((int)k % ORDERS);
        amp_scaler_desc d = range_desc(k + k / RANGE_SCALE_COUNT);
        d.ignore_overflow = k % 5 == 4;
        Scalers s(&d);
        Pairs t;
        for (size_t i = 0; i < 5; i++)
            t.add(TYPES[(i + k) % 3], RANGE_LENGTHS[(3 * k + i) % RANGE_LENGTH_COUNT], (i + k) % 5);
        t.make(&s.exec);
        for (unsigned window = 0; window < 4; window++) {
            for (Pair& x : t.all) fill_range(x, s.cpu.state, k % 2 ? 2000 : 1u << 30, window % 2 ? 30000 : 1u << 30);
            if (window == 3) t.spoil(k % 5, t.all[k % 5].n - 1, bad_bits(t.all[k % 5].type, (unsigned)k));
            s.scale_loss();
            s.unscale(t);
            CHECK(t.agree());
            s.agree(t.elements());
            s.update();
        }
    }
}

/* More chunks than blocks: each block takes several, and what it finds has the right place. */
static void test_unscale_many_chunks() {
    Scalers s(nullptr);
    Pairs t;
    for (size_t i = 0; i < 1300; i++) t.add(TYPES[i % 3], 1 + i % 40, 0, i % 2 ? "odd" : nullptr);
    t.make(&s.exec);
    for (int window = 0; window < 6; window++) {
        set_schedule(window % ORDERS);
        for (Pair& x : t.all) fill_range(x, s.cpu.state, 500, 1u << 30);
        for (int bad = 0; bad < 3 * (window % 3); bad++) {
            const size_t i = 500 + test_random() % 800;
            t.spoil(i, test_random() % t.all[i].n, bad_bits(t.all[i].type, test_random()));
        }
        s.scale_loss();
        s.check(t);
        s.agree(t.elements());
        s.unscale(t);
        CHECK(t.agree());
        s.agree(t.elements());
        s.update();
    }
}

/* The first launch of two unscales the parts that can be taken back, and no others: a warp's 256 elements, and the 256
   that lie 2048 behind them. */
static void test_unscale_at_once() {
#if defined(AMP_CUDA_EMU)
    size_t count[2] = { 0, 0 };
    for (size_t k = 0; k < 3 * RANGE_SCALE_COUNT; k++) {
        const amp_scaler_desc d = range_desc(k + k / RANGE_SCALE_COUNT);
        int exponent;
        const bool power = std::frexp(d.init_scale, &exponent) == 0.5f && exponent > -126 && exponent < 128;
        Scalers s(&d);
        Pairs t;
        t.add(TYPES[k % 3], RANGE_LENGTHS[k % RANGE_LENGTH_COUNT] + 4096, k % 4);
        t.make(&s.exec);
        Pair& x = t.all[0];
        const uint32_t low = least_normal(x.type, d.init_scale);
        const uint32_t high = last_finite(x.type, x.type, s.cpu.state.inverse);
        std::vector<unsigned char> moves(x.n / 512 + 16, power && d.init_scale != 1.0f);
        auto part = [](size_t i) { return i / 4096 * 8 + i % 2048 / 256; };
        fill_range(x, s.cpu.state, 1500, 5000);
        for (size_t i = 0; i < x.n; i++) {
            uint32_t bits = 0;
            memcpy(&bits, &x.host[i * x.size], x.size);
            bits &= sign_of(x.type) - 1;
            if (bits != 0 && (bits < low || bits > high)) moves[part(i)] = 0;
        }
        s.scale_loss();
        emu_fail_launch_at(2);
        CHECK(amp_cuda_scaler_unscale(s.gpu, t.list, &s.exec) == AMP_ERR_DEVICE);
        emu_fail_launch_at(0);
        for (size_t i = 0; i < x.n; i++) {
            float v = get(&x.host[i * x.size], x.type);
            if (moves[part(i)]) x.set(i, v * s.cpu.state.inverse);
            count[moves[part(i)]]++;
        }
        CHECK_MSG(t.agree(), "scale %g, type %d", (double)d.init_scale, (int)x.type);
    }
    CHECK_MSG(count[0] > 100000 && count[1] > 100000, "%ld stay, %ld move", (long)count[0], (long)count[1]);
#else
    TEST_SKIP("no launch of a GPU can be made to fail");
#endif
}

/* Sums are checked as they will be stored. */
static void test_sums_overflow() {
    for (int to = 0; to < 3; to++) {
        amp_scaler_desc d = {};
        d.init_scale = 2;
        Scalers s(&d);
        Pairs src, dst;
        src.add(AMP_F32, 5000, 1, "g");
        dst.add(TYPES[to], 5000, 2, "sum");
        src.make(&s.exec);
        dst.make(&s.exec);
        src.fill(100.0f);
        dst.fill(100.0f);
        dst.all[0].set_bits(4321, bad_bits(TYPES[to], 0) - 1);
        dst.all[0].send();
        src.all[0].set(4321, TYPES[to] == AMP_F16 ? 40.0f : 3e36f);
        src.all[0].send();
        s.scale_loss();
        s.into(dst, src, 1);
        CHECK(s.cpu.info.first_index == 4321 && s.cpu.info.inf_count == 1);
        s.agree(5000);
        src.all[0].set(4321, TYPES[to] == AMP_F16 ? 30.0f : 1e25f);      /* less than half the last digit */
        src.all[0].send();
        s.into(dst, src, 1);
        s.agree(5000);
        CHECK(dst.agree());
    }
}

/* --- windows ---------------------------------------------------------------------------------------------- */

struct World {
    Scalers s;
    std::deque<Pairs> src, dst;

    explicit World(const amp_scaler_desc* d) : s(d) {
        static const size_t lengths[3][4] = { { 0, 1, 9, 40 }, { 4097, 3, 0, 0 }, { 17, 0, 0, 0 } };
        for (size_t i = 0; i < 3; i++) {
            src.emplace_back();
            dst.emplace_back();
            for (size_t k = 0; k < 4 - i; k++) {
                src[i].add(TYPES[test_random() % 3], lengths[i][k], test_random() % 4, "source");
                dst[i].add(TYPES[one_in(3) ? test_random() % 3 : 0], lengths[i][k], test_random() % 4, "target");
            }
            src[i].make(&s.exec);
            dst[i].make(&s.exec);
            dst[i].fill(1.0f);
            renew(i, 100);
        }
    }
    void renew(size_t i, unsigned good) {
        float scale = s.cpu.state.scale_in_use;
        src[i].fill(scale < 1e4f ? scale : 1e4f);
        if (test_random() % 100 < good) return;
        size_t k = test_random() % src[i].all.size();
        if (src[i].all[k].n)
            src[i].spoil(k, test_random() % src[i].all[k].n, bad_bits(src[i].all[k].type, test_random()));
    }
    void call() {
        size_t i = test_random() % 3, j = one_in(8) ? test_random() % 3 : i;
        switch (test_random() % 8) {
            case 0: case 1: s.check(src[i]); break;
            case 2: s.unscale(src[i]); break;
            case 3: case 4:
                if (src[i].count() == dst[j].count()) s.into(dst[j], src[i], one_in(2));
                break;
            case 5: if (one_in(4)) s.report(); break;
            case 6: s.scale_loss(); renew(i, 80); break;
            default: s.check(dst[i]); break;
        }
        if (s.cpu.recorded) s.agree(5000);
    }
};

static void test_random_windows() {
    static const float scales[] = { 1024.0f, 65536.0f, 0.5f, 1.0f, 4.0f, 1e-38f };
    for (unsigned round = 0; round < 24; round++) {
        amp_scaler_desc d = {};
        set_schedule((int)(round % ORDERS));
        d.preset = round % 6 == 5 ? AMP_SCALER_STATIC : round % 2 ? AMP_SCALER_PYTORCH : AMP_SCALER_MEGATRON;
        d.init_scale = scales[round % 6];
        d.min_scale = AMP_ZERO;
        if (d.preset == AMP_SCALER_STATIC) d.ignore_overflow = (int)(round / 6 % 2);
        else d.growth_interval = 2;
        World w(&d);
        for (int window = 0; window < 6; window++) {
            for (size_t i = 0; i < 3; i++) w.renew(i, 90);
            w.s.scale_loss();
            for (unsigned calls = test_random() % 7; calls > 0; calls--) w.call();
            for (size_t i = 0; i < 3; i++)
                CHECK(w.src[i].agree(d.ignore_overflow) && w.dst[i].agree(d.ignore_overflow));
            if (!w.s.cpu.recorded) w.s.check(w.src[0]);
            w.s.update();
            w.s.agree(5000);
        }
    }
}

/* --- the machine ------------------------------------------------------------------------------------------- */

/* What a random desc of this preset may hold. */
static amp_scaler_desc random_desc(amp_scaler_preset preset) {
    amp_scaler_desc d = {};
    int is_static = preset == AMP_SCALER_STATIC || preset == AMP_SCALER_MINDSPORE_FIXED;
    d.preset = preset;
    d.init_scale = one_in(4) ? 1e38f : (float)(1 + test_random() % 64);
    if (!is_static) d.growth_interval = 1 + (int)(test_random() % 4);
    if (!is_static && one_in(2)) d.growth_factor = 1.1 + (double)(test_random() % 1000000) / 300000.0;
    if (!is_static && (preset == AMP_SCALER_MEGATRON || one_in(2))) d.hysteresis = 1 + (int)(test_random() % 3);
    if (one_in(3)) d.min_scale = 0.5f;
    if (one_in(4)) d.max_skips = 1 + (int)(test_random() % 3);
    if (one_in(3)) d.at_min = AMP_LIMIT_ERROR;
    return d;
}

static void test_every_preset() {
    for (int p = 0; p < AMP_SCALER_PRESET_COUNT; p++)
        for (int round = 0; round < 4; round++) {
            amp_scaler_desc d = random_desc((amp_scaler_preset)p);
            Scalers s(&d);
            Pairs t;
            unsigned often = 2 + test_random() % 5;
            t.add(AMP_F32, 3, 0);
            t.make(&s.exec);
            t.fill(1.0f);
            for (int step = 0; step < 30; step++) {
                s.scale_loss();
                if (one_in(often)) s.report();
                if (!s.cpu.recorded || one_in(4)) s.check(t);
                s.update();
                if (one_in(3)) s.agree(3);
            }
            s.agree(3);
        }
}

/* The presets' own defaults arrive on the device. */
static void test_defaults() {
    for (int p = 0; p < AMP_SCALER_PRESET_COUNT; p++) {
        amp_scaler_desc d = {};
        d.preset = (amp_scaler_preset)p;
        amp_scaler probe;
        if (amp_scaler_init(&probe, &d) != AMP_OK) d.init_scale = 512;
        Scalers s(&d);
        s.agree(0);
    }
}

static int asked, answer;
static int on_limit(const amp_scaler* s, void* user_data) {
    asked += s->state.scale > 0 && user_data == &asked;
    return answer;
}

/* What overflows when it is unscaled follows the scale that update has left. */
static void test_moved_scale() {
    for (int order = 0; order < ORDERS; order++) {
        amp_scaler_desc d = {};
        d.init_scale = 1;
        Scalers s(&d);
        Pairs t;
        for (amp_dtype type : TYPES) t.add(type, 8, 0);
        t.make(&s.exec);
        set_schedule(order);
        for (int step = 0; step < 3; step++) { s.report(); s.update(); }
        for (Pair& x : t.all) fill_range(x, s.cpu.state, 500, 1u << 30);
        t.spoil(0, 1, 0x7f000000u);
        t.spoil(1, 1, 0x7800u);
        t.spoil(2, 1, 0x7f00u);
        s.scale_loss();
        s.unscale(t);
        s.agree(t.elements());
        CHECK(t.agree() && s.cpu.info.inf_count >= 3 && s.cpu.state.scale < 1.0f);
    }
    set_schedule(0);
}

/* Limits are remembered until somebody reads, and told once. */
static void test_limits() {
    amp_scaler_desc d = {};
    d.init_scale = d.min_scale = 4;
    d.at_min = AMP_LIMIT_CALLBACK;
    d.max_skips = 3;
    d.on_limit = on_limit;
    d.user_data = &asked;
    d.logger = &GPU_EAR;
    amp_exec exec = exec_on(0);
    amp_cuda_scaler* s = nullptr;
    amp_scaler host;
    CHECK(amp_cuda_scaler_create(&s, &d, &exec) == AMP_OK);
    auto overflow = [&] {
        CHECK(amp_cuda_scaler_report_overflow(s, &exec) == AMP_OK && amp_cuda_scaler_update(s, &exec) == AMP_OK);
    };
    for (int step = 0; step < 3; step++) overflow();
    CHECK(amp_cuda_scaler_read(s, &host, &exec) == AMP_OK && asked == 1);
    CHECK(amp_cuda_scaler_read(s, &host, &exec) == AMP_OK && asked == 1);
    overflow();
    gpu_said.clear();
    CHECK(amp_cuda_scaler_read(s, &host, &exec) == AMP_ERR_OVERFLOW && asked == 2);
    CHECK(gpu_said.find("more overflows in a row than max_skips: loss scale 4, 4 overflows") != std::string::npos);
    CHECK(host.state.consecutive_skips == 4 && host.state.skipped == 4);
    CHECK(amp_cuda_scaler_read(s, &host, &exec) == AMP_OK && asked == 2);
    answer = 1;
    overflow();
    CHECK(amp_cuda_scaler_read(s, &host, &exec) == AMP_ERR_OVERFLOW && asked == 3);
    amp_cuda_scaler_destroy(s);
}

/* A scale without a finite inverse stops every step, and each read says so. */
static void test_useless_scale() {
    amp_scaler_desc d = {};
    d.init_scale = 4e-39f;
    Scalers s(&d);
    Pairs t;
    t.add(AMP_F32, 10, 0);
    t.make(&s.exec);
    t.fill(1e-20f);
    for (int step = 0; step < 3; step++) {
        s.scale_loss();
        s.check(t);
        if (step == 0) s.report();
        s.agree(0);
        s.update();
        gpu_said.clear();
        CHECK(s.limit == AMP_ERR_OVERFLOW);
        s.agree(0);
        CHECK(gpu_said.find("amp_scaler_set_scale brings it back") != std::string::npos);
    }
    s.scale_loss();
    s.check(t);
    s.agree(0);
    CHECK(s.cpu.state.found_inf);
}

/* Losses that are not finite: no step, the scale stays, and more than 20 windows in a row are an error. */
static void test_unsound() {
    const uint32_t kinds[] = { 0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u };
    amp_scaler_desc fixed = {}, dynamic = {};
    fixed.preset = AMP_SCALER_MINDSPORE_FIXED;
    fixed.ignore_overflow = 1;
    dynamic.growth_interval = 2;
    for (const amp_scaler_desc& d : { dynamic, fixed }) {
        Scalers s(&d);
        Pairs t;
        t.add(AMP_F32, 10, 0);
        t.make(&s.exec);
        for (int step = 0; step < 24; step++) {
            t.fill(1.0f);
            s.scale_loss();
            std::vector<float> losses = { 3.0e38f, -1.0f, 0.0f };
            if (step > 1) memcpy(&losses[step % 3], &kinds[step % 4], 4);
            s.check_losses(losses);
            s.check(t);
            s.agree(10);
            CHECK(s.cpu.state.unsound == (step > 1) && s.cpu.info.unsound == (step > 1));
            s.update();
            CHECK(s.limit == (step < 22 ? AMP_OK : AMP_ERR_OVERFLOW));
            s.agree(10);
            CHECK(s.cpu.state.scale == (d.ignore_overflow ? 128.0f : step > 0 ? 131072.0f : 65536.0f));
        }
    }
}

/* --- state out and in --------------------------------------------------------------------------------------- */

static void test_write() {
    amp_scaler_desc d = {};
    d.growth_interval = 3;
    Scalers s(&d), other(&d);
    amp_scaler host, foreign;
    unsigned char bytes[AMP_SCALER_STATE_BYTES], again[AMP_SCALER_STATE_BYTES];
    Pairs t;
    t.add(AMP_F16, 100, 0);
    t.make(&s.exec);
    t.fill(1.0f);
    for (int step = 0; step < 5; step++) {
        s.scale_loss();
        if (step == 3) s.report();
        s.check(t);
        s.update();
    }
    CHECK(amp_cuda_scaler_read(s.gpu, &host, &s.exec) == AMP_OK);
    CHECK(amp_scaler_save(&host, bytes, sizeof bytes) == AMP_OK
          && amp_scaler_save(&s.cpu, again, sizeof again) == AMP_OK);
    CHECK(memcmp(bytes, again, sizeof bytes) == 0);
    CHECK(amp_scaler_load(&other.cpu, bytes, sizeof bytes) == AMP_OK);
    CHECK(amp_cuda_scaler_write(other.gpu, &other.cpu, &other.exec) == AMP_OK);
    other.agree(0);
    other.scale_loss();
    other.check(t);
    other.agree(100);
    REFUSED(amp_cuda_scaler_write(other.gpu, &host, &other.exec), AMP_ERR_STATE,
            "amp_cuda_scaler_write: not between a check and update");
    other.update();
    CHECK(amp_scaler_set_scale(&other.cpu, 48.0f) == AMP_OK);
    CHECK(amp_cuda_scaler_write(other.gpu, &other.cpu, &other.exec) == AMP_OK);
    other.agree(100);
    other.scale_loss();
    other.unscale(t);
    other.agree(100);
    CHECK(t.agree());
    d.growth_interval = 4;
    d.logger = &GPU_EAR;
    CHECK(amp_scaler_init(&foreign, &d) == AMP_OK);
    REFUSED(amp_cuda_scaler_write(s.gpu, &foreign, &s.exec), AMP_ERR_ARGUMENT, "another rule");
    REFUSED(amp_cuda_scaler_write(nullptr, &host, &s.exec), AMP_ERR_ARGUMENT, "write: the scaler is NULL");
    REFUSED(amp_cuda_scaler_write(s.gpu, nullptr, &s.exec), AMP_ERR_ARGUMENT, "write: host is NULL");
}

/* --- misuse --------------------------------------------------------------------------------------------------- */

static void test_refused_lists() {
    amp_exec exec = exec_on(0);
    amp_cuda_tensors* list = nullptr;
    static float host[4];
    Pair x(AMP_F32, 4);
    amp_tensor t = { x.there(), AMP_F32, 4, "w" };
    struct { amp_tensor tensor; amp_result code; const char* words; } bad[] = {
        { { host, AMP_F32, 4, "w" }, AMP_ERR_ARGUMENT, "amp_cuda_tensors_create: w is host memory" },
        { { host, AMP_F32, 4, nullptr }, AMP_ERR_ARGUMENT, "a tensor is host memory" },
        { { nullptr, AMP_F32, 4, "w" }, AMP_ERR_ARGUMENT, "tensor 1 (w): data is NULL, count is 4" },
        { { x.there(), AMP_F64, 4, "w" }, AMP_ERR_DTYPE, "data type 4 is not F32, F16 or BF16" },
        { { x.there(), (amp_dtype)9, 4, "w" }, AMP_ERR_DTYPE, "data type 9" },
        { { x.there(), AMP_F32, SIZE_MAX / 8, "w" }, AMP_ERR_ARGUMENT, "no memory holds" },
    };
    for (auto& b : bad) {
        amp_tensor pair[2] = { t, b.tensor };
        list = (amp_cuda_tensors*)host;
        REFUSED(amp_cuda_tensors_create(&list, pair, 2, &exec), b.code, b.words);
        CHECK(list == nullptr);
    }
    REFUSED(amp_cuda_tensors_create(&list, nullptr, 1, &exec), AMP_ERR_ARGUMENT, "the list is NULL");
    REFUSED(amp_cuda_tensors_create(&list, &t, -1, &exec), AMP_ERR_ARGUMENT, "count -1 is negative");
    REFUSED(amp_cuda_tensors_create(nullptr, &t, 1, &exec), AMP_ERR_ARGUMENT, "out is NULL");
    CHECK(amp_cuda_tensors_create(&list, nullptr, 0, &exec) == AMP_OK);
    amp_cuda_tensors_destroy(list);
    amp_cuda_tensors_destroy(nullptr);
}

static void test_refused_descs() {
    amp_exec exec = exec_on(0);
    amp_cuda_scaler* gpu = nullptr;
    amp_scaler cpu;
    for (int k = 0; k < 8; k++) {
        amp_scaler_desc d = {};
        if (k == 0) d.growth_factor = 1;
        if (k == 1) d.backoff_factor = 1;
        if (k == 2) d.init_scale = -1;
        if (k == 3) d.min_scale = 1e9f;
        if (k == 4) d.preset = AMP_SCALER_STATIC;
        if (k == 5) d.preset = (amp_scaler_preset)99;
        if (k == 6) d.growth_interval = -5;
        if (k == 7) d.at_min = AMP_LIMIT_CALLBACK;
        d.logger = &CPU_EAR;
        amp_scaler_desc e = d;
        if (k % 2) e.logger = nullptr;      /* the exec's then */
        else e.logger = &GPU_EAR;
        SAME(amp_scaler_init(&cpu, &d), amp_cuda_scaler_create(&gpu, &e, &exec));
        CHECK(gpu == nullptr);
    }
    REFUSED(amp_cuda_scaler_create(nullptr, nullptr, &exec), AMP_ERR_ARGUMENT, "out is NULL");
    amp_cuda_scaler_destroy(nullptr);
    CHECK(amp_cuda_scaler_loss_scale(nullptr) == nullptr && amp_cuda_scaler_device_state(nullptr) == nullptr);
    REFUSED(amp_cuda_scaler_update(nullptr, &exec), AMP_ERR_ARGUMENT, "update: the scaler is NULL");
    REFUSED(amp_cuda_scaler_read(nullptr, &cpu, &exec), AMP_ERR_ARGUMENT, "read: the scaler is NULL");
    REFUSED(amp_cuda_scaler_check(nullptr, nullptr, &exec), AMP_ERR_ARGUMENT, "check: the scaler is NULL");
    REFUSED(amp_cuda_scaler_unscale(nullptr, nullptr, &exec), AMP_ERR_ARGUMENT, "unscale: the scaler is NULL");
    REFUSED(amp_cuda_scaler_report_overflow(nullptr, &exec), AMP_ERR_ARGUMENT, "overflow: the scaler is NULL");
    REFUSED(amp_cuda_scaler_check_loss(nullptr, nullptr, 1, &exec), AMP_ERR_ARGUMENT, "check_loss: the scaler is NULL");
    CHECK(amp_cuda_scaler_update(nullptr, nullptr) == AMP_ERR_ARGUMENT);
}

/* Losses in memory that the device cannot read, and counts below 0, leave the window as it was. */
static void test_refused_losses() {
    Scalers s(nullptr);
    const float host[2] = { INFINITY, 1.0f };
    Pair x(AMP_F32, 4);
    x.set(0, INFINITY);
    x.send();
    float* losses = (float*)(void*)x.there();
    s.scale_loss();
    REFUSED(amp_cuda_scaler_check_loss(s.gpu, host, 2, &s.exec), AMP_ERR_ARGUMENT,
            "amp_cuda_scaler_check_loss: losses is host memory");
    REFUSED(amp_cuda_scaler_check_loss(s.gpu, host, -3, &s.exec), AMP_ERR_ARGUMENT,
            "amp_cuda_scaler_check_loss: count -3 is negative");
    REFUSED(amp_cuda_scaler_check_loss(s.gpu, losses, -1, &s.exec), AMP_ERR_ARGUMENT, "count -1 is negative");
    REFUSED(amp_cuda_scaler_check_loss(s.gpu, nullptr, 2, &s.exec), AMP_ERR_ARGUMENT, "losses is NULL");
    CHECK(amp_cuda_scaler_check_loss(s.gpu, losses, 0, &s.exec) == AMP_OK);
    s.agree(0);
}

/* The order of calls, as the CPU has it. */
static void test_order_of_calls() {
    Scalers s(nullptr);
    Pairs a, b, none, two;
    a.add(AMP_F16, 10, 0);
    b.add(AMP_F32, 10, 0);
    two.add(AMP_F32, 5, 0);
    two.add(AMP_F32, 5, 0);
    none.add(AMP_F32, 0, 0);
    for (Pairs* t : { &a, &b, &none, &two }) { t->make(&s.exec); t->fill(1.0f); }
    s.check(a);                     /* before any loss */
    s.unscale(a);
    s.into(b, a, 0);
    s.update();
    s.scale_loss();
    s.update();
    s.check(none);
    s.update();                     /* an empty list records nothing */
    REFUSED(amp_cuda_scaler_check(s.gpu, nullptr, &s.exec), AMP_ERR_ARGUMENT, "the list is NULL");
    REFUSED(amp_cuda_scaler_unscale_into(s.gpu, b.list, two.list, 0, &s.exec), AMP_ERR_ARGUMENT,
            "dst has 1 tensors, src has 2");
    s.into(a, a, 0);
    s.unscale(a);
    s.unscale(a);                   /* twice */
    s.into(b, a, 0);                /* from what is unscaled */
    s.check(a);
    s.agree(10);
    s.update();
    s.update();
    s.agree(10);
}

/* More lists in a window than a scaler keeps. */
static void test_many_lists() {
    Scalers s(nullptr);
    std::deque<Pairs> lists;
    for (int i = 0; i < AMP_SCALER_MAX_LISTS + 2; i++) {
        lists.emplace_back();
        lists.back().add(AMP_F32, 5, 0);
        lists.back().make(&s.exec);
        lists.back().fill(1.0f);
    }
    s.scale_loss();
    for (Pairs& t : lists) s.check(t);
    s.agree(5);
    s.unscale(lists.back());        /* no room */
    s.update();
    s.scale_loss();
    s.unscale(lists.back());
    s.agree(5);
}

/* --- cost, capture, failures ---------------------------------------------------------------------------------- */

static void test_cost() {
#if defined(AMP_CUDA_EMU)
    Scalers s(nullptr);
    Pairs a, b;
    for (int i = 0; i < 250; i++) {             /* of each 245 are not empty: both lists fit the spans */
        a.add(TYPES[i % 3], (size_t)(i % 50), 0);
        b.add(AMP_F32, (size_t)(i % 50), 0);
    }
    a.make(&s.exec);
    b.make(&s.exec);
    a.fill(1.0f);
    long before[3] = { emu_launch_count(), emu_sync_count(), emu_alloc_count() };
    const long calls[] = { 0, 1, 2, 2, 2, 1, 1 };
    for (int k = 0; k < 7; k++) {
        if (k == 0) amp_cuda_scaler_loss_scale(s.gpu);
        if (k == 1) CHECK(amp_cuda_scaler_check(s.gpu, a.list, &s.exec) == AMP_OK);
        if (k == 2) CHECK(amp_cuda_scaler_unscale_into(s.gpu, b.list, a.list, 0, &s.exec) == AMP_OK);
        if (k == 3) CHECK(amp_cuda_scaler_unscale_into(s.gpu, b.list, a.list, 1, &s.exec) == AMP_OK);
        if (k == 4) CHECK(amp_cuda_scaler_unscale(s.gpu, a.list, &s.exec) == AMP_OK);
        if (k == 5) CHECK(amp_cuda_scaler_report_overflow(s.gpu, &s.exec) == AMP_OK);
        if (k == 6) CHECK(amp_cuda_scaler_update(s.gpu, &s.exec) == AMP_OK);
        CHECK_MSG(emu_launch_count() == before[0] + calls[k], "call %d: %ld launches", k,
                  emu_launch_count() - before[0]);
        before[0] = emu_launch_count();
    }
    CHECK(emu_sync_count() == before[1] && emu_alloc_count() == before[2]);
#else
    TEST_SKIP("a GPU does not count launches");
#endif
}

/* A window that was captured does on each replay what the CPU does. */
static void test_graph() {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    amp_scaler_desc d = {};
    d.init_scale = 1024;
    d.growth_interval = 2;
    d.hysteresis = 2;
    OK(cudaStreamCreate(&stream));
    {
        Scalers s(&d, stream);
        Pairs a, b;
        add_all_kinds(a);
        for (const Pair& t : a.all) b.add(AMP_F32, t.n, 1);
        a.make(&s.exec);
        b.make(&s.exec);
        amp_cuda_scaler_loss_scale(s.gpu);
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        CHECK(amp_cuda_scaler_check(s.gpu, a.list, &s.exec) == AMP_OK);
        CHECK(amp_cuda_scaler_unscale_into(s.gpu, b.list, a.list, 0, &s.exec) == AMP_OK);
        CHECK(amp_cuda_scaler_unscale_into(s.gpu, b.list, a.list, 1, &s.exec) == AMP_OK);
        CHECK(amp_cuda_scaler_update(s.gpu, &s.exec) == AMP_OK);
        OK(cudaStreamEndCapture(stream, &graph));
        OK(cudaGraphInstantiate(&ready, graph, 0));
        s.agree(0);                      /* nothing has run yet */
        for (int step = 0; step < 12; step++) {
            a.fill(100.0f);
            if (step % 5 == 3 || step == 9)
                a.spoil((size_t)step, 0, bad_bits(a.all[(size_t)step].type, (unsigned)step));
            amp_scaler_scale_loss(&s.cpu, 1.0f);
            amp_scaler_check(&s.cpu, a.here.data(), a.count(), nullptr);
            amp_scaler_unscale_into(&s.cpu, b.here.data(), a.here.data(), a.count(), 0, nullptr);
            amp_scaler_unscale_into(&s.cpu, b.here.data(), a.here.data(), a.count(), 1, nullptr);
            amp_scaler_update(&s.cpu);
            OK(cudaGraphLaunch(ready, stream));
            s.agree(a.elements());
            CHECK(b.agree());
        }
        CHECK(s.cpu.state.skipped == 3);
        OK(cudaGraphExecDestroy(ready));
        OK(cudaGraphDestroy(graph));
    }
    OK(cudaStreamDestroy(stream));
}

static void test_failures() {
#if defined(AMP_CUDA_EMU)
    Scalers s(nullptr);
    Pairs t, b;
    t.add(AMP_F16, 5000, 0, "w");
    b.add(AMP_F32, 5000, 0, "w");
    t.make(&s.exec);
    b.make(&s.exec);
    t.fill(1.0f);
    b.fill(1.0f);
    each_failure([&] {
        amp_cuda_scaler* gpu;
        amp_result r = amp_cuda_scaler_create(&gpu, nullptr, &s.exec);
        emu_fail_any_call_at(0);
        CHECK((r == AMP_OK) == (gpu != nullptr));
        amp_cuda_scaler_destroy(gpu);
        return r;
    }, 0);
    each_failure([&] {
        amp_cuda_tensors* list;
        amp_result r = amp_cuda_tensors_create(&list, t.there.data(), 1, &s.exec);
        emu_fail_any_call_at(0);
        CHECK((r == AMP_OK) == (list != nullptr));
        amp_cuda_tensors_destroy(list);
        return r;
    }, 0);
    for (long k = 1; k <= 2; k++) {                     /* the first launch, the second */
        s.scale_loss();
        emu_fail_launch_at(k);
        CHECK(amp_cuda_scaler_unscale_into(s.gpu, b.list, t.list, 1, &s.exec) == AMP_ERR_DEVICE);
        emu_fail_launch_at(k);
        CHECK(amp_cuda_scaler_unscale(s.gpu, t.list, &s.exec) == AMP_ERR_DEVICE);
        emu_fail_launch_at(0);
        CHECK(t.agree() && b.agree());
    }
    emu_fail_launch_at(1);
    CHECK(amp_cuda_scaler_check(s.gpu, t.list, &s.exec) == AMP_ERR_DEVICE);
    emu_fail_launch_at(1);
    CHECK(amp_cuda_scaler_report_overflow(s.gpu, &s.exec) == AMP_ERR_DEVICE);
    s.update();                                         /* nothing was recorded */
    s.scale_loss();
    s.check(t);
    emu_fail_launch_at(1);
    CHECK(amp_cuda_scaler_update(s.gpu, &s.exec) == AMP_ERR_DEVICE);
    s.agree(5000);
    s.update();
    s.agree(5000);
    emu_set_device_count(0);
    amp_cuda_scaler* gpu;
    amp_cuda_tensors* list;
    CHECK(amp_cuda_scaler_create(&gpu, nullptr, &s.exec) == AMP_ERR_UNSUPPORTED && !gpu);
    CHECK(amp_cuda_tensors_create(&list, t.there.data(), 1, &s.exec) == AMP_ERR_UNSUPPORTED && !list);
    emu_set_device_count(1);
    emu_set_memory_limit(emu_live_bytes() + 10);
    CHECK(amp_cuda_scaler_create(&gpu, nullptr, &s.exec) == AMP_ERR_MEMORY && !gpu);
    CHECK(amp_cuda_tensors_create(&list, t.there.data(), 1, &s.exec) == AMP_ERR_MEMORY && !list);
    emu_set_memory_limit((size_t)4 << 30);
#else
    TEST_SKIP("no launch of a GPU can be made to fail");
#endif
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) { TEST_SKIP("no GPU"); TEST_END(); }
    TEST(test_clean_check);
    TEST(test_each_place);
    TEST(test_many_bad);
    TEST(test_limit_of_range);
    TEST(test_norm);
    TEST(test_same_norm);
    TEST(test_unscale_bits);
    TEST(test_unscale_range);
    TEST(test_unscale_many_chunks);
    TEST(test_unscale_at_once);
    TEST(test_sums_overflow);
    TEST(test_random_windows);
    TEST(test_every_preset);
    TEST(test_defaults);
    TEST(test_moved_scale);
    TEST(test_limits);
    TEST(test_useless_scale);
    TEST(test_unsound);
    TEST(test_write);
    TEST(test_refused_lists);
    TEST(test_refused_descs);
    TEST(test_refused_losses);
    TEST(test_order_of_calls);
    TEST(test_many_lists);
    TEST(test_cost);
    TEST(test_graph);
    TEST(test_failures);
#if defined(AMP_CUDA_EMU)
    CHECK(emu_live_bytes() == 0 && emu_live_objects() == 0);
#endif
    TEST_END();
}
