/* test_checkpoint.c - the safetensors writer and reader, and whole-model checkpoints.
   Files from anywhere must be refused or read correctly, and whatever fails must change nothing. */
#if defined(__unix__) || defined(__APPLE__)
  #define _GNU_SOURCE
  #include <dirent.h>
  #include <errno.h>
  #include <fcntl.h>
  #include <signal.h>
  #include <stdarg.h>
  #include <sys/resource.h>
  #include <sys/stat.h>
  #if defined(__linux__)
    #include <sys/syscall.h>
  #endif
  #include <unistd.h>
  #define HAVE_POSIX 1
#else
  #define HAVE_POSIX 0
#endif
#include <math.h>
#include "small_model.h"

/* --- helpers --------------------------------------------------------------------------- */

static char folder[200] = ".";
static const char* in_folder(const char* name) {
    static char paths[32][300];      /* the last 32 stay valid */
    static int next;
    char* p = paths[next++ % 32];
    snprintf(p, sizeof paths[0], "%s/%s", folder, name);
    return p;
}

static amp_file_desc counting_desc(long fail_at) {
    amp_file_desc d;
    memset(&d, 0, sizeof d);
    d.allocator.alloc = failing_alloc;
    d.allocator.free = failing_free;
    d.logger = &LISTENER;
    fail_at_call(fail_at);
    heard_count = 0;
    heard[0] = 0;
    return d;
}

static amp_file_tensor tensor(const char* name, amp_dtype dtype, void* data, int rank, size_t a, size_t b, size_t c, size_t d) {
    amp_file_tensor t;
    size_t shape[4];
    int k;
    memset(&t, 0, sizeof t);
    shape[0] = a; shape[1] = b; shape[2] = c; shape[3] = d;
    t.tensor.data = data;
    t.tensor.dtype = dtype;
    t.tensor.name = name;
    t.tensor.count = 1;
    t.rank = rank;
    for (k = 0; k < rank && k < 4; k++) {
        t.shape[k] = shape[k];
        t.tensor.count *= shape[k];
    }
    return t;
}

static void write_bytes(const char* path, const void* data, size_t n) {
    FILE* f = fopen(path, "wb");
    CHECK_MSG(f && fwrite(data, 1, n, f) == n, "%s", path);
    if (f) fclose(f);
}
static unsigned char* read_bytes(const char* path, size_t* n) {
    FILE* f = fopen(path, "rb");
    unsigned char* p = NULL;
    *n = 0;
    if (!f) return NULL;
    p = (unsigned char*)malloc(1 << 20);
    *n = fread(p, 1, 1 << 20, f);
    fclose(f);
    return p;
}
static int exists(const char* path) {
    FILE* f = fopen(path, "rb");
    if (f) fclose(f);
    return f != NULL;
}

/* A file of any header and `data` bytes 1, 2, 3, ... */
static void write_file(const char* path, const char* header, size_t header_bytes, size_t data) {
    unsigned char* p = (unsigned char*)calloc(1, 8 + header_bytes + data);
    size_t i;
    for (i = 0; i < 8; i++) p[i] = (unsigned char)((unsigned long long)header_bytes >> (8 * i) & 255);
    memcpy(p + 8, header, header_bytes);
    for (i = 0; i < data; i++) p[8 + header_bytes + i] = (unsigned char)(i + 1);
    write_bytes(path, p, 8 + header_bytes + data);
    free(p);
}

/* --- round trip ------------------------------------------------------------------------ */

static void test_known_bytes(void) {
    static const char expected[] =
        "\xb0\0\0\0\0\0\0\0"
        "{\"__metadata__\":{\"k\":\"a\\u000a\\u0022\",\"amp.crc32.h\":\"77ad5f39\",\"amp.crc32.w\":\"aca16a6a\"},\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"h\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[4,6]}}";
    static const unsigned char data[6] = { 0x00, 0x00, 0x80, 0x3f, 0x01, 0x3c };
    const char* path = in_folder("known.safetensors");
    float one = 1.0f;
    amp_half h = { 0x3c01 };
    amp_file_tensor t[2];
    amp_file_text text = { "k", "a\n\"" };
    size_t n, length = sizeof expected - 1;
    unsigned char* p;
    t[0] = tensor("h", AMP_F16, &h, 0, 0, 0, 0, 0);      /* the writer puts the larger element first */
    t[1] = tensor("w", AMP_DTYPE_DEFAULT, &one, 1, 1, 0, 0, 0);
    CHECK(amp_file_save(path, t, 2, &text, 1, NULL) == AMP_OK);
    p = read_bytes(path, &n);
    CHECK(p && n > length + 6);
    if (!p || n <= length) return;
    CHECK_MSG((n - 6) % 8 == 0 && n - 6 - 8 == p[0] && p[1] == 0, "header of %u bytes", p[0]);
    CHECK(memcmp(p + 8, expected + 8, length - 8) == 0);
    for (; length < n - 6; length++) CHECK(p[length] == ' ');
    CHECK(memcmp(p + n - 6, data, 6) == 0);
    free(p);
}

#define TENSORS 22
static const char* const names[TENSORS] = {
    "conv2d1.weight", "", "a\"b\\c/d", "tab\there\nline\x01\x1f\x7f", "gr\xc3\xbc\xc3\x9f", "\xe6\x95\xb0\xe5\xad\xa6",
    "\xf0\x9d\x84\x9e clef", "{}[]:,", "\\u0041", "dtype", "shape", "__metadata", "x", "y", "z", "X", "w1", "w2", "w3",
    "w4", "w5", "very.long.name.0123456789.0123456789.0123456789.0123456789.0123456789.0123456789.0123456789"
};

/* The text beside a tensor is the CRC-32 of its bytes in the file, the lowest of an element first, here formed bit by
   bit. */
static void check_crc(const char* path, const char* name, const unsigned char* data, size_t n, size_t element) {
    const uint16_t one = 1;
    char key[160], text[16] = "", wanted[24];
    unsigned long crc = 0xfffffffful;
    size_t turned = *(const unsigned char*)&one ? 0 : element - 1;
    size_t i;
    int bit;
    for (i = 0; i < n; i++)
        for (crc ^= data[i ^ turned], bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320ul : 0);
    snprintf(key, sizeof key, "amp.crc32.%s", name);
    snprintf(wanted, sizeof wanted, "%08lx", crc ^ 0xfffffffful);
    CHECK(amp_file_text_of(path, key, text, sizeof text, NULL) == AMP_OK);
    CHECK_MSG(strcmp(text, wanted) == 0, "%s: %s instead of %s", name, text, wanted);
}

static void test_round_trip(void) {
    static const amp_dtype types[5] = { AMP_F32, AMP_F16, AMP_BF16, AMP_F64, AMP_DTYPE_DEFAULT };
    const char* path = in_folder("round.safetensors");
    static unsigned char data[TENSORS][961], back[TENSORS][961];
    amp_file_tensor t[TENSORS], u[TENSORS];
    amp_file_text texts[3] = { { "", "" }, { "format", "pt" }, { "k\xc3\xa9y\n", "\"quoted\" \\ \x02 \xe2\x82\xac" } };
    amp_file_desc d;
    char out[64];
    int i, k, rank;
    for (i = 0; i < TENSORS; i++) {
        for (k = 0; k < (int)sizeof data[0]; k++) data[i][k] = (unsigned char)test_random();
        rank = i % 5;
        t[i] = tensor(names[i], types[i % 4 == 3 ? 3 : (i / 5 + i) % 5], data[i], rank, 2, i % 7 == 4 ? 0 : 3, 5, (size_t)(1 + i % 4));
        u[TENSORS - 1 - i] = t[i];                       /* asked for in another order */
        u[TENSORS - 1 - i].tensor.data = back[i];
    }
    t[4].tensor.data = u[TENSORS - 5].tensor.data = t[4].tensor.count ? t[4].tensor.data : NULL;   /* empty: NULL is fine */
    CHECK(t[4].tensor.count == 0);
    memset(back, 0xa5, sizeof back);
    d = counting_desc(0);
    CHECK_MSG(amp_file_save(path, t, TENSORS, texts, 3, &d) == AMP_OK, "%s", heard);
    CHECK_MSG(amp_file_load(path, u, TENSORS, &d) == AMP_OK, "%s", heard);
    CHECK_MSG(heard_count == 0 && alloc_live == 0, "%d, %ld", heard_count, alloc_live);
    for (i = 0; i < TENSORS; i++) {
        size_t bytes = t[i].tensor.count * amp_dtype_size(t[i].tensor.dtype);
        CHECK_MSG(memcmp(data[i], back[i], bytes) == 0, "tensor %d", i);
        CHECK_MSG(back[i][bytes] == 0xa5, "tensor %d", i);
        check_crc(path, names[i], data[i], bytes, amp_dtype_size(t[i].tensor.dtype));
    }
    for (i = 0; i < 3; i++) {
        size_t n = strlen(texts[i].value);
        CHECK(amp_file_text_of(path, texts[i].key, out, sizeof out, &d) == AMP_OK && strcmp(out, texts[i].value) == 0);
        CHECK(amp_file_text_of(path, texts[i].key, out, n + 1, NULL) == AMP_OK);
        if (n > 0) CHECK(amp_file_text_of(path, texts[i].key, out, n, NULL) == AMP_ERR_FORMAT);
    }
    CHECK(amp_file_text_of(path, "missing", out, sizeof out, NULL) == AMP_ERR_FORMAT);
    memset(back, 0xa5, sizeof back);                     /* a part of the file */
    CHECK(amp_file_load(path, &u[7], 1, NULL) == AMP_OK);
    CHECK(memcmp(data[TENSORS - 8], back[TENSORS - 8], 8) == 0 && back[0][0] == 0xa5);
    CHECK(amp_file_save(path, NULL, 0, NULL, 0, NULL) == AMP_OK);   /* an empty file is a file */
    CHECK(amp_file_load(path, NULL, 0, NULL) == AMP_OK);
    CHECK(amp_file_load(path, &u[7], 1, NULL) == AMP_ERR_FORMAT);
}

