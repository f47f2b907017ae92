/* fuzz_idx.c - the examples' reader of MNIST files (inflate, gzip, IDX) on hostile files.
   With libFuzzer:   clang -g -fsanitize=fuzzer,address -DAMP_FUZZER fuzz_idx.c -lm && ./a.out corpus/
   Without:          cc fuzz_idx.c -lm && ./a.out [rounds] [seed]     (mutates a few files of its own)
                     ./a.out rounds seed corpus     (writes them there instead, for libFuzzer to begin with)
   Input: one byte that says where to cut, then an image file and a label file. They are either refused with one line,
   or accepted, and then every pixel and label is there and in its range. The packed data is also unpacked without its
   checksum, which would otherwise stop nearly every mutation at the door. */
#define DATA_MAX_BYTES (1u << 20)
#include "../../examples/data.h"

/* Says what went wrong and crashes, so that a fuzzer keeps the input. */
static void give_up(const char* what) {
    fprintf(stderr, "fuzz_idx: %s\n", what);
    abort();
}

/* Touches every byte, for the sanitizers. */
static unsigned sum(const uint8_t* p, size_t n) {
    unsigned total = 0;
    while (n--) total += *p++;
    return total;
}

static void try_parse(const uint8_t* p, size_t n) {
    size_t cut = n > 1 ? 1 + (n - 1) * p[0] / 255 : n, i;
    char error[DATA_ERROR];
    data_set d;
    if (n == 0) return;
    memset(error, 0, sizeof error);
    if (!data_parse(&d, p + 1, cut - 1, "images", p + cut, n - cut, "labels", error)) {
        if (d.pixels || d.labels || d.count) give_up("a refused file left something behind");
        if (strlen(error) < 10 || strchr(error, '\n')) give_up("a refusal without a sentence");
        return;
    }
    if (d.count < 1 || d.height < 1 || d.height > DATA_MAX_SIDE || d.width < 1 || d.width > DATA_MAX_SIDE)
        give_up("a size out of range");
    for (i = 0; i < (size_t)d.count; i++)
        if (d.labels[i] > 9) give_up("a label out of range");
    (void)sum(d.pixels, (size_t)d.count * (size_t)d.height * (size_t)d.width);
    data_free(&d);
}

static void try_inflate(const uint8_t* p, size_t n) {
    data_inflate* s = (data_inflate*)calloc(1, sizeof *s);
    if (!s) return;
    s->in = p;
    s->in_size = n;
    if (data_inflate_run(s) != (s->error == NULL)) give_up("an error without a sentence, or the reverse");
    if (s->in_pos > n || s->out_size > s->out_capacity || s->out_size > DATA_MAX_BYTES) give_up("sizes that cannot be");
    (void)sum(s->out, s->out_size);
    free(s->out);
    free(s);
}

int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size);
int LLVMFuzzerTestOneInput(const unsigned char* data, size_t size) {
    try_parse(data, size);
    try_inflate(data, size);
    if (size > 11) try_inflate(data + 11, size - 11);                       /* behind the first file's gzip header */
    return 0;
}

#if !defined(AMP_FUZZER)

enum { MAX_FILE = 2048 };

static unsigned long long state = 1;
static unsigned below(unsigned n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(state >> 33) % n;
}

