/* text.h - where gpt.c and lesson 12 get their letters from: a file, or a tale that is made up. Everything is static.
   Bytes only count, so that any file is a text. */
#ifndef EXAMPLES_TEXT_H
#define EXAMPLES_TEXT_H

#include "../amp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Bytes that occur have numbers, 0 to words - 1, in their own order. Nine tenths of the text are to train with. */
typedef struct text {
    int32_t* letters;           /* [length] */
    int length, words, split;   /* from `split` on it is to validate with */
    unsigned char byte_of[256];
    uint64_t seed;              /* of pieces and of the tale */
} text;

enum { TEXT_MOST = 1 << 30, TEXT_TALE = 200000 };

static inline int text_draw(const text* t, uint64_t number, int n) {
    return (int)(amp_random_bits(t->seed, number) % (uint32_t)n);
}

/* Sentences of one form, with words drawn by chance: a loss of 0.28 a letter is the least that is possible. */
static inline void text_tell(text* t, char* to, int room) {
    static const char* const part[6][8] = {
        { "Once", "One night", "At noon", "In spring", "Long ago", "Far away", "At last", "Again" },
        { "old", "young", "brave", "quiet", "hungry", "clever", "small", "lonely" },
        { "fox", "king", "miller", "raven", "sailor", "giant", "queen", "wolf" },
        { "met", "fed", "heard", "feared", "followed", "saved", "forgot", "found" },
        { "grey", "gentle", "wild", "merry", "proud", "sleepy", "tall", "wise" },
        { "owl", "bear", "witch", "baker", "horse", "child", "mouse", "knight" } };
    uint64_t drawn = 0;
    int i;
    while (t->length + 20 < room)
        for (i = 0; i < 6 && t->length + 20 < room; i++)
            t->length += sprintf(to + t->length, "%s%s%s", part[i][text_draw(t, drawn++, 8)], i == 0 ? " the" : i == 3 ? " a" : "",
                                 i == 5 ? ".\n" : " ");
}

/* The bytes of a file; NULL if it cannot be read, is larger than TEXT_MOST, or memory lacks. */
static inline char* text_read(const char* path, int* length) {
    FILE* f = fopen(path, "rb");
    char *bytes = NULL, *more;
    int room = 0;
    for (*length = 0; f && !ferror(f) && !feof(f);) {
        if (*length == room) {
            room = room ? 2 * room : 1 << 16;
            more = room <= TEXT_MOST ? (char*)realloc(bytes, (size_t)room) : NULL;
            if (!more) break;
            bytes = more;
        }
        *length += (int)fread(bytes + *length, 1, (size_t)(room - *length), f);
    }
    if (f && feof(f) && !ferror(f)) { fclose(f); return bytes; }
    if (f) fclose(f);
    free(bytes);
    return NULL;
}

/* Reads the file, or with NULL tells a tale. `least` letters are needed, a tenth to validate with. 0 after a sentence on
   stderr. */
static inline int text_open(text* t, const char* path, int least, uint64_t seed) {
    int number_of[256] = { 0 }, i;
    char* bytes;
    memset(t, 0, sizeof *t);
    t->seed = seed;
    bytes = path ? text_read(path, &t->length) : (char*)malloc(TEXT_TALE);
    if (bytes && !path) text_tell(t, bytes, TEXT_TALE);
    t->letters = bytes && t->length >= least ? (int32_t*)malloc((size_t)t->length * sizeof *t->letters) : NULL;
    if (!t->letters) {
        if (bytes && t->length < least) fprintf(stderr, "%s: a text of at least %d letters is needed\n",
                                                path ? path : "a tale", least);
        else if (path) fprintf(stderr, "%s: cannot be read\n", path);
        else fprintf(stderr, "there is not enough memory for a text\n");
        free(bytes);
        return 0;
    }
    for (i = 0; i < t->length; i++) number_of[(unsigned char)bytes[i]] = 1;
    for (i = 0; i < 256; i++)
        if (number_of[i]) { t->byte_of[t->words] = (unsigned char)i; number_of[i] = t->words++; }
    for (i = 0; i < t->length; i++) t->letters[i] = number_of[(unsigned char)bytes[i]];
    t->split = t->length / 10 * 9;
    free(bytes);
    return 1;
}

/* n pieces of `each` letters from the part to train with, at places that are pure functions of seed and number, and as
   targets the same a letter later. */
static inline void text_pieces(const text* t, uint64_t number, int n, int each, int32_t* tokens, int32_t* targets) {
    int i;
    for (i = 0; i < n; i++) {
        const int at = text_draw(t, number + (uint64_t)i, t->split - each);
        memcpy(tokens + i * each, t->letters + at, (size_t)each * sizeof *tokens);
        memcpy(targets + i * each, t->letters + at + 1, (size_t)each * sizeof *targets);
    }
}

#endif