/* Thousands of tensors: the work stays n log n, also for names that have long beginnings in common. */
static void test_many(void) {
    enum { MANY = 20000 };
    const char* path = in_folder("many.safetensors");
    amp_file_tensor* t = (amp_file_tensor*)malloc(MANY * sizeof *t);
    char (*name)[40] = (char (*)[40])malloc(MANY * sizeof *name);
    unsigned short* data = (unsigned short*)malloc(MANY * sizeof *data);
    int i, wrong = 0;
    for (i = 0; i < MANY; i++) {
        snprintf(name[i], sizeof name[0], "model.layers.blocks.attention.%05d", (i * 7919) % MANY);
        data[i] = (unsigned short)(i * 3);
        t[i] = tensor(name[i], AMP_F16, &data[i], 0, 0, 0, 0, 0);
    }
    CHECK(amp_file_save(path, t, MANY, NULL, 0, NULL) == AMP_OK);
    memset(data, 0, MANY * sizeof *data);
    CHECK(amp_file_load(path, t, MANY, NULL) == AMP_OK);
    for (i = 0; i < MANY; i++) wrong += data[i] != (unsigned short)(i * 3);
    CHECK_MSG(wrong == 0, "%d", wrong);
    {   /* and one that is written in several pieces */
        static float large[2][200001];
        const char* other = in_folder("large.safetensors");
        amp_file_tensor l = tensor("large", AMP_F32, large[0], 1, 200001, 0, 0, 0);
        for (i = 0; i < 200001; i++) large[0][i] = test_uniform();
        CHECK(amp_file_save(other, &l, 1, NULL, 0, NULL) == AMP_OK);
        check_crc(other, "large", (const unsigned char*)large[0], sizeof large[0], 4);
        l.tensor.data = large[1];
        CHECK(amp_file_load(other, &l, 1, NULL) == AMP_OK && memcmp(large[0], large[1], sizeof large[0]) == 0);
    }
    t[77].tensor.name = name[12345];
    CHECK(amp_file_save(path, t, MANY, NULL, 0, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_file_load(path, t, MANY, NULL) == AMP_ERR_ARGUMENT);
    free(t);
    free(name);
    free(data);
    remove(path);
}

/* --- damaged files --------------------------------------------------------------------- */

#define SENTINEL 0xa5
static unsigned char target_a[24], target_b[4];
static void reset_targets(void) { memset(target_a, SENTINEL, 24); memset(target_b, SENTINEL, 4); }
static int targets_untouched(void) {
    int i;
    for (i = 0; i < 24; i++) if (target_a[i] != SENTINEL) return 0;
    for (i = 0; i < 4; i++) if (target_b[i] != SENTINEL) return 0;
    return 1;
}
static amp_result load_targets(const char* path) {
    amp_file_tensor t[2];
    amp_file_desc d = counting_desc(0);
    t[0] = tensor("a", AMP_F32, target_a, 2, 2, 3, 0, 0);
    t[1] = tensor("b", AMP_F16, target_b, 1, 2, 0, 0, 0);
    reset_targets();
    return amp_file_load(path, t, 2, &d);
}
/* A small file with both targets, a third tensor and a text; its bytes. */
static unsigned char* small_file(const char* path, size_t* n) {
    float a[6] = { 1, 2, 3, -4, 5.5f, 1e-30f };
    amp_half b[2] = { { 0x7c01 }, { 0x8000 } };
    double c = 0.1;
    amp_file_tensor t[3];
    amp_file_text text = { "key", "v\xc3\xa4lue" };
    t[0] = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    t[1] = tensor("b", AMP_F16, b, 1, 2, 0, 0, 0);
    t[2] = tensor("c", AMP_F64, &c, 0, 0, 0, 0, 0);
    CHECK(amp_file_save(path, t, 3, &text, 1, NULL) == AMP_OK);
    return read_bytes(path, n);
}
/* Refused with one sentence and nothing changed. */
static void check_refused_file(amp_result r, const char* what, long number) {
    CHECK_MSG(r == AMP_ERR_FORMAT, "%s %ld: %s (%s)", what, number, amp_result_string(r), heard);
    CHECK_MSG(targets_untouched() && alloc_live == 0, "%s %ld", what, number);
    CHECK_MSG(heard_count == 1 && strncmp(heard, "checkpoint: ", 12) == 0, "%s %ld: %d %s", what, number, heard_count, heard);
}

static void test_truncation(void) {
    const char* path = in_folder("small.safetensors");
    const char* cut = in_folder("cut.safetensors");
    char out[16] = "unchanged";
    size_t n, i;
    unsigned char* p = small_file(path, &n);
    CHECK(load_targets(path) == AMP_OK && !targets_untouched());
    for (i = 0; i < n; i++) {
        write_bytes(cut, p, i);
        check_refused_file(load_targets(cut), "cut at", (long)i);
        CHECK(amp_file_text_of(cut, "key", out, sizeof out, NULL) == AMP_ERR_FORMAT && strcmp(out, "unchanged") == 0);
    }
    p = (unsigned char*)realloc(p, n + 1);
    p[n] = 0;
    write_bytes(cut, p, n + 1);
    check_refused_file(load_targets(cut), "one byte more", 0);
    CHECK(amp_file_text_of(cut, "key", out, sizeof out, NULL) == AMP_ERR_FORMAT && strcmp(out, "unchanged") == 0);
    free(p);
}

/* Every bit of the file: refused, or the damage is in something not asked for and the data is the right one. */
static void test_flips(void) {
    const char* path = in_folder("small.safetensors");
    const char* bad = in_folder("bad.safetensors");
    unsigned char good_a[24], good_b[4];
    size_t n, i;
    long refused = 0, same = 0;
    int bit;
    unsigned char* p = small_file(path, &n);
    CHECK(load_targets(path) == AMP_OK);
    memcpy(good_a, target_a, 24);
    memcpy(good_b, target_b, 4);
    for (i = 0; i < n; i++)
        for (bit = 0; bit <= 8; bit++) {
            unsigned char flip = (unsigned char)(bit < 8 ? 1 << bit : 0xff);
            amp_result r;
            p[i] ^= flip;
            write_bytes(bad, p, n);
            p[i] ^= flip;
            r = load_targets(bad);
            if (r == AMP_OK) {
                same++;
                CHECK_MSG(memcmp(good_a, target_a, 24) == 0 && memcmp(good_b, target_b, 4) == 0, "byte %d", (int)i);
            } else {
                refused++;
                check_refused_file(r, "flip in byte", (long)i);
                CHECK_MSG(i < n - 28 || strstr(heard, "' is damaged: its CRC-32 is "), "byte %d: %s", (int)i, heard);
            }
        }
    CHECK_MSG(refused > 1000 && same > 10, "%ld refused, %ld the same", refused, same);
    free(p);
}

#define A "\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]}"
#define B "\"b\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[24,28]}"
#define AT(type, shape, from, to) "{\"dtype\":\"" type "\",\"shape\":[" shape "],\"data_offsets\":[" #from "," #to "]}"

#define CRCS(one, crc1, two, crc2) \
    "{\"__metadata__\":{\"amp.crc32." one "\":\"" crc1 "\",\"amp.crc32." two "\":\"" crc2 "\"}," A "," B "}"

/* Headers, the bytes of data behind them, and a piece of the sentence with which they are refused ("" = accepted). */
static const struct { const char* header; int data; const char* piece; } hostile[] = {
    { "{" A "," B "}", 28, "" },
    { "{" B "," A "}    ", 28, "" },
    { "{ \"a\" : { \"shape\" : [ 2 , 3 ] ,\t\"data_offsets\":[0,\n24],\"dtype\":\"F32\" }\r, " B "}", 28, "" },
    { "{\"\\u0061\":" AT("\\u00463\\u0032", "2,3", 0, 24) "," B ",\"__metadata__\":{}}", 28, "" },
    { "{" A "," B ",\"e\":" AT("I64", "0,18446744073709551615", 28, 28) "}", 28, "" },
    { "{" A "," B ",\"e\":" AT("F8_E4M3", "1,1,1,1,1,1,4", 28, 32) ",\"f\":" AT("F4", "2", 32, 33) "}", 33, "" },
    { "{" A "," B ",\"\\ud834\\udd1e\":" AT("U8", "1", 28, 29) "}", 29, "" },
    { "{" A "," B ",\"e\":" AT("BOOL", "8", 28, 36) "}", 36, "" },
    /* checksums */
    { CRCS("a", "928e10a3", "b", "a0d3767a"), 28, "" },
    { CRCS("b", "a0d3767a", "c", "none"), 28, "" },
    { CRCS("b", "a0d3767a", "a", "928e11a3"), 28, "tensor 'a' is damaged: its CRC-32 is 928e10a3, the file says 928e11a3" },
    { CRCS("a", "928e10a3", "b", "a0d3767"), 28, "text 'amp.crc32.b' is not eight" },
    { CRCS("0", "no tensor", "b", "a0d3767"), 28, "text 'amp.crc32.b' is not eight" },
    { CRCS("a", "928e10a3", "b", "a0d3767a0"), 28, "text 'amp.crc32.b' is not eight" },
    { CRCS("a", "928E10A3", "b", "a0d3767a"), 28, "text 'amp.crc32.a' is not eight" },
    /* syntax */
    { "[" A "," B "]", 28, "begins with {" },
    { " {" A "," B "}", 28, "begins with {" },
    { "\xef\xbb\xbf{" A "," B "}", 28, "begins with {" },
    { "{}", 28, "goes on after its last tensor" },
    { "{}", 0, "has no tensor 'a'" },
    { "{", 0, "2 to 100000000" },
    { "{{", 0, "'\"' is missing" },
    { "{" A "," B, 28, "',' is missing" },
    { "{" A "," B "}}", 28, "last bracket" },
    { "{" A "," B "}\n", 28, "last bracket" },
    { "{" A "," B "} {}", 28, "last bracket" },
    { "{" A "," B ",}", 28, "'\"' is missing" },
    { "{," A "," B "}", 28, "'\"' is missing" },
    { "{" A ",," B "}", 28, "'\"' is missing" },
    { "{" A " " B "}", 28, "',' is missing" },
    { "{" A "," B "/**/}", 28, "',' is missing" },
    { "{'a':1}", 0, "'\"' is missing" },
    { "{\"a\"" A "}", 24, "':' is missing" },
    { "{\"a\":1}", 0, "'{' is missing" },
    { "{\"a\":null}", 0, "'{' is missing" },
    { "{\"a\":\"F32\"}", 0, "'{' is missing" },
    { "{\"a\":[]}", 0, "'{' is missing" },
    { "{\"a\":{}}", 0, "lacks" },
    { "{\"a\":{\"a\":{\"a\":{\"a\":{}}}}}", 0, "unknown field" },
    { "{\"a\":{\"dtype\":{\"a\":1}}}", 0, "'\"' is missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[[2],3],\"data_offsets\":[0,24]}," B "}", 28, "whole number" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3]}," B "}", 28, "lacks" },
    { "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,24]}," B "}", 28, "lacks" },
    { "{\"a\":{\"shape\":[2,3],\"data_offsets\":[0,24]}," B "}", 28, "lacks" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24],\"x\":1}," B "}", 28, "unknown field" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24],\"shape\":[2,3]}," B "}", 28, "field twice" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24,28]}," B "}", 28, "']' is missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[24]}," B "}", 28, "',' is missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":6,\"data_offsets\":[0,24]}," B "}", 28, "'[' is missing" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2,3,],\"data_offsets\":[0,24]}," B "}", 28, "whole number" },
    { "{\"a\":{\"dtype\":\"F32\",\"shape\":[2 3],\"data_offsets\":[0,24]}," B "}", 28, "',' is missing" },
    /* numbers */
    { "{\"a\":" AT("F32", "2,3.0", 0, 24) "," B "}", 28, "',' is missing" },
    { "{\"a\":" AT("F32", "2,3e0", 0, 24) "," B "}", 28, "',' is missing" },
    { "{\"a\":" AT("F32", "2,-3", 0, 24) "," B "}", 28, "whole number" },
    { "{\"a\":" AT("F32", "2,+3", 0, 24) "," B "}", 28, "whole number" },
    { "{\"a\":" AT("F32", "2,03", 0, 24) "," B "}", 28, "begins with a zero" },
    { "{\"a\":" AT("F32", "2,0x3", 0, 24) "," B "}", 28, "',' is missing" },
    { "{\"a\":" AT("F32", "2,\\\"3\\\"", 0, 24) "," B "}", 28, "whole number" },
    { "{\"a\":" AT("F32", "2,3", 18446744073709551616, 24) "," B "}", 28, "too large" },
    { "{\"a\":" AT("F32", "2,99999999999999999999999999", 0, 24) "," B "}", 28, "too large" },
    { "{\"a\":" AT("F32", "4294967296,4294967296", 0, 24) "," B "}", 28, "too many elements" },
    { "{\"a\":" AT("F32", "4611686018427387910", 0, 24) "," B "}", 28, "do not fit" },      /* 2^62 + 6: times 4 is 24 */
    { "{\"a\":" AT("F32", "18446744073709551615", 0, 24) "," B "}", 28, "do not fit" },
    /* dtypes */
    { "{\"a\":" AT("F33", "2,3", 0, 24) "," B "}", 28, "unknown dtype" },
    { "{\"a\":" AT("f32", "2,3", 0, 24) "," B "}", 28, "unknown dtype" },
    { "{\"a\":" AT("", "2,3", 0, 24) "," B "}", 28, "unknown dtype" },
    { "{\"a\":" AT("I32", "2,3", 0, 24) "," B "}", 28, "is I32 in the file, but f32 in memory" },
    { "{\"a\":" AT("F64", "3", 0, 24) "," B "}", 28, "is f64 in the file, but f32 in memory" },
    { "{" A "," B ",\"e\":" AT("F4", "3", 28, 29) "}", 29, "do not fit" },
    { "{" A "," B ",\"e\":" AT("F4", "3", 28, 30) "}", 30, "do not fit" },
    /* shapes */
    { "{\"a\":" AT("F32", "3,2", 0, 24) "," B "}", 28, "has the shape [3,2] in the file, but [2,3] in memory" },
    { "{\"a\":" AT("F32", "6", 0, 24) "," B "}", 28, "[6] in the file, but [2,3] in memory" },
    { "{\"a\":" AT("F32", "2,3,1", 0, 24) "," B "}", 28, "[2,3,1] in the file" },
    { "{\"a\":" AT("F32", "2,3,1,1,1", 0, 24) "," B "}", 28, "[2,3,1,1,...] in the file" },
    { "{\"a\":" AT("F32", "2,0", 0, 0) ",\"b\":" AT("F16", "2", 0, 4) "}", 4, "[2,0] in the file" },
    /* offsets */
    { "{\"a\":" AT("F32", "2,3", 0, 20) "," B "}", 28, "do not fit" },
    { "{\"a\":" AT("F32", "2,3", 24, 0) "," B "}", 28, "do not fit" },
    { "{\"a\":" AT("F32", "2,3", 4, 28) "," B "}", 28, "hole" },
    { "{" A ",\"b\":" AT("F16", "2", 20, 24) "}", 28, "inside the one before" },
    { "{" A ",\"b\":" AT("F16", "2", 0, 4) "}", 24, "inside the one before" },
    { "{" A ",\"b\":" AT("F16", "2", 26, 30) "}", 30, "hole" },
    { "{" A ",\"b\":" AT("F16", "2", 18446744073709551612, 18446744073709551615) "}", 28, "do not fit" },
    { "{" A ",\"b\":" AT("F16", "2", 18446744073709551611, 18446744073709551615) "}", 28, "hole" },
    { "{" A "," B ",\"e\":" AT("U8", "18446744073709551587", 28, 18446744073709551615) "}", 28, "do not fit" },
    { "{" A "," B ",\"e\":" AT("U8", "1152921504606846975", 28, 1152921504606847003) "}", 99, "truncated" },
    { "{" A "," B "}", 29, "goes on after" },
    { "{" A "," B "}", 27, "truncated" },
    { "{" A "}", 24, "has no tensor 'b'" },
    /* names and texts */
    { "{" A "," A "," B "}", 28, "inside the one before" },
    { "{" A ",\"a\":" AT("F16", "2", 24, 28) "}", 28, "occurs twice" },
    { "{" A ",\"\\u0061\":" AT("F16", "2", 24, 28) "}", 28, "occurs twice" },
    { "{" A "," B ",\"a\":" AT("F16", "0", 28, 28) "}", 28, "'a' occurs twice" },
    { "{" A "," B ",\"a\\u0000\":" AT("U8", "0", 28, 28) "}", 28, "zero character" },
    { "{" A "," B ",\"x\x01\":" AT("U8", "0", 28, 28) "}", 28, "control character" },
    { "{" A "," B ",\"x\n\":" AT("U8", "0", 28, 28) "}", 28, "control character" },
    { "{" A "," B ",\"\\x41\":" AT("U8", "0", 28, 28) "}", 28, "unknown escape" },
    { "{" A "," B ",\"\\u12g4\":" AT("U8", "0", 28, 28) "}", 28, "four hexadecimal" },
    { "{" A "," B ",\"\\u12", 28, "four hexadecimal" },
    { "{" A "," B ",\"\\", 28, "unknown escape" },
    { "{" A "," B ",\"abc", 28, "not closed" },
    { "{" A "," B ",\"\\ud834\":" AT("U8", "0", 28, 28) "}", 28, "surrogate" },
    { "{" A "," B ",\"\\udd1e\":" AT("U8", "0", 28, 28) "}", 28, "surrogate" },
    { "{" A "," B ",\"\\ud834\\ud834\":" AT("U8", "0", 28, 28) "}", 28, "surrogate" },
    { "{" A "," B ",\"\\ud834\\n\":" AT("U8", "0", 28, 28) "}", 28, "surrogate" },
    { "{" A "," B ",\"\x80\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xc0\x80\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xc3\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xe0\x80\x80\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xed\xa0\x80\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xf0\x8f\xbf\xbf\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xf4\x90\x80\x80\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"\xf8\x88\x80\x80\x80\":" AT("U8", "0", 28, 28) "}", 28, "not UTF-8" },
    { "{" A "," B ",\"__metadata__\":{\"a\":1}}", 28, "'\"' is missing" },
    { "{" A "," B ",\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 28, "'\"' is missing" },
    { "{" A "," B ",\"__metadata__\":{\"a\":null}}", 28, "'\"' is missing" },
    { "{" A "," B ",\"__metadata__\":null}", 28, "'{' is missing" },
    { "{" A "," B ",\"__metadata__\":[]}", 28, "'{' is missing" },
    { "{" A "," B ",\"__metadata__\":" AT("F32", "1", 28, 32) "}", 32, "'\"' is missing" },
    { "{" A "," B ",\"__metadata__\":{\"a\":\"b\",}}", 28, "'\"' is missing" },
    { "{" A "," B ",\"__metadata__\":{\"a\" \"b\"}}", 28, "':' is missing" },
    { "{" A "," B ",\"__metadata__\":{\"a\":\"b\"", 28, "',' is missing" },
    { "{" A "," B ",\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}", 28, "occurs twice" },
    { "{\"__metadata__\":{}," A "," B ",\"__metadata__\":{}}", 28, "__metadata__ occurs twice" },
    { "{\"__metadata__\":{}," A "," B ",\"__metadat\\u0061__\":{}}", 28, "__metadata__ occurs twice" }
};

static void test_hostile_headers(void) {
    const char* path = in_folder("hostile.safetensors");
    size_t i;
    for (i = 0; i < sizeof hostile / sizeof hostile[0]; i++) {
        amp_result r;
        write_file(path, hostile[i].header, strlen(hostile[i].header), (size_t)hostile[i].data);
        r = load_targets(path);
        if (!hostile[i].piece[0]) {
            CHECK_MSG(r == AMP_OK, "header %d: %s", (int)i, heard);
            CHECK_MSG(strncmp(hostile[i].header, "{\"b\"", 4) == 0 || target_a[0] == 1 || target_a[3] == 1, "header %d", (int)i);
            continue;
        }
        check_refused_file(r, hostile[i].header, (long)i);
        CHECK_MSG(strstr(heard, hostile[i].piece), "header %d, %s: %s", (int)i, hostile[i].header, heard);
    }
    {   /* a rank that only differs behind the fourth dimension */
        static const char five[] = "{\"a\":" AT("U8", "0,1,1,1,1", 0, 0) ",\"b\":" AT("F16", "1,1,1,1,1", 0, 2) "}";
        amp_file_tensor t = tensor("b", AMP_F16, target_b, 4, 1, 1, 1, 1);
        write_file(path, five, sizeof five - 1, 2);
        CHECK(amp_file_load(path, &t, 1, NULL) == AMP_ERR_FORMAT && targets_untouched());
        CHECK(amp_file_load(path, &t, 0, NULL) == AMP_OK);
    }
    write_file(path, "{\"a\0\":1}", 8, 0);
    check_refused_file(load_targets(path), "zero byte", 0);
}

/* Escapes mean one to four bytes of UTF-8, on both sides of each limit. */
static void test_escapes(void) {
    static const char header[] = "{\"__metadata__\":{\"k\":\"\\u007f\\u0080\\u07FF\\u0800\\uffff\\uD800\\udc00\\udbff\\udfff\\n\\/\"}}";
    const char* path = in_folder("escapes.safetensors");
    char out[40] = "";
    write_file(path, header, sizeof header - 1, 0);
    CHECK(amp_file_text_of(path, "k", out, sizeof out, NULL) == AMP_OK);
    CHECK_MSG(strcmp(out, "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xef\xbf\xbf\xf0\x90\x80\x80\xf4\x8f\xbf\xbf\n/") == 0, "%s", out);
}

/* Header lengths that the file does not have, and large headers of nothing but brackets, quotes or tensors' beginnings. */
static void test_header_lengths(void) {
    static const unsigned long long lengths[] = {
        0, 1, 3, 111, 113, 1000, 99999999, 100000000, 100000001, 0x7fffffff, 0x80000000u, 0xffffffffu, 0x100000000ull,
        0x7fffffffffffffffull, 0x8000000000000000ull, 0xfffffffffffffff7ull, 0xffffffffffffffffull
    };
    static const char* const repeated[] = { "{", "[", "\"", "\\", "{\"", "\"\":\"\",", "{\"a\":", "\"\":{" };
    const char* path = in_folder("length.safetensors");
    const size_t large = 1000000;
    char* header = (char*)malloc(large);
    size_t i, k, n = strlen("{" A "," B "}");
    unsigned char file[300];
    CHECK_MSG(n == 112, "%d", (int)n);
    for (i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        for (k = 0; k < 8; k++) file[k] = (unsigned char)(lengths[i] >> (8 * k) & 255);
        memcpy(file + 8, "{" A "," B "}", n);
        memset(file + 8 + n, 0, 28);
        write_bytes(path, file, 8 + n + 28);
        check_refused_file(load_targets(path), "header length", (long)lengths[i]);
        CHECK_MSG((strstr(heard, "2 to 100000000 are") != NULL) == (lengths[i] < 2 || lengths[i] > 100000000), "%s", heard);
        CHECK_MSG(alloc_bytes < 4000, "%lu bytes for a header that is not there", (unsigned long)alloc_bytes);
    }
    for (i = 0; i < sizeof repeated / sizeof repeated[0]; i++) {
        size_t piece = strlen(repeated[i]);
        for (k = 0; k < large; k++) header[k] = repeated[i][k % piece];
        header[0] = '{';
        write_file(path, header, large, 0);
        check_refused_file(load_targets(path), repeated[i], 0);
        CHECK_MSG(alloc_bytes < 5 * large + 1000, "%s: %lu bytes", repeated[i], (unsigned long)alloc_bytes);
        memcpy(header, "{\"__metadata__\":{\"", 18);
        write_file(path, header, large, 0);
        check_refused_file(load_targets(path), repeated[i], 1);
        CHECK_MSG(alloc_bytes < 5 * large + 1000, "%s: %lu bytes", repeated[i], (unsigned long)alloc_bytes);
    }
    free(header);
    remove(path);
}

