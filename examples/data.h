/* data.h - where the examples get their digits from. Header only; everything is static.

   Two sources, one result (a data_set):
     data_load    reads the MNIST files (IDX format, plain or .gz) from a directory that the caller names,
                  data_load_both those to train and those to test with;
     data_digits  draws digits of its own, from strokes, so that nothing has to be downloaded.
   All return 1, or 0 with one sentence in `error` (DATA_ERROR bytes), and then hold no memory.

   The drawn digits use integer arithmetic only: the same seed gives the same pixels on every machine.
   The files are treated as hostile: every size is checked before it is used, memory grows only with data that
   is really there, and the checksum must agree. */
#ifndef EXAMPLES_DATA_H
#define EXAMPLES_DATA_H

#include "../amp.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DATA_ERROR 400                  /* bytes of an error buffer */
#ifndef DATA_MAX_BYTES
  #define DATA_MAX_BYTES (64u << 20)    /* no file, packed or unpacked, may be larger; MNIST has 47 million bytes */
#endif
#define DATA_SIDE 28                    /* drawn digits are 28x28, like MNIST's */
#define DATA_MAX_SIDE 32

typedef struct data_set {
    int count, height, width;
    uint8_t* pixels;                    /* [count, height, width]; 0 = paper, 255 = ink */
    uint8_t* labels;                    /* [count]; 0..9 */
} data_set;

static inline void data_free(data_set* d) {
    free(d->pixels);
    free(d->labels);
    memset(d, 0, sizeof *d);
}

/* Writes the sentence and returns 0, the value of a failed call. */
static inline int data_fail(char* error, const char* format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error, DATA_ERROR, format, args);
    va_end(args);
    return 0;
}

/* ---------------------------------------------------------------------------------------- */
/* Inflate: the packed format of gzip, from RFC 1951.                                        */
/* ---------------------------------------------------------------------------------------- */

#define DATA_CODE_BITS 15               /* the longest Huffman code */

typedef struct data_inflate {
    const uint8_t* in;
    size_t in_size, in_pos;
    uint32_t bits;                      /* read but not yet used; the next bit is the lowest */
    int bit_count;
    uint8_t* out;                       /* grows; the caller frees it */
    size_t out_size, out_capacity;
    const char* error;                  /* the first thing that was wrong, or NULL */
    uint16_t literals[1 << DATA_CODE_BITS], distances[1 << DATA_CODE_BITS];
} data_inflate;

static inline int data_bad(data_inflate* s, const char* why) {
    if (!s->error) s->error = why;
    return 0;
}

static const char data_ends_early[] = "the packed data ends early";

/* Tries to have n <= 16 bits at hand and returns how many there are. */
static inline int data_fill(data_inflate* s, int n) {
    while (s->bit_count < n && s->in_pos < s->in_size) {
        s->bits |= (uint32_t)s->in[s->in_pos++] << s->bit_count;
        s->bit_count += 8;
    }
    return s->bit_count;
}

static inline void data_drop(data_inflate* s, int n) {
    s->bits >>= n;
    s->bit_count -= n;
}

/* The next n <= 16 bits as a number; 0, with s->error set, at the end of the input. */
static inline unsigned data_bits(data_inflate* s, int n) {
    unsigned value;
    if (data_fill(s, n) < n) { data_bad(s, data_ends_early); return 0; }
    value = s->bits & ((1u << n) - 1u);
    data_drop(s, n);
    return value;
}

/* Gives whole unused bytes back to the input and forgets the rest of the current one. */
static inline void data_align(data_inflate* s) {
    s->in_pos -= (size_t)(s->bit_count / 8);
    s->bits = 0;
    s->bit_count = 0;
}

/* Room for `more` bytes of output. The buffer doubles, so it is never more than twice what was unpacked. */
static inline int data_reserve(data_inflate* s, size_t more) {
    size_t capacity = s->out_capacity ? s->out_capacity : 4096;
    uint8_t* out;
    if (more > DATA_MAX_BYTES - s->out_size) return data_bad(s, "the unpacked data is larger than any digit file");
    if (s->out_size + more <= s->out_capacity) return 1;
    while (capacity < s->out_size + more) capacity *= 2;
    out = (uint8_t*)realloc(s->out, capacity);
    if (!out) return data_bad(s, "there is not enough memory to unpack it");
    s->out = out;
    s->out_capacity = capacity;
    return 1;
}

/* Builds a decoding table from code lengths (0 = unused symbol). Codes are canonical: shorter ones first, equal
   lengths in the order of the symbols. Entry = symbol*16 + length, indexed by the next 15 bits of input; 0 = no
   code. Refused: more codes than there is room for, and gaps, unless a table has one code only, or none. */
