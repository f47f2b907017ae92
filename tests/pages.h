/* pages.h - memory that ends with a page, behind which nothing may be read or written. Linux; include it first. */
#ifndef AMP_TEST_PAGES_H
#define AMP_TEST_PAGES_H

#if defined(__linux__)
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE     /* MAP_ANONYMOUS */
#endif
#include <stdlib.h>
#include <sys/mman.h>

/* munmap(*base, *length) frees it. */
static inline void* at_page_end(size_t bytes, void** base, size_t* length) {
    *length = (bytes + 4095) / 4096 * 4096 + 4096;
    *base = mmap(NULL, *length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*base == MAP_FAILED || mprotect((char*)*base + *length - 4096, 4096, PROT_NONE) != 0) abort();
    return (char*)*base + *length - 4096 - bytes;
}
#endif
#endif