/* --- failures around the file ------------------------------------------------------------ */

static void test_memory(void) {
    const char* path = in_folder("small.safetensors");
    char out[16];
    amp_file_tensor t[2];
    amp_file_text text = { "key", "value" };
    amp_file_desc d;
    float a[6] = { 0 };
    unsigned char* before;
    size_t n, m;
    long k;
    amp_result r = AMP_ERR_MEMORY;
    before = small_file(path, &n);
    t[0] = tensor("a", AMP_F32, target_a, 2, 2, 3, 0, 0);
    t[1] = tensor("b", AMP_F16, target_b, 1, 2, 0, 0, 0);
    for (k = 1; r != AMP_OK && k < 50; k++) {
        d = counting_desc(k);
        reset_targets();
        r = amp_file_load(path, t, 2, &d);
        CHECK_MSG(alloc_live == 0, "%ld blocks at call %ld", alloc_live, k);
        if (r == AMP_OK) break;
        CHECK_MSG(r == AMP_ERR_MEMORY && targets_untouched() && heard_count == 1, "load, call %ld: %s", k, heard);
    }
    CHECK_MSG(k == 3, "loading made %ld allocations", k - 1);
    for (k = 1, r = AMP_ERR_MEMORY; r != AMP_OK && k < 50; k++) {
        d = counting_desc(k);
        memcpy(out, "unchanged", 10);
        r = amp_file_text_of(path, "key", out, sizeof out, &d);
        CHECK_MSG(alloc_live == 0, "%ld blocks at call %ld", alloc_live, k);
        if (r != AMP_OK) CHECK(r == AMP_ERR_MEMORY && strcmp(out, "unchanged") == 0 && heard_count == 1);
    }
    t[0].tensor.data = a;
    for (k = 1, r = AMP_ERR_MEMORY; r != AMP_OK && k < 50; k++) {
        unsigned char* after;
        d = counting_desc(k);
        r = amp_file_save(path, t, 1, &text, 1, &d);
        after = read_bytes(path, &m);
        CHECK_MSG(alloc_live == 0, "%ld blocks at call %ld", alloc_live, k);
        if (r != AMP_OK) CHECK(r == AMP_ERR_MEMORY && heard_count == 1 && m == n && memcmp(before, after, n) == 0);
        free(after);
    }
    CHECK_MSG(k == 3, "saving made %ld allocations", k - 2);
    free(before);
}

static void check_save_fails(const char* path, const amp_file_tensor* t, int count, amp_result wanted, const char* what) {
    amp_file_desc d = counting_desc(0);
    amp_result r = amp_file_save(path, t, count, NULL, 0, &d);
    CHECK_MSG(r == wanted && heard_count == 1, "%s: %s, %s", what, amp_result_string(r), heard);
    if (wanted == AMP_ERR_IO) CHECK_MSG(strstr(heard, path) && strstr(heard, ": "), "%s", heard);
}

static void test_disk(void) {
    const char* path = in_folder("small.safetensors");
    float a[6] = { 7, 7, 7, 7, 7, 7 };
    amp_file_tensor t = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    char out[8];
    size_t n;
    free(small_file(path, &n));
    check_save_fails(in_folder("missing/dir/x.safetensors"), &t, 1, AMP_ERR_IO, "no such directory");
    check_save_fails(in_folder("small.safetensors/x"), &t, 1, AMP_ERR_IO, "a file as directory");
    CHECK(load_targets(in_folder("nothing.safetensors")) == AMP_ERR_IO && targets_untouched() && heard_count == 1);
    CHECK_MSG(strstr(heard, "nothing.safetensors"), "%s", heard);
    CHECK(amp_file_text_of(in_folder("nothing.safetensors"), "k", out, sizeof out, NULL) == AMP_ERR_IO);
    CHECK(load_targets(path) == AMP_OK);
}

#if HAVE_POSIX
/* How many files begin with that name. */
static int count_files(const char* begin) {
    DIR* d = opendir(folder);
    struct dirent* e;
    int n = 0;
    while (d && (e = readdir(d)) != NULL) n += strncmp(e->d_name, begin, strlen(begin)) == 0;
    if (d) closedir(d);
    return n;
}

/* After a failed save: the old file is whole and no temporary file is left. */
static void check_old_file(const unsigned char* before, size_t n) {
    size_t m;
    unsigned char* after = read_bytes(in_folder("small.safetensors"), &m);
    CHECK(after && m == n && memcmp(before, after, n) == 0);
    CHECK(count_files("small.") == 1);
    free(after);
}

/* A limit on the size of files, as on a full disk: once for data that fits the stream's buffer, so that only flushing
   finds out, and once half way. */
static void test_file_limit(void) {
    static float a[100000];
    struct rlimit old, small;
    size_t n;
    int i;
    unsigned char* before = small_file(in_folder("small.safetensors"), &n);
    CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
    signal(SIGXFSZ, SIG_IGN);
    for (i = 0; i < 2; i++) {
        amp_file_tensor t = tensor("a", AMP_F32, a, 1, i ? 100000 : 10, 0, 0, 0);
        small = old;
        small.rlim_cur = i ? 8192 : 16;
        CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
        check_save_fails(in_folder("small.safetensors"), &t, 1, AMP_ERR_IO, "file too large");
        CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
        check_old_file(before, n);
    }
    free(before);
}

/* What is not a regular file stays what it is and is not waited for: a directory, a pipe, a link to a pipe. */
static void test_not_a_file(void) {
    static const char* const targets[] = { "taken.safetensors", "pipe.safetensors", "link.safetensors" };
    static const mode_t kinds[] = { S_IFDIR, S_IFIFO, S_IFLNK };
    float a[6] = { 0 };
    amp_file_tensor t = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    struct stat st;
    int i;
    CHECK(mkdir(in_folder(targets[0]), 0700) == 0);
    CHECK(mkfifo(in_folder(targets[1]), 0600) == 0);
    CHECK(symlink("pipe.safetensors", in_folder(targets[2])) == 0);
    alarm(20);
    for (i = 0; i < 3; i++) {
        const char* path = in_folder(targets[i]);
        check_save_fails(path, &t, 1, AMP_ERR_IO, targets[i]);
        CHECK_MSG(strstr(heard, path) && strstr(heard, "not a regular file"), "%s", heard);
        CHECK(lstat(path, &st) == 0 && (st.st_mode & S_IFMT) == kinds[i]);
        CHECK(count_files(targets[i]) == 1);
        CHECK(load_targets(path) == AMP_ERR_IO && heard_count == 1 && targets_untouched());
        CHECK_MSG(strstr(heard, path) && strstr(heard, "not a regular file"), "%s", heard);
    }
    alarm(0);
}

/* A link is replaced by the file, whether there is something behind it or not, and what is behind it stays. */
static void test_links(void) {
    const char* link = in_folder("link.safetensors");
    float a[6] = { 0 };
    amp_file_tensor t = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    struct stat st;
    size_t n;
    unsigned char* before = small_file(in_folder("small.safetensors"), &n);
    unlink(link);
    CHECK(symlink("small.safetensors", link) == 0);
    CHECK(load_targets(link) == AMP_OK);
    CHECK(amp_file_save(link, &t, 1, NULL, 0, NULL) == AMP_OK);
    CHECK(lstat(link, &st) == 0 && S_ISREG(st.st_mode));
    check_old_file(before, n);
    CHECK(unlink(link) == 0 && symlink("nothing.safetensors", link) == 0);
    CHECK(load_targets(link) == AMP_ERR_IO && targets_untouched());
    CHECK(amp_file_save(link, &t, 1, NULL, 0, NULL) == AMP_OK);
    CHECK(lstat(link, &st) == 0 && S_ISREG(st.st_mode) && !exists(in_folder("nothing.safetensors")));
    free(before);
}

/* Whatever lies at a name that can be foreseen: a link is not written through, a pipe not waited for. */
static void test_foreseen_name(void) {
    const char* temporary = in_folder("fresh.safetensors.tmp");
    float a[6] = { 0 };
    amp_file_tensor t = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    size_t n;
    unsigned char* before = small_file(in_folder("small.safetensors"), &n);
    alarm(20);
    CHECK(symlink("small.safetensors", temporary) == 0);
    CHECK(amp_file_save(in_folder("fresh.safetensors"), &t, 1, NULL, 0, NULL) == AMP_OK);
    check_old_file(before, n);
    CHECK(unlink(temporary) == 0 && mkfifo(temporary, 0600) == 0);
    CHECK(amp_file_save(in_folder("fresh.safetensors"), &t, 1, NULL, 0, NULL) == AMP_OK);
    CHECK(unlink(temporary) == 0 && count_files("fresh.") == 1);
    alarm(0);
    free(before);
}

static mode_t mode_after_save(const char* name) {
    float a[6] = { 0 };
    amp_file_tensor t = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    struct stat st;
    CHECK(amp_file_save(in_folder(name), &t, 1, NULL, 0, NULL) == AMP_OK);
    return stat(in_folder(name), &st) == 0 ? st.st_mode & 07777 : 0;
}

/* A new file has the mode that fopen gives; one that replaces another has that one's. */
static void test_modes(void) {
    static const mode_t modes[] = { 0600, 0666, 0440 };
    mode_t mask = umask(027);
    int i;
    CHECK(mode_after_save("mode.safetensors") == 0640);
    for (i = 0; i < 3; i++) {
        CHECK(chmod(in_folder("mode.safetensors"), modes[i]) == 0);
        CHECK_MSG(mode_after_save("mode.safetensors") == modes[i], "%o", (unsigned)modes[i]);
    }
    umask(mask);
}

/* A name of 255 bytes is as long as they get, so the temporary one is cut, not inside a character. */
static void test_long_file_name(void) {
    char name[256];
    size_t i;
    for (i = 0; i < 254; i += 2) memcpy(name + i, "\xc3\xa4", 2);
    name[254] = 'x';
    name[255] = 0;
    CHECK(mode_after_save(name) != 0 && count_files("\xc3\xa4") == 1);
}

/* Of a path that is too long for a sentence both ends are told, of whole characters, and the reason. */
static void test_long_path(void) {
    char path[3000];
    float a[6] = { 0 };
    amp_file_tensor t = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0);
    size_t n, shift;
    for (shift = 0; shift < 9; shift++) {
        amp_file_desc d = counting_desc(0);
        const char* cut;
        n = (size_t)snprintf(path, sizeof path, "%s/%.*s", folder, (int)shift, "abcdefghi");
        while (n < 2900) n += (size_t)snprintf(path + n, sizeof path - n, "/\xc3\xa4\xc3\xa4\xc3\xa4\xc3\xa4");
        snprintf(path + n, sizeof path - n, "/end%.*s.safetensors", (int)(2 * shift), "abcdefghijklmnopq");
        CHECK(amp_file_save(path, &t, 1, NULL, 0, &d) == AMP_ERR_IO && heard_count == 1);
        CHECK_MSG(strstr(heard, ".safetensors': No such file"), "%s", heard);
        CHECK(amp_file_load(path, &t, 1, &d) == AMP_ERR_IO && heard_count == 2);
        CHECK_MSG(strstr(heard, ".safetensors': No such file"), "%s", heard);
        cut = strstr(heard, "...");
        CHECK(strlen(heard) < 400 && cut && (cut[3] & 0xc0) != 0x80 && (cut[-1] == '/' || (cut[-1] & 0xc0) == 0x80));
    }
}
#endif

/* Files in which weights are kept too are told by their first bytes. */
static void test_foreign_files(void) {
    static const struct { const char* head; size_t bytes; const char* told; } files[] = {
        { "PK\3\4\0\0\x08\x08\0\0\0\0", 12, "torch.save" }, { "\x80\x02\x8a\nl\xfc\x9c\x46\xf9\x20\x6a\xa8", 12, "torch.save" },
        { "\x89HDF\r\n\x1a\n\0\0", 10, "HDF5" }, { "\x93NUMPY\1\0v\0", 10, "numpy.save" }, { "GGUF\3\0\0\0\1\0", 10, "GGUF" }
    };
    const char* path = in_folder("foreign.safetensors");
    size_t i;
    for (i = 0; i < sizeof files / sizeof files[0]; i++) {
        write_bytes(path, files[i].head, files[i].bytes);
        CHECK(load_targets(path) == AMP_ERR_FORMAT && targets_untouched() && heard_count == 1);
        CHECK_MSG(strstr(heard, files[i].told) && strstr(heard, "safetensors.torch.save_file"), "%s", heard);
    }
}

/* --- what the system is asked for, and when it fails ------------------------------------------ */

#if HAVE_POSIX && defined(__linux__)
/* These stand in front of the C library's: c an exclusive creation, s a file flushed, r a new name, d a directory
   flushed. The call of that letter fails `fail_times` times. */
