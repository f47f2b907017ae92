/* test_data.c - the examples' data and charts: inflate, gzip and IDX on good and on hostile input, files, drawn digits,
   the palette as the colour-blind see it, what a chart writes. */
#define DATA_MAX_BYTES (1u << 20)       /* so that the limit itself can be tested with little memory */
#include "../examples/data.h"
#include "../examples/chart.h"
#include "test.h"
#include <time.h>

/* Made with Python's zlib: the packed forms of IDX files. Blocks: stored; fixed codes; dynamic codes; several. */
static const uint8_t stored_images[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 1, 76, 0, 179, 255, 0, 0, 8, 3, 0,
    0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 4, 0, 10, 34, 72, 124, 190, 14, 108, 216,
    82, 218, 112, 20, 198, 134, 84, 48, 26, 18, 24, 44, 78, 126, 188, 8, 98, 202, 64, 196,
    86, 246, 164, 96, 42, 2, 232, 220, 222, 238, 12, 56, 114, 186, 16, 116, 230, 102, 244, 144,
    58, 242, 184, 140, 110, 94, 92, 104, 130, 170, 224, 157, 138, 164, 178, 76, 0, 0, 0
};
static const uint8_t fixed_labels[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 99, 96, 224, 96, 100, 96, 96, 96, 102, 103,
    224, 4, 0, 165, 18, 211, 114, 11, 0, 0, 0
};
static const uint8_t dynamic_images[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 205, 218, 161, 142, 195, 48, 12, 6, 224, 72,
    71, 46, 210, 33, 83, 31, 52, 53, 13, 53, 13, 53, 205, 251, 63, 200, 226, 173, 224, 52,
    229, 63, 248, 119, 145, 218, 102, 104, 86, 245, 57, 118, 163, 180, 246, 253, 213, 90, 251, 217,
    215, 239, 117, 61, 71, 223, 67, 68, 213, 204, 125, 140, 152, 153, 171, 177, 71, 74, 52, 79,
    141, 238, 203, 246, 188, 143, 86, 19, 157, 207, 41, 121, 88, 95, 115, 152, 180, 12, 215, 154,
    214, 61, 99, 152, 246, 150, 236, 88, 198, 92, 221, 246, 77, 44, 178, 235, 152, 77, 252, 117,
    233, 160, 199, 226, 45, 36, 173, 133, 166, 247, 89, 207, 53, 164, 166, 207, 95, 55, 142, 119,
    191, 236, 255, 215, 104, 134, 252, 178, 99, 145, 162, 11, 252, 210, 115, 186, 137, 65, 191, 108,
    35, 165, 22, 248, 165, 199, 242, 143, 95, 118, 44, 179, 151, 218, 179, 95, 250, 123, 201, 48,
    228, 151, 30, 139, 122, 64, 191, 236, 60, 178, 229, 200, 47, 125, 125, 41, 172, 192, 239, 29,
    235, 46, 242, 75, 47, 66, 115, 40, 242, 75, 175, 211, 133, 22, 249, 101, 247, 47, 189, 204,
    158, 253, 210, 251, 58, 85, 65, 126, 249, 253, 238, 88, 200, 47, 223, 174, 11, 242, 75, 127,
    47, 37, 23, 248, 165, 123, 89, 14, 253, 210, 243, 200, 221, 144, 95, 250, 250, 82, 104, 129,
    223, 123, 236, 158, 253, 210, 235, 145, 141, 64, 126, 233, 117, 122, 106, 34, 191, 244, 156, 158,
    49, 62, 197, 111, 47, 177, 192, 47, 191, 223, 29, 138, 252, 210, 211, 40, 119, 203, 11, 252,
    210, 223, 75, 161, 5, 126, 249, 223, 106, 43, 63, 197, 111, 150, 92, 224, 151, 191, 207, 16,
    134, 252, 242, 215, 221, 45, 22, 248, 229, 23, 199, 77, 22, 248, 165, 135, 98, 42, 159, 226,
    119, 164, 56, 242, 75, 239, 235, 10, 44, 240, 203, 239, 119, 203, 237, 217, 239, 13, 118, 29,
    249, 189, 163, 103, 64, 126, 233, 94, 98, 9, 242, 75, 207, 163, 130, 11, 252, 242, 247, 25,
    98, 34, 191, 55, 217, 61, 250, 165, 215, 163, 66, 11, 252, 210, 235, 180, 79, 232, 151, 158,
    211, 46, 9, 253, 178, 251, 58, 41, 181, 103, 191, 252, 126, 247, 143, 222, 55, 191, 244, 239,
    128, 82, 11, 252, 242, 191, 213, 54, 92, 224, 151, 30, 203, 244, 14, 253, 178, 243, 168, 208,
    2, 191, 244, 245, 37, 182, 86, 224, 247, 134, 117, 55, 145, 95, 254, 102, 208, 72, 228, 151,
    94, 26, 251, 52, 232, 151, 221, 191, 92, 231, 75, 78, 126, 233, 125, 221, 117, 190, 228, 228,
    151, 158, 211, 215, 249, 146, 147, 95, 186, 221, 235, 124, 201, 201, 47, 191, 103, 120, 157, 47,
    57, 249, 125, 0, 186, 1, 24, 60, 208, 36, 0, 0
};
static const uint8_t flushed_labels[] = {
    31, 139, 8, 0, 0, 0, 0, 0, 0, 3, 98, 96, 224, 96, 100, 96, 96, 224, 97, 0,
    0, 0, 0, 255, 255, 99, 100, 98, 102, 97, 101, 99, 231, 224, 100, 96, 4, 0, 167, 73,
    7, 246, 20, 0, 0, 0
};

