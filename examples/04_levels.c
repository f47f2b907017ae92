/* 04_levels.c - lesson 4: who decides which layer runs in half.

   A level is a list: O0 puts everything into FP32, O1 the matrix products into half, O2 all but norms and
   losses, O3 all but losses. Above the list stand regions (amp_autocast_push), above regions pins (amp_pin). The
   table that amp_model_print writes names for each layer the type, the rule, and who set the rule.

   Run:  make examples && build/04_levels                                                                 */
#define AMP_IMPLEMENTATION
#include "../amp.h"

/* A small network with one layer of each class. `pinned` is the type for its last dense layer; 0 = not pinned. */
static void build(amp_model* m, amp_dtype pinned) {
    amp_conv2d_desc conv = { .out_channels = 8, .kernel = 3, .padding = 1 };
    amp_value x = amp_input(m, 1, 28, 28), shortcut;
    x = shortcut = amp_maxpool2d(m, amp_relu(m, amp_conv2d(m, x, &conv)), 2);
    x = amp_batch_norm(m, amp_conv2d(m, x, &conv), NULL);
    x = amp_relu(m, amp_add(m, x, shortcut));             /* a residual: promotes if its inputs differ */
    x = amp_layer_norm(m, amp_linear(m, x, 64), NULL);
    x = amp_linear(m, amp_gelu(m, x), 10);
    if (pinned != AMP_DTYPE_DEFAULT) amp_pin(m, x, pinned);
    amp_softmax_cross_entropy(m, x, NULL);
}

static int show(const char* title, amp_level level, amp_dtype pinned) {
    amp_model_desc desc = { .batch = 32, .precision = { .level = level }, .logger = { .log = amp_log_stderr } };
    amp_model* m;
    amp_result r = amp_model_create(&m, &desc);
    if (r != AMP_OK) return 0;
    build(m, pinned);
    r = amp_model_finalize(m);
    if (r == AMP_OK) {
        printf("=== %s ===\n", title);
        amp_model_print(m, stdout);
        printf("\n");
    }
    amp_model_destroy(m);
    return r == AMP_OK;
}

int main(void) {
    int ok = show("O0: all FP32", AMP_O0, AMP_DTYPE_DEFAULT);
    ok = ok && show("O1: matrix products in half, the rest follows or is FP32", AMP_O1, AMP_DTYPE_DEFAULT);
    ok = ok && show("O2: all but norms and losses in half", AMP_O2, AMP_DTYPE_DEFAULT);
    ok = ok && show("O3: all but losses in half, no FP32 copy of the weights", AMP_O3, AMP_DTYPE_DEFAULT);
    ok = ok && show("O2 with the last dense layer pinned to FP32", AMP_O2, AMP_F32);
    return ok ? 0 : 1;
}