static inline int data_huffman(uint16_t* table, const uint8_t* lengths, int count) {
    int per_length[DATA_CODE_BITS + 1] = {0}, length, symbol, left = 1, longest = 0;
    unsigned next[DATA_CODE_BITS + 2] = {0};
    for (symbol = 0; symbol < count; symbol++) per_length[lengths[symbol]]++;
    for (length = 1; length <= DATA_CODE_BITS; length++) {
        left = 2 * left - per_length[length];
        if (left < 0) return 0;
        if (per_length[length]) longest = length;
        next[length + 1] = (next[length] + (unsigned)per_length[length]) << 1;
    }
    if (left > 0 && longest > 1) return 0;
    memset(table, 0, sizeof *table << DATA_CODE_BITS);
    for (symbol = 0; symbol < count; symbol++) {
        unsigned code, reversed = 0, step;
        int bit, n = lengths[symbol];
        if (n == 0) continue;
        code = next[n]++;
        for (bit = 0; bit < n; bit++) reversed |= ((code >> bit) & 1u) << (n - 1 - bit);
        for (step = reversed; step < 1u << DATA_CODE_BITS; step += 1u << n)
            table[step] = (uint16_t)(symbol * 16 + n);
    }
    return 1;
}

/* The next symbol, or -1. */
static inline int data_symbol(data_inflate* s, const uint16_t* table) {
    int have = data_fill(s, DATA_CODE_BITS);
    unsigned entry = table[s->bits & ((1u << DATA_CODE_BITS) - 1u)];
    int length = (int)(entry & 15u);
    if (length > have || (length == 0 && have < DATA_CODE_BITS)) { data_bad(s, data_ends_early); return -1; }
    if (length == 0) { data_bad(s, "the packed data has a code that was not defined"); return -1; }
    data_drop(s, length);
    return (int)(entry >> 4);
}

/* A repetition: length symbol 257 + index, then a distance. Overlap is meant: it repeats a pattern. */
static inline int data_repeat(data_inflate* s, int index) {
    static const uint16_t base[29] = { 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67,
                                       83, 99, 115, 131, 163, 195, 227, 258 };
    static const uint8_t extra[29] = { 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4,
                                       5, 5, 5, 5, 0 };
    size_t length, distance, i;
    int symbol;
    if (index >= 29) return data_bad(s, "the packed data has a length that does not exist");
    length = (size_t)base[index] + data_bits(s, extra[index]);
    symbol = data_symbol(s, s->distances);
    if (symbol < 0) return 0;
    if (symbol >= 30) return data_bad(s, "the packed data has a distance that does not exist");
    /* Distances: 1, 2, 3, 4, then two symbols for each further bit. */
    distance = symbol < 2 ? (size_t)symbol + 1
                          : ((size_t)(2 + (symbol & 1)) << (symbol / 2 - 1)) + 1 + data_bits(s, symbol / 2 - 1);
    if (s->error) return 0;
    if (distance > s->out_size) return data_bad(s, "the packed data refers to bytes before its beginning");
    if (!data_reserve(s, length)) return 0;
    for (i = 0; i < length; i++) s->out[s->out_size + i] = s->out[s->out_size + i - distance];
    s->out_size += length;
    return 1;
}

/* The body of a block with Huffman codes. */
static inline int data_block_body(data_inflate* s) {
    for (;;) {
        int symbol = data_symbol(s, s->literals);
        if (symbol < 0) return 0;
        if (symbol == 256) return 1;
        if (symbol > 256) {
            if (!data_repeat(s, symbol - 257)) return 0;
        } else {
            if (!data_reserve(s, 1)) return 0;
            s->out[s->out_size++] = (uint8_t)symbol;
        }
    }
}

/* Block type 0: bytes as they are, after their number and its complement. */
static inline int data_block_stored(data_inflate* s) {
    unsigned length, complement;
    data_align(s);
    length = data_bits(s, 16);
    complement = data_bits(s, 16);
    if (s->error) return 0;
    if (length != (complement ^ 0xffffu)) return data_bad(s, "a stored block contradicts its own length");
    data_align(s);
    if (length > s->in_size - s->in_pos) return data_bad(s, data_ends_early);
    if (!data_reserve(s, length)) return 0;
    if (length) memcpy(s->out + s->out_size, s->in + s->in_pos, length);
    s->out_size += length;
    s->in_pos += length;
    return 1;
}

/* Block type 1: the code lengths that the RFC fixes. */
static inline int data_block_fixed(data_inflate* s) {
    uint8_t lengths[288];
    int i;
    for (i = 0; i < 288; i++) lengths[i] = (uint8_t)(i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8);
    data_huffman(s->literals, lengths, 288);
    memset(lengths, 5, 32);
    data_huffman(s->distances, lengths, 32);
    return data_block_body(s);
}

/* Reads `count` code lengths, themselves packed: 0..15 a length, 16 repeats the last one, 17 and 18 are runs of
   zeros. */