static char error[DATA_ERROR];

/* A failed call leaves one line that begins with the file's name. */
static void check_sentence(const char* name) {
    CHECK_MSG(strncmp(error, name, strlen(name)) == 0 && error[strlen(name)] == ':', "%s", error);
    CHECK_MSG(!strchr(error, '\n') && strlen(error) > strlen(name) + 10, "%s", error);
}

static void put32(uint8_t* p, uint32_t value) {
    p[0] = (uint8_t)(value >> 24); p[1] = (uint8_t)(value >> 16); p[2] = (uint8_t)(value >> 8); p[3] = (uint8_t)value;
}

/* ---------------------------------------------------------------------------------------- */
/* gzip files from elsewhere.                                                                */
/* ---------------------------------------------------------------------------------------- */

static int image_pixel(int i) { return (i * i * 7 + 3 * i) & 255; }
static int dynamic_pixel(int i) { return (i / 28) % 5 ? 0 : ((i * i) >> 6) % 11 * 9; }

static int parse_small(const uint8_t* images, size_t image_size, const uint8_t* labels, size_t label_size) {
    data_set d;
    int ok = data_parse(&d, images, image_size, "images.gz", labels, label_size, "labels.gz", error), i;
    if (!ok) {
        CHECK(!d.pixels && !d.labels && d.count == 0);
        return 0;
    }
    CHECK(d.count == 3 && d.height == 5 && d.width == 4 && d.labels[0] == 7 && d.labels[1] == 0 && d.labels[2] == 9);
    for (i = 0; i < 60; i++)
        if (d.pixels[i] != image_pixel(i)) break;
    CHECK_MSG(i == 60, "pixel %d", i);
    data_free(&d);
    CHECK(!d.pixels && !d.labels && d.count == 0);
    return 1;
}

static void test_blocks(void) {
    data_set d;
    int i;
    CHECK_MSG(parse_small(stored_images, sizeof stored_images, fixed_labels, sizeof fixed_labels), "%s", error);
    CHECK_MSG(data_parse(&d, dynamic_images, sizeof dynamic_images, "a", flushed_labels, sizeof flushed_labels, "b",
                         error), "%s", error);
    CHECK(d.count == 12 && d.height == 28 && d.width == 28);
    for (i = 0; d.pixels && i < 12 * 28 * 28; i++)
        if (d.pixels[i] != dynamic_pixel(i)) break;
    CHECK_MSG(i == 12 * 28 * 28, "pixel %d", i);
    for (i = 0; d.labels && i < 12; i++) CHECK(d.labels[i] == i % 10);
    data_free(&d);
}

/* Every beginning of a file is refused. The copy has exactly the size, so that a sanitizer sees a read behind it. */
static void truncate_everywhere(const uint8_t* p, size_t n, const char* name) {
    size_t k;
    for (k = 0; k < n; k++) {
        uint8_t *copy = (uint8_t*)malloc(k ? k : 1), *out;
        uint32_t dims[3];
        memcpy(copy, p, k);
        CHECK_MSG(!data_idx(copy, k, n > 100 ? DATA_MAGIC_IMAGES : DATA_MAGIC_LABELS, dims, &out, name, error) && !out,
                  "%lu of %lu bytes were accepted", (unsigned long)k, (unsigned long)n);
        check_sentence(name);
        free(copy);
    }
}