static char asked[64];
static char fail_call;
static int fail_times, fail_error;
static mode_t created_mode;
static int fails(char call) {
    size_t n = strlen(asked);
    if (n + 1 < sizeof asked) { asked[n] = call; asked[n + 1] = 0; }
    if (call != fail_call || fail_times == 0) return 0;
    fail_times--;
    errno = fail_error;
    return 1;
}
int open(const char* path, int flags, ...) {
    va_list args;
    mode_t mode = 0;
    va_start(args, flags);
    if (flags & O_CREAT) mode = va_arg(args, mode_t);
    va_end(args);
    if (flags & O_CREAT) created_mode = mode;
    if ((flags & O_CREAT) && (flags & O_EXCL) && fails('c')) return -1;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
int fsync(int fd) {
    struct stat st;
    if (fails(fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? 'd' : 's')) return -1;
    return (int)syscall(SYS_fsync, fd);
}
int rename(const char* from, const char* to) {
    if (fails('r')) return -1;
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

static amp_result save_with(const char* path, char call, int times, int error) {
    static float a[6];
    amp_file_tensor t = tensor("b", AMP_F32, a, 2, 2, 3, 0, 0);
    amp_file_desc d = counting_desc(0);
    amp_result r;
    fail_call = call;
    fail_times = times;
    fail_error = error;
    asked[0] = 0;
    r = amp_file_save(path, &t, 1, NULL, 0, &d);
    fail_call = 0;
    return r;
}

/* The file is on the disk before it has its name, and the name afterwards; what fails leaves no temporary file. */
static void test_order_of_calls(void) {
    static const struct { char call; int times, error; amp_result wanted; const char* asked; int kept; } cases[] = {
        { 0, 0, 0, AMP_OK, "csrd", 0 }, { 'c', 3, EEXIST, AMP_OK, "ccccsrd", 0 }, { 'c', 1, EACCES, AMP_ERR_IO, "c", 1 },
        { 's', 1, EIO, AMP_ERR_IO, "cs", 1 }, { 's', 1, EINVAL, AMP_OK, "csrd", 0 }, { 'r', 1, EACCES, AMP_ERR_IO, "csr", 1 },
        { 'd', 1, EINVAL, AMP_OK, "csrd", 0 }, { 'd', 1, EIO, AMP_ERR_IO, "csrd", 0 }
    };
    const char* path = in_folder("small.safetensors");
    char here[2000];
    size_t i, n;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char* before = small_file(path, &n);
        amp_result r = save_with(path, cases[i].call, cases[i].times, cases[i].error);
        CHECK_MSG(r == cases[i].wanted && heard_count == (r != AMP_OK), "%d: %s", (int)i, heard);
        CHECK_MSG(strcmp(asked, cases[i].asked) == 0, "%d: %s", (int)i, asked);
        if (r != AMP_OK) CHECK_MSG(strstr(heard, strerror(cases[i].error)), "%s", heard);
        if (cases[i].kept) check_old_file(before, n);
        CHECK(count_files("small.") == 1 && (load_targets(path) == AMP_OK) == cases[i].kept);
        free(before);
    }
    CHECK(save_with(path, 'c', -1, EEXIST) == AMP_ERR_IO && heard_count == 1);     /* not for ever */
    CHECK(chmod(path, 0600) == 0 && save_with(path, 0, 0, 0) == AMP_OK);         /* at no moment open to more */
    CHECK_MSG(created_mode == 0600, "%o", (unsigned)created_mode);
    CHECK(getcwd(here, sizeof here) && chdir(folder) == 0);                      /* no slash: the directory is "." */
    CHECK(save_with("small.safetensors", 0, 0, 0) == AMP_OK && strcmp(asked, "csrd") == 0);
    CHECK(chdir(here) == 0);
}
#endif

static void test_arguments(void) {
    const char* path = in_folder("arguments.safetensors");
    static float a[6];
    amp_file_tensor good = tensor("a", AMP_F32, a, 2, 2, 3, 0, 0), t[2];
    amp_file_text texts[2] = { { "k", "v" }, { "k", "w" } };
    amp_file_desc d;
    int i;
    static const struct { const char* what; amp_result wanted; } cases[] = {
        { "NULL name", AMP_ERR_ARGUMENT }, { "name not UTF-8", AMP_ERR_ARGUMENT }, { "reserved name", AMP_ERR_ARGUMENT },
        { "dtype", AMP_ERR_DTYPE }, { "rank 5", AMP_ERR_ARGUMENT }, { "rank -1", AMP_ERR_ARGUMENT },
        { "count", AMP_ERR_ARGUMENT }, { "NULL data", AMP_ERR_ARGUMENT }, { "elements overflow", AMP_ERR_ARGUMENT },
        { "bytes overflow", AMP_ERR_ARGUMENT }, { "name twice", AMP_ERR_ARGUMENT }
    };
    for (i = 0; i < (int)(sizeof cases / sizeof cases[0]); i++) {
        t[0] = t[1] = good;
        t[1].tensor.name = "b";
        switch (i) {
            case 0: t[1].tensor.name = NULL; break;
            case 1: t[1].tensor.name = "\xff"; break;
            case 2: t[1].tensor.name = "__metadata__"; break;
            case 3: t[1].tensor.dtype = AMP_I64; break;
            case 4: t[1].rank = 5; break;
            case 5: t[1].rank = -1; break;
            case 6: t[1].tensor.count = 5; break;
            case 7: t[1].tensor.data = NULL; break;
            case 8: t[1].shape[0] = (size_t)-1; t[1].tensor.count = (size_t)-1 * 3; break;
            case 9: t[1].shape[0] = (size_t)-1 / 4 + 1; t[1].shape[1] = 1; t[1].tensor.count = t[1].shape[0]; break;
            default: t[1].tensor.name = "a"; break;
        }
        check_save_fails(path, t, 2, cases[i].wanted, cases[i].what);
        if (i < 10) {
            d = counting_desc(0);
            CHECK_MSG(amp_file_load(path, t, 2, &d) == cases[i].wanted && heard_count == 1, "%s", cases[i].what);
            CHECK_MSG(i != 3 || strstr(heard, "tensor 'b': i64 (7) is not f32, f16, bf16 or f64"), "%s", heard);
        }
    }
    CHECK(!exists(path));
    check_save_fails(NULL, &good, 1, AMP_ERR_ARGUMENT, "NULL path");
    check_save_fails("", &good, 1, AMP_ERR_ARGUMENT, "empty path");
    check_save_fails(path, NULL, 1, AMP_ERR_ARGUMENT, "NULL tensors");
    check_save_fails(path, &good, -1, AMP_ERR_ARGUMENT, "negative count");
    CHECK(amp_file_save(path, &good, 1, texts, 2, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_file_save(path, &good, 1, NULL, 1, NULL) == AMP_ERR_ARGUMENT);
    texts[1].key = NULL;
    CHECK(amp_file_save(path, &good, 1, texts, 2, NULL) == AMP_ERR_ARGUMENT);
    texts[1].key = "l";
    texts[1].value = "\xc3";
    CHECK(amp_file_save(path, &good, 1, texts, 2, NULL) == AMP_ERR_ARGUMENT);
    texts[1].key = "amp.crc32.l";
    texts[1].value = "01234567";
    d = counting_desc(0);
    CHECK(amp_file_save(path, &good, 1, texts, 2, &d) == AMP_ERR_ARGUMENT && heard_count == 1);
    CHECK_MSG(strstr(heard, "amp.crc32. are reserved"), "%s", heard);
    CHECK(amp_file_text_of(path, NULL, (char*)a, 8, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_file_text_of(path, "k", NULL, 8, NULL) == AMP_ERR_ARGUMENT);
    CHECK(amp_file_text_of(path, "k", (char*)a, 0, NULL) == AMP_ERR_ARGUMENT);
    d = counting_desc(0);
    d.allocator.free = NULL;
    CHECK(amp_file_save(path, &good, 1, NULL, 0, &d) == AMP_ERR_DESC && heard_count == 1);
    CHECK(amp_file_load(path, &good, 1, &d) == AMP_ERR_DESC && heard_count == 2);
    CHECK(!exists(path));
}

/* --- models ------------------------------------------------------------------------------ */

typedef struct model_options {
    amp_level level;
    amp_dtype low;
    int hidden, accumulate, layers, scaler_interval;
    float lr;
    int maximize;
    amp_optimizer_kind kind;
    unsigned long long seed;
    float dropout;
    int pinned;                    /* the dense layers' ReLUs run in FP32 */
    int groups;                    /* of the optimizer; the last layer is in the last one */
    int vectors;                   /* 1 = biases and norms are in the first one */
    int split;                     /* masters */
    amp_dtype moments;
    const amp_optimizer_desc* own; /* optimizer of group 1 */
} model_options;
static const model_options usual = { AMP_O1, AMP_F16, 12, 1, 1, 3, 0.01f, 0, AMP_ADAMW, 5, 0.25f, 0, 0, 0, 0, AMP_F32, NULL };

/* A small net with everything that has state: masters, moments, running statistics, dropout, a scaler that moves. */
static amp_model* make_model(const model_options* o) {
    amp_model_desc d;
    amp_scaler_desc s;
    amp_conv2d_desc conv;
    amp_param_group groups[3];
    amp_model* m;
    amp_value x;
    int i;
    memset(&d, 0, sizeof d);
    memset(groups, 0, sizeof groups);
    groups[1].lr = 0.25f;
    groups[2].frozen = 1;
    groups[1].optimizer = o->own;
    d.optimizer.groups = groups;
    d.optimizer.group_count = o->groups;
    memset(&s, 0, sizeof s);
    memset(&conv, 0, sizeof conv);
    s.init_scale = 1024.0f;
    s.growth_interval = o->scaler_interval;
    d.batch = 8;
    d.precision.level = o->level;
    d.precision.low_dtype = o->low;
    d.scaler = &s;
    d.optimizer.kind = o->kind;
    d.split_masters = o->split;
    d.moment_dtype = o->moments;
    d.optimizer.lr = o->lr;
    d.optimizer.maximize = o->maximize;
    d.optimizer.schedule.warmup_steps = 10;
    d.accumulate = o->accumulate;
    d.seed = o->seed;
    d.allocator.alloc = failing_alloc;
    d.allocator.free = failing_free;
    d.logger = LISTENER;
    if (amp_model_create(&m, &d) != AMP_OK) return NULL;
    conv.out_channels = 3;
    conv.kernel = 3;
    conv.no_bias = 1;
    x = amp_conv2d_with(m, amp_input(m, 1, 6, 6), &conv);
    x = amp_relu(m, amp_batch_norm(m, x));
    for (i = 0; i < o->layers; i++) {
        x = amp_relu(m, amp_linear(m, x, o->hidden));
        if (o->pinned) amp_pin(m, x, AMP_F32);
        x = amp_dropout(m, x, o->dropout);
    }
    x = amp_linear(m, x, 4);
    if (o->groups) amp_group(m, x, o->groups - 1);
    if (o->vectors) amp_group_vectors(m, 0);
    amp_softmax_cross_entropy(m, x);
    if (amp_model_finalize(m) == AMP_OK) return m;
    printf("%s\n", amp_model_error(m));
    amp_model_destroy(m);
    return NULL;
}

/* Steps first .. first + count - 1 of a fixed stream of batches; returns the sum of the losses. */
static double train(amp_model* m, int first, int count) {
    static float images[8 * 36];
    int32_t labels[8];
    amp_batch batch;
    amp_step_info info;
    double sum = 0.0;
    int step, i;
    memset(&batch, 0, sizeof batch);
    batch.n = 8;
    batch.inputs[0] = images;
    batch.targets[0] = labels;
    for (step = first; step < first + count; step++) {
        test_seed = 1000ull + (unsigned)step;
        for (i = 0; i < 8; i++) labels[i] = (int32_t)(test_random() % 4);
        for (i = 0; i < 8 * 36; i++) images[i] = test_uniform() + (float)labels[i / 36];
        CHECK_MSG(amp_train_step(m, &batch, &info) == AMP_OK, "%s", amp_model_error(m));
        sum += (double)info.loss;
    }
    return sum;
}

/* All that is known of a model through its public parts: equal bits? */
static int same_models(amp_model* a, amp_model* b) {
    static float images[8 * 36], out_a[64], out_b[64];
    amp_batch batch;
    amp_param *p, *q;
    amp_eval_info ea, eb;
    int32_t labels[8] = { 0, 1, 2, 3, 0, 1, 2, 3 };
    int i, n, k, same;
    p = amp_model_params(a, &n);
    q = amp_model_params(b, &k);
    same = n == k && n > 0;
    for (i = 0; same && i < n; i++) {
        size_t count = p[i].count;
        same = count == q[i].count;
        if (p[i].master) same = same && memcmp(p[i].master, q[i].master, 4 * count) == 0;
        if (p[i].low) same = same && memcmp(p[i].low, q[i].low, 2 * count) == 0;
        if (p[i].rest) same = same && memcmp(p[i].rest, q[i].rest, 2 * count) == 0;
        if (p[i].m) same = same && memcmp(p[i].m, q[i].m, amp_dtype_size(p[i].moment_dtype) * count) == 0;
        if (p[i].v) same = same && memcmp(p[i].v, q[i].v, amp_dtype_size(p[i].moment_dtype) * count) == 0;
    }
    same = same && memcmp(&amp_model_scaler(a)->state, &amp_model_scaler(b)->state, sizeof(amp_scaler_state)) == 0;
    same = same && memcmp(&amp_model_optimizer(a)->state, &amp_model_optimizer(b)->state, sizeof(amp_optimizer_state)) == 0;
    memset(&batch, 0, sizeof batch);
    for (i = 0; i < 8 * 36; i++) images[i] = (float)(i % 13) - 6.0f;
    batch.n = 8;
    batch.inputs[0] = images;
    batch.targets[0] = labels;
    memset(out_a, 0, sizeof out_a);
    memset(out_b, 0, sizeof out_b);
    same = same && amp_evaluate(a, &batch, &ea) == AMP_OK && amp_evaluate(b, &batch, &eb) == AMP_OK;   /* running statistics */
    return same && memcmp(&ea.loss, &eb.loss, sizeof ea.loss) == 0 && ea.correct == eb.correct;
}

static void check_resume(const model_options* o, const char* what) {
    const char* path = in_folder("model.safetensors");
    amp_model *a = make_model(o), *b = make_model(o);
    double loss_a, loss_b;
    CHECK_MSG(a && b, "%s", what);
    if (!a || !b) return;
    train(a, 0, 7 * (o->accumulate ? o->accumulate : 1));
    CHECK_MSG(!same_models(a, b), "%s", what);
    CHECK_MSG(amp_checkpoint_save(a, path) == AMP_OK, "%s: %s", what, amp_model_error(a));
    loss_a = train(a, 100, 6);
    train(b, 50, 2 * (o->accumulate ? o->accumulate : 1));          /* whatever it did before does not matter */
    CHECK_MSG(amp_checkpoint_load(b, path) == AMP_OK, "%s: %s", what, amp_model_error(b));
    loss_b = train(b, 100, 6);
    CHECK_MSG(memcmp(&loss_a, &loss_b, sizeof loss_a) == 0, "%s: %g, %g", what, loss_a, loss_b);
    CHECK_MSG(same_models(a, b), "%s", what);
    amp_model_destroy(a);
    amp_model_destroy(b);
    CHECK_MSG(alloc_live == 0, "%s: %ld blocks", what, alloc_live);
}

#if HAVE_POSIX
static amp_result no_data(amp_batch* batch, const int64_t* indices, void* user_data) {
    (void)batch; (void)indices; (void)user_data;
    CHECK(count_files("best.") == *(int*)user_data);
    return AMP_ERR_IO;
}
/* amp_fit tries its best_path before the first step: no file is there afterwards, and an old one keeps its bytes. */
static void test_trial(void) {
    const char* path = in_folder("best.safetensors");
    amp_model* m = make_model(&usual);
    amp_fit_desc f;
    amp_data data;
    size_t n, k;
    int files = 0;
    unsigned char *before, *after;
    CHECK(m != NULL);
    if (!m) return;
    memset(&f, 0, sizeof f);
    memset(&data, 0, sizeof data);
    data.count = 8; data.read = no_data; data.user_data = &files;
    f.best_path = path;
    CHECK(amp_fit(m, &data, &f, NULL) == AMP_ERR_IO && strstr(heard, "read") && count_files("best.") == 0);
    CHECK(amp_checkpoint_save(m, path) == AMP_OK);
    before = read_bytes(path, &n);
    train(m, 0, 3);                /* what would be saved now is another file */
    files = 1;
    CHECK(amp_fit(m, &data, &f, NULL) == AMP_ERR_IO && strstr(heard, "read") && count_files("best.") == 1);
    after = read_bytes(path, &k);
    CHECK(n == k && memcmp(before, after, n) == 0);
    free(before); free(after);
    CHECK(mkdir(in_folder("best.folder"), 0700) == 0);
    f.best_path = in_folder("best.folder");
    CHECK(amp_fit(m, &data, &f, NULL) == AMP_ERR_IO && strstr(heard, "not a regular file"));
    amp_model_destroy(m);
}
#endif

static void test_resume(void) {
    static const amp_level levels[4] = { AMP_O0, AMP_O1, AMP_O2, AMP_O3 };
    model_options o = usual;
    char what[40];
    int i, kind;
    fail_at_call(0);
    for (i = 0; i < 4; i++)
        for (kind = AMP_SGD; kind <= AMP_RMSPROP; kind++) {
            o.level = levels[i];
            o.kind = (amp_optimizer_kind)kind;
            snprintf(what, sizeof what, "O%d, optimizer %d", i, kind);
            check_resume(&o, what);
        }
    o = usual;
    o.low = AMP_BF16;
    check_resume(&o, "bf16");
    o.accumulate = 2;
    check_resume(&o, "accumulate");
}

/* A model whose last layer has an optimizer of its own: fewer moments, and a file that only its like loads. */
static void test_group_with_optimizer(void) {
    const char* path = in_folder("model.safetensors");
    amp_optimizer_desc own;
    model_options o = usual;
    amp_model *m, *other;
    amp_param* p;
    int count;
    memset(&own, 0, sizeof own);
    own.lr = 0.125f;
    o.groups = 2;
    o.own = &own;
    check_resume(&o, "SGD beside AdamW");
    own.momentum = 0.5f;
    check_resume(&o, "momentum beside AdamW");
    own.momentum = 0;
    m = make_model(&o);
    o.own = NULL;
    other = make_model(&o);
    CHECK(m && other);
    if (!m || !other) return;
    p = amp_model_params(m, &count);
    CHECK(p[0].m && p[0].v && p[count - 1].group == 1 && !p[count - 1].m && !p[count - 1].v);
    CHECK(amp_model_optimizer(m)->groups[1].lr == 0.25f);              /* the group's, before its optimizer's */
    train(m, 0, 4);
    CHECK(amp_checkpoint_save(m, path) == AMP_OK);
    CHECK(amp_checkpoint_load(other, path) == AMP_ERR_FORMAT);
    CHECK_MSG(strstr(heard, "amp.group1.optimizer is 1 in the file, but 0 in the model"), "%s", heard);
    amp_model_destroy(m); amp_model_destroy(other);
}

/* Split masters are FP32 in a file: one that is whole loads it, and writes the same file; so it goes back. Moments keep
   their type. */
static void test_split_masters(void) {
    static const amp_level levels[2] = { AMP_O1, AMP_O2 };
    const char *path = in_folder("model.safetensors"), *again = in_folder("again.safetensors");
    model_options o = usual;
    int k, i, count;
    o.low = AMP_BF16;
    for (k = 0; k < 2; k++) {
        amp_model *split, *whole, *back;
        amp_param *p, *q;
        unsigned char *bytes, *others;
        size_t n = 0, m = 0;
        o.level = levels[k];
        o.hidden = k ? 1500 : 12;                                   /* more than a chunk of the file */
        o.split = 1;
        check_resume(&o, "split masters");
        o.moments = AMP_BF16;
        check_resume(&o, "split masters, moments in bf16");
        o.moments = AMP_F32;
        split = make_model(&o); back = make_model(&o);
        o.split = 0;
        whole = make_model(&o);
        CHECK(split && whole && back);
        if (!split || !whole || !back) return;
        train(split, 0, 9);
        train(back, 3, 2);
        p = amp_model_params(split, &count);
        q = amp_model_params(whole, NULL);
        CHECK(p[3].rest && !p[3].master && p[3].low && q[3].master && !q[3].rest);
        CHECK(amp_checkpoint_save(split, path) == AMP_OK);
        CHECK_MSG(amp_checkpoint_load(whole, path) == AMP_OK, "%s", amp_model_error(whole));
        for (i = 0; i < count; i++) {
            static float w[2][75000];
            CHECK(p[i].count <= 75000 && amp_model_read_param(split, &p[i], w[0]) == AMP_OK);
            CHECK(amp_model_read_param(whole, &q[i], w[1]) == AMP_OK);
            CHECK_MSG(memcmp(w[0], w[1], 4 * p[i].count) == 0, "%s", p[i].name);
        }
        CHECK(amp_checkpoint_save(whole, again) == AMP_OK);
        bytes = read_bytes(path, &n);
        others = read_bytes(again, &m);
        CHECK(n == m && n > 0 && memcmp(bytes, others, n) == 0);
        free(bytes); free(others);
        CHECK(amp_checkpoint_load(back, again) == AMP_OK);
        train(split, 100, 2);
        train(back, 100, 2);
        CHECK(same_models(split, back));
        CHECK(amp_checkpoint_save(split, again) == AMP_OK);
        train(back, 3, 2);
        CHECK(amp_checkpoint_load_weights(back, again, &i) == AMP_OK && i >= count);
        for (i = 0; i < count; i++)
            CHECK(!p[i].rest || memcmp(p[i].rest, amp_model_params(back, NULL)[i].rest, 2 * p[i].count) == 0);
        o.moments = AMP_BF16;
        amp_model_destroy(back);
        back = make_model(&o);
        CHECK(amp_checkpoint_load(back, again) == AMP_ERR_FORMAT && strstr(heard, "is f32 in the file, but bf16 in the model"));
        o.moments = AMP_F32;
        amp_model_destroy(split); amp_model_destroy(whole); amp_model_destroy(back);
    }
}

/* A graph's number is for good: checkpoints of earlier versions go on. */
static void test_known_graph(void) {
    const char* path = in_folder("model.safetensors");
    amp_model* m = make_model(&usual);
    char text[24] = "";
    CHECK(m && amp_checkpoint_save(m, path) == AMP_OK);
    CHECK(amp_file_text_of(path, "amp.graph", text, sizeof text, NULL) == AMP_OK);
    CHECK_MSG(strcmp(text, "6405490425643470313") == 0, "amp.graph is %s: files of before are refused. Numbers of operators "
              "stand in it: a new row belongs at the end of AMP_OP_LIST", text);
    amp_model_destroy(m);
}

/* Files of models that differ in one thing, each with a piece of the sentence. */
static void test_foreign_models(void) {
    const char* path = in_folder("model.safetensors");
    static const char* const pieces[] = {
        "linear1.weight' has the shape [4,48] in the file, but [13,48] in the model", "has no tensor 'linear4.weight'",
        "tensor 'linear3.", 
        "amp.optimizer is", "amp.maximize is 0 in the file, but 1 in the model", "amp.level is", "amp.seed is",
        "amp.accumulate is", "other layers, types or settings", "other layers, types or settings", ""
    };
    model_options o;
    amp_model *a, *b, *untouched;
    int i;
    o = usual;
    o.layers = 2;
    o.hidden = 4;
    for (i = 0; i < (int)(sizeof pieces / sizeof pieces[0]); i++) {
        model_options other = o;
        switch (i) {
            case 0: other.hidden = 13; break;
            case 1: other.layers = 3; break;
            case 2: other.layers = 1; break;
            case 3: other.kind = AMP_LAMB; break;
            case 4: other.maximize = 1; break;
            case 5: other.level = AMP_O2; break;
            case 6: other.seed = 6; break;
            case 7: other.accumulate = 2; break;
            case 8: other.dropout = 0.5f; break;
            case 9: other.pinned = 1; break;
            default: other.scaler_interval = 4; break;
        }
        a = make_model(&o);
        b = make_model(&other);
        untouched = make_model(&other);
        CHECK(a && b && untouched);
        if (!a || !b || !untouched) return;
        train(a, 0, 3);
        train(b, 0, 2);
        train(untouched, 0, 2);
        CHECK(amp_checkpoint_save(a, path) == AMP_OK);
        heard_count = 0;
        CHECK_MSG(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT, "case %d: %s", i, amp_model_error(b));
        CHECK_MSG(strstr(amp_model_error(b), pieces[i]) && heard_count == 1, "case %d: %s", i, amp_model_error(b));
        CHECK_MSG(same_models(b, untouched), "case %d", i);
        CHECK_MSG(memcmp(heard, amp_model_error(b), 10) == 0, "case %d: %s", i, heard);
        train(b, 2, 2);
        train(untouched, 2, 2);
        CHECK_MSG(same_models(b, untouched), "case %d, two steps later", i);
        amp_model_destroy(a);
        amp_model_destroy(b);
        amp_model_destroy(untouched);
    }
}

/* The optimizer's settings may differ: the model keeps its own, goes on with the file's state, and its logger hears of it. */
static void test_foreign_settings(void) {
    static const char* const keys[] = { "momentum", "dampening", "nesterov", "beta1", "beta2", "eps", "weight_decay", "clip_norm",
                                        "schedule", "schedule.warmup_steps", "schedule.total_steps",
                                        "schedule.step_size", "schedule.gamma", "schedule.floor" };
    const char* path = in_folder("model.safetensors");
    const char* piece = "amp.clip_norm is 0 in the file, but 0.5 in the model, which keeps its own";
    char key[64];
    amp_model *a = make_model(&usual), *b = make_model(&usual);
    int i;
    if (!a || !b) { CHECK(a && b); return; }
    train(a, 0, 3);
    CHECK(amp_checkpoint_save(a, path) == AMP_OK);
    for (i = 0; i < (int)(sizeof keys / sizeof keys[0]); i++) {
        amp_optimizer_desc *d = &amp_model_optimizer(b)->desc, saved = *d, mine;
        switch (i) {
            case 0: d->momentum = 0.5f; break;
            case 1: d->dampening = 0.5f; break;
            case 2: d->nesterov = 1; break;
            case 3: d->beta1 = 0.5f; break;
            case 4: d->beta2 = 0.5f; break;
            case 5: d->eps = 0.5f; break;
            case 6: d->weight_decay = 0.5f; break;
            case 7: d->clip_norm = 0.5f; break;
            case 8: d->schedule.kind = AMP_SCHEDULE_COSINE; break;
            case 9: d->schedule.warmup_steps = 7; break;
            case 10: d->schedule.total_steps = 7; break;
            case 11: d->schedule.step_size = 7; break;
            case 12: d->schedule.gamma = 0.5f; break;
            default: d->schedule.floor = 0.5f; break;
        }
        mine = *d;
        snprintf(key, sizeof key, "amp.%s is ", keys[i]);
        heard_count = 0;
        amp_model_optimizer(b)->state.step = 0;
        CHECK_MSG(amp_checkpoint_load(b, path) == AMP_OK, "%s: %s", keys[i], amp_model_error(b));
        CHECK_MSG(heard_count == 1 && heard_code == AMP_OK && strstr(heard, key), "%s: %d, %s", keys[i], heard_count, heard);
        CHECK_MSG(i != 7 || strstr(heard, piece), "%s", heard);
        CHECK_MSG(memcmp(d, &mine, sizeof mine) == 0 && amp_model_optimizer(b)->state.step == 3, "%s", keys[i]);
        *d = saved;
    }
    CHECK(amp_model_error(b)[0] == 0);              /* a sentence beside success is no error */
    heard_count = 0;
    CHECK(amp_checkpoint_load(b, path) == AMP_OK && heard_count == 0);
    amp_model_optimizer(b)->desc.clip_norm = 0.5f;
    amp_model_optimizer(b)->desc.maximize = 1;
    CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT && heard_count == 1);        /* the refusal alone is told */
    amp_model_destroy(a);
    amp_model_destroy(b);
}

/* Two characters more, or fewer, right behind a piece of the header. */
static void write_stretched(const char* path, const unsigned char* p, size_t n, const char* piece, int fewer) {
    unsigned char* q = (unsigned char*)malloc(n + 2);
    size_t at = 8, length = strlen(piece), header = p[0] + 256u * p[1];
    while (at + length < n && memcmp(p + at, piece, length) != 0) at++;
    CHECK_MSG(q && at + length < 8 + header, "%s", piece);
    at += length;
    memcpy(q, p, at);
    memset(q + at, '0', 2);
    memcpy(q + (fewer ? at : at + 2), p + (fewer ? at + 2 : at), n - at - (fewer ? 2 : 0));
    header = fewer ? header - 2 : header + 2;
    q[0] = (unsigned char)(header & 255);
    q[1] = (unsigned char)(header >> 8);
    write_bytes(path, q, fewer ? n - 2 : n + 2);
    free(q);
}
static void test_wrong_lengths(void) {
    const char* path = in_folder("model.safetensors");
    const char* bad = in_folder("bad.safetensors");
    amp_model *a = make_model(&usual), *b = make_model(&usual), *before = make_model(&usual);
    size_t n;
    unsigned char* p;
    int fewer;
    if (!a || !b || !before) { CHECK(a && b && before); return; }
    train(a, 0, 3);
    CHECK(amp_checkpoint_save(a, path) == AMP_OK);
    p = read_bytes(path, &n);
    for (fewer = 0; fewer < 2; fewer++) {
        write_stretched(bad, p, n, "\"amp.lr\":\"", fewer);
        CHECK_MSG(amp_checkpoint_load(b, bad) == AMP_ERR_FORMAT && strstr(amp_model_error(b), "malformed"), "%s", amp_model_error(b));
        write_stretched(bad, p, n, "\"amp.scaler\":\"", fewer);
        CHECK_MSG(amp_checkpoint_load(b, bad) == AMP_ERR_FORMAT && strstr(amp_model_error(b), "malformed"), "%s", amp_model_error(b));
    }
    CHECK(same_models(b, before));
    free(p);
    amp_model_destroy(a);
    amp_model_destroy(b);
    amp_model_destroy(before);
}

/* The base learning rate is part of the state: changed by hand before saving, it comes back. */
static void test_learning_rate(void) {
    const char* path = in_folder("model.safetensors");
    amp_model *a = make_model(&usual), *b = make_model(&usual);
    if (!a || !b) { CHECK(a && b); return; }
    CHECK(amp_optimizer_set_lr(amp_model_optimizer(a), 0.0625f) == AMP_OK);
    CHECK(amp_checkpoint_save(a, path) == AMP_OK && amp_checkpoint_load(b, path) == AMP_OK);
    CHECK(amp_model_optimizer(b)->state.lr == 0.0625f && heard_code == AMP_OK);
    CHECK_MSG(strstr(heard, "amp.lr is 0.0625 in the file, but ") && strstr(heard, "takes the file's"), "%s", heard);
    amp_model_destroy(a);
    amp_model_destroy(b);
}

/* So are the groups' own rates; their weight decay is a setting of the model's, and their number must agree. */
static void test_group_rates(void) {
    const char* path = in_folder("model.safetensors");
    model_options o = usual;
    amp_model *a, *b, *other;
    amp_optimizer* of;
    unsigned char* p;
    size_t n, at = 0;
    o.groups = 3;
    a = make_model(&o);
    b = make_model(&o);
    o.groups = 2;
    other = make_model(&o);
    if (!a || !b || !other) { CHECK(a && b && other); return; }
    amp_model_optimizer(a)->groups[0].frozen = 1;
    amp_model_optimizer(a)->groups[0].lr = (float)AMP_ZERO;
    amp_model_optimizer(a)->groups[1].lr = 0.0625f;
    amp_model_optimizer(a)->groups[2].lr = 0.125f;
    amp_model_optimizer(a)->groups[2].frozen = 0;
    CHECK(amp_checkpoint_save(a, path) == AMP_OK && amp_checkpoint_load(b, path) == AMP_OK);
    of = amp_model_optimizer(b);
    CHECK(of->groups[0].lr == (float)AMP_ZERO && of->groups[1].lr == 0.0625f && of->groups[2].lr == 0.125f);
    CHECK(of->groups[0].frozen == 1 && of->groups[1].frozen == 0 && of->groups[2].frozen == 0);
    CHECK(amp_checkpoint_load(other, path) == AMP_ERR_FORMAT);
    CHECK_MSG(strstr(amp_model_error(other), "amp.groups is 3 in the file, but 2"), "%s", amp_model_error(other));
    o.groups = 3; o.vectors = 1;
    amp_model_destroy(other);
    other = make_model(&o);
    CHECK(other && amp_checkpoint_load(other, path) == AMP_ERR_FORMAT);
    CHECK_MSG(strstr(amp_model_error(other), "other layers, types or settings"), "%s", amp_model_error(other));
    of->groups[1].weight_decay = 0.5f;
    CHECK(amp_checkpoint_load(b, path) == AMP_OK && of->groups[1].weight_decay == 0.5f && heard_code == AMP_OK);
    CHECK_MSG(strstr(heard, "amp.group1.weight_decay is 0 in the file, but 0.5"), "%s", heard);
    of->groups[1].weight_decay = 0;
    p = read_bytes(path, &n);
    while (at + 16 < n && memcmp(p + at, "amp.group2.lr\":\"", 16) != 0) at++;
    p[at + 16] = 'b';                                       /* 0.125 becomes a negative number */
    write_bytes(path, p, n);
    CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT);
    CHECK_MSG(strstr(amp_model_error(b), "malformed"), "%s", amp_model_error(b));
    p[at + 16] = '2';
    write_bytes(path, p, n);
    CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT && of->groups[2].lr == 0.125f);
    CHECK_MSG(strstr(amp_model_error(b), "is damaged"), "%s", amp_model_error(b));
    free(p);
    amp_model_destroy(a);
    amp_model_destroy(b);
    amp_model_destroy(other);
}

