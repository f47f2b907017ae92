/* gan.c - a generator and a discriminator, two models in half: noise becomes points of a ring of
   clusters. The gradient of the discriminator's input is that of the generator's output.
   Run:  make examples && build/gan                                                             */
#define AMP_IMPLEMENTATION
#include "../amp.h"
#include <math.h>
enum { NOISE = 4, CLUSTERS = 8, HALF = 64, STEPS = 1500 };
static float noise[HALF * NOISE], points[2 * HALF * 2], real_or_not[2 * HALF], slope[HALF * 2];
static const amp_batch from = { .n = HALF, .inputs = { noise } };
static float draw(void) { static uint64_t drawn; return amp_random_normal(1, drawn++); }
static void draw_noise(void) { for (int i = 0; i < HALF * NOISE; i++) noise[i] = draw(); }
static float centre(int i, int axis) { return sinf(0.78539816f * (float)(i + 2 * axis)); }
static amp_model* build(int in, int out, amp_value ends[2]) {
    amp_model* m;
    amp_model_create(&m, &(amp_model_desc){ .batch = 2 * HALF, .logger = { amp_log_stderr },
        .precision.level = AMP_O2, .optimizer = { AMP_ADAM, .lr = 0.002f, .beta1 = 0.5f } });
    amp_value x = ends[0] = amp_input(m, in, 1, 1);
    for (int i = 0; i < 2; i++) x = amp_leaky_relu(m, amp_linear(m, x, 64), 0.1f);
    ends[1] = amp_linear(m, x, out);
    return m;
}
/* The share of 100 batches of points that lie near a cluster. */
static double share_near(amp_model* generator, amp_value out) {
    int near = 0;
    for (int i = 0; i < 100; i++) {
        draw_noise();
        if (amp_predict(generator, &from, out, points)) return 1.0;
        for (int k = 0; k < HALF * CLUSTERS; k++)
            near += hypotf(points[k / CLUSTERS * 2] - centre(k, 0),
                           points[k / CLUSTERS * 2 + 1] - centre(k, 1)) < 0.2f;
    }
    return near / (100.0 * HALF);
}
int main(void) {
    amp_value g[2], d[2];
    amp_model *generator = build(NOISE, 2, g), *judge = build(2, 1, d);
    amp_output(generator, g[1]);
    amp_bce_with_logits(judge, d[1]);
    amp_retain_gradient(judge, d[0]);
    if (amp_model_finalize(generator) || amp_model_finalize(judge)) return 1;
    const amp_batch both = { .n = 2 * HALF, .inputs = { points }, .targets = { real_or_not } };
    const amp_batch made = { .n = HALF, .inputs = { points }, .targets = { real_or_not + HALF } };
    const amp_seeds seeds = { .gradients = { { slope } } };
    const double before = share_near(generator, g[1]);
    int failed = 0;
    for (int i = 0; i < HALF; i++) real_or_not[HALF + i] = 1.0f;
    for (int step = 0; step < STEPS && !failed; step++) {
        draw_noise();
        for (int i = 2 * HALF; i < 4 * HALF; i++) points[i] = centre(i / 2, i % 2) + 0.05f * draw();
        failed = amp_forward(generator, &from, NULL)            /* points, told from real ones; */
            || amp_model_read_value(generator, g[1], points) || amp_train_step(judge, &both, NULL)
            || amp_forward(judge, &made, NULL) || amp_backward(judge, NULL)
            || amp_model_read_gradient(judge, d[0], slope)      /* how would they look real? */
            || amp_discard(judge) || amp_backward(generator, &seeds) || amp_update(generator, NULL);
    }
    const double after = share_near(generator, g[1]);
    printf("points near a cluster: %.3f, after training %.3f\n", before, after);
    amp_model_destroy(generator), amp_model_destroy(judge);
    return failed || after < before + 0.3;
}
