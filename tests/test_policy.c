/* test_policy.c - the levels, lists and overrides of the autocast policy. The tables are written out here once more,
   by hand, from the systems' own lists, so that a slip in the header shows. */
#include "helpers.h"

/* The desc must be refused with AMP_ERR_POLICY, one sentence that contains both words, and the policy untouched. */
static void refused(amp_policy_desc d, const char* word, const char* other) {
    amp_policy p, before;
    memset(&p, 0x5a, sizeof p);
    before = p;
    heard[0] = 0;
    heard_count = 0;
    d.logger = &LISTENER;
    CHECK_MSG(amp_policy_init(&p, &d) == AMP_ERR_POLICY, "%s / %s", word, other);
    CHECK_MSG(heard_count == 1 && heard_code == AMP_ERR_POLICY, "%d sentences", heard_count);
    CHECK_MSG(strstr(heard, word) && strstr(heard, other), "wanted '%s' and '%s' in: %s", word, other, heard);
    CHECK(memcmp(&p, &before, sizeof p) == 0);
    d.logger = NULL;
    CHECK(amp_policy_init(&p, &d) == AMP_ERR_POLICY);
}

static amp_policy_desc level_desc(amp_level level) {
    amp_policy_desc d;
    memset(&d, 0, sizeof d);
    d.level = level;
    return d;
}

static amp_policy policy_of(amp_policy_desc d) {
    amp_policy p;
    amp_result r;
    memset(&p, 0, sizeof p);
    d.logger = &LISTENER;
    r = amp_policy_init(&p, &d);
    CHECK_MSG(r == AMP_OK, "%s", heard);
    return p;
}

/* --- levels ------------------------------------------------------------------------------- */

/* One letter per level O0..O3: L = 16 bits, F = FP32, P = widest input, . = type of the input. */
static const struct { amp_op op; const char* name; const char* rules; } table[] = {
    { AMP_OP_INPUT,                 "input",                 "...." },
    { AMP_OP_CONV2D,                "conv2d",                "FLLL" },
    { AMP_OP_LINEAR,                "linear",                "FLLL" },
    { AMP_OP_MAX_POOL2D,            "max_pool2d",            "F.LL" },
    { AMP_OP_AVG_POOL2D,            "avg_pool2d",            "F.LL" },
    { AMP_OP_BATCH_NORM,            "batch_norm",            "F.FL" },
    { AMP_OP_LAYER_NORM,            "layer_norm",            "FFFL" },
    { AMP_OP_RELU,                  "relu",                  "F.LL" },
    { AMP_OP_GELU,                  "gelu",                  "F.LL" },
    { AMP_OP_TANH,                  "tanh",                  "F.LL" },
    { AMP_OP_SIGMOID,               "sigmoid",               "F.LL" },
    { AMP_OP_SOFTMAX,               "softmax",               "FFLL" },
    { AMP_OP_DROPOUT,               "dropout",               "F.LL" },
    { AMP_OP_ADD,                   "add",                   "FPLL" },
    { AMP_OP_CONCAT,                "concat",                "FPLL" },
    { AMP_OP_FLATTEN,               "flatten",               "...." },
    { AMP_OP_SOFTMAX_CROSS_ENTROPY, "softmax_cross_entropy", "FFFF" },
    { AMP_OP_MSE,                   "mse",                   "FFFF" },
    { AMP_OP_BCE_WITH_LOGITS,       "bce_with_logits",       "FFFF" },
    { AMP_OP_GELU_TANH,             "gelu_tanh",             "F.LL" },
    { AMP_OP_SILU,                  "silu",                  "F.LL" },
    { AMP_OP_HARD_SWISH,            "hard_swish",            "F.LL" },
    { AMP_OP_LEAKY_RELU,            "leaky_relu",            "F.LL" },
    { AMP_OP_MUL,                   "mul",                   "FPLL" },
    { AMP_OP_UPSAMPLE,              "upsample",              "F.LL" },
    { AMP_OP_CUSTOM,                "custom",                "FFFL" },
    { AMP_OP_MEAN,                  "mean",                  "FFFF" },
    { AMP_OP_CONV_TRANSPOSE2D,      "conv_transpose2d",      "FLLL" },
    { AMP_OP_RMS_NORM,              "rms_norm",              "FFFL" },
    { AMP_OP_EMBEDDING,             "embedding",             "FFLL" },
    { AMP_OP_POSITION_EMBEDDING,    "position_embedding",    "FFLL" },
    { AMP_OP_GROUP_NORM,            "group_norm",            "FFFL" },
    { AMP_OP_INSTANCE_NORM,         "instance_norm",         "F.FL" },
    { AMP_OP_ATTENTION,             "attention",             "FLLL" },
    { AMP_OP_ROPE,                  "rope",                  "F.LL" },
    { AMP_OP_TO_POSITIONS,          "to_positions",          "...." },
    { AMP_OP_TO_IMAGE,              "to_image",              "...." }
};
enum { OPS = sizeof table / sizeof *table };