/* Does the file hold this text? Then *at is where it begins. */
static int find_text(const unsigned char* p, size_t n, const char* text, size_t* at) {
    for (*at = 0; *at + strlen(text) <= n; ++*at)
        if (memcmp(p + *at, text, strlen(text)) == 0) return 1;
    return 0;
}

/* How long a group was frozen is state too, but no text where it never was: such files are as they ever were. */
static void test_frozen_steps(void) {
    const char* path = in_folder("model.safetensors");
    model_options o = usual;
    amp_model *a, *b;
    unsigned char* p;
    size_t n, at;
    int groups;
    for (groups = 0; groups < 3; groups += 2) {                 /* without groups there is groups[0] */
        int last = groups ? groups - 1 : 0;
        const char* key = groups ? "amp.group1.frozen_steps\":\"" : "amp.group0.frozen_steps\":\"";
        o.groups = groups;
        a = make_model(&o);
        b = make_model(&o);
        if (!a || !b) { CHECK(a && b); return; }
        train(a, 0, 3);
        CHECK(amp_checkpoint_save(a, path) == AMP_OK);
        p = read_bytes(path, &n);
        CHECK(!find_text(p, n, "frozen", &at) && find_text(p, n, "amp.group0", &at) == (groups > 0));
        free(p);
        amp_model_optimizer(b)->groups[last].frozen = 1;
        train(b, 7, 2);
        CHECK(amp_model_optimizer(b)->state.frozen_steps[last] > 0);
        CHECK(amp_checkpoint_load(b, path) == AMP_OK);          /* nothing of what was frozen here stays */
        CHECK(amp_model_optimizer(b)->state.frozen_steps[last] == 0 && !amp_model_optimizer(b)->groups[last].frozen);
        amp_model_optimizer(a)->groups[last].frozen = 1;
        train(a, 0, 3);
        amp_model_optimizer(a)->groups[last].frozen = 0;
        amp_model_optimizer(a)->groups[last].lr = 0.03125f;
        CHECK(amp_model_optimizer(a)->state.frozen_steps[last] > 0);
        CHECK(amp_checkpoint_save(a, path) == AMP_OK && amp_checkpoint_load(b, path) == AMP_OK);
        CHECK(amp_model_optimizer(b)->groups[last].lr == 0.03125f);
        train(a, 7, 2);
        train(b, 7, 2);
        CHECK(same_models(a, b));
        p = read_bytes(path, &n);
        CHECK(find_text(p, n, key, &at));
        at += strlen(key);
        CHECK(p[at] == '3' && p[at + 1] == '"');                /* 3 of 6 steps */
        p[at] = '7';
        write_bytes(path, p, n);
        CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT && strstr(amp_model_error(b), "frozen_steps is malformed"));
        p[at] = '-';
        write_bytes(path, p, n);
        CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT && strstr(amp_model_error(b), "frozen_steps is malformed"));
        p[at] = '2';
        write_bytes(path, p, n);
        CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT && strstr(amp_model_error(b), "is damaged"));
        CHECK(same_models(a, b));
        free(p);
        amp_model_destroy(a);
        amp_model_destroy(b);
    }
}

