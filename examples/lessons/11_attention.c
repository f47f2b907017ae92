/* 11_attention.c - lesson 11: attention without T x T?                                Run:  make lesson N=11

   In attention each of T tokens asks all tokens: a score for each pair; softmax makes attention weights of a row of
   scores; the answer is the mean of the values by these weights. Written plainly, both are matrices of T x T numbers.
   FlashAttention (Dao et al., 2022) works in tiles. A row keeps its largest score and the sum of e^(score - largest);
   when a larger one comes, the sums so far shrink by e^(old - new). The backward pass computes each tile again. */
#define AMP_IMPLEMENTATION
#include "../../amp.h"
#include "../chart.h"
#include "plain.h"
#include <time.h>
static float (*const tiled)[MANY] = found[TILES];
#define TILE ((size_t)1 << tile_power)
enum { WIDEST = 128 };
static const int tile_power = 7;             /* try 4 to 7 */
static const int sizes = 6;             /* try 2 to 6 */
static float p[WIDEST * WIDEST], dp[WIDEST * WIDEST], delta[LONGEST], logsum[LONGEST];      /* all that tiles need */
static float largest;                                                              /* of all scores */

/* p: a tile of scores, then of shares, in type `low`. Returns how many rows of the answer are inf or NaN. */
static int tiles_forward(size_t T, int with_largest, amp_dtype low) {
    int lost = 0;
    memset(tiled[OUT], 0, T * D * sizeof(float));
    for (size_t i = 0; i < T; i += TILE) {
        float *out = tiled[OUT] + i * D, most[WIDEST], sum[WIDEST] = { 0.0f };
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

/* Forward and backward, as attend_plainly. share = e^(score - logsum); dscore = share * (dshare - delta), delta = sum
   of out * dout in its row. */
static size_t attend_in_tiles(size_t T) {
    tiles_forward(T, 1, AMP_F32);
    for (int x = DQ; x <= DV; x++) memset(tiled[x], 0, T * D * sizeof(float));
    memset(delta, 0, sizeof delta);
    for (size_t x = 0; x < T * D; x++) delta[x / D] += tiled[OUT][x] * dout[x];
    for (size_t i = 0; i < T; i += TILE)
        for (size_t j = 0; j < T; j += TILE) {
            product(SCORES, TILE, scale, q + i * D, AMP_F32, k + j * D, 0.0f, p);
            product(SCORES, TILE, 1.0f, dout + i * D, AMP_F32, v + j * D, 0.0f, dp);
            for (size_t x = 0; x < TILE * TILE; x++)
                p[x] = expf(p[x] - logsum[i + x / TILE]), dp[x] = p[x] * (dp[x] - delta[i + x / TILE]);
            product(TURNED, TILE, 1.0f, p, AMP_F32, dout + i * D, 1.0f, tiled[DV] + j * D);
            product(MIX, TILE, scale, dp, AMP_F32, k + j * D, 1.0f, tiled[DQ] + i * D);
            product(TURNED, TILE, scale, dp, AMP_F32, q + i * D, 1.0f, tiled[DK] + j * D);
        }
    return 2 * (TILE * TILE + T) * sizeof(float);
}

static size_t attend(size_t T) {
    static amp_workspace room;
    const amp_attention_shape s = { .batch = 1, .queries = T, .heads = 1, .head_size = D };
    const amp_exec e = { .grows = &room };
    float (*const to)[MANY] = found[OPERATOR];
    amp_attention_forward(&s, amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(to[OUT]), logsum, &e);
    amp_attention_backward(&s, amp_f32(dout), amp_f32(q), amp_f32(k), amp_f32(v), amp_f32(to[OUT]), logsum,
                           amp_f32(to[DQ]), amp_f32(to[DK]), amp_f32(to[DV]), 0, &e);
    return room.size + T * sizeof(float);
}
int main(int argc, char** argv) {
    static const float at[SIZES] = { 128, 256, 512, 1024, 2048, 4096 }, factors[6] = { 1, 2, 3, 6, 18, 36 };
    static size_t (*const ways[WAYS])(size_t) = { attend_plainly, attend_in_tiles, attend };
    static float kb[WAYS][SIZES], ms[WAYS][SIZES], *const inputs[4] = { q, k, v, dout };
    double apart[WAYS] = { 0.0 };
    amp_half x = { 0 }, raised;
    int lost[3] = { 0 };
    for (int i = 0; i < 4 * MANY; i++) inputs[i % 4][i / 4] = amp_random_normal(1, (uint64_t)i);
    attend_plainly((size_t)64 << sizes);      /* so that no time below is that of getting memory */
    puts("    T     matrices of T x T              in tiles   amp_attention_forward");
    for (int s = 0; s < sizes; s++)
        for (int w = 0; w < WAYS; w++) {
            const size_t T = (size_t)128 << s, tries = LONGEST / T, start = (size_t)clock();
            for (size_t i = 0; i < tries; i++) kb[w][s] = (float)ways[w](T) / 1000.0f;
            ms[w][s] = 1000.0f * (float)((size_t)clock() - start) / (float)CLOCKS_PER_SEC / (float)tries;
            for (size_t i = 0; i < 4 * T * D; i++)
                apart[w] = fmax(apart[w], fabs((double)(found[w][i % 4][i / 4] - found[PLAIN][i % 4][i / 4])));
            if (w == 0) printf("%5g", (double)at[s]);
            printf("%9.0f KB %8.2f ms%s", (double)kb[w][s], (double)ms[w][s], w == WAYS - 1 ? "\n" : "");
        }
    puts("\nlargest score  of 1024 rows lost without the maximum: half, FP32; with it: half");
    for (int i = 0; i < 6; i++) {
        scale = 0.125f * factors[i], largest = 0.0f;
        for (int run = 0; run < 3; run++) lost[run] = tiles_forward(1024, run == 2, run == 1 ? AMP_F32 : AMP_F16);
        printf("%13.2f %43d %6d %14d\n", (double)largest, lost[0], lost[1], lost[2]);
    }
    while (raised = amp_half_from_float(expf(amp_half_to_float(x))), amp_is_finite(amp_f16(&raised))) x.bits++;
    const double end = (double)amp_half_to_float(x);
    chart_series curves[2 * WAYS] = {
        chart_curve("T x T", CHART_OTHER, at, kb[0], sizes), chart_curve("tiles", CHART_FP32, at, kb[1], sizes),
        chart_curve("amp_attention", CHART_FP32, at, kb[2], sizes), chart_curve("T x T", CHART_OTHER, at, ms[0], sizes),
        chart_curve("tiles", CHART_FP32, at, ms[1], sizes), chart_curve("amp_attention", CHART_FP32, at, ms[2], sizes) };
    curves[2].dash = curves[5].dash = "6 4";
    const chart_panel panels[2] = {
        { "Twice the tokens: four times the memory\nof T x T, hardly more of tiles", "T, tokens", "kilobytes", 2, 1,
          .series = curves, .series_count = WAYS },
        { "In time all are squares of T:\ntiles compute all scores, too", "T, tokens", "milliseconds", 2, 1,
          .series = curves + WAYS, .series_count = WAYS } };
    if (!chart_save(argc, argv, "11_attention", "Attention without T x T?", panels, 2)) return 1;
    printf("check: e^x is inf in half from %.4f (run: 11.09)\n       tiles are %.0e off, amp.h %.0e\n", end,
           apart[TILES], apart[OPERATOR]);
    if (fabs(end - 11.09) < 0.01 && fmax(apart[1], apart[2]) < 1e-5 && lost[0] > 0 && lost[2] == 0) return 0;
    return fprintf(stderr, "11_attention: tiles give other answers, or the maximum does not keep e^x finite\n"), 1;
}