static amp_rule rule_of(char letter) {
    return letter == 'L' ? AMP_RULE_LOW : letter == 'F' ? AMP_RULE_FP32 : letter == 'P' ? AMP_RULE_PROMOTE : AMP_RULE_FOLLOW;
}

static void test_levels(void) {
    static const amp_dtype types[] = { AMP_DTYPE_DEFAULT, AMP_F16, AMP_BF16 };
    int level, t, i;
    CHECK_MSG((int)OPS == (int)AMP_OP_COUNT, "`table` has %d operators, AMP_OP_LIST has %d: add a row to `table` for each new "
        "operator, and a letter to each row of `styles`", (int)OPS, (int)AMP_OP_COUNT);
    for (level = 0; level <= 3; level++)
        for (t = 0; t < 3; t++) {
            amp_policy_desc d = level_desc((amp_level)level);
            amp_policy p;
            d.low_dtype = types[t];
            p = policy_of(d);
            CHECK((int)p.level == level);
            CHECK(p.low_dtype == (types[t] == AMP_BF16 ? AMP_BF16 : AMP_F16));
            CHECK(p.master_weights == (level != 3));
            CHECK(p.cast_back == 0);
            for (i = 0; i < OPS; i++) {
                CHECK_MSG(p.rules[table[i].op] == rule_of(table[i].rules[level]), "%s at O%d: %s", table[i].name,
                          level, amp_rule_name(p.rules[table[i].op]));
                CHECK(p.reasons[table[i].op] == AMP_REASON_LEVEL);
            }
        }
}

static void test_no_desc_is_O0(void) {
    amp_policy p, q = policy_of(level_desc(AMP_O0));
    memset(&p, 0, sizeof p);
    CHECK(amp_policy_init(&p, NULL) == AMP_OK);
    CHECK(memcmp(&p, &q, sizeof p) == 0);
    CHECK(amp_policy_init(NULL, NULL) == AMP_ERR_ARGUMENT);
}