static inline int data_code_lengths(data_inflate* s, uint8_t* lengths, int count) {
    int i = 0;
    while (i < count) {
        int symbol = data_symbol(s, s->distances), times;
        uint8_t value = 0;
        if (symbol < 0) return 0;
        if (symbol < 16) { lengths[i++] = (uint8_t)symbol; continue; }
        if (symbol == 16 && i == 0) return data_bad(s, "a table of codes begins with a repetition");
        if (symbol == 16) value = lengths[i - 1];
        times = symbol == 16 ? 3 + (int)data_bits(s, 2) : symbol == 17 ? 3 + (int)data_bits(s, 3)
                                                                       : 11 + (int)data_bits(s, 7);
        if (s->error) return 0;
        if (times > count - i) return data_bad(s, "a table of codes is longer than announced");
        memset(lengths + i, value, (size_t)times);
        i += times;
    }
    return 1;
}

/* Block type 2: the code lengths come first. s->distances serves as the table of the lengths' own code. */
static inline int data_block_dynamic(data_inflate* s) {
    static const uint8_t order[19] = { 16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15 };
    static const char bad[] = "a table of codes is not a valid Huffman code";
    uint8_t lengths[286 + 30], code[19] = {0};
    int literals = 257 + (int)data_bits(s, 5), distances = 1 + (int)data_bits(s, 5);
    int codes = 4 + (int)data_bits(s, 4), i;
    if (s->error) return 0;
    if (literals > 286 || distances > 30) return data_bad(s, "a table of codes has more symbols than exist");
    for (i = 0; i < codes; i++) code[order[i]] = (uint8_t)data_bits(s, 3);
    if (s->error) return 0;
    if (!data_huffman(s->distances, code, 19)) return data_bad(s, bad);
    if (!data_code_lengths(s, lengths, literals + distances)) return 0;
    if (lengths[256] == 0) return data_bad(s, "a table of codes has no code for the end");
    if (!data_huffman(s->literals, lengths, literals)) return data_bad(s, bad);
    if (!data_huffman(s->distances, lengths + literals, distances)) return data_bad(s, bad);
    return data_block_body(s);
}

/* All blocks. Afterwards s->in_pos is the first byte behind the packed data. */
static inline int data_inflate_run(data_inflate* s) {
    unsigned last = 0;
    while (!last) {
        unsigned type;
        int ok;
        last = data_bits(s, 1);
        type = data_bits(s, 2);
        if (s->error) return 0;
        if (type == 3) return data_bad(s, "the packed data has a block of unknown type");
        ok = type == 0 ? data_block_stored(s) : type == 1 ? data_block_fixed(s) : data_block_dynamic(s);
        if (!ok) return 0;
    }
    data_align(s);
    return 1;
}

/* ---------------------------------------------------------------------------------------- */
/* gzip: header, packed data, checksum, size. RFC 1952.                                      */
/* ---------------------------------------------------------------------------------------- */

static inline uint32_t data_crc32(const uint8_t* p, size_t n) {
    uint32_t table[256], crc = 0xffffffffu, i, bit;
    for (i = 0; i < 256; i++) {
        table[i] = i;
        for (bit = 0; bit < 8; bit++) table[i] = (table[i] >> 1) ^ ((table[i] & 1u) ? 0xedb88320u : 0u);
    }
    while (n--) crc = (crc >> 8) ^ table[(crc ^ *p++) & 255u];
    return crc ^ 0xffffffffu;
}