static void test_truncated(void) {
    truncate_everywhere(stored_images, sizeof stored_images, "stored");
    truncate_everywhere(fixed_labels, sizeof fixed_labels, "fixed");
    truncate_everywhere(dynamic_images, sizeof dynamic_images, "dynamic");
    truncate_everywhere(flushed_labels, sizeof flushed_labels, "flushed");
}

/* One wrong bit: refused, or without any effect on what comes out. Without effect are the header's notes (time,
   system, hints) and the bits that fill up a byte. */
static void flip_everywhere(const uint8_t* p, size_t n) {
    uint8_t *good, *out, *copy = (uint8_t*)malloc(n);
    size_t good_size, size, k;
    int harmless = 0;
    CHECK(data_gunzip(p, n, &good, &good_size, "good", error));
    for (k = 0; k < 8 * n; k++) {
        int ok;
        memcpy(copy, p, n);
        copy[k / 8] ^= (uint8_t)(1u << k % 8);
        ok = data_gunzip(copy, n, &out, &size, "flipped", error);
        if (ok) CHECK_MSG(size == good_size && !memcmp(out, good, size), "bit %lu", (unsigned long)k);
        else check_sentence("flipped");
        harmless += ok;
        free(out);
    }
    CHECK_MSG(harmless <= 7 * 8 + 14, "%d bits without effect", harmless);   /* bytes 3 to 9, two times 7 bits */
    free(good);
    free(copy);
}

static void test_flipped(void) {
    flip_everywhere(stored_images, sizeof stored_images);
    flip_everywhere(fixed_labels, sizeof fixed_labels);
    flip_everywhere(dynamic_images, sizeof dynamic_images);
    flip_everywhere(flushed_labels, sizeof flushed_labels);
}

/* ---------------------------------------------------------------------------------------- */
/* gzip files made bit by bit.                                                               */
/* ---------------------------------------------------------------------------------------- */

static uint8_t made[40000];
static size_t made_bits;

/* n bits of value, lowest first. */
static void put(unsigned value, int n) {
    int i;
    for (i = 0; i < n; i++, made_bits++) made[made_bits / 8] |= (uint8_t)(((value >> i) & 1u) << made_bits % 8);
}
/* A Huffman code: highest bit first. */
static void put_code(unsigned code, int n) {
    while (n-- > 0) put((code >> n) & 1u, 1);
}
/* A symbol in the fixed code of literals and lengths. */
static void put_symbol(unsigned s) {
    if (s < 144) put_code(0x30 + s, 8);
    else if (s < 256) put_code(0x190 + s - 144, 9);
    else if (s < 280) put_code(s - 256, 7);
    else put_code(0xc0 + s - 280, 8);
}

static void begin(void) {
    static const uint8_t header[10] = { 31, 139, 8, 0, 0, 0, 0, 0, 0, 3 };
    memset(made, 0, sizeof made);
    memcpy(made, header, 10);
    made_bits = 80;
}
static void begin_fixed(void) { begin(); put(1, 1); put(1, 2); }

/* Adds checksum and size of what should come out. */
static size_t finish(const uint8_t* raw, size_t n) {
    uint32_t crc = data_crc32(raw, n), i;
    made_bits = (made_bits + 7) / 8 * 8;
    for (i = 0; i < 4; i++) put((crc >> 8 * i) & 255u, 8);
    for (i = 0; i < 4; i++) put(((uint32_t)n >> 8 * i) & 255u, 8);
    return made_bits / 8;
}

static void refused(const char* what) {
    uint8_t* out;
    size_t size;
    CHECK(!data_gunzip(made, finish(NULL, 0), &out, &size, "made.gz", error) && !out && size == 0);
    check_sentence("made.gz");
    CHECK_MSG(strstr(error, what), "'%s' instead of '%s'", error, what);
}

static void test_crc(void) {
    CHECK(data_crc32((const uint8_t*)"123456789", 9) == 0xcbf43926u);        /* the usual check value */
}

/* The longest distance and the longest length, and the shortest of both: 32768 random bytes, then a copy of their
   first 258, then the last byte three times more. */
static void test_extremes(void) {
    static uint8_t raw[32768 + 258 + 3];
    uint8_t* out;
    size_t size, i;
    begin_fixed();
    for (i = 0; i < 32768; i++) put_symbol(raw[i] = (uint8_t)(test_random() & 255u));
    memcpy(raw + 32768, raw, 258);
    memset(raw + 32768 + 258, raw[32768 + 257], 3);
    put_symbol(285);
    put_code(29, 5);
    put(8191, 13);
    put_symbol(257);
    put_code(0, 5);
    put_symbol(256);
    CHECK_MSG(data_gunzip(made, finish(raw, sizeof raw), &out, &size, "made", error), "%s", error);
    CHECK(out && size == sizeof raw && !memcmp(out, raw, sizeof raw));
    free(out);
}