/* Truncations, and a bit of every byte of a checkpoint: refused with nothing changed, or loaded exactly. */
static void test_damaged_checkpoint(void) {
    const char* path = in_folder("model.safetensors");
    const char* bad = in_folder("bad.safetensors");
    model_options o = usual;
    amp_model *a, *b, *before;
    size_t n, m, i;
    unsigned char *p, *q;
    int refused = 0;
    o.hidden = 2;
    a = make_model(&o);
    b = make_model(&o);
    before = make_model(&o);
    if (!a || !b || !before) { CHECK(a && b && before); return; }
    train(a, 0, 4);
    CHECK(amp_checkpoint_save(a, path) == AMP_OK);
    p = read_bytes(path, &n);
    for (i = 0; i < n; i++) {
        unsigned char flip = (unsigned char)(1 << i % 8);
        p[i] ^= flip;
        write_bytes(bad, p, n);
        p[i] ^= flip;
        if (amp_checkpoint_load(b, bad) != AMP_OK) {
            refused++;
            CHECK_MSG(same_models(b, before), "byte %d", (int)i);
            continue;
        }
        /* What a flip may change is a setting, of which the model keeps its own: what is saved again is the whole file. */
        CHECK(amp_checkpoint_save(b, bad) == AMP_OK);
        q = read_bytes(bad, &m);
        CHECK_MSG(m == n && memcmp(p, q, n) == 0, "byte %d", (int)i);
        free(q);
        amp_model_destroy(b);
        b = make_model(&o);
    }
    CHECK_MSG(refused > (int)n * 98 / 100, "%d of %d refused", refused, (int)n);
    for (i = 0; i < n; i += 1 + n / 400) {
        write_bytes(bad, p, i);
        CHECK(amp_checkpoint_load(b, bad) == AMP_ERR_FORMAT);
    }
    CHECK(same_models(b, before));
    free(p);
    amp_model_destroy(a);
    amp_model_destroy(b);
    amp_model_destroy(before);
}

static void test_model_failures(void) {
    const char* path = in_folder("model.safetensors");
    const char* memory = in_folder("memory.safetensors");
    model_options o = usual;
    amp_model *a, *b, *before;
    amp_model_desc d;
    amp_result r = AMP_ERR_MEMORY;
    long k;
    CHECK(amp_checkpoint_save(NULL, path) == AMP_ERR_ARGUMENT && amp_checkpoint_load(NULL, path) == AMP_ERR_ARGUMENT);
    memset(&d, 0, sizeof d);
    d.batch = 1;
    a = new_model(&d);
    CHECK(amp_checkpoint_save(a, path) == AMP_ERR_STATE && amp_checkpoint_load(a, path) == AMP_ERR_STATE);   /* not finalized */
    amp_model_destroy(a);
    o.accumulate = 2;
    a = make_model(&o);
    b = make_model(&o);
    before = make_model(&o);
    if (!a || !b || !before) { CHECK(a && b && before); return; }
    CHECK(amp_checkpoint_save(a, NULL) == AMP_ERR_ARGUMENT);
    train(a, 0, 4);
    CHECK(amp_checkpoint_save(a, path) == AMP_OK);
    train(a, 4, 1);
    CHECK(amp_checkpoint_save(a, path) == AMP_ERR_STATE && amp_checkpoint_load(a, path) == AMP_ERR_STATE);   /* half a step */
    CHECK_MSG(strstr(amp_model_error(a), "micro-batches"), "%s", amp_model_error(a));
    train(a, 5, 1);
    CHECK(amp_checkpoint_save(a, in_folder("missing/x")) == AMP_ERR_IO);
    CHECK(amp_checkpoint_load(b, in_folder("missing/x")) == AMP_ERR_IO);
    for (k = 1; r != AMP_OK && k < 50; k++) {
        fail_at_call(k);
        r = amp_checkpoint_save(a, memory);
        CHECK(r == AMP_OK || (r == AMP_ERR_MEMORY && !exists(memory)));
    }
    CHECK_MSG(k > 3 && r == AMP_OK, "%ld", k);
    for (k = 1, r = AMP_ERR_MEMORY; r != AMP_OK && k < 50; k++) {
        CHECK(same_models(b, before));
        fail_at_call(k);
        r = amp_checkpoint_load(b, path);
        CHECK(r == AMP_OK || r == AMP_ERR_MEMORY);
    }
    fail_at_call(0);
    CHECK_MSG(k > 4 && r == AMP_OK && !same_models(b, before), "%ld", k);
    amp_model_destroy(a);
    amp_model_destroy(b);
    amp_model_destroy(before);
    CHECK_MSG(alloc_live == 0, "%ld", alloc_live);
}

/* Takes what fits by name: all of the body, nothing of a head with another name. */
static void test_load_weights(void) {
    const char* path = in_folder("model.safetensors");
    model_options o = usual;
    amp_model *a, *b, *before;
    int count = -1, n, i;
    amp_param* p;
    o.accumulate = 1;
    a = make_model(&o);
    o.kind = AMP_SGD;
    o.seed = 6;
    o.layers = 2;
    b = make_model(&o);
    before = make_model(&o);
    if (!a || !b || !before) { CHECK(a && b && before); return; }
    train(a, 0, 5);
    train(b, 9, 3);
    train(before, 9, 3);
    CHECK(amp_checkpoint_save(a, path) == AMP_OK);
    CHECK(amp_checkpoint_load(b, path) == AMP_ERR_FORMAT && same_models(b, before));
    /* linear2 is 4x12 in one and 12x12 in the other. */
    CHECK(amp_checkpoint_load_weights(b, path, &count) == AMP_ERR_FORMAT && count == -1 && same_models(b, before));
    CHECK_MSG(strstr(amp_model_error(b), "'linear2.weight' has the shape [4,12] in the file, but [12,12] in the model"), "%s",
              amp_model_error(b));
    amp_model_destroy(b);
    o.layers = 1;
    o.hidden = 12;
    b = make_model(&o);
    if (!b) { CHECK(b); return; }
    train(b, 9, 3);
    heard_count = 0;
    CHECK_MSG(amp_checkpoint_load_weights(b, path, &count) == AMP_OK && count == 9, "%d, %s", count, amp_model_error(b));
    CHECK_MSG(heard_count == 0, "%s", heard);              /* nothing was missing */
    CHECK(amp_checkpoint_load_weights(b, path, NULL) == AMP_OK);
    CHECK(amp_model_optimizer(b)->state.step == 3 && amp_model_scaler(b)->state.applied == 3);
    p = amp_model_params(a, &n);
    for (i = 0; i < n; i++) {
        amp_param* q = amp_model_find_param(b, p[i].name);
        CHECK(q && memcmp(q->master, p[i].master, 4 * q->count) == 0);
    }
    CHECK(alloc_fail_at == 0 && amp_checkpoint_load_weights(NULL, path, &count) == AMP_ERR_ARGUMENT);
    amp_model_destroy(a);
    amp_model_destroy(b);
    amp_model_destroy(before);
}

/* A dense layer and a block of GPT-2 on rows of 4 features; turned: files hold weights as [in, out]. */
static amp_model* turned_model(int turned, int batch, amp_level level, amp_dtype low, int split) {
    amp_model_desc d = model_desc(batch, level, low);
    amp_linear_desc square = { 4, 0, AMP_INIT_TORCH, 0.0f, turned };
    amp_transformer_desc block;
    amp_model* m;
    d.split_masters = split;
    d.optimizer.kind = AMP_ADAMW;
    d.allocator.alloc = failing_alloc;
    d.allocator.free = failing_free;
    memset(&block, 0, sizeof block);
    block.heads = 2; block.hidden = 6; block.name = "h.0"; block.transposed = turned; block.sd = 0.3f;
    m = new_model(&d);
    amp_mse(m, amp_transformer_block(m, amp_linear_with(m, amp_input(m, 4, 1, 1), &square), &block));
    CHECK_MSG(amp_model_finalize(m) == AMP_OK, "%s", amp_model_error(m));
    return m;
}
/* A step on rows of seed. */
static void turn_once(amp_model* m, unsigned seed) {
    float x[8], y[8];
    amp_batch b;
    int i;
    for (i = 0; i < 8; i++) { x[i] = amp_random_normal(seed, (uint64_t)i); y[i] = amp_random_normal(seed + 1, (uint64_t)i); }
    memset(&b, 0, sizeof b);
    b.n = 2; b.inputs[0] = x; b.targets[0] = y;
    CHECK(amp_train_step(m, &b, NULL) == AMP_OK);
}
/* Weights whose files are transposed, as of Hugging Face's Conv1D: a file holds weights and moments as [in, out], all of them;
   loading has the bits of before; a model that does not say so refuses the file, also where all shapes agree. */
static void test_transposed_weights(void) {
    static const struct { const char* name; int out, in; } weights[] = {
        { "linear1", 4, 4 }, { "h.0.attn.c_attn", 12, 4 }, { "h.0.attn.c_proj", 4, 4 }, { "h.0.mlp.c_fc", 6, 4 },
        { "h.0.mlp.c_proj", 4, 6 } };
    static const struct { amp_level level; amp_dtype low; int split; } kinds[] = {
        { AMP_O0, AMP_F16, 0 }, { AMP_O2, AMP_F16, 0 }, { AMP_O3, AMP_F16, 0 }, { AMP_O2, AMP_BF16, 1 } };
    const char* path = in_folder("turned.safetensors");
    int kind, i, k, r, c, count;
    for (kind = 0; kind < COUNT(kinds); kind++) {
        const amp_dtype type = kinds[kind].level == AMP_O3 ? AMP_F16 : AMP_F32;
        amp_model* m = turned_model(1, 2, kinds[kind].level, kinds[kind].low, kinds[kind].split);
        amp_model* other = turned_model(1, 2, kinds[kind].level, kinds[kind].low, kinds[kind].split);
        amp_model* straight = turned_model(0, 2, kinds[kind].level, kinds[kind].low, kinds[kind].split);
        turn_once(m, 1);
        turn_once(other, 3);
        CHECK_MSG(amp_checkpoint_save(m, path) == AMP_OK, "%s", heard);
        for (i = 0; i < COUNT(weights); i++)
            for (k = 0; k < 3; k++) {       /* the weight and its moments */
                char name[64], whole[64];
                double file[72];
                float memory[72];
                amp_param* p;
                amp_file_tensor t;
                snprintf(whole, sizeof whole, "%s.weight", weights[i].name);
                snprintf(name, sizeof name, "%s.weight%s", weights[i].name, k == 0 ? "" : k == 1 ? ".m" : ".v");
                t = tensor(name, k ? AMP_F32 : type, file, 2, (size_t)weights[i].in, (size_t)weights[i].out, 0, 0);
                CHECK_MSG(amp_file_load(path, &t, 1, NULL) == AMP_OK, "%s", name);
                p = amp_model_find_param(m, whole);
                CHECK(p && p->count == (size_t)weights[i].in * (size_t)weights[i].out);
                if (k) memcpy(memory, k == 1 ? p->m : p->v, p->count * sizeof *memory);
                else CHECK(amp_model_read_param(m, p, memory) == AMP_OK);
                for (r = 0; r < weights[i].out; r++)
                    for (c = 0; c < weights[i].in; c++) {
                        const double want = (double)memory[r * weights[i].in + c];
                        const double is = value_at(file, k ? AMP_F32 : type, (size_t)(c * weights[i].out + r));
                        CHECK_MSG(memcmp(&want, &is, sizeof is) == 0, "%s [%d,%d]: %g, not %g", name, r, c, is, want);
                    }
            }
        CHECK(!same_weights(m, other));
        CHECK_MSG(amp_checkpoint_load(other, path) == AMP_OK && same_weights(m, other), "%s", heard);
        turn_once(m, 5);
        turn_once(other, 5);
        CHECK(same_weights(m, other));                      /* moments too */
        CHECK(amp_checkpoint_load(straight, path) == AMP_ERR_FORMAT);
        CHECK(amp_checkpoint_load_weights(straight, path, &count) == AMP_ERR_FORMAT);
        CHECK_MSG(strstr(heard, "'h.0.attn.c_attn.weight' has the shape [4,12] in the file, but [12,4] in the model"), "%s", heard);

        for (k = 1; ; k++) {                                /* memory that fails */
            amp_result result;
            fail_at_call(k);
            result = k % 2 ? amp_checkpoint_load(other, path) : amp_checkpoint_save(m, path);
            if (alloc_calls < k) { CHECK(result == AMP_OK); break; }
            CHECK(result == AMP_ERR_MEMORY && same_weights(m, other));
        }
        fail_at_call(0);
        CHECK(k > 8);
        amp_model_destroy(m); amp_model_destroy(other); amp_model_destroy(straight);
    }
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);

    for (i = 0; i < 2; i++) {       /* square weights alone */
        const amp_linear_desc square = { 4, 0, AMP_INIT_TORCH, 0.0f, i };
        const amp_model_desc d = model_desc(2, AMP_O0, AMP_F16);
        amp_model* m = new_model(&d);
        amp_mse(m, amp_linear_with(m, amp_input(m, 4, 1, 1), &square));
        CHECK(amp_model_finalize(m) == AMP_OK);
        CHECK((i ? amp_checkpoint_load : amp_checkpoint_save)(m, path) == (i ? AMP_ERR_FORMAT : AMP_OK));
        amp_model_destroy(m);
    }
}

