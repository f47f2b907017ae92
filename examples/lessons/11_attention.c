/* 11_attention.c - lesson 11: attention without T x T?                                Run:  make lesson N=11

   In attention each of T tokens asks all tokens: a score for each pair; softmax makes attention weights of a row of
   scores; the answer is the mean of the values by these weights. Written plainly, both are matrices of T x T numbers.
   FlashAttention (Dao et al., 2022) works in tiles. A row keeps its largest score and the sum of e^(score - largest);
   when a larger one comes, the sums so far shrink by e^(old - new). The backward pass computes each tile again. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include <time.h>
enum { OUT, DQ, DK, DV, D = 64, TILE = 128, SIZES = 6, LONGEST = TILE << (SIZES - 1), MANY = LONGEST * D };
static float q[MANY], k[MANY], v[MANY], dout[MANY], plain[4][MANY], tiled[4][MANY];
static float p[TILE * TILE], dp[TILE * TILE], delta[LONGEST], logsum[LONGEST];      /* all that tiles need */
static float scores[LONGEST * LONGEST], shares[LONGEST * LONGEST], dshares[LONGEST * LONGEST];  /* not with tiles */
static float scale = 0.125f, largest;                                              /* 1 / sqrt(D); of all scores */
/* SCORES: c[n,n] = a[n,D] b[n,D]^T. MIX: c[n,D] = a[n,n] b[n,D]. TURNED: the same with a^T. Times alpha, plus old c. */
typedef enum kind { SCORES, MIX, TURNED } kind;
static void product(kind of, size_t n, float alpha, const float* a, amp_dtype t, const float* b, float old, float* c) {
    const amp_gemm_shape s = { .trans_a = of == TURNED ? AMP_TRANS : AMP_NO_TRANS, .m = n, .n = of == SCORES ? n : D,
                               .trans_b = of == SCORES ? AMP_TRANS : AMP_NO_TRANS, .k = of == SCORES ? D : n };
    amp_gemm(&s, alpha, amp_ref_of(a, t), amp_f32(b), old, amp_f32(c), NULL);
}

static void attend_plainly(size_t T) {        /* forward and backward */
    product(SCORES, T, scale, q, AMP_F32, k, 0.0f, scores);
    amp_softmax_forward(amp_f32(scores), amp_f32(shares), T, T, NULL);
    product(MIX, T, 1.0f, shares, AMP_F32, v, 0.0f, plain[OUT]);
    product(TURNED, T, 1.0f, shares, AMP_F32, dout, 0.0f, plain[DV]);
    product(SCORES, T, 1.0f, dout, AMP_F32, v, 0.0f, dshares);
    amp_softmax_backward(amp_f32(dshares), amp_f32(shares), amp_f32(scores), 0, T, T, NULL);
    product(MIX, T, scale, scores, AMP_F32, k, 0.0f, plain[DQ]);
    product(TURNED, T, scale, scores, AMP_F32, q, 0.0f, plain[DK]);
}

/* p: a tile of scores, then of shares, in type `low`. Returns how many rows of the answer are inf or NaN. */
static int tiles_forward(size_t T, int with_largest, amp_dtype low) {
    int lost = 0;
    memset(tiled[OUT], 0, T * D * sizeof(float));
    for (size_t i = 0; i < T; i += TILE) {
        float *out = tiled[OUT] + i * D, most[TILE], sum[TILE] = { 0.0f };
        for (size_t r = 0; r < TILE; r++) most[r] = with_largest ? -INFINITY : 0.0f;
        for (size_t j = 0; j < T; j += TILE) {
            product(SCORES, TILE, scale, q + i * D, AMP_F32, k + j * D, 0.0f, p);
            for (size_t r = 0; r < TILE; r++) {
                float *row = p + r * TILE, shrink = most[r];
                for (size_t c = 0; c < TILE; c++) largest = row[c] > largest ? row[c] : largest;
                for (size_t c = 0; with_largest && c < TILE; c++) most[r] = row[c] > most[r] ? row[c] : most[r];
                sum[r] *= shrink = expf(shrink - most[r]);
                for (size_t d = 0; d < D; d++) out[r * D + d] *= shrink;
                for (size_t c = 0; c < TILE; c++) sum[r] += row[c] = expf(row[c] - most[r]);
            }
            amp_convert(amp_ref_of(p, low), amp_f32(p), TILE * TILE);
            product(MIX, TILE, 1.0f, p, low, v + j * D, 1.0f, out);
        }
        for (size_t x = 0; x < TILE * D; x++) out[x] /= sum[x / D];
        for (size_t r = 0; r < TILE; r++)
            logsum[i + r] = most[r] + logf(sum[r]), lost += !amp_is_finite(amp_f32(&out[r * D]));
    }
    return lost;
}