static void test_bad_codes(void) {
    begin_fixed(); put_symbol('a'); put_symbol(257); put_code(1, 5); refused("before its beginning");
    begin_fixed(); put_symbol(257); put_code(0, 5); refused("before its beginning");
    begin_fixed(); put_symbol('a'); put_symbol(286); refused("a length that does not exist");
    begin_fixed(); put_symbol('a'); put_symbol(257); put_code(30, 5); refused("a distance that does not exist");
    begin(); put(1, 1); put(3, 2); refused("unknown type");
    begin(); put(1, 1); put(0, 2); made_bits = 88; put(5, 16); put(5, 16); refused("contradicts");
    begin_fixed(); put_symbol('a'); put_symbol(256); refused("the checksum is wrong");
}

/* Dynamic blocks: numbers of symbols, then the code of the code lengths, whose lengths come in the order 16, 17,
   18, 0. */
static void begin_dynamic(unsigned literals, unsigned distances, unsigned l16, unsigned l17, unsigned l18,
                          unsigned l0) {
    begin();
    put(1, 1); put(2, 2);
    put(literals - 257, 5); put(distances - 1, 5); put(0, 4);
    put(l16, 3); put(l17, 3); put(l18, 3); put(l0, 3);
}

static void test_bad_tables(void) {
    begin_dynamic(287, 1, 1, 0, 0, 1); refused("more symbols than exist");
    begin_dynamic(257, 31, 1, 0, 0, 1); refused("more symbols than exist");
    begin_dynamic(257, 1, 1, 1, 1, 1); refused("not a valid Huffman code");          /* four codes of one bit */
    begin_dynamic(257, 1, 2, 2, 2, 0); refused("not a valid Huffman code");          /* a gap */
    begin_dynamic(257, 1, 1, 0, 0, 1); put(1, 1); refused("begins with a repetition");
    begin_dynamic(257, 1, 0, 0, 1, 1);                                      /* 138 + 121 zeros for 258 symbols */
    put(1, 1); put(127, 7); put(1, 1); put(110, 7); refused("longer than announced");
    begin_dynamic(257, 1, 0, 0, 1, 1);                                      /* 138 + 120 zeros */
    put(1, 1); put(127, 7); put(1, 1); put(109, 7); refused("no code for the end");
    begin_dynamic(257, 1, 0, 0, 0, 1); put(1, 1); refused("a code that was not defined");
}

/* Optional fields of the header: extra bytes, name, comment, and a checksum over all that. */
static void test_header_fields(void) {
    static const char fields[] = "\x04\x00xyz\0name\0comment";               /* with its final 0 */
    uint8_t raw = 'a', *out;
    size_t size, k, n;
    uint32_t crc;
    begin();
    made[3] = 2 | 4 | 8 | 16;
    for (k = 0; k < sizeof fields; k++) put((uint8_t)fields[k], 8);
    crc = data_crc32(made, made_bits / 8);
    put(crc & 0xffffu, 16);
    put(1, 1); put(1, 2); put_symbol('a'); put_symbol(256);
    n = finish(&raw, 1);
    CHECK_MSG(data_gunzip(made, n, &out, &size, "made", error) && size == 1 && out[0] == 'a', "%s", error);
    free(out);
    for (k = 0; k < n; k++) {
        uint8_t* copy = (uint8_t*)malloc(k ? k : 1);
        memcpy(copy, made, k);
        CHECK(!data_gunzip(copy, k, &out, &size, "made", error));
        check_sentence("made");
        free(copy);
    }
    for (k = 4; k < 10 + sizeof fields + 2; k++) {                           /* all of it is under the checksum */
        made[k] ^= 1;
        CHECK_MSG(!data_gunzip(made, n, &out, &size, "made", error), "byte %lu", (unsigned long)k);
        made[k] ^= 1;
    }
    made[n] = 0;
    CHECK(!data_gunzip(made, n + 1, &out, &size, "made", error) && strstr(error, "something follows"));
    made[3] |= 0x20;
    CHECK(!data_gunzip(made, n, &out, &size, "made", error) && strstr(error, "RFC 1952"));
}