/* What each system puts where, as its documents say it: one letter per operator of `table`, G = gray.
   MindSpore 2.10, mindspore.amp.auto_mixed_precision: the white list of O1 has Conv2d, its transpose, Dense and ReLU of these,
   the black list of O2 BatchNorm and LayerNorm; the loss of build_train_network is FP32; O3 converts all operators, and
   parameters stay FP32 in each level (seen in 2.10: to_float casts per cell).
   GroupNorm, InstanceNorm and RmsNorm are in neither list.
   Apex, final version, apex/amp/lists and frontend.py: O1 has linear, conv2d and its transpose in half, softmax, gelu, layer_norm,
   group_norm,
   interpolate and the losses in FP32, add and cat promote, and says why instance_norm is in no list; O2 keeps nothing but batch norm in FP32, O3 nothing.
   NNabla 1.39, tutorial "Mixed Precision Training", type_config="half": everything in half but SoftMax and the losses;
   statistics of norms are FP32 inside.
   OneFlow 0.9, auto_mixed_precision_lists.cpp: white matmul and conv2d; gray avg_pool, add, multiply, layer_norm, dropout, softmax,
   gelu, tanh, sigmoid and normalization; clear max_pool, relu, concat and flatten. Of the operators that it lacks, 1.0 has
   silu, rms_norm and group_norm as gray, upsample_nearest_2d as clear; what is in no list is FP32,
   as the mean and variance of which its instance norm is made. An embedding is gather,
   clear: it has its weight's type, which is FP32, and so in PyTorch, MindSpore and Apex, none of which lists it at O1. Positions
   are added: broadcast_add. Attention is matrix products around a softmax in FP32; rope is multiply and add, whose factors have
   the type of x. */
static const struct {
    amp_style style; const char* name; int level; const char* rules; int cast_back, masters;
} styles[] = {
    /*                                   i c l m a b l r g t s s d a c f x m b g s h l m u c m t r e p g i a r t t */
    { AMP_STYLE_PYTORCH,   "pytorch", 1,   ". L L . . . F . . . . F . P P . F F F . . . . P . F F L F F F F . L . . .", 0, 1 },
    { AMP_STYLE_PYTORCH,   "pytorch", 2,   ". L L L L F F L L L L L L L L . F F F L L L L L L F F L F L L F F L L . .", 0, 1 },
    { AMP_STYLE_MINDSPORE, "mindspore", 1, ". L L . . . F L . . . F . P P . F F F . . . . P . F F L F F F F . L . . .", 1, 1 },
    { AMP_STYLE_MINDSPORE, "mindspore", 2, ". L L L L F F L L L L L L L L . F F F L L L L L L F F L L L L L L L L . .", 0, 1 },
    { AMP_STYLE_MINDSPORE, "mindspore", 3, ". L L L L L L L L L L L L L L . F F F L L L L L L L F L L L L L L L L . .", 0, 1 },
    { AMP_STYLE_MINDSPORE, "mindspore", 0, ". F F F F F F F F F F F F F F . F F F F F F F F F F F F F F F F F F F . .", 0, 1 },
    { AMP_STYLE_APEX,      "apex", 1,      ". L L . . . F . F . . F . P P . F F F F . . . P F F F L F F F F . L . . .", 0, 1 },
    { AMP_STYLE_APEX,      "apex", 2,      ". L L L L F L L L L L L L L L . F F F L L L L L L F F L L L L L L L L . .", 0, 1 },
    { AMP_STYLE_APEX,      "apex", 3,      ". L L L L L L L L L L L L L L . F F F L L L L L L L F L L L L L L L L . .", 0, 0 },
    { AMP_STYLE_NNABLA,    "nnabla", 2,    ". L L L L L L L L L L F L L L . F F F L L L L L L F F L L L L L L L L . .", 0, 1 },
    { AMP_STYLE_ONEFLOW,   "oneflow", 1,   ". L L . G G G . G G G G G G . . F F F G G F F G . F F F G F G G F L G . .", 0, 1 },
    { AMP_STYLE_ONEFLOW,   "oneflow", 0,   ". F F F F F F F F F F F F F F . F F F F F F F F F F F F F F F F F F F . .", 0, 1 },
};

