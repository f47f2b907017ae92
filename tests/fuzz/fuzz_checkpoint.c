/* fuzz_checkpoint.c - the safetensors reader on hostile files.
   With libFuzzer:   clang -g -fsanitize=fuzzer,address -DAMP_FUZZER fuzz_checkpoint.c amp.o -lm && ./a.out corpus/
   Without:          cc fuzz_checkpoint.c amp.o -lm && ./a.out [rounds] [seed]     (mutates a few files of its own)
                     ./a.out rounds seed corpus     (writes them there instead, for libFuzzer to begin with)
   A file is either refused, and then no target has changed, or accepted, and then what was read survives being written
   and read again. */
#if defined(__unix__) || defined(__APPLE__)
  #define _XOPEN_SOURCE 700
  #include <unistd.h>
#endif
#include "../../amp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE 4096
#define SENTINEL 0xa5
static char path[300], again[310];

/* Says what went wrong and crashes, so that a fuzzer keeps the input. */
static void give_up(const char* what) {
    fprintf(stderr, "fuzz_checkpoint: %s (the file is %s)\n", what, path);
    abort();
}

static void choose_paths(void) {
    const char* folder = getenv("TMPDIR");
    unsigned long number = 0;
#if defined(__unix__) || defined(__APPLE__)
    if (!folder) folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    number = (unsigned long)getpid();
#endif
    snprintf(path, sizeof path, "%.200s/amp_fuzz_%lu.safetensors", folder ? folder : ".", number);
    snprintf(again, sizeof again, "%s.again", path);
}

typedef struct targets { unsigned char a[24], b[4], c[8], d[2]; } targets;
static void describe(amp_file_tensor t[4], targets* x) {
    memset(t, 0, 4 * sizeof *t);
    t[0].tensor.data = x->a; t[0].tensor.name = "a"; t[0].tensor.dtype = AMP_F32; t[0].tensor.count = 6;
    t[0].rank = 2; t[0].shape[0] = 2; t[0].shape[1] = 3;
    t[1].tensor.data = x->b; t[1].tensor.name = "b"; t[1].tensor.dtype = AMP_F16; t[1].tensor.count = 2;
    t[1].rank = 1; t[1].shape[0] = 2;
    t[2].tensor.data = x->c; t[2].tensor.name = "c\xc3\xa4"; t[2].tensor.dtype = AMP_F64; t[2].tensor.count = 1;
    t[3].tensor.data = x->d; t[3].tensor.name = "d\"\\"; t[3].tensor.dtype = AMP_BF16; t[3].tensor.count = 1;
    t[3].rank = 4; t[3].shape[0] = t[3].shape[1] = t[3].shape[2] = t[3].shape[3] = 1;
}

static int only_sentinels(const void* data, size_t n) {
    const unsigned char* p = (const unsigned char*)data;
    for (; n > 0; n--) if (*p++ != SENTINEL) return 0;
    return 1;
}

/* Loads the first `count` targets; on success the round trip must be exact. */
static void try_targets(int count) {
    amp_file_tensor t[4], u[4];
    targets x, y;
    memset(&x, SENTINEL, sizeof x);
    memset(&y, SENTINEL, sizeof y);
    describe(t, &x);
    describe(u, &y);
    if (amp_file_load(path, t, count, NULL) != AMP_OK) {
        if (!only_sentinels(&x, sizeof x)) give_up("a refused file changed a target");
        return;
    }
    if (amp_file_save(again, t, count, NULL, 0, NULL) != AMP_OK || amp_file_load(again, u, count, NULL) != AMP_OK
        || memcmp(&x, &y, sizeof x) != 0) give_up("what was read cannot be written and read again");
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
    char text[16];
    FILE* f;
    int i;
    if (!path[0]) choose_paths();
    f = fopen(path, "wb");
    if (!f || fwrite(data, 1, size, f) != size || fclose(f) != 0) give_up("cannot write");
    for (i = 0; i <= 4; i++) try_targets(i);
    memset(text, SENTINEL, sizeof text);
    if (amp_file_text_of(path, "key", text, sizeof text, NULL) == AMP_OK) {
        if (!memchr(text, 0, sizeof text)) give_up("a text without an end");
    } else if (!only_sentinels(text, sizeof text)) give_up("a refused file changed a text");
    return 0;
}

#if !defined(AMP_FUZZER)

static unsigned long long state = 1;
static unsigned below(unsigned n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(state >> 33) % n;
}