/* 12 KiB that unpack to 2 MiB: stopped at the limit, which is 1 MiB here. Just below the limit it works. */
static void test_bomb(void) {
    uint8_t* raw = (uint8_t*)calloc(DATA_MAX_BYTES, 1);
    uint8_t* out;
    size_t size, left = DATA_MAX_BYTES - 1, i;
    begin_fixed();
    put_symbol(0);
    for (; left >= 258; left -= 258) { put_symbol(285); put_code(0, 5); }
    for (; left > 0; left--) put_symbol(0);
    put_symbol(256);
    CHECK_MSG(data_gunzip(made, finish(raw, DATA_MAX_BYTES), &out, &size, "made", error), "%s", error);
    CHECK(size == DATA_MAX_BYTES && !memcmp(out, raw, size));
    free(out);
    begin_fixed();
    put_symbol(0);
    for (i = 0; i < 8200; i++) { put_symbol(285); put_code(0, 5); }
    put_symbol(256);
    refused("larger than any digit file");
    free(raw);
}

/* ---------------------------------------------------------------------------------------- */
/* IDX.                                                                                      */
/* ---------------------------------------------------------------------------------------- */

/* Two images of 2x3 and their labels, plain. */
static void plain(uint8_t images[28], uint8_t labels[10]) {
    int i;
    put32(images, 0x803); put32(images + 4, 2); put32(images + 8, 2); put32(images + 12, 3);
    for (i = 0; i < 12; i++) images[16 + i] = (uint8_t)(10 * i);
    put32(labels, 0x801); put32(labels + 4, 2);
    labels[8] = 3; labels[9] = 4;
}

static void idx_refused(const uint8_t* images, size_t image_size, const uint8_t* labels, size_t label_size,
                        const char* sentence) {
    data_set d;
    CHECK(!data_parse(&d, images, image_size, "images", labels, label_size, "labels", error));
    CHECK(!d.pixels && !d.labels && d.count == 0);
    CHECK_MSG(!strcmp(error, sentence), "'%s' instead of '%s'", error, sentence);
}

static void test_idx(void) {
    uint8_t im[29], la[11];
    data_set d;
    plain(im, la);
    CHECK(data_parse(&d, im, 28, "images", la, 10, "labels", error));
    CHECK(d.count == 2 && d.height == 2 && d.width == 3 && d.labels[1] == 4 && d.pixels[11] == 110);
    data_free(&d);
    idx_refused(im, 7, la, 10, "images: 16 bytes of header expected, the file ends after 7");
    idx_refused(im, 0, la, 10, "images: 16 bytes of header expected, the file ends after 0");
    idx_refused(im, 28, la, 5, "labels: 8 bytes of header expected, the file ends after 5");
    idx_refused(im, 27, la, 10, "images: the header announces 12 bytes of data, the file has 11");
    im[28] = la[10] = 0;
    idx_refused(im, 29, la, 10, "images: the header announces 12 bytes of data, the file has 13");
    idx_refused(im, 28, la, 9, "labels: the header announces 2 bytes of data, the file has 1");
    idx_refused(im, 28, la, 11, "labels: the header announces 2 bytes of data, the file has 3");
    idx_refused(la, 10, im, 28, "images: 16 bytes of header expected, the file ends after 10");
    idx_refused(im, 28, im, 28, "labels: magic number 0x00000801 expected, found 0x00000803");
    put32(im, 0x802);
    idx_refused(im, 28, la, 10, "images: magic number 0x00000803 expected, found 0x00000802");
    plain(im, la); put32(im + 4, 0);
    idx_refused(im, 28, la, 10, "images: the header announces no entries at all");
    plain(im, la); put32(im + 4, 0xffffffffu);
    idx_refused(im, 28, la, 10, "images: the header announces 25769803770 bytes of data, the file has 12");
    plain(im, la); put32(im + 8, 33);
    idx_refused(im, 28, la, 10, "images: the images are 33 pixels high, allowed is 1 to 32");
    plain(im, la); put32(im + 12, 0);
    idx_refused(im, 28, la, 10, "images: the images are 0 pixels wide, allowed is 1 to 32");
    plain(im, la); put32(la + 4, 3);
    idx_refused(im, 28, la, 11, "labels: 3 labels, but images has 2 images");
    plain(im, la); la[9] = 10;
    idx_refused(im, 28, la, 10, "labels: label 1 is 10, but there are only the classes 0 to 9");
}

/* ---------------------------------------------------------------------------------------- */
/* Files.                                                                                    */
/* ---------------------------------------------------------------------------------------- */

static char directory[512], which[17], path[640];