/* Other types are converted, other names are left alone; running statistics come too. */
static void test_load_weights_types(void) {
    const char* path = in_folder("weights.safetensors");
    static const amp_level levels[2] = { AMP_O2, AMP_O3 };
    static const amp_dtype types[4] = { AMP_F32, AMP_F16, AMP_BF16, AMP_F64 };
    static const char foreign[] = "{\"linear2.bias\":{\"dtype\":\"I32\",\"shape\":[4],\"data_offsets\":[0,16]}}";
    static const float zeros[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    float bias[4] = { 1.0f, -2.0f, 0.5f, 0.25f }, mean[3] = { 3.0f, 4.0f, 5.0f }, out[4];
    amp_half odd[3] = { { 0x3c00 }, { 0x3c00 }, { 0x3c00 } };
    double raw[4];
    amp_file_tensor t[4];
    int i, level, count;
    for (level = 0; level < 2; level++) {
        model_options o = usual;
        amp_model *m, *before;
        long k, calls = 0;
        o.level = levels[level];
        m = make_model(&o);
        before = make_model(&o);
        if (!m || !before) { CHECK(m && before); return; }
        for (i = 0; i < 4; i++) {
            CHECK(amp_convert(amp_ref_of(raw, types[i]), amp_f32(bias), 4) == AMP_OK);
            t[0] = tensor("linear2.bias", types[i], raw, 1, 4, 0, 0, 0);
            t[1] = tensor("batch_norm1.running_mean", AMP_F32, mean, 1, 3, 0, 0, 0);
            t[2] = tensor("linear2.bias.m", AMP_F16, odd, 1, 1, 0, 0, 0);       /* a moment is not looked at */
            t[3] = tensor("batch_norm1.bias", AMP_F16, odd, 1, 3, 0, 0, 0);     /* what follows it is at an odd place */
            CHECK(amp_file_save(path, t, 4, NULL, 0, NULL) == AMP_OK);
            count = -1;
            for (k = 1; count < 0 && k < 20; k++) {                             /* without memory nothing changes */
                fail_at_call(i == 0 ? k : 0);
                if (amp_checkpoint_load_weights(m, path, &count) != AMP_OK) CHECK(same_models(m, before) && count == -1);
                calls = k;
            }
            fail_at_call(0);
            CHECK_MSG(count == 3 && (i || calls == 4), "%s: %s", amp_dtype_name(types[i]), amp_model_error(m));
            CHECK_MSG(heard_code == AMP_OK && strstr(heard, "6 of 9 tensors of the model were not found and left alone: "
                      "'conv2d1.weight', 'batch_norm1.weight', 'linear1.weight', ...; the file is '"), "%s", heard);
            CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear2.bias"), out) == AMP_OK);
            CHECK_MSG(memcmp(out, bias, sizeof bias) == 0, "%s", amp_dtype_name(types[i]));
            CHECK(amp_convert(amp_f32(out), amp_f16(amp_model_find_param(m, "linear2.bias")->low),
                4) == AMP_OK);
            CHECK_MSG(memcmp(out, bias, sizeof bias) == 0, "the copy, %s", amp_dtype_name(types[i]));
            CHECK(amp_model_write_param(m, amp_model_find_param(m, "linear2.bias"), zeros) == AMP_OK);
        }
        CHECK(amp_checkpoint_save(m, path) == AMP_OK);
        t[1].tensor.data = out;
        CHECK(amp_file_load(path, &t[1], 1, NULL) == AMP_OK && memcmp(out, mean, sizeof mean) == 0);
        t[0] = tensor("linear9.bias", AMP_F32, bias, 1, 4, 0, 0, 0);
        CHECK(amp_file_save(path, t, 1, NULL, 0, NULL) == AMP_OK);
        CHECK(amp_checkpoint_load_weights(m, path, &count) == AMP_ERR_FORMAT && strstr(amp_model_error(m), "has no weight of"));
        CHECK_MSG(strstr(heard, "its first name is 'linear9.bias', the model has 'conv2d1.weight', "), "%s", heard);
        write_file(path, foreign, strlen(foreign), 16);
        CHECK(amp_checkpoint_load_weights(m, path, &count) == AMP_ERR_FORMAT);
        CHECK_MSG(strstr(amp_model_error(m), "'linear2.bias' is I32 in the file, but f32 in the model"), "%s", amp_model_error(m));
        amp_model_destroy(m);
        amp_model_destroy(before);
    }
    CHECK_MSG(alloc_live == 0, "%ld", alloc_live);
}

/* "module.", which PyTorch's DataParallel puts before all names, is left out, but not where some names lack it, nor where
   the model has such names itself. */
static void test_load_weights_of_module(void) {
    const char* path = in_folder("module.safetensors");
    float bias[4] = { 1.0f, -2.0f, 0.5f, 0.25f }, mean[3] = { 3.0f, 4.0f, 5.0f }, out[4] = { 0.0f };
    amp_file_tensor t[2];
    amp_model* m = make_model(&usual);
    amp_model_desc d;
    int count = -1;
    if (!m) { CHECK(m); return; }
    t[0] = tensor("module.linear2.bias", AMP_F32, bias, 1, 4, 0, 0, 0);
    t[1] = tensor("module.batch_norm1.running_mean", AMP_F32, mean, 1, 3, 0, 0, 0);
    CHECK(amp_file_save(path, t, 2, NULL, 0, NULL) == AMP_OK);
    CHECK_MSG(amp_checkpoint_load_weights(m, path, &count) == AMP_OK && count == 2, "%s", amp_model_error(m));
    CHECK(amp_model_read_param(m, amp_model_find_param(m, "linear2.bias"), out) == AMP_OK && memcmp(out, bias, sizeof bias) == 0);
    t[1].tensor.name = "modules.running_mean";
    CHECK(amp_file_save(path, t, 2, NULL, 0, NULL) == AMP_OK);
    CHECK(amp_checkpoint_load_weights(m, path, &count) == AMP_ERR_FORMAT);
    CHECK_MSG(strstr(heard, "its first name is 'module.linear2.bias', the model has 'conv2d1.weight', ")
              && strstr(heard, ", ...; amp_name renames a layer"), "%s", heard);
    amp_model_destroy(m);

    memset(&d, 0, sizeof d);
    d.batch = 1;
    m = new_model(&d);
    const amp_value v = amp_linear(m, amp_input(m, 2, 1, 1), 4);
    amp_name(m, v, "module.linear2");
    CHECK(amp_model_finalize(m) == AMP_OK && amp_file_save(path, t, 1, NULL, 0, NULL) == AMP_OK);
    CHECK_MSG(amp_checkpoint_load_weights(m, path, &count) == AMP_OK && count == 1, "%s", amp_model_error(m));
    amp_model_destroy(m);
}

/* A value beyond the type of the weights becomes its largest finite one, as by amp_model_write_param, and the logger hears
   of it. An infinity stays one where the file's type is the same or the narrower. */
static void test_load_weights_saturates(void) {
    static const struct { amp_level level; amp_dtype type; double values[4]; float expected[4]; const char* told; } rows[] = {
        { AMP_O3, AMP_F32, { 1e6, -7e4, 0.5, 65504.0 }, { 65504.0f, -65504.0f, 0.5f, 65504.0f }, "2 of 4 values of 'linear2.bias' are beyond f16" },
        { AMP_O3, AMP_BF16, { 65536.0, 1.0, 2.0, -65536.0 }, { 65504.0f, 1.0f, 2.0f, -65504.0f }, "2 of 4 values of 'linear2.bias' are beyond f16" },
        { AMP_O3, AMP_F64, { 0.25, 1.0, 1e300, 3.0 }, { 0.25f, 1.0f, 65504.0f, 3.0f }, "1 of 4 values of 'linear2.bias' are beyond f16" },
        { AMP_O2, AMP_F64, { 0.25, 1e6, -1e300, 3.0 }, { 0.25f, 1e6f, -3.40282347e38f, 3.0f }, "1 of 4 values of 'linear2.bias' are beyond f32" },
        { AMP_O2, AMP_F32, { 0.25, 1e6, 2.0, 3.0 }, { 0.25f, 1e6f, 2.0f, 3.0f }, NULL },
        { AMP_O2, AMP_F16, { 0.25, 1e6, 2.0, 3.0 }, { 0.25f, INFINITY, 2.0f, 3.0f }, NULL }
    };
    const char* path = in_folder("weights.safetensors");
    for (int i = 0; i < COUNT(rows); i++) {
        model_options o = usual;
        double raw[4];
        float out[4], again[4], values[4];
        amp_half low[4];
        int count = 0;
        o.level = rows[i].level;
        amp_model* m = make_model(&o);
        const amp_param* p = m ? amp_model_find_param(m, "linear2.bias") : NULL;
        if (!p) { CHECK(p); return; }
        CHECK(amp_convert(amp_ref_of(raw, rows[i].type), amp_ref_of(rows[i].values, AMP_F64), 4) == AMP_OK);
        const amp_file_tensor t = tensor("linear2.bias", rows[i].type, raw, 1, 4, 0, 0, 0);
        CHECK(amp_file_save(path, &t, 1, NULL, 0, NULL) == AMP_OK);
        heard_before[0] = 0;
        heard_count = 0;
        CHECK_MSG(amp_checkpoint_load_weights(m, path, &count) == AMP_OK && count == 1, "%s", amp_model_error(m));
        CHECK(amp_model_read_param(m, p, out) == AMP_OK);
        memcpy(low, p->low, sizeof low);
        for (int k = 0; k < 4; k++)
            CHECK_MSG(to_bits(out[k]) == to_bits(rows[i].expected[k]), "row %d: %g instead of %g", i, (double)out[k],
                      (double)rows[i].expected[k]);
        CHECK_MSG(heard_count == (rows[i].told ? 2 : 1), "row %d: %d sentences", i, heard_count);   /* one of what is missing */
        if (rows[i].told) CHECK_MSG(strstr(heard_before, rows[i].told), "row %d: %s", i, heard_before);
        CHECK(amp_convert(amp_f32(values), amp_ref_of(raw, rows[i].type), 4) == AMP_OK);
        if (i == 3) memcpy(values, out, sizeof values);         /* no float says what that file does */
        CHECK(amp_model_write_param(m, p, values) == AMP_OK && amp_model_read_param(m, p, again) == AMP_OK);
        CHECK_MSG(memcmp(again, out, sizeof out) == 0 && memcmp(low, p->low, sizeof low) == 0, "row %d", i);
        amp_model_destroy(m);
    }
}

/* --- a loop of the caller's ---------------------------------------------------------------- */

/* Frozen batch norm trains otherwise: as a checkpoint it is another model, while weights and statistics fit it. */
/* A switch is saved as 0 or 1, whatever it was set to. */
static void test_saved_switch(void) {
    const char* path = in_folder("switch.safetensors");
    int k;
    for (k = 0; k < 2; k++) {
        amp_model_desc d = model_desc(1, AMP_O0, AMP_DTYPE_DEFAULT);
        amp_model* m;
        char saved[8] = "";
        d.optimizer.momentum = 0.5f;
        d.optimizer.nesterov = 3 * k;
        m = new_model(&d);
        amp_mse(m, amp_linear(m, amp_input(m, 2, 1, 1), 1));
        CHECK(amp_model_finalize(m) == AMP_OK);
        CHECK_MSG(amp_checkpoint_save(m, path) == AMP_OK, "%s", amp_model_error(m));
        CHECK(amp_file_text_of(path, "amp.nesterov", saved, sizeof saved, NULL) == AMP_OK);
        CHECK_MSG(strcmp(saved, k ? "1" : "0") == 0, "%s", saved);
        amp_model_destroy(m);
    }
}

static amp_model* make_norm(int frozen, amp_value* v) {
    amp_model_desc d;
    amp_norm_desc n;
    amp_model* m = NULL;
    memset(&d, 0, sizeof d);
    memset(&n, 0, sizeof n);
    d.batch = 4; n.frozen = frozen;
    m = new_model(&d);
    *v = amp_batch_norm_with(m, amp_input(m, 3, 2, 2), &n);
    amp_mse(m, *v);
    CHECK(amp_model_finalize(m) == AMP_OK);
    return m;
}
static void test_frozen_norm(void) {
    const char* path = in_folder("norm.safetensors");
    amp_value v;
    amp_model *usual_norm = make_norm(0, &v), *frozen = make_norm(1, &v), *other = make_norm(1, &v);
    float x[48], out[3][48];
    amp_batch b;
    int i, count = 0;
    for (i = 0; i < 48; i++) x[i] = 3.0f + test_uniform() * (float)(i % 7);
    memset(&b, 0, sizeof b);
    b.n = 4; b.inputs[0] = x; b.targets[0] = x;
    for (i = 0; i < 3; i++) CHECK(amp_train_step(usual_norm, &b, NULL) == AMP_OK);
    CHECK(amp_checkpoint_save(usual_norm, path) == AMP_OK);
    CHECK(amp_checkpoint_load(frozen, path) == AMP_ERR_FORMAT);
    CHECK(amp_checkpoint_load_weights(frozen, path, &count) == AMP_OK && count == 4);
    CHECK(amp_predict(usual_norm, &b, v, out[0]) == AMP_OK && amp_predict(frozen, &b, v, out[1]) == AMP_OK);
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    CHECK(amp_train_step(frozen, &b, NULL) == AMP_OK && amp_checkpoint_save(frozen, path) == AMP_OK);
    CHECK(amp_checkpoint_load(usual_norm, path) == AMP_ERR_FORMAT && amp_checkpoint_load(other, path) == AMP_OK);
    CHECK(amp_predict(frozen, &b, v, out[1]) == AMP_OK && amp_predict(other, &b, v, out[2]) == AMP_OK);
    CHECK(memcmp(out[2], out[1], sizeof out[0]) == 0 && memcmp(out[0], out[1], sizeof out[0]) != 0);
    amp_model_destroy(usual_norm); amp_model_destroy(frozen); amp_model_destroy(other);
}

/* Three parameters: a master with a half copy, half alone, and a frozen one without moments; beside them a running mean. */
enum { LOOP = 37 };
typedef struct own_loop {
    float master[LOOP], grad[3][LOOP], m[2][LOOP], v[2][LOOP], frozen[5], mean[3];
    amp_half low[2][LOOP];
    double place;
    amp_param params[3];
    amp_optimizer optimizer;
    amp_scaler scaler;
    amp_file_tensor more[2];
} own_loop;

static void loop_init(own_loop* l, unsigned long long seed) {
    amp_param_group groups[2];
    amp_optimizer_desc d;
    amp_scaler_desc s;
    int i;
    memset(l, 0, sizeof *l);
    memset(&d, 0, sizeof d);
    memset(&s, 0, sizeof s);
    memset(groups, 0, sizeof groups);
    test_seed = seed;
    for (i = 0; i < LOOP; i++) l->master[i] = test_uniform();
    for (i = 0; i < LOOP; i++) l->low[1][i] = amp_half_from_float(test_uniform());
    for (i = 0; i < 3; i++) {
        l->params[i].grad = l->grad[i];
        l->params[i].count = i < 2 ? LOOP : 5;
        l->params[i].group = i == 2;
        l->params[i].low_dtype = AMP_F16;
    }
    l->params[0].master = l->master;
    l->params[0].low = l->low[0];
    l->params[1].low = l->low[1];
    l->params[2].master = l->frozen;
    for (i = 0; i < 2; i++) { l->params[i].m = l->m[i]; l->params[i].v = l->v[i]; }
    l->params[0].name = "w";
    l->params[1].name = "u";
    l->params[2].name = "table";
    groups[1].frozen = 1;
    d.kind = AMP_ADAM;
    d.groups = groups;
    d.group_count = 2;
    d.schedule.warmup_steps = 10;
    s.init_scale = 64.0f;
    s.growth_interval = 3;
    CHECK(amp_optimizer_init(&l->optimizer, &d, l->params, 3) == AMP_OK && amp_scaler_init(&l->scaler, &s) == AMP_OK);
    l->more[0] = tensor("mean", AMP_F32, l->mean, 1, 3, 0, 0, 0);
    l->more[1] = tensor("place", AMP_F64, &l->place, 0, 0, 0, 0, 0);
}

/* `count` steps of a stream of gradients, which goes on where the loop's place is; every fifth overflows. */
static void loop_train(own_loop* l, int count) {
    int k, i;
    for (; count > 0; count--, l->place += 1.0) {
        float scale = amp_scaler_scale_loss(&l->scaler, 1.0f);
        test_seed = 77ull + (unsigned long long)l->place;
        for (k = 0; k < 3; k++)
            for (i = 0; i < LOOP; i++) l->grad[k][i] = scale * test_uniform();
        for (i = 0; i < 3; i++) l->mean[i] += test_uniform();
        if ((int)l->place % 5 == 4) l->grad[1][7] *= 3e38f;
        CHECK(amp_optimizer_step(&l->optimizer, &l->scaler, NULL) == AMP_OK && amp_scaler_update(&l->scaler) == AMP_OK);
    }
}

static int same_loops(const own_loop* a, const own_loop* b) {
    const amp_scaler_state *s = &a->scaler.state, *t = &b->scaler.state;
    return !memcmp(a->master, b->master, sizeof a->master) && !memcmp(a->low, b->low, sizeof a->low)
           && !memcmp(a->m, b->m, sizeof a->m) && !memcmp(a->v, b->v, sizeof a->v)
           && !memcmp(a->frozen, b->frozen, sizeof a->frozen) && !memcmp(a->mean, b->mean, sizeof a->mean)
           && !memcmp(&a->place, &b->place, sizeof a->place)
           && !memcmp(&s->scale, &t->scale, sizeof s->scale) && s->tracker == t->tracker
           && s->applied == t->applied && s->skipped == t->skipped
           && !memcmp(&a->optimizer.state, &b->optimizer.state, sizeof a->optimizer.state)
           && !memcmp(a->optimizer.groups, b->optimizer.groups, sizeof a->optimizer.groups);
}

/* One object saves and loads what a loop's optimizer and scaler would, and goes on with the same bits. */
static void test_mixed(void) {
    const char* path = in_folder("mixed.safetensors");
    static float w[2][50], g[50];
    amp_mixed x[2];
    int i, k, t;
    for (k = 0; k < 2; k++) {
        amp_param p;
        amp_mixed_desc d;
        memset(&p, 0, sizeof p);
        memset(&d, 0, sizeof d);
        p.master = w[k]; p.grad = g; p.count = 50; p.low_dtype = AMP_F16;
        d.params = &p; d.count = 1; d.optimizer.kind = AMP_ADAM; d.logger = &LISTENER;
        d.allocator.alloc = failing_alloc; d.allocator.free = failing_free;
        d.scaler.growth_interval = 4;
        CHECK(amp_mixed_init(&x[k], &d) == AMP_OK);
    }
    for (t = 0; t < 20; t++) {
        for (k = 0; k < 2; k++) {
            const float scale = amp_mixed_scale(&x[k], 1.0f, 1.0f);
            for (i = 0; i < 50; i++) g[i] = scale * amp_random_uniform(3, (uint64_t)(50 * t + i + (t < 10 ? 1000 * k : 0)));
            if (t == 5) put_bits(g, 0x7fc00000u);
            CHECK(amp_mixed_step(&x[k], NULL) == AMP_OK);
        }
        if (t == 9) {
            CHECK(memcmp(w[0], w[1], sizeof *w) != 0);
            CHECK_MSG(amp_mixed_save(&x[0], path) == AMP_OK, "%s", heard);
            CHECK_MSG(amp_mixed_load(&x[1], path) == AMP_OK, "%s", heard);
        }
        if (t < 9) continue;
        CHECK(memcmp(w[0], w[1], sizeof *w) == 0 && memcmp(x[0].optimizer.params->low, x[1].optimizer.params->low, 100) == 0);
        CHECK(x[0].scaler.state.applied == t && x[1].scaler.state.applied == t && x[1].scaler.state.skipped == 1);
        CHECK(to_bits(x[0].scaler.state.scale) == to_bits(x[1].scaler.state.scale));
    }
    amp_mixed_scale(&x[0], 1.0f, 1.0f);
    CHECK(amp_mixed_save(&x[0], path) == AMP_ERR_STATE);
    CHECK(amp_mixed_load(&x[1], in_folder("none.safetensors")) == AMP_ERR_IO);
    CHECK(amp_mixed_save(NULL, path) == AMP_ERR_ARGUMENT && amp_mixed_load(NULL, path) == AMP_ERR_ARGUMENT);
    for (k = 0; k < 2; k++) amp_mixed_free(&x[k]);
    CHECK(amp_mixed_save(&x[0], path) == AMP_ERR_ARGUMENT);
    CHECK(alloc_live == 0);
    remove(path);
}

static void test_own_loop(void) {
    const char* path = in_folder("loop.safetensors");
    static own_loop a, b;
    amp_file_desc d = counting_desc(0);
    loop_init(&a, 1);
    loop_init(&b, 2);
    loop_train(&a, 13);
    a.frozen[2] = 0.5f;
    CHECK(amp_optimizer_set_lr(&a.optimizer, 0.25f) == AMP_OK);
    a.optimizer.groups[0].lr = 0.125f;
    loop_train(&b, 4);                                              /* whatever it did before does not matter */
    CHECK_MSG(amp_optimizer_save(&a.optimizer, &a.scaler, path, a.more, 2, &d) == AMP_OK, "%s", heard);
    CHECK(!same_loops(&a, &b));
    CHECK_MSG(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d) == AMP_OK, "%s", heard);
    CHECK(same_loops(&a, &b) && alloc_live == 0);
    loop_train(&a, 9);
    CHECK(!same_loops(&a, &b));
    loop_train(&b, 9);
    CHECK(same_loops(&a, &b) && b.scaler.state.skipped == 4);
    /* Without a scaler, and without anything besides. */
    CHECK(amp_optimizer_save(&a.optimizer, NULL, path, NULL, 0, NULL) == AMP_OK);
    a.master[3] = 9.0f;
    CHECK(amp_optimizer_load(&a.optimizer, NULL, path, NULL, 0, NULL) == AMP_OK && same_loops(&a, &b));
    a.master[3] = 9.0f;
    a.optimizer.desc.beta2 = 0.5f;                                  /* a setting that was changed stays */
    heard_count = 0;
    CHECK(amp_optimizer_load(&a.optimizer, NULL, path, NULL, 0, &d) == AMP_OK && same_loops(&a, &b) && heard_count == 1);
    CHECK_MSG(strstr(heard, "but 0.5 in the optimizer, which keeps its own") && heard_code == AMP_OK, "%s", heard);
    CHECK(a.optimizer.desc.beta2 == 0.5f);
}

