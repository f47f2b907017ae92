/* compile.c - a user's file: includes the header twice, beside other headers' `half`, and calls something of each topic.
   Compiled by check.sh in many languages and option sets; with USE_IMPLEMENTATION it holds the implementation itself. */
typedef float half;                 /* CUDA, OpenEXR and others take this name; the header must not mind */
#ifdef USE_IMPLEMENTATION
  #define AMP_IMPLEMENTATION
#endif
#include "../amp.h"
#include "../amp.h"
#include <stdio.h>
#include <string.h>

#ifdef AMP_LOG_DEFAULT              /* hear: who gave no logger is heard all the same */
static int heard;
void hear(amp_result code, const char* sentence, void* user_data) {
    heard += code != AMP_OK && sentence[0] && !user_data;
}
#endif

int main(void) {
    half f = amp_half_to_float(amp_half_from_float(1.5f));
    float m[4] = { 1, 2, 3, 4 }, out[4];
    amp_scaler s;
    amp_gemm_shape shape;
    amp_model* model = NULL;
    amp_model_desc d;
    amp_value x;
    memset(&d, 0, sizeof d);
    memset(&shape, 0, sizeof shape);
    shape.m = shape.n = shape.k = 2;
    d.batch = 1;
    if (amp_scaler_init(&s, NULL) != AMP_OK || s.state.scale != 65536.0f) return 1;
    if (amp_gemm(&shape, 1.0f, amp_f32(m), amp_f32(m), 0.0f, amp_f32(out), NULL) != AMP_OK) return 2;
#if defined(__cplusplus) || (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 201112L)
    {   /* the pointer's type is the operand's */
        const float* read_only = m;
        float wide[4];
        amp_half low[4];
        const amp_bfloat16* none = NULL;
        if (amp_convert(AMP_REF(low), AMP_REF(read_only), 4) != AMP_OK) return 9;
        if (amp_convert(AMP_REF(wide), AMP_REF(low), 4) != AMP_OK || wide[3] != 4.0f) return 10;
        if (AMP_REF(none).dtype != AMP_BF16 || AMP_NONE.data) return 11;
    }
#endif
    if (amp_model_create(&model, &d) != AMP_OK) return 3;
    x = amp_layer_norm_with(model, amp_input(model, 3, 1, 1), NULL);
#ifdef __cplusplus
    amp_norm_desc norm = amp_norm_desc();
    x = amp_layer_norm_with(model, amp_layer_norm_with(model, x, norm), {});
#endif
    amp_softmax_cross_entropy(model, amp_linear(model, amp_layer_norm(model, x), 2));
    if (amp_model_finalize(model) != AMP_OK) return 4;
    amp_model_destroy(model);
#ifdef AMP_LOG_DEFAULT
    {
        const amp_logger empty = { NULL, NULL };
        amp_exec exec;
        memset(&exec, 0, sizeof exec);
        exec.logger = &empty;
        if (amp_gemm(NULL, 1.0f, amp_f32(m), amp_f32(m), 0.0f, amp_f32(out), NULL) == AMP_OK || heard != 1) return 6;
        if (amp_gemm(NULL, 1.0f, amp_f32(m), amp_f32(m), 0.0f, amp_f32(out), &exec) == AMP_OK || heard != 2) return 7;
        d.batch = -1;
        if (amp_model_create(&model, &d) == AMP_OK || heard != 3) return 8;
    }
#endif
    return f == 1.5f && out[3] == 22.0f ? 0 : 5;
}