static int write_file(const char* ending, const uint8_t* p, size_t n) {
    FILE* f;
    snprintf(path, sizeof path, "%s/%s%s", directory, which, ending);
    f = fopen(path, "wb");
    return f && fwrite(p, 1, n, f) == n && fclose(f) == 0;
}
static void remove_file(const char* ending) {
    snprintf(path, sizeof path, "%s/%s%s", directory, which, ending);
    remove(path);
}

static void not_loaded(const char* sentence) {
    data_set d;
    CHECK(!data_load(&d, directory, which, error) && !d.pixels && !d.labels);
    CHECK_MSG(strstr(error, sentence) && strncmp(error, which, strlen(which)) == 0, "%s", error);
}

static void test_files(void) {
    const char* folder = getenv("TMPDIR");
    uint8_t im[28], la[10];
    data_set d;
    snprintf(directory, sizeof directory, "%.400s", folder ? folder : "/tmp");
    snprintf(which, sizeof which, "amp%lx%lx", (unsigned long)time(NULL) & 0xfffffful,
             (unsigned long)clock() & 0xfffful);
    plain(im, la);
    not_loaded("-images-idx3-ubyte: not found in ");
    if (!write_file("-images-idx3-ubyte", im, 28)) { TEST_SKIP("files: no temporary directory"); return; }
    not_loaded("-labels-idx1-ubyte: not found in ");
    CHECK(write_file("-labels-idx1-ubyte", la, 10));
    CHECK_MSG(data_load(&d, directory, which, error) && d.count == 2, "%s", error);
    data_free(&d);
    CHECK(write_file("-images-idx3-ubyte", im, 7));
    not_loaded("-images-idx3-ubyte: 16 bytes of header expected, the file ends after 7");
    remove_file("-images-idx3-ubyte");
    CHECK(write_file("-images-idx3-ubyte.gz", stored_images, sizeof stored_images));
    not_loaded("-labels-idx1-ubyte: 2 labels, but ");
    remove_file("-labels-idx1-ubyte");
    CHECK(write_file("-labels-idx1-ubyte.gz", fixed_labels, sizeof fixed_labels));
    CHECK_MSG(data_load(&d, directory, which, error) && d.count == 3, "%s", error);
    data_free(&d);
    CHECK(write_file("-images-idx3-ubyte.gz", stored_images, sizeof stored_images - 1));
    not_loaded("-images-idx3-ubyte.gz: the gzip checksum at the end is cut off");
    CHECK(write_file("-images-idx3-ubyte.gz", stored_images, 0));
    not_loaded("-images-idx3-ubyte.gz: 16 bytes of header expected, the file ends after 0");
    remove_file("-images-idx3-ubyte.gz");
    remove_file("-labels-idx1-ubyte.gz");
    snprintf(directory, sizeof directory, "%0500d", 1);
    not_loaded("not found in ");
}

/* ---------------------------------------------------------------------------------------- */
/* Drawn digits, batches.                                                                    */
/* ---------------------------------------------------------------------------------------- */

enum { DIGITS = 600, SIZE = DATA_SIDE * DATA_SIDE };

static void test_digits(void) {
    static double mean[10][SIZE];
    static uint8_t one[SIZE];
    int per_class[10] = {0}, i, k, other, equal = 0;
    data_set d, again;
    CHECK(data_digits(&d, DIGITS, 1, error) && data_digits(&again, DIGITS / 2, 1, error));
    CHECK(d.count == DIGITS && d.height == DATA_SIDE && d.width == DATA_SIDE);
    CHECK(!memcmp(d.pixels, again.pixels, (size_t)(DIGITS / 2) * SIZE) && !memcmp(d.labels, again.labels, DIGITS / 2));
    CHECK(data_draw(one, 1, 77) == d.labels[77] && !memcmp(one, d.pixels + 77 * SIZE, SIZE));
    /* Integers only: these are the pixels on every machine. */
    CHECK_MSG(data_crc32(d.pixels, (size_t)DIGITS * SIZE) == 0x6ad68412u, "0x%08lx",
              (unsigned long)data_crc32(d.pixels, (size_t)DIGITS * SIZE));
    for (i = 0; i < DIGITS; i++) {
        per_class[d.labels[i]]++;
        for (k = 0; k < SIZE; k++) mean[d.labels[i]][k] += d.pixels[i * SIZE + k];
        for (k = 0; k < i; k++) equal += !memcmp(d.pixels + i * SIZE, d.pixels + k * SIZE, SIZE);
    }
    CHECK_MSG(equal == 0, "%d pairs of digits are equal", equal);
    for (i = 0; i < 10; i++) {
        CHECK_MSG(per_class[i] > DIGITS / 20, "digit %d: %d times", i, per_class[i]);
        for (other = 0; other < i; other++) {                               /* mean images differ clearly somewhere */
            double largest = 0.0;
            for (k = 0; k < SIZE; k++) {
                double gap = mean[i][k] / per_class[i] - mean[other][k] / per_class[other];
                if (gap > largest) largest = gap;
            }
            CHECK_MSG(largest > 25.0, "digits %d and %d: largest difference %.1f", i, other, largest);
        }
    }
    data_free(&d);
    data_free(&again);
    CHECK(data_digits(&d, 50, 2, error) && data_digits(&again, 50, 1, error));
    CHECK(memcmp(d.pixels, again.pixels, 50 * SIZE) != 0);
    data_free(&d);
    data_free(&again);
    CHECK(!data_digits(&d, 0, 1, error) && !data_digits(&d, -3, 1, error) && !d.pixels);
}