/* share = e^(score - logsum); dscore = share * (dshare - delta), delta = sum of out * dout in its row. */
static void tiles_backward(size_t T) {
    for (int x = DQ; x <= DV; x++) memset(tiled[x], 0, T * D * sizeof(float));
    memset(delta, 0, sizeof delta);
    for (size_t x = 0; x < T * D; x++) delta[x / D] += tiled[OUT][x] * dout[x];
    for (size_t i = 0; i < T; i += TILE)
        for (size_t j = 0; j < T; j += TILE) {
            product(SCORES, TILE, scale, q + i * D, AMP_F32, k + j * D, 0.0f, p);
            product(SCORES, TILE, 1.0f, dout + i * D, AMP_F32, v + j * D, 0.0f, dp);
            for (size_t x = 0; x < TILE * TILE; x++) p[x] = expf(p[x] - logsum[i + x / TILE]);
            for (size_t x = 0; x < TILE * TILE; x++) dp[x] = p[x] * (dp[x] - delta[i + x / TILE]);
            product(TURNED, TILE, 1.0f, p, AMP_F32, dout + i * D, 1.0f, tiled[DV] + j * D);
            product(MIX, TILE, scale, dp, AMP_F32, k + j * D, 1.0f, tiled[DQ] + i * D);
            product(TURNED, TILE, scale, dp, AMP_F32, q + i * D, 1.0f, tiled[DK] + j * D);
        }
}

int main(int argc, char** argv) {
    static const float at[SIZES] = { 128, 256, 512, 1024, 2048, 4096 }, factors[6] = { 1, 2, 3, 6, 18, 36 };
    static float kb[2][SIZES], ms[2][SIZES], apart, *const inputs[4] = { q, k, v, dout };
    amp_half x = { 0 }, power;
    int lost[3] = { 0 };
    for (int i = 0; i < 4 * MANY; i++) inputs[i % 4][i / 4] = amp_random_normal(1, (uint64_t)i);
    attend_plainly(LONGEST);                  /* so that no time below is that of getting memory */
    puts("    T       matrices of T x T                   in tiles");
    for (int s = 0; s < SIZES; s++) {
        const size_t T = (size_t)TILE << s, tries = LONGEST / T, start = (size_t)clock();
        for (size_t i = 0; i < tries; i++) attend_plainly(T);
        const size_t middle = (size_t)clock();
        for (size_t i = 0; i < tries; i++) tiles_forward(T, 1, AMP_F32), tiles_backward(T);
        ms[0][s] = 1000.0f * (float)(middle - start) / (float)CLOCKS_PER_SEC / (float)tries;
        ms[1][s] = 1000.0f * (float)((size_t)clock() - middle) / (float)CLOCKS_PER_SEC / (float)tries;
        kb[0][s] = (float)(3 * T * T * sizeof(float)) / 1000.0f;
        kb[1][s] = (float)(sizeof p + sizeof dp + 2 * T * sizeof(float)) / 1000.0f;
        for (size_t i = 0; i < 4 * T * D; i++) apart = fmaxf(apart, fabsf(plain[i % 4][i / 4] - tiled[i % 4][i / 4]));
        printf("%5g %12.0f KB %8.2f ms %12.0f KB %8.2f ms\n", (double)at[s], (double)kb[0][s], (double)ms[0][s],
               (double)kb[1][s], (double)ms[1][s]);
    }
    puts("\nlargest score  of 1024 rows lost without the maximum: half, FP32; with it: half");
    for (int i = 0; i < 6; i++) {
        scale = 0.125f * factors[i], largest = 0.0f;
        for (int run = 0; run < 3; run++) lost[run] = tiles_forward(1024, run == 2, run == 1 ? AMP_F32 : AMP_F16);
        printf("%13.2f %43d %6d %14d\n", (double)largest, lost[0], lost[1], lost[2]);
    }
    while (power = amp_half_from_float(expf(amp_half_to_float(x))), amp_is_finite(amp_f16(&power))) x.bits++;
    const chart_series curves[4] = {
        chart_curve("T x T", CHART_OTHER, at, kb[0], SIZES), chart_curve("tiles", CHART_FP32, at, kb[1], SIZES),
        chart_curve("T x T", CHART_OTHER, at, ms[0], SIZES), chart_curve("tiles", CHART_FP32, at, ms[1], SIZES) };
    const chart_panel panels[2] = {
        { "Twice the tokens: four times the memory\nof T x T, hardly more of tiles", "T, tokens", "kilobytes", 2, 1,
          .series = curves, .series_count = 2 },
        { "In time both are squares of T:\ntiles compute all scores, too", "T, tokens", "milliseconds", 2, 1,
          .series = curves + 2, .series_count = 2 } };
    if (!chart_save(argc, argv, "11_attention", "Attention without T x T?", panels, 2)) return 1;
    const float end = amp_half_to_float(x);
    printf("check: e^x is inf in half from %.4f (run: 11.09); tiles are %.0e off\n", (double)end, (double)apart);
    if (fabsf(end - 11.09f) < 0.01f && apart < 1e-5f && lost[0] > 0 && lost[2] == 0) return 0;
    return fprintf(stderr, "11_attention: tiles give other answers, or the maximum does not keep e^x finite\n"), 1;
}