/* The same of a loop: what a split one saves, one with FP32 masters loads, and back. */
static void test_own_loop_split(void) {
    const char* path = in_folder("loop.safetensors");
    enum { MANY = 70000 };                                          /* more than a chunk of the file */
    static float w[MANY], joined[MANY], g[MANY], m[MANY];
    static uint16_t low[2][MANY], rest[MANY], m16[MANY], before[2][MANY];
    amp_optimizer_desc d;
    amp_optimizer whole, split;
    amp_param p, q;
    int i;
    memset(&p, 0, sizeof p);
    memset(&d, 0, sizeof d);
    for (i = 0; i < MANY; i++) { w[i] = test_uniform(); g[i] = test_uniform(); }
    amp_master_split(low[0], rest, w, MANY);
    memset(w, 0, sizeof w);
    p.name = "w"; p.count = MANY; p.grad = g; p.low_dtype = AMP_BF16;
    q = p;
    p.low = low[0]; p.rest = rest; p.m = m16; p.moment_dtype = AMP_F16;
    q.low = low[1]; q.master = w; q.m = m;
    d.momentum = 0.9f;
    CHECK(amp_optimizer_init(&split, &d, &p, 1) == AMP_OK && amp_optimizer_init(&whole, &d, &q, 1) == AMP_OK);
    CHECK(amp_optimizer_step(&split, NULL, NULL) == AMP_OK);
    CHECK_MSG(amp_optimizer_save(&split, NULL, path, NULL, 0, NULL) == AMP_OK, "%s", heard);
    CHECK(amp_optimizer_load(&whole, NULL, path, NULL, 0, NULL) == AMP_ERR_FORMAT);     /* the moments' types */
    q.m = before[0]; q.moment_dtype = AMP_F16;
    CHECK_MSG(amp_optimizer_load(&whole, NULL, path, NULL, 0, NULL) == AMP_OK, "%s", heard);
    amp_master_join(joined, low[0], rest, MANY);
    CHECK(memcmp(joined, w, sizeof w) == 0 && memcmp(before[0], m16, sizeof m16) == 0);
    CHECK(amp_optimizer_save(&whole, NULL, path, NULL, 0, NULL) == AMP_OK);
    memcpy(before[0], low[0], sizeof rest); memcpy(before[1], rest, sizeof rest);
    memset(low[0], 0, sizeof rest); memset(rest, 1, sizeof rest);
    CHECK_MSG(amp_optimizer_load(&split, NULL, path, NULL, 0, NULL) == AMP_OK, "%s", heard);
    CHECK(memcmp(before[0], low[0], sizeof rest) == 0 && memcmp(before[1], rest, sizeof rest) == 0);
}

/* A long name is cut in the sentence, but no character of it. */
static void test_long_names(void) {
    amp_file_tensor t;
    amp_file_desc d = counting_desc(0);
    static float one;
    char name[100];
    int i, lead;
    for (lead = 0; lead < 4; lead++) {
        memset(name, 'a', sizeof name);
        for (i = 0; i < 24; i++) memcpy(name + lead + 4 * i, "\xf0\x9d\x84\x9e", 4);
        name[lead + 96] = 0;
        t = tensor(name, AMP_F32, &one, 9, 1, 0, 0, 0);
        CHECK(amp_file_save(in_folder("names.safetensors"), &t, 1, NULL, 0, &d) == AMP_ERR_ARGUMENT);
        i = lead + (57 - lead) / 4 * 4;
        CHECK_MSG(strstr(heard, "'") && strncmp(strstr(heard, "'") + 1, name, (size_t)i) == 0
                  && strncmp(strstr(heard, "'") + 1 + i, "...'", 4) == 0, "%s", heard);
    }
}

/* What does not fit is refused with a sentence, and changes nothing. */
static void check_loop_refused(amp_result r, amp_result wanted, const char* piece, const own_loop* now, const own_loop* before) {
    CHECK_MSG(r == wanted && strstr(heard, piece), "%d, %s: %s", (int)r, piece, heard);
    CHECK_MSG(same_loops(now, before), "%s", piece);
}

static void test_own_loop_refusals(void) {
    const char *path = in_folder("loop.safetensors"), *other = in_folder("loop2.safetensors");
    static own_loop a, b, before;
    char longest[143];
    amp_file_desc d = counting_desc(0);
    amp_optimizer none;
    amp_model* m = make_model(&usual);
#define REFUSED(call, code, piece) check_loop_refused(call, code, piece, &b, &before)
    memset(&none, 0, sizeof none);
    memset(longest, 'x', sizeof longest);
    longest[142] = '\0';
    loop_init(&a, 1);
    loop_init(&b, 2);
    before = b;
    loop_train(&a, 3);
    CHECK(amp_optimizer_save(&a.optimizer, &a.scaler, path, a.more, 2, &d) == AMP_OK);
    REFUSED(amp_optimizer_load(NULL, &b.scaler, path, b.more, 2, &d), AMP_ERR_ARGUMENT, "no optimizer");
    REFUSED(amp_optimizer_load(&none, &b.scaler, path, b.more, 2, &d), AMP_ERR_ARGUMENT, "no optimizer");
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, "", b.more, 2, &d), AMP_ERR_ARGUMENT, "no path");
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, NULL, 2, &d), AMP_ERR_ARGUMENT, "2 tensors at NULL");
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, -1, &d), AMP_ERR_ARGUMENT, "-1 tensors");
    REFUSED(amp_optimizer_load(&b.optimizer, NULL, path, b.more, 2, &d), AMP_ERR_FORMAT, "holds a scaler, but none is given");
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 1, &d), AMP_ERR_FORMAT,
            "tensor 'place' is in the file, but not in the optimizer");
    b.params[1].name = "q";
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_FORMAT, "no tensor 'q'");
    b.params[1].name = NULL;
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_ARGUMENT, "parameter 1 needs a name");
    b.params[1].name = longest;
    REFUSED(amp_optimizer_save(&b.optimizer, &b.scaler, other, b.more, 2, &d), AMP_ERR_ARGUMENT, "parameter 1 needs a name");
    longest[141] = '\0';
    CHECK(amp_optimizer_save(&b.optimizer, &b.scaler, other, b.more, 2, &d) == AMP_OK);
    CHECK(amp_optimizer_load(&b.optimizer, &b.scaler, other, b.more, 2, &d) == AMP_OK);
    b.params[1].name = "u.m";
    b.params[0].name = "u";
    REFUSED(amp_optimizer_save(&b.optimizer, &b.scaler, other, b.more, 2, &d), AMP_ERR_ARGUMENT, "'u.m' is used twice");
    b.params[0].name = "w";
    b.params[1].name = "u";
    b.params[1].group = 1;
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_FORMAT, "parameters in other groups");
    b.params[1].group = 0;
    b.optimizer.desc.maximize = 1;
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_FORMAT, "but 1 in the optimizer");
    b.optimizer.desc.maximize = 0;
    b.scaler.rule.growth = 4.0;
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_FORMAT, "scaler");
    b.scaler.rule.growth = 2.0;
    CHECK(m && amp_checkpoint_load(m, path) == AMP_ERR_FORMAT && strstr(heard, "was it written by amp_checkpoint_save?"));
    CHECK(m && amp_checkpoint_save(m, other) == AMP_OK);
    d = counting_desc(0);
    b.optimizer.desc = amp_model_optimizer(m)->desc;
    b.optimizer.count = 2;                                           /* that desc has one group */
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, other, NULL, 0, &d), AMP_ERR_FORMAT, "written by amp_optimizer_save?");
    b.optimizer.desc = before.optimizer.desc;
    b.optimizer.count = 3;
    CHECK(amp_optimizer_save(&b.optimizer, NULL, other, b.more, 2, &d) == AMP_OK);
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, other, b.more, 2, &d), AMP_ERR_FORMAT, "amp.scaler is missing");
    amp_scaler_scale_loss(&a.scaler, 1.0f);
    CHECK(amp_optimizer_save(&a.optimizer, &a.scaler, path, a.more, 2, &d) == AMP_ERR_STATE);
    CHECK(amp_optimizer_load(&a.optimizer, &a.scaler, path, a.more, 2, &d) == AMP_ERR_STATE);
    memset(&b.scaler, 0, sizeof b.scaler);
    before = b;
    REFUSED(amp_optimizer_save(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_STATE, "amp_scaler_init was never called");
    heard[0] = '\0';
    REFUSED(amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d), AMP_ERR_STATE, "amp_scaler_init was never called");
    amp_model_destroy(m);
#undef REFUSED
}

/* What loading would refuse is not saved over a good file; nor is anything read or written through what is gone. */
static void test_own_loop_written_by_hand(void) {
    const char* path = in_folder("loop.safetensors");
    static own_loop a, b;
    amp_file_desc d = counting_desc(0);
    amp_optimizer* o = &a.optimizer;
    size_t n, m;
    unsigned char *good, *now;
    int k;
    loop_init(&a, 1);
    loop_init(&b, 1);
    loop_train(&a, 3);
    loop_train(&b, 3);
    CHECK(amp_optimizer_save(o, &a.scaler, path, a.more, 2, &d) == AMP_OK);
    good = read_bytes(path, &n);
    for (k = 0; k < 6; k++) {
        static const char* const words[] = {
            "amp_optimizer_save: state.step -3", "amp_optimizer_save: state.step 4611686018427387904",
            "amp_optimizer_save: groups[0].lr -2", "amp_optimizer_save: state.lr -1", "parameter 1 (u): neither master nor low",
            "parameter 0 (w): group 16 does not exist, there are 2"
        };
        if (k == 0) o->state.step = -3;
        if (k == 1) o->state.step = INT64_C(1) << 62;
        if (k == 2) o->groups[0].lr = -2.0f;
        if (k == 3) o->state.lr = (float)AMP_ZERO;
        if (k == 4) a.params[1].low = NULL;
        if (k == 5) a.params[0].group = AMP_MAX_GROUPS;
        heard_count = 0;
        CHECK(amp_optimizer_save(o, &a.scaler, path, a.more, 2, &d) == AMP_ERR_ARGUMENT && heard_count == 1);
        CHECK_MSG(strstr(heard, words[k]), "%s", heard);
        if (k > 3) {
            CHECK(amp_optimizer_load(o, &a.scaler, path, a.more, 2, &d) == AMP_ERR_ARGUMENT && heard_count == 2);
            CHECK_MSG(strstr(heard, words[k]), "%s", heard);
        }
        now = read_bytes(path, &m);
        CHECK(n == m && memcmp(good, now, n) == 0);
        free(now);
        a.params[1].low = a.low[1];
        a.params[0].group = 0;
        CHECK(amp_optimizer_load(o, &a.scaler, path, a.more, 2, &d) == AMP_OK && same_loops(&a, &b));
    }
    free(good);
}

/* The same for a model. */
static void test_model_written_by_hand(void) {
    const char* path = in_folder("model.safetensors");
    amp_model* m = make_model(&usual);
    amp_optimizer* o = m ? amp_model_optimizer(m) : NULL;
    int k;
    if (!o) { CHECK(o != NULL); return; }
    CHECK(amp_checkpoint_save(m, path) == AMP_OK);
    for (k = 0; k < 3; k++) {
        if (k == 0) o->state.step = -3;
        if (k == 1) o->state.step = INT64_C(1) << 62;
        if (k == 2) o->groups[0].lr = -2.0f;
        CHECK(amp_checkpoint_save(m, path) == AMP_ERR_ARGUMENT);
        CHECK_MSG(strstr(amp_model_error(m), k < 2 ? "amp_checkpoint_save: state.step" : "amp_checkpoint_save: groups[0].lr -2"), "%s",
                  amp_model_error(m));
        CHECK(amp_checkpoint_load(m, path) == AMP_OK && o->state.step == 0 && o->groups[0].lr != -2.0f);
    }
    amp_model_destroy(m);
}

static void test_own_loop_memory(void) {
    const char *path = in_folder("loop.safetensors"), *other = in_folder("memory.safetensors");
    static own_loop a, b, before;
    amp_file_desc d;
    amp_result r = AMP_ERR_MEMORY;
    long k;
    loop_init(&a, 1);
    loop_init(&b, 2);
    before = b;
    remove(other);
    CHECK(amp_optimizer_save(&a.optimizer, &a.scaler, path, a.more, 2, NULL) == AMP_OK);
    for (k = 1; r != AMP_OK && k < 50; k++) {
        d = counting_desc(k);
        r = amp_optimizer_save(&a.optimizer, &a.scaler, other, a.more, 2, &d);
        CHECK(alloc_live == 0 && (r == AMP_OK || (r == AMP_ERR_MEMORY && heard_count == 1 && !exists(other))));
    }
    CHECK_MSG(k == 4, "saving made %ld allocations", k - 2);
    for (k = 1, r = AMP_ERR_MEMORY; r != AMP_OK && k < 50; k++) {
        CHECK(same_loops(&b, &before));
        d = counting_desc(k);
        r = amp_optimizer_load(&b.optimizer, &b.scaler, path, b.more, 2, &d);
        CHECK(alloc_live == 0 && (r == AMP_OK || (r == AMP_ERR_MEMORY && heard_count == 1)));
    }
    CHECK_MSG(k == 5 && same_loops(&a, &b), "loading made %ld allocations", k - 2);
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
#if HAVE_POSIX
    char command[300];
    const char* parent = getenv("TMPDIR");
    if (!parent) parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";   /* in memory: every save is synced */
    snprintf(folder, sizeof folder, "%.150s/amp_checkpoint_XXXXXX", parent);
    if (!mkdtemp(folder)) { printf("cannot make the directory %s\n", folder); return 1; }
#endif
    TEST(test_known_bytes);
    TEST(test_round_trip);
    TEST(test_many);
    TEST(test_truncation);
    TEST(test_flips);
    TEST(test_hostile_headers);
    TEST(test_escapes);
    TEST(test_header_lengths);
    TEST(test_memory);
    TEST(test_disk);
    TEST(test_foreign_files);
#if HAVE_POSIX
    TEST(test_file_limit);
    TEST(test_not_a_file);
    TEST(test_links);
    TEST(test_foreseen_name);
    TEST(test_modes);
    TEST(test_long_file_name);
    TEST(test_long_path);
#endif
#if HAVE_POSIX && defined(__linux__)
    TEST(test_order_of_calls);
#endif
    TEST(test_arguments);
#if HAVE_POSIX && !defined(TEST_FILES_ONLY)
    TEST(test_trial);
#endif
#if !defined(TEST_FILES_ONLY)
    TEST(test_resume);
    TEST(test_group_with_optimizer);
    TEST(test_split_masters);
    TEST(test_known_graph);
    TEST(test_foreign_models);
    TEST(test_foreign_settings);
    TEST(test_wrong_lengths);
    TEST(test_learning_rate);
    TEST(test_group_rates);
    TEST(test_frozen_steps);
    TEST(test_damaged_checkpoint);
    TEST(test_model_failures);
    TEST(test_load_weights);
    TEST(test_transposed_weights);
    TEST(test_load_weights_types);
    TEST(test_load_weights_saturates);
    TEST(test_load_weights_of_module);
    TEST(test_saved_switch);
    TEST(test_frozen_norm);
    TEST(test_mixed);
    TEST(test_own_loop);
    TEST(test_own_loop_split);
    TEST(test_own_loop_refusals);
    TEST(test_long_names);
    TEST(test_own_loop_written_by_hand);
    TEST(test_model_written_by_hand);
    TEST(test_own_loop_memory);
#endif
#if HAVE_POSIX
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    CHECK(system(command) == 0);
#endif
    CHECK(alloc_live == 0 && alloc_wrong_frees == 0);
    TEST_END();
}