static void test_batches(void) {
    static float x[3 * 32 * 32];
    int order[100], other[100], seen[100] = {0}, i, same = 0;
    int32_t labels[3];
    data_set d;
    data_shuffle(order, 100, 5);
    data_shuffle(other, 100, 6);
    for (i = 0; i < 100; i++) {
        if (order[i] >= 0 && order[i] < 100) seen[order[i]]++;
        same += order[i] == other[i];
    }
    for (i = 0; i < 100; i++) CHECK(seen[i] == 1);
    CHECK_MSG(same < 20, "%d places are the same under another seed", same);
    CHECK(data_digits(&d, 100, 3, error));
    data_batch(&d, order, 99, 3, 32, x, labels);                            /* images order[99], order[0], order[1] */
    CHECK(labels[0] == d.labels[order[99]] && labels[1] == d.labels[order[0]] && labels[2] == d.labels[order[1]]);
    for (i = 0; i < 3 * 32 * 32; i++) {
        int row = i / 32 % 32 - 2, column = i % 32 - 2, image = order[(99 + i / 1024) % 100];
        int inside = row >= 0 && row < 28 && column >= 0 && column < 28;
        float expected = (float)((inside ? d.pixels[image * SIZE + row * 28 + column] : 0) - 33) / 79.0f;
        if (x[i] < expected || x[i] > expected) break;
    }
    CHECK_MSG(i == 3 * 32 * 32, "element %d", i);
    data_batch(&d, NULL, 7, 1, 28, x, labels);
    CHECK(labels[0] == d.labels[7]);
    data_free(&d);
}

/* The linear red, green and blue of "#rrggbb". */
static void read_color(const char* color, double rgb[3]) {
    unsigned parts[3];
    int i;
    CHECK_MSG(sscanf(color, "#%2x%2x%2x", &parts[0], &parts[1], &parts[2]) == 3, "%s", color);
    for (i = 0; i < 3; i++) {
        double c = parts[i] / 255.0;
        rgb[i] = c <= 0.04045 ? c / 12.92 : pow((c + 0.055) / 1.055, 2.4);
    }
}

static double luminance(const char* color) {
    double c[3];
    read_color(color, c);
    return 0.2126729 * c[0] + 0.7151522 * c[1] + 0.0721750 * c[2];
}

/* The ratio that WCAG asks for. */
static double contrast(const char* a, const char* b) {
    double la = luminance(a) + 0.05, lb = luminance(b) + 0.05;
    return la > lb ? la / lb : lb / la;
}

/* CIELAB of a color as one sees it with all cones (0), without those for red (1), without those for green (2):
   Vienot, Brettel and Mollon 1999. */
static void seen_color(const char* color, int without, double lab[3]) {
    static const double cones[3][3][3] = {
        { { 1, 0, 0 }, { 0, 1, 0 }, { 0, 0, 1 } },
        { { 0.11238, 0.88762, 0 }, { 0.11238, 0.88762, 0 }, { 0.00401, -0.00401, 1 } },
        { { 0.29275, 0.70725, 0 }, { 0.29275, 0.70725, 0 }, { -0.02234, 0.02234, 1 } } };
    static const double xyz[3][3] = { { 0.4124564, 0.3575761, 0.1804375 },
                                      { 0.2126729, 0.7151522, 0.0721750 },
                                      { 0.0193339, 0.1191920, 0.9503041 } };
    static const double white[3] = { 0.95047, 1.0, 1.08883 };
    double rgb[3], f[3];
    int i, k, j;
    read_color(color, rgb);
    for (i = 0; i < 3; i++) {
        double v = 0.0;
        for (k = 0; k < 3; k++) {
            double cone = 0.0;
            for (j = 0; j < 3; j++) cone += cones[without][k][j] * rgb[j];
            v += xyz[i][k] * (cone < 0.0 ? 0.0 : cone > 1.0 ? 1.0 : cone) / white[i];
        }
        f[i] = v > 216.0 / 24389.0 ? cbrt(v) : (24389.0 / 27.0 * v + 16.0) / 116.0;
    }
    lab[0] = 116.0 * f[1] - 16.0;
    lab[1] = 500.0 * (f[0] - f[1]);
    lab[2] = 200.0 * (f[1] - f[2]);
}