static void test_styles(void) {
    static const struct { amp_style style; amp_level level; } none[] = {
        { AMP_STYLE_NNABLA, AMP_O1 }, { AMP_STYLE_NNABLA, AMP_O3 }, { AMP_STYLE_ONEFLOW, AMP_O2 }, { AMP_STYLE_ONEFLOW, AMP_O3 } };
    amp_policy_desc d;
    int k, i;
    for (k = 0; k < (int)(sizeof styles / sizeof *styles); k++) {
        amp_policy p;
        CHECK_MSG((int)strlen(styles[k].rules) == 2 * AMP_OP_COUNT - 1, "row %d of `styles` has not %d letters: add one for "
                  "each new operator", k, (int)AMP_OP_COUNT);
        d = level_desc((amp_level)styles[k].level);
        d.style = styles[k].style;
        p = policy_of(d);
        CHECK(p.style == d.style && p.cast_back == styles[k].cast_back && strcmp(amp_style_name(d.style), styles[k].name) == 0);
        CHECK_MSG(p.master_weights == styles[k].masters, "%s O%d: masters", styles[k].name, styles[k].level);
        if (styles[k].level >= 2) {
            d.master_weights = AMP_ZERO;                /* the user's word counts */
            CHECK(policy_of(d).master_weights == 0);
        }
        for (i = 0; i < OPS; i++) {
            amp_rule want = styles[k].rules[2 * i] == 'G' ? AMP_RULE_GRAY : rule_of(styles[k].rules[2 * i]);
            CHECK_MSG(p.rules[table[i].op] == want, "%s O%d: %s is %s", styles[k].name, styles[k].level, table[i].name,
                      amp_rule_name(p.rules[table[i].op]));
            CHECK(p.reasons[table[i].op] == AMP_REASON_LEVEL);
        }
    }
    for (k = 0; k < 4; k++) {
        d = level_desc(none[k].level);
        d.style = none[k].style;
        refused(d, amp_style_name(d.style), amp_level_name(d.level));
    }
    d = level_desc(AMP_O1);
    d.style = (amp_style)AMP_STYLE_COUNT;
    refused(d, "style", "5");
    d.style = (amp_style)-1;
    refused(d, "style", "-1");
    CHECK(strcmp(amp_style_name((amp_style)AMP_STYLE_COUNT), "?") == 0 && strcmp(amp_style_name((amp_style)-1), "?") == 0);
}

static void test_unknown_values(void) {
    amp_policy_desc d = level_desc((amp_level)4);
    refused(d, "level", "4");
    d.level = (amp_level)-1;
    refused(d, "level", "-1");
    d = level_desc(AMP_O2);
    d.low_dtype = AMP_F32;
    refused(d, "low_dtype", "f32");
    d.low_dtype = AMP_F64;
    refused(d, "low_dtype", "f64");
    d.low_dtype = (amp_dtype)77;
    refused(d, "low_dtype", "?");
}

/* --- overrides, with Apex's refusals -------------------------------------------------------- */

static void test_apex_refusals(void) {
    static const int values[] = { 1, AMP_ZERO };
    int level, k;
    for (level = 0; level <= 1; level++) {
        amp_policy_desc d = level_desc((amp_level)level);
        const char* name = level ? "O1" : "O0";
        for (k = 0; k < 2; k++) {
            d = level_desc((amp_level)level);
            d.keep_batchnorm_fp32 = values[k];
            refused(d, "keep_batchnorm_fp32", name);
            d = level_desc((amp_level)level);
            d.master_weights = values[k];
            refused(d, "master_weights", name);
        }
    }
}