/* A file with all targets and two texts. */
static size_t make_seed(unsigned char* out) {
    amp_file_text texts[2] = { { "key", "value" }, { "", "\n\"\xe2\x82\xac" } };
    amp_file_tensor t[4];
    targets x;
    FILE* f;
    size_t n;
    unsigned i;
    for (i = 0; i < sizeof x; i++) ((unsigned char*)&x)[i] = (unsigned char)below(256);
    describe(t, &x);
    if (amp_file_save(path, t, 1 + (int)below(4), texts, (int)below(3), NULL) != AMP_OK) give_up("cannot save");
    f = fopen(path, "rb");
    n = f ? fread(out, 1, MAX_FILE, f) : 0;
    if (f) fclose(f);
    return n;
}

/* Replaces `cut` bytes at `at` by a piece. */
static size_t splice(unsigned char* p, size_t n, size_t at, size_t cut, const char* piece, size_t length) {
    if (cut > n - at) cut = n - at;
    if (n - cut + length > MAX_FILE) return n;
    memmove(p + at + length, p + at + cut, n - at - cut);
    memcpy(p + at, piece, length);
    return n - cut + length;
}

static size_t mutate(unsigned char* p, size_t n) {
    static const char* const pieces[] = {
        "{", "}", "[", "]", "\"", ",", ":", "\\", "\\u0061", "\\ud834\\udd1e", "\\u0000", "0", "18446744073709551615",
        "18446744073709551616", "4294967296", "-1", "1.0", "null", " ", "\n", "\x80", "\xc3\xa4", "\xed\xa0\x80", "\"F32\"",
        "\"F4\"", "\"I64\"", "\"dtype\":\"F16\",", "\"shape\":[0],", "\"data_offsets\":[0,0]", "\"__metadata__\":{\"x\":\"y\"},",
        "\"e\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},", "\"a\":", "\"b\":", "\"\":", "amp.crc32.",
        "\"amp.crc32.a\":\"01234567\","
    };
    const char* piece = pieces[below(sizeof pieces / sizeof pieces[0])];
    size_t at = 8 + below((unsigned)n - 7), other;
    if (at > n) at = n;
    switch (below(8)) {
        case 0: p[below((unsigned)n)] ^= (unsigned char)(1u << below(8)); return n;
        case 1: p[below((unsigned)n)] = (unsigned char)below(256); return n;
        case 2: return splice(p, n, at, 0, piece, strlen(piece));
        case 3: return splice(p, n, at, strlen(piece), piece, strlen(piece));
        case 4: return splice(p, n, at, 1 + below(8), "", 0);
        case 5: return at;                                                   /* truncated */
        case 6: p[below(8)] = (unsigned char)below(256); return n;           /* the header's length */
        default:                                                             /* one part copied over another */
            other = 8 + below((unsigned)n - 7);
            if (other > n) other = n;
            { char copy[40];
              size_t length = below(40);
              if (length > n - other) length = n - other;
              memcpy(copy, p + other, length);
              return splice(p, n, at, below(2) ? length : 0, copy, length); }
    }
}

/* Makes the header's length right again for a file that still ends in `data` bytes of data. */
static void repair_length(unsigned char* p, size_t n, size_t data) {
    size_t header = n < 8 + data ? 0 : n - 8 - data;
    int i;
    for (i = 0; i < 8; i++) p[i] = (unsigned char)((unsigned long long)header >> (8 * i) & 255);
}

/* Writes an input into a folder. */
static void keep(const char* folder, unsigned long number, const unsigned char* p, size_t n) {
    char name[300];
    FILE* f;
    snprintf(name, sizeof name, "%.200s/%lu", folder, number);
    f = fopen(name, "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f) != 0) give_up("cannot write");
}

int main(int argc, char** argv) {
    static unsigned char p[MAX_FILE];
    unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 20000, i;
    choose_paths();
    if (argc > 2) state = strtoul(argv[2], NULL, 10);
    for (i = 0; i < rounds; i++) {
        size_t n = make_seed(p), data = n - 8 - (p[0] + 256u * p[1]);
        unsigned k, count = 1 + below(4);
        for (k = 0; k < count && n > 8; k++) n = mutate(p, n);
        if (n > 8 && below(4)) repair_length(p, n, data);
        if (argc > 3) keep(argv[3], i, p, n);
        else LLVMFuzzerTestOneInput(p, n);
    }
    remove(path);
    remove(again);
    printf("%lu passed, 0 failed\n", rounds);
    return 0;
}

#endif