static double color_distance(const char* a, const char* b, int without) {
    double x[3], y[3];
    seen_color(a, without, x);
    seen_color(b, without, y);
    return sqrt(pow(x[0] - y[0], 2.0) + pow(x[1] - y[1], 2.0) + pow(x[2] - y[2], 2.0));
}

/* Any two colours of pictures differ for everybody, lines are seen on their page, text is read on it. */
static void check_colors(const char* const* colors, const char* ink, const char* page) {
    int i, k, without;
    CHECK_MSG(contrast(ink, page) >= 4.5, "%s %s", ink, page);
    for (i = 0; i < CHART_COLORS; i++) {
        CHECK_MSG(contrast(colors[i], page) >= 3.0, "%s %g", colors[i], contrast(colors[i], page));
        for (k = 0; k < i; k++)
            for (without = 0; without < 3; without++) {
                double apart = color_distance(colors[i], colors[k], without);
                CHECK_MSG(apart > 25.0, "%s and %s are %g apart", colors[i], colors[k], apart);
            }
    }
}

static void test_chart_palette(void) {
    CHECK(fabs(contrast("#ffffff", "#000000") - 21.0) < 1e-4);
    CHECK(fabs(color_distance("#ffffff", "#000000", 0) - 100.0) < 0.01);
    check_colors(chart_light, CHART_INK_LIGHT, CHART_PAGE_LIGHT);
    check_colors(chart_dark, CHART_INK_DARK, CHART_PAGE_DARK);
}

/* What a chart writes: superscripts, powers of two as ticks, a title of two lines, both sets of colours. */
static void test_chart_text(void) {
    static const float x[3] = { 4, 16, 256 }, y[3] = { 1e-6f, 1e-3f, 1.0f };
    static char text[20000];
    const char* picture = "build/test_chart.svg";
    chart_series line = chart_curve("2^-3 < x", CHART_FP16, x, y, 3);
    chart_panel panel;
    FILE* file;
    size_t length;
    memset(&panel, 0, sizeof panel);
    panel.title = "one line\nand another";
    panel.x_label = "x";
    panel.log_x = 2;
    panel.log_y = 1;
    panel.series = &line;
    panel.series_count = 1;
    CHECK_MSG(chart_write(picture, "A test", &panel, 1, error), "%s", error);
    file = fopen(picture, "rb");
    CHECK(file != NULL);
    if (!file) return;
    length = fread(text, 1, sizeof text - 1, file);
    text[length] = 0;
    fclose(file);
    remove(picture);
    CHECK(strstr(text, ">2<tspan dy=\"-5\" font-size=\"11\">&#8722;3</tspan><tspan dy=\"5\"> &lt; x</tspan></text>") != NULL);
    CHECK(strstr(text, ">32</text>") && strstr(text, ">256</text>") && !strstr(text, ">100</text>"));
    CHECK(strstr(text, ">10<tspan dy=\"-5\" font-size=\"11\">&#8722;6</tspan></text>") != NULL);
    CHECK(strstr(text, ">one line</text>") && strstr(text, ">and another</text>"));
    CHECK(strstr(text, "@media(prefers-color-scheme:dark)") && strstr(text, ".s1{stroke:#0a62f0}")
          && strstr(text, ".s1{stroke:#3578ff}"));
}

int main(int argc, char** argv) {
    TEST_BEGIN(argc, argv);
    TEST(test_crc);
    TEST(test_blocks);
    TEST(test_truncated);
    TEST(test_flipped);
    TEST(test_extremes);
    TEST(test_bad_codes);
    TEST(test_bad_tables);
    TEST(test_header_fields);
    TEST(test_bomb);
    TEST(test_idx);
    TEST(test_files);
    TEST(test_digits);
    TEST(test_batches);
    TEST(test_chart_palette);
    TEST(test_chart_text);
    TEST_END();
}