static void test_overrides(void) {
    int level;
    for (level = 2; level <= 3; level++) {
        amp_policy_desc d = level_desc((amp_level)level);
        amp_policy p = policy_of(d);
        CHECK(p.rules[AMP_OP_CONV2D] == AMP_RULE_LOW);
        d.keep_batchnorm_fp32 = 1;
        p = policy_of(d);
        CHECK(p.rules[AMP_OP_BATCH_NORM] == AMP_RULE_FP32 && p.reasons[AMP_OP_BATCH_NORM] == AMP_REASON_KEEP_BN);
        CHECK(p.rules[AMP_OP_RMS_NORM] == p.rules[AMP_OP_LAYER_NORM] && p.rules[AMP_OP_LAYER_NORM] == (level == 2 ? AMP_RULE_FP32 : AMP_RULE_LOW));
        d.keep_batchnorm_fp32 = AMP_ZERO;
        p = policy_of(d);
        CHECK(p.rules[AMP_OP_BATCH_NORM] == AMP_RULE_LOW && p.reasons[AMP_OP_BATCH_NORM] == AMP_REASON_KEEP_BN);
        d.keep_batchnorm_fp32 = 2;
        refused(d, "keep_batchnorm_fp32", "not 2 and 0");
        d.keep_batchnorm_fp32 = -2;
        refused(d, "keep_batchnorm_fp32", "AMP_ZERO");

        d = level_desc((amp_level)level);
        d.master_weights = 1;
        CHECK(policy_of(d).master_weights == 1);
        d.master_weights = AMP_ZERO;
        CHECK(policy_of(d).master_weights == 0);
        d.master_weights = 5;
        refused(d, "master_weights", "not 0 and 5");
    }
}

/* --- lists ------------------------------------------------------------------------------------ */

static void list_moves(int is_white, const amp_op list[2], amp_rule rule, amp_reason reason) {
    amp_policy_desc d = level_desc(AMP_O1);
    amp_policy p;
    int i;
    if (is_white) { d.white = list; d.white_count = 2; } else { d.black = list; d.black_count = 2; }
    p = policy_of(d);
    for (i = 0; i < OPS; i++) {
        amp_op op = table[i].op;
        int listed = op == list[0] || op == list[1];
        CHECK_MSG(p.rules[op] == (listed ? rule : rule_of(table[i].rules[1])), "%s", table[i].name);
        CHECK(p.reasons[op] == (listed ? reason : AMP_REASON_LEVEL));
    }
}

static void test_lists(void) {
    amp_op white[2] = { AMP_OP_SOFTMAX, AMP_OP_GELU }, black[2] = { AMP_OP_LINEAR, AMP_OP_RELU };
    amp_policy_desc d = level_desc(AMP_O1);
    amp_policy p;
    list_moves(1, white, AMP_RULE_LOW, AMP_REASON_WHITE);
    list_moves(0, black, AMP_RULE_FP32, AMP_REASON_BLACK);
    d.white = white; d.white_count = 2;
    p = policy_of(d);
    white[0] = AMP_OP_ADD;                      /* the policy has its own copy */
    CHECK(p.rules[AMP_OP_SOFTMAX] == AMP_RULE_LOW && p.rules[AMP_OP_ADD] == AMP_RULE_PROMOTE);

    d = level_desc(AMP_O2);                     /* a list beats keep_batchnorm_fp32 */
    white[0] = AMP_OP_BATCH_NORM;
    d.white = white; d.white_count = 1;
    p = policy_of(d);
    CHECK(p.rules[AMP_OP_BATCH_NORM] == AMP_RULE_LOW && p.reasons[AMP_OP_BATCH_NORM] == AMP_REASON_WHITE);
}

static void refused_lists(amp_level level, amp_op white, int white_count, amp_op black, int black_count, const char* word) {
    amp_policy_desc d = level_desc(level);
    d.white = &white; d.white_count = white_count;
    d.black = &black; d.black_count = black_count;
    refused(d, word, "policy");
}