static inline uint32_t data_little32(const uint8_t* p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}
static inline uint32_t data_big32(const uint8_t* p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

/* Skips a text of the header with its final 0; returns the position behind it, or n + 1 if there is none. */
static inline size_t data_skip_text(const uint8_t* p, size_t n, size_t pos) {
    while (pos < n && p[pos] != 0) pos++;
    return pos + 1;
}

/* Length of the header of a gzip file, or 0 with *why. */
static inline size_t data_gzip_header(const uint8_t* p, size_t n, const char** why) {
    size_t pos = 10;
    unsigned flags = n > 3 ? p[3] : 0u;
    *why = "the gzip header ends early";
    if (n < 10) return 0;
    if (p[0] != 0x1f || p[1] != 0x8b) { *why = "not a gzip file"; return 0; }
    if (p[2] != 8 || (flags & 0xe0u)) {
        *why = "the gzip header asks for something that RFC 1952 does not have";
        return 0;
    }
    if (flags & 4u) {                                                    /* extra field: its length, then itself */
        if (n - pos < 2) return 0;
        pos += 2u + p[pos] + 256u * p[pos + 1];
    }
    if (flags & 8u) pos = data_skip_text(p, n, pos);                     /* file name */
    if (flags & 16u) pos = data_skip_text(p, n, pos);                    /* comment */
    if (pos > n) return 0;
    if (flags & 2u) {                                                    /* checksum of the header itself */
        if (n - pos < 2) return 0;
        if ((data_crc32(p, pos) & 0xffffu) != (p[pos] | (unsigned)p[pos + 1] << 8)) {
            *why = "the checksum of the gzip header is wrong";
            return 0;
        }
        pos += 2;
    }
    return pos;
}

/* Header, blocks and the eight bytes at the end: checksum and size of what was packed. */
static inline int data_gunzip_run(data_inflate* s) {
    const char* why = NULL;
    s->in_pos = data_gzip_header(s->in, s->in_size, &why);
    if (s->in_pos == 0) return data_bad(s, why);
    if (!data_inflate_run(s)) return 0;
    if (s->in_size - s->in_pos < 8) return data_bad(s, "the gzip checksum at the end is cut off");
    if (s->in_size - s->in_pos > 8) return data_bad(s, "something follows after the end of the gzip data");
    if (data_little32(s->in + s->in_pos) != data_crc32(s->out, s->out_size))
        return data_bad(s, "the checksum is wrong, the file is damaged");
    if (data_little32(s->in + s->in_pos + 4) != (uint32_t)s->out_size)
        return data_bad(s, "the size noted at the end is wrong, the file is damaged");
    return 1;
}

/* *out: new memory with the unpacked bytes, to be freed by the caller. */
static inline int data_gunzip(const uint8_t* p, size_t n, uint8_t** out, size_t* out_size, const char* name,
                              char* error) {
    data_inflate* s = (data_inflate*)calloc(1, sizeof *s);
    int ok;
    *out = NULL;
    *out_size = 0;
    if (!s) return data_fail(error, "%s: there is not enough memory to unpack it", name);
    s->in = p;
    s->in_size = n;
    ok = data_gunzip_run(s);
    if (ok) {
        *out = s->out;
        *out_size = s->out_size;
    } else {
        data_fail(error, "%s: %s (byte %lu of %lu)", name, s->error, (unsigned long)s->in_pos, (unsigned long)n);
        free(s->out);
    }
    free(s);
    return ok;
}

/* ---------------------------------------------------------------------------------------- */
/* IDX: a magic number, the dimensions (32 bits each, big-endian), then the bytes.           */
/* ---------------------------------------------------------------------------------------- */

#define DATA_MAGIC_LABELS 0x00000801u   /* unsigned bytes, 1 dimension */
#define DATA_MAGIC_IMAGES 0x00000803u   /* unsigned bytes, 3 dimensions */

/* Unpacks `p` if it is gzip, otherwise copies it; then takes the header off. dims[0..rank) receives the
   dimensions. */
static inline int data_idx(const uint8_t* p, size_t n, uint32_t magic, uint32_t dims[3], uint8_t** out,
                           const char* name, char* error) {
    size_t rank = magic & 255u, header = 4 + 4 * rank, size = n, i;
    uint64_t expected = 1;
    *out = NULL;
    if (n >= 2 && p[0] == 0x1f && p[1] == 0x8b) {
        if (!data_gunzip(p, n, out, &size, name, error)) return 0;
        p = *out;
    }
    if (size < header) {
        data_fail(error, "%s: %lu bytes of header expected, the file ends after %lu", name, (unsigned long)header,
                  (unsigned long)size);
        goto fail;
    }
    if (data_big32(p) != magic) {
        data_fail(error, "%s: magic number 0x%08lx expected, found 0x%08lx", name, (unsigned long)magic,
                  (unsigned long)data_big32(p));
        goto fail;
    }
    for (i = 0; i < rank; i++) {
        dims[i] = data_big32(p + 4 + 4 * i);
        if (dims[i] == 0 || (i > 0 && dims[i] > DATA_MAX_SIDE)) {
            if (i == 0) data_fail(error, "%s: the header announces no entries at all", name);
            else data_fail(error, "%s: the images are %lu pixels %s, allowed is 1 to %d", name, (unsigned long)dims[i],
                           i == 1 ? "high" : "wide", DATA_MAX_SIDE);
            goto fail;
        }
        expected *= dims[i];                      /* at most 2^32 * 32 * 32: no overflow */
    }
    if (expected != size - header) {
        data_fail(error, "%s: the header announces %llu bytes of data, the file has %llu", name,
                  (unsigned long long)expected, (unsigned long long)(size - header));
        goto fail;
    }
    if (!*out) *out = (uint8_t*)malloc(size);     /* a plain file: the caller keeps its own buffer */
    if (!*out) return data_fail(error, "%s: there is not enough memory for it", name);
    memmove(*out, p + header, size - header);
    return 1;
fail:
    free(*out);
    *out = NULL;
    return 0;
}

/* Makes a data set from the contents of an image file and a label file. The names are for the messages. */
static inline int data_parse(data_set* d, const uint8_t* images, size_t image_size, const char* image_name,
                             const uint8_t* labels, size_t label_size, const char* label_name, char* error) {
    uint32_t dims[3] = {0, 0, 0}, label_count[3] = {0, 0, 0}, i;
    memset(d, 0, sizeof *d);
    if (!data_idx(images, image_size, DATA_MAGIC_IMAGES, dims, &d->pixels, image_name, error) ||
        !data_idx(labels, label_size, DATA_MAGIC_LABELS, label_count, &d->labels, label_name, error)) {
        data_free(d);
        return 0;
    }
    if (label_count[0] != dims[0]) {
        data_free(d);
        return data_fail(error, "%s: %lu labels, but %s has %lu images", label_name, (unsigned long)label_count[0],
                         image_name, (unsigned long)dims[0]);
    }
    for (i = 0; i < dims[0]; i++) {
        int label = d->labels[i];
        if (label <= 9) continue;
        data_free(d);
        return data_fail(error, "%s: label %lu is %d, but there are only the classes 0 to 9", label_name,
                         (unsigned long)i, label);
    }
    d->count = (int)dims[0];                      /* fits: a file has at most DATA_MAX_BYTES */
    d->height = (int)dims[1];
    d->width = (int)dims[2];
    return 1;
}

/* ---------------------------------------------------------------------------------------- */
/* Files.                                                                                    */
/* ---------------------------------------------------------------------------------------- */

typedef struct data_file {
    char     name[64];                            /* with .gz if that is the one that was found */
    uint8_t* bytes;
    size_t   size;
} data_file;

/* The whole rest of a stream, in memory that grows with it. */
static inline int data_slurp(data_file* f, FILE* in, char* error) {
    size_t capacity = 0;
    for (;;) {
        size_t got;
        if (f->size == capacity) {
            uint8_t* bigger = (uint8_t*)realloc(f->bytes, capacity = capacity ? 2 * capacity : 65536);
            if (!bigger) return data_fail(error, "%s: there is not enough memory to read it", f->name);
            f->bytes = bigger;
        }
        got = fread(f->bytes + f->size, 1, capacity - f->size, in);
        f->size += got;
        if (f->size > DATA_MAX_BYTES) return data_fail(error, "%s: larger than any digit file", f->name);
        if (got == 0) break;
    }
    if (ferror(in)) return data_fail(error, "%s: cannot be read", f->name);
    return 1;
}

/* Reads directory/name, or directory/name.gz if there is no such file. */
static inline int data_read(data_file* f, const char* directory, const char* name, char* error) {
    char path[1024];
    FILE* in = NULL;
    int packed, ok;
    memset(f, 0, sizeof *f);
    for (packed = 0; packed < 2 && !in; packed++) {
        int length = snprintf(path, sizeof path, "%s/%s%s", directory, name, packed ? ".gz" : "");
        if (length < 0 || (size_t)length >= sizeof path)
            return data_fail(error, "%s: the name of its directory is too long", name);
        in = fopen(path, "rb");
        snprintf(f->name, sizeof f->name, "%s%s", name, packed ? ".gz" : "");
    }
    if (!in) return data_fail(error, "%s: not found in %.200s, neither plain nor as .gz", name, directory);
    ok = data_slurp(f, in, error);
    fclose(in);
    if (!ok) {
        free(f->bytes);
        f->bytes = NULL;
    }
    return ok;
}

/* The data set "train" or "t10k" of a directory with MNIST's file names. */
static inline int data_load(data_set* d, const char* directory, const char* which, char* error) {
    char name[64];
    data_file images, labels;
    int ok;
    memset(d, 0, sizeof *d);
    snprintf(name, sizeof name, "%.16s-images-idx3-ubyte", which);
    if (!data_read(&images, directory, name, error)) return 0;
    snprintf(name, sizeof name, "%.16s-labels-idx1-ubyte", which);
    ok = data_read(&labels, directory, name, error);
    if (ok)
        ok = data_parse(d, images.bytes, images.size, images.name, labels.bytes, labels.size, labels.name, error);
    free(images.bytes);
    free(labels.bytes);
    return ok;
}

/* "train" and "t10k" of a directory: they must have images of one size, as one network is to see both. */
static inline int data_load_both(data_set* training, data_set* test, const char* directory, char* error) {
    memset(test, 0, sizeof *test);
    if (!data_load(training, directory, "train", error)) return 0;
    if (data_load(test, directory, "t10k", error)) {
        if (training->height == test->height && training->width == test->width) return 1;
        data_fail(error, "%.200s: the images to train with are %dx%d pixels, those to test with %dx%d", directory,
                  training->height, training->width, test->height, test->width);
    }
    data_free(training);
    data_free(test);
    return 0;
}

/* ---------------------------------------------------------------------------------------- */
/* Drawn digits. Lengths in 1/256 of a pixel, factors in 1/1024, all integers.               */
/* ---------------------------------------------------------------------------------------- */

#define DATA_UP  (-1)                   /* lift the pen */
#define DATA_END (-2)
#define DATA_POINTS 32                  /* of one stroke, at most */

/* How people write digits: strokes through points x,y of a 100x100 box, y down. The curve passes smoothly through
   its points; a point given twice is a corner; a stroke that ends where it began is closed. */
typedef struct data_glyph { int digit; signed char points[40]; } data_glyph;
static const data_glyph data_glyphs[] = {
    { 0, { 50,5, 24,22, 18,50, 24,80, 50,95, 76,80, 82,50, 76,22, 50,5, DATA_END } },
    { 0, { 56,5, 36,20, 28,50, 34,82, 48,95, 64,80, 72,50, 68,20, 56,5, DATA_END } },
    { 0, { 62,12, 40,8, 22,40, 28,82, 54,94, 76,66, 76,30, 58,6, 44,12, DATA_END } },
    { 1, { 50,5, 50,95, DATA_END } },
    { 1, { 32,26, 52,5, 52,5, 52,95, DATA_END } },
    { 1, { 34,22, 50,5, 50,5, 50,94, DATA_UP, 28,94, 72,94, DATA_END } },
    { 2, { 22,28, 34,8, 56,5, 76,20, 72,42, 48,68, 22,94, 22,94, 80,94, DATA_END } },
    { 2, { 24,25, 40,6, 62,8, 74,26, 62,54, 36,82, 24,94, 20,84, 32,78, 54,90, 80,92, DATA_END } },
    { 3, { 24,16, 46,5, 72,16, 70,36, 46,46, 46,46, 74,58, 76,80, 50,95, 22,84, DATA_END } },
    { 3, { 24,8, 74,8, 74,8, 46,42, 46,42, 74,54, 76,78, 52,94, 22,86, DATA_END } },
    { 4, { 34,6, 20,60, 20,60, 80,60, DATA_UP, 64,30, 62,95, DATA_END } },
    { 4, { 64,95, 64,5, 64,5, 18,66, 18,66, 84,66, DATA_END } },
    { 4, { 28,10, 26,46, 44,54, 70,46, DATA_UP, 74,8, 68,95, DATA_END } },
    { 5, { 74,8, 32,8, 32,8, 27,44, 27,44, 54,38, 76,56, 72,82, 46,95, 22,84, DATA_END } },
    { 5, { 76,10, 46,8, 30,22, 36,44, 62,52, 74,72, 58,92, 24,90, DATA_END } },
    { 6, { 66,6, 40,26, 26,56, 28,84, 50,95, 72,84, 72,62, 52,52, 32,64, DATA_END } },
    { 6, { 56,5, 34,40, 24,72, 38,94, 62,92, 70,72, 54,58, 30,70, DATA_END } },
    { 7, { 20,8, 80,8, 80,8, 44,95, DATA_END } },
    { 7, { 20,10, 78,8, 78,8, 48,95, DATA_UP, 34,50, 74,48, DATA_END } },
    { 7, { 22,24, 22,10, 22,10, 78,8, 78,8, 56,50, 50,95, DATA_END } },
    { 8, { 50,48, 28,34, 28,14, 50,5, 72,14, 72,34, 50,48, 24,66, 26,88, 50,95, 74,88, 76,66, 50,48, DATA_END } },
    { 8, { 72,14, 50,5, 30,18, 40,40, 66,60, 68,86, 46,95, 28,82, 40,58, 64,36, 72,14, DATA_END } },
    { 9, { 72,28, 54,6, 30,14, 26,36, 44,50, 66,40, 72,22, 72,22, 70,95, DATA_END } },
    { 9, { 70,26, 50,6, 30,20, 34,44, 56,46, 70,26, 72,60, 58,88, 32,94, DATA_END } }
};
#define DATA_GLYPHS ((int)(sizeof data_glyphs / sizeof data_glyphs[0]))

/* Random numbers of one sample: a stream of its own, so that sample i does not depend on the others. */
typedef struct data_dice { uint64_t seed, next; } data_dice;
/* A whole number from low to high, both included. */
static inline int data_roll(data_dice* r, int low, int high) {
    uint64_t span = (uint64_t)(high - low) + 1;
    return low + (int)((amp_random_bits(r->seed, r->next++) * span) >> 32);
}
/* The sum of two: values in the middle are more frequent than those at the ends. */
static inline int data_roll2(data_dice* r, int low, int high) {
    int first = data_roll(r, low, high);
    return (first + data_roll(r, low, high)) / 2;
}

typedef struct data_point { int x, y; } data_point;
typedef struct data_pen { int radius, blur, ink; } data_pen;

/* Draws the line a-b with round ends. Full ink within radius - blur of the line, none beyond radius + blur, and
   between them a ramp in the squared distance, which needs no square root. Where lines overlap the darker wins. */
static inline void data_line(uint8_t* pixels, data_point a, data_point b, const data_pen* pen) {
    int64_t outer = pen->radius + pen->blur, inner = pen->radius > pen->blur ? pen->radius - pen->blur : 0;
    int64_t dx = b.x - a.x, dy = b.y - a.y, length2 = dx * dx + dy * dy;
    int64_t out2 = outer * outer, in2 = inner * inner, reach = outer + 256;
    int64_t left = a.x < b.x ? a.x : b.x, right = a.x < b.x ? b.x : a.x;
    int64_t top = a.y < b.y ? a.y : b.y, bottom = a.y < b.y ? b.y : a.y;
    int x, y;
    for (y = 0; y < DATA_SIDE; y++) {
        int64_t py = 256 * y + 128;
        if (py < top - reach || py > bottom + reach) continue;
        for (x = 0; x < DATA_SIDE; x++) {
            int64_t px = 256 * x + 128, along, ex, ey, d2, ink;
            if (px < left - reach || px > right + reach) continue;
            along = (px - a.x) * dx + (py - a.y) * dy;               /* foot of the perpendicular, times length2 */
            along = along < 0 ? 0 : along > length2 ? length2 : along;
            ex = px - a.x - (length2 ? dx * along / length2 : 0);
            ey = py - a.y - (length2 ? dy * along / length2 : 0);
            d2 = ex * ex + ey * ey;
            if (d2 >= out2) continue;
            ink = d2 <= in2 ? pen->ink : pen->ink * (out2 - d2) / (out2 - in2);
            if (ink > pixels[y * DATA_SIDE + x]) pixels[y * DATA_SIDE + x] = (uint8_t)ink;
        }
    }
}

static inline int data_same(data_point a, data_point b) { return a.x == b.x && a.y == b.y; }

/* One coordinate of the Catmull-Rom curve from q to r at t = k/6; p and s are the neighbours. */
static inline int data_spline(int p, int q, int r, int s, int k) {
    int linear = 36 * k * (r - p), square = 6 * k * k * (2 * p - 5 * q + 4 * r - s);
    return (432 * q + linear + square + k * k * k * (3 * q - p - 3 * r + s)) / 432;
}

/* A smooth stroke through n points, drawn as six short lines between neighbours. */
static inline void data_stroke(uint8_t* pixels, const data_point* p, int n, const data_pen* pen) {
    int closed = n > 3 && data_same(p[0], p[n - 1]), i, k;
    for (i = 0; i + 1 < n; i++) {
        data_point before = p[i > 0 ? i - 1 : closed ? n - 2 : 0];
        data_point after = p[i + 2 < n ? i + 2 : closed ? 1 : n - 1];
        data_point from = p[i], to;
        if (data_same(p[i], p[i + 1])) continue;                     /* a corner */
        for (k = 1; k <= 6; k++) {
            to.x = data_spline(before.x, p[i].x, p[i + 1].x, after.x, k);
            to.y = data_spline(before.y, p[i].y, p[i + 1].y, after.y, k);
            data_line(pixels, from, to, pen);
            from = to;
        }
    }
}

/* One person's hand: an affine map about the middle of the box, and an unsteady pen. */
typedef struct data_hand { int xx, xy, yx, yy, shift_x, shift_y, wobble; } data_hand;

static inline data_hand data_random_hand(data_dice* r) {
    data_hand h;
    int turn = data_roll2(r, -420, 420), slant = data_roll2(r, -460, 460);
    h.xx = data_roll2(r, 560, 1160);
    h.yy = data_roll2(r, 640, 1180);
    h.xy = slant - turn;                                             /* a small turn is a pair of opposite shears */
    h.yx = turn;
    h.shift_x = data_roll2(r, -768, 768);
    h.shift_y = data_roll2(r, -768, 768);
    h.wobble = data_roll(r, 60, 380);
    return h;
}

/* A point of the box, counted from its middle, on the paper. 100 units of the box are 20 pixels. */
static inline data_point data_place(const data_hand* h, int x, int y, data_dice* r) {
    data_point p;
    p.x = 128 * DATA_SIDE + h->shift_x + (h->xx * x + h->xy * y) / 20 + data_roll(r, -h->wobble, h->wobble);
    p.y = 128 * DATA_SIDE + h->shift_y + (h->yx * x + h->yy * y) / 20 + data_roll(r, -h->wobble, h->wobble);
    return p;
}

static inline void data_draw_glyph(uint8_t* pixels, const data_glyph* g, const data_hand* h, const data_pen* pen,
                                   data_dice* r) {
    data_point stroke[DATA_POINTS];
    const signed char* p = g->points;
    const signed char* first = p;
    int n = 0;
    for (;;) {
        if (p[0] < 0) {
            data_stroke(pixels, stroke, n, pen);
            if (p[0] == DATA_END) return;
            first = ++p;
            n = 0;
        } else if (n > 0 && p[0] == p[-2] && p[1] == p[-1]) {
            stroke[n] = stroke[n - 1];                               /* both halves of a corner move together */
            n++;
            p += 2;
        } else if (n > 2 && p[0] == first[0] && p[1] == first[1]) {
            stroke[n++] = stroke[0];                                 /* and so do the ends of a closed stroke */
            p += 2;
        } else {
            stroke[n++] = data_place(h, p[0] - 50, p[1] - 50, r);
            p += 2;
        }
    }
}

/* Short strokes that do not belong to the digit. */
static inline void data_clutter(uint8_t* pixels, data_dice* r) {
    int count = data_roll(r, 0, 3), i;
    for (i = 0; i < count; i++) {
        data_point a, b;
        data_pen pen;
        a.x = data_roll(r, 0, 256 * DATA_SIDE);
        a.y = data_roll(r, 0, 256 * DATA_SIDE);
        b.x = a.x + data_roll(r, -1800, 1800);
        b.y = a.y + data_roll(r, -1800, 1800);
        pen.radius = data_roll(r, 100, 300);
        pen.blur = data_roll(r, 128, 256);
        pen.ink = data_roll(r, 60, 220);
        data_line(pixels, a, b, &pen);
    }
}

/* Paper grain: up to +-strength on every pixel, four pixels from each random number. */
static inline void data_grain(uint8_t* pixels, int strength, data_dice* r) {
    uint32_t random = 0;
    int i;
    for (i = 0; i < DATA_SIDE * DATA_SIDE; i++) {
        int value;
        if (i % 4 == 0) random = amp_random_bits(r->seed, r->next++);
        value = pixels[i] + ((int)(random & 255u) - 128) * strength / 128;
        random >>= 8;
        pixels[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
    }
}

/* Draws sample number `index` of stream `seed` into pixels[28*28] and returns its digit. */
static inline int data_draw(uint8_t* pixels, uint64_t seed, uint64_t index) {
    data_dice r;
    data_hand hand;
    data_pen pen;
    int digit, pick;
    r.seed = seed;
    r.next = index << 12;                                            /* a sample uses about 300 numbers */
    digit = data_roll(&r, 0, 9);
    do pick = data_roll(&r, 0, DATA_GLYPHS - 1); while (data_glyphs[pick].digit != digit);
    hand = data_random_hand(&r);
    pen.radius = data_roll(&r, 150, 420);
    pen.blur = data_roll(&r, 128, 300);
    pen.ink = data_roll(&r, 130, 255);
    memset(pixels, 0, DATA_SIDE * DATA_SIDE);
    data_clutter(pixels, &r);
    data_draw_glyph(pixels, &data_glyphs[pick], &hand, &pen, &r);
    data_grain(pixels, data_roll(&r, 0, 90), &r);
    return digit;
}

/* A data set of `count` drawn digits. */
static inline int data_digits(data_set* d, int count, uint64_t seed, char* error) {
    int i;
    memset(d, 0, sizeof *d);
    if (count < 1 || count > 1000000)
        return data_fail(error, "%d digits asked for, 1 to 1000000 can be drawn", count);
    d->pixels = (uint8_t*)malloc((size_t)count * DATA_SIDE * DATA_SIDE);
    d->labels = (uint8_t*)malloc((size_t)count);
    if (!d->pixels || !d->labels) {
        data_free(d);
        return data_fail(error, "there is not enough memory for %d digits", count);
    }
    for (i = 0; i < count; i++)
        d->labels[i] = (uint8_t)data_draw(d->pixels + (size_t)i * DATA_SIDE * DATA_SIDE, seed, (uint64_t)i);
    d->count = count;
    d->height = d->width = DATA_SIDE;
    return 1;
}

/* ---------------------------------------------------------------------------------------- */
/* From bytes to batches.                                                                    */
/* ---------------------------------------------------------------------------------------- */

/* Puts the numbers 0..count-1 into a random order (Fisher and Yates). */
static inline void data_shuffle(int* order, int count, uint64_t seed) {
    int i;
    for (i = 0; i < count; i++) order[i] = i;
    for (i = count - 1; i > 0; i--) {
        int j = (int)((amp_random_bits(seed, (uint64_t)i) * (uint64_t)(i + 1)) >> 32), keep = order[i];
        order[i] = order[j];
        order[j] = keep;
    }
}

/* Image i as floats x[side, side], in the middle of blank paper if side is larger than the image. Normalised with
   the mean and deviation of MNIST's pixels, 33 and 79: one exact difference, one division. */
static inline void data_image(const data_set* d, int i, int side, float* x) {
    const uint8_t* p = d->pixels + (size_t)i * (size_t)d->height * (size_t)d->width;
    int top = (side - d->height) / 2, left = (side - d->width) / 2, row, column;
    for (row = 0; row < side; row++)
        for (column = 0; column < side; column++) {
            int r = row - top, c = column - left, inside = r >= 0 && r < d->height && c >= 0 && c < d->width;
            int value = inside ? p[r * d->width + c] : 0;
            x[row * side + column] = (float)(value - 33) / 79.0f;
        }
}

/* A batch: images order[first..first+n) to x[n, side, side], labels to labels[n]. The order wraps around at its
   end; order == NULL takes the images as they lie. */
static inline void data_batch(const data_set* d, const int* order, int first, int n, int side, float* x,
                              int32_t* labels) {
    int i;
    for (i = 0; i < n; i++) {
        int at = (first + i) % d->count, image = order ? order[at] : at;
        data_image(d, image, side, x + (size_t)i * (size_t)side * (size_t)side);
        labels[i] = d->labels[image];
    }
}

#endif /* EXAMPLES_DATA_H */