/* Two images of 2x3, stored; two labels, plain; two images of 20x20 with dynamic codes. Made with Python's zlib. */
static const uint8_t stored[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 1, 28, 0, 227, 255, 0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3, 0, 10, 20, 30,
    40, 50, 60, 70, 80, 90, 100, 110, 24, 16, 183, 117, 28, 0, 0, 0
};
static const uint8_t labels[] = { 0, 0, 8, 1, 0, 0, 0, 2, 3, 4 };
static const uint8_t dynamic[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 61, 146, 137, 109, 68, 65, 8, 67, 81, 34, 68, 10, 72, 255,
    245, 224, 174, 226, 103, 38, 187, 171, 249, 154, 195, 28, 182, 169, 250, 249, 174, 170, 47, 175, 223, 183, 182, 219,
    223, 234, 41, 169, 106, 166, 74, 254, 251, 167, 125, 155, 90, 111, 189, 211, 24, 60, 96, 189, 215, 240, 54, 203,
    174, 186, 89, 9, 226, 182, 215, 121, 214, 223, 90, 192, 187, 157, 75, 135, 19, 45, 110, 53, 115, 185, 121, 2,
    184, 57, 185, 104, 59, 225, 210, 73, 158, 168, 247, 41, 121, 151, 125, 61, 81, 123, 106, 210, 16, 173, 201, 245,
    252, 212, 157, 143, 59, 213, 67, 26, 229, 173, 222, 118, 122, 77, 198, 229, 154, 76, 154, 40, 32, 211, 112, 34,
    120, 38, 88, 233, 7, 73, 42, 34, 152, 129, 227, 242, 144, 36, 78, 39, 117, 26, 51, 37, 75, 225, 232, 190,
    67, 155, 215, 81, 211, 191, 148, 147, 64, 175, 22, 32, 0, 237, 146, 62, 108, 81, 184, 31, 52, 106, 133, 228,
    41, 231, 100, 90, 8, 206, 181, 239, 100, 4, 192, 65, 169, 218, 67, 234, 248, 130, 66, 16, 136, 26, 174, 128,
    210, 207, 128, 163, 45, 90, 137, 59, 131, 19, 84, 179, 18, 220, 47, 162, 79, 208, 39, 171, 211, 155, 78, 148,
    152, 135, 119, 198, 62, 43, 240, 150, 89, 192, 215, 126, 30, 226, 143, 77, 179, 231, 231, 214, 231, 150, 108, 180,
    188, 12, 65, 120, 45, 221, 39, 60, 254, 34, 5, 51, 132, 103, 156, 247, 5, 191, 233, 202, 208, 8, 199, 152,
    33, 49, 53, 55, 18, 22, 143, 48, 68, 50, 129, 96, 30, 187, 43, 116, 110, 24, 58, 238, 235, 38, 236, 84,
    154, 27, 92, 129, 137, 106, 251, 98, 68, 142, 185, 217, 49, 100, 50, 218, 245, 7, 69, 110, 154, 5, 48, 3,
    0, 0
};

static size_t make_seed(uint8_t* out) {
    size_t n = 1;
    out[0] = 0;
    if (below(2)) {
        memcpy(out + n, stored, sizeof stored);
        n += sizeof stored;
    } else {
        memcpy(out + n, dynamic, sizeof dynamic);
        n += sizeof dynamic;
    }
    out[0] = (uint8_t)((n - 1) * 255 / (n - 1 + sizeof labels) + 1);        /* the cut falls just behind the images */
    memcpy(out + n, labels, sizeof labels);
    return n + sizeof labels;
}

static size_t mutate(uint8_t* p, size_t n) {
    size_t at = below((unsigned)n), other = below((unsigned)n), length = below(16);
    switch (below(6)) {
        case 0: p[at] ^= (uint8_t)(1u << below(8)); return n;
        case 1: p[at] = (uint8_t)below(256); return n;
        case 2: return at + 1;                                               /* truncated */
        case 3: p[at] = below(2) ? 0 : 255; return n;
        case 4:                                                              /* one part copied over another */
            if (length > n - at) length = n - at;
            if (length > n - other) length = n - other;
            memmove(p + at, p + other, length);
            return n;
        default:                                                             /* some bytes taken out */
            if (length > n - at - 1) length = n - at - 1;
            memmove(p + at, p + at + length, n - at - length);
            return n - length;
    }
}

/* Writes an input into a folder. */
static void keep(const char* folder, unsigned long number, const uint8_t* p, size_t n) {
    char name[300];
    FILE* f;
    snprintf(name, sizeof name, "%.200s/%lu", folder, number);
    f = fopen(name, "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f) != 0) give_up("cannot write");
}

/* Each round runs on memory of exactly the file's size, so that a sanitizer sees the first byte too many. */
int main(int argc, char** argv) {
    static uint8_t p[MAX_FILE];
    unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : 20000, i;
    if (argc > 2) state = strtoul(argv[2], NULL, 10);
    for (i = 0; i < rounds; i++) {
        size_t n = make_seed(p);
        unsigned k, count = below(5);
        uint8_t* exact;
        for (k = 0; k < count; k++) n = mutate(p, n);
        exact = (uint8_t*)malloc(n);
        if (!exact) give_up("no memory");
        memcpy(exact, p, n);
        if (argc > 3) keep(argv[3], i, exact, n);
        else LLVMFuzzerTestOneInput(exact, n);
        free(exact);
    }
    printf("%lu passed, 0 failed\n", rounds);
    return 0;
}

#endif