static void test_list_errors(void) {
    amp_policy_desc d;
    refused_lists(AMP_O1, AMP_OP_GELU, 1, AMP_OP_GELU, 1, "not both");
    refused_lists(AMP_O1, AMP_OP_GELU, 1, AMP_OP_LINEAR, 1, "not both");
    refused_lists(AMP_O1, (amp_op)AMP_OP_COUNT, 1, AMP_OP_GELU, 0, "not an operator");
    refused_lists(AMP_O1, AMP_OP_GELU, 0, (amp_op)-1, 1, "not an operator");
    refused_lists(AMP_O2, AMP_OP_GELU, 0, (amp_op)1000, 1, "1000");
    refused_lists(AMP_O1, AMP_OP_INPUT, 1, AMP_OP_GELU, 0, "not an operator");
    refused_lists(AMP_O1, AMP_OP_GELU, 0, AMP_OP_FLATTEN, 1, "not an operator");
    refused_lists(AMP_O1, AMP_OP_MSE, 1, AMP_OP_GELU, 0, "loss");
    refused_lists(AMP_O3, AMP_OP_SOFTMAX_CROSS_ENTROPY, 1, AMP_OP_GELU, 0, "loss");
    refused_lists(AMP_O3, AMP_OP_BCE_WITH_LOGITS, 1, AMP_OP_GELU, 0, "bce_with_logits");
    refused_lists(AMP_O0, AMP_OP_GELU, 1, AMP_OP_GELU, 0, "O0");
    refused_lists(AMP_O0, AMP_OP_GELU, 0, AMP_OP_GELU, 1, "O0");
    refused_lists(AMP_O1, AMP_OP_GELU, -1, AMP_OP_GELU, 0, "count");
    d = level_desc(AMP_O1);
    d.white_count = 1;
    refused(d, "count", "entries");
    d = level_desc(AMP_O1);
    d.black_count = 2;
    refused(d, "count", "entries");
}

/* Lists come out as copies, cut to the room there is; the count is the whole. */
static void test_lists_out(void) {
    amp_policy p = policy_of(level_desc(AMP_O1)), before = p;
    amp_op out[AMP_OP_COUNT];
    int n = amp_policy_white_list(&p, out, AMP_OP_COUNT);
    CHECK(n == 4 && out[0] == AMP_OP_CONV2D && out[1] == AMP_OP_LINEAR && out[2] == AMP_OP_CONV_TRANSPOSE2D && out[3] == AMP_OP_ATTENTION);
    out[0] = AMP_OP_MSE;
    CHECK(memcmp(&p, &before, sizeof p) == 0);
    n = amp_policy_black_list(&p, out, AMP_OP_COUNT);
    CHECK(n == 11 && out[0] == AMP_OP_LAYER_NORM && out[1] == AMP_OP_SOFTMAX && out[4] == AMP_OP_BCE_WITH_LOGITS
        && out[5] == AMP_OP_CUSTOM && out[6] == AMP_OP_MEAN && out[7] == AMP_OP_RMS_NORM && out[8] == AMP_OP_EMBEDDING
        && out[9] == AMP_OP_POSITION_EMBEDDING && out[10] == AMP_OP_GROUP_NORM);
    out[1] = AMP_OP_RELU;
    CHECK(amp_policy_white_list(&p, out, 1) == 4 && out[0] == AMP_OP_CONV2D && out[1] == AMP_OP_RELU);
    CHECK(amp_policy_white_list(&p, NULL, 0) == 4);
    CHECK(amp_policy_white_list(NULL, out, 1) == 0);
    CHECK(amp_policy_black_list(NULL, out, 1) == 0);
}

static void test_set_rule(void) {
    amp_policy p = policy_of(level_desc(AMP_O1)), before;
    CHECK(amp_policy_set_rule(&p, AMP_OP_RELU, AMP_RULE_FP32) == AMP_OK);
    CHECK(p.rules[AMP_OP_RELU] == AMP_RULE_FP32 && p.reasons[AMP_OP_RELU] == AMP_REASON_RULE);
    CHECK(amp_policy_set_rule(&p, AMP_OP_LINEAR, AMP_RULE_PROMOTE) == AMP_OK);
    CHECK(p.rules[AMP_OP_LINEAR] == AMP_RULE_PROMOTE);
    CHECK(amp_policy_set_rule(&p, AMP_OP_MSE, AMP_RULE_FP32) == AMP_OK);
    CHECK(amp_policy_set_rule(&p, AMP_OP_GELU, AMP_RULE_GRAY) == AMP_OK && p.rules[AMP_OP_GELU] == AMP_RULE_GRAY);
    before = p;
    CHECK(amp_policy_set_rule(&p, AMP_OP_MSE, AMP_RULE_LOW) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(&p, AMP_OP_SOFTMAX_CROSS_ENTROPY, AMP_RULE_FOLLOW) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(&p, (amp_op)AMP_OP_COUNT, AMP_RULE_LOW) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(&p, (amp_op)-1, AMP_RULE_LOW) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(&p, AMP_OP_RELU, (amp_rule)5) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(&p, AMP_OP_RELU, (amp_rule)-1) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(&p, AMP_OP_FLATTEN, AMP_RULE_LOW) == AMP_ERR_POLICY);
    CHECK(amp_policy_set_rule(NULL, AMP_OP_RELU, AMP_RULE_LOW) == AMP_ERR_ARGUMENT);
    CHECK(memcmp(&p, &before, sizeof p) == 0);
}

/* --- names ------------------------------------------------------------------------------------- */

static void test_names(void) {
    static const struct { amp_reason reason; const char* name; } reasons[] = {
        { AMP_REASON_LEVEL, "level list" }, { AMP_REASON_WHITE, "white list" }, { AMP_REASON_BLACK, "black list" },
        { AMP_REASON_RULE, "set by hand" }, { AMP_REASON_KEEP_BN, "keep_batchnorm_fp32" }, { AMP_REASON_REGION, "region" },
        { AMP_REASON_PIN, "pinned" } };
    amp_op op = (amp_op)AMP_OP_COUNT;
    int i;
    for (i = 0; i < OPS; i++) {
        CHECK(strcmp(amp_op_name(table[i].op), table[i].name) == 0);
        CHECK(amp_op_from_name(table[i].name, &op) == 1 && op == table[i].op);
    }
    op = AMP_OP_GELU;
    CHECK(amp_op_from_name("conv3d", &op) == 0 && op == AMP_OP_GELU);
    CHECK(amp_op_from_name("", &op) == 0 && amp_op_from_name(NULL, &op) == 0
          && amp_op_from_name("relu", NULL) == 0);
    CHECK(amp_op_from_name("?", &op) == 0);
    CHECK(strcmp(amp_op_name((amp_op)AMP_OP_COUNT), "?") == 0 && strcmp(amp_op_name((amp_op)-1), "?") == 0);
    CHECK(strcmp(amp_rule_name(AMP_RULE_LOW), "LOW") == 0 && strcmp(amp_rule_name(AMP_RULE_FP32), "FP32") == 0);
    CHECK(strcmp(amp_rule_name(AMP_RULE_PROMOTE), "PROMOTE") == 0
          && strcmp(amp_rule_name(AMP_RULE_FOLLOW), "FOLLOW") == 0);
    CHECK(strcmp(amp_rule_name(AMP_RULE_GRAY), "GRAY") == 0 && strcmp(amp_rule_name((amp_rule)9), "?") == 0);
    CHECK(strcmp(amp_level_name(AMP_O0), "O0") == 0 && strcmp(amp_level_name(AMP_O1), "O1") == 0);
    CHECK(strcmp(amp_level_name(AMP_O2), "O2") == 0 && strcmp(amp_level_name(AMP_O3), "O3") == 0);
    CHECK(strcmp(amp_level_name((amp_level)4), "?") == 0);
    for (i = 0; i < (int)(sizeof reasons / sizeof *reasons); i++)
        CHECK(strcmp(amp_reason_name(reasons[i].reason), reasons[i].name) == 0);
    CHECK(strcmp(amp_reason_name((amp_reason)7), "?") == 0);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_levels);
    TEST(test_no_desc_is_O0);
    TEST(test_styles);
    TEST(test_unknown_values);
    TEST(test_apex_refusals);
    TEST(test_overrides);
    TEST(test_lists);
    TEST(test_list_errors);
    TEST(test_lists_out);
    TEST(test_set_rule);
    TEST(test_names);
    TEST_END();
}
