/* stack_blocks.c - do the blocks of a product that has no workspace fit the memory that they have on the stack? For the
   instruction set in use (AMP_ISA), and products of all kernels. It looks into the implementation. */
#define AMP_IMPLEMENTATION
#define AMP_STATIC
#include "../amp.h"
#include <stdio.h>

static size_t most, checked;

static void check(const ampi_gemm_isa* g, ampi_product* s) {
    const ampi_gemm_plan p = ampi_gemm_plan_on_stack(g, s);
    if (p.at_stage > most) most = p.at_stage;
    checked++;
}

int main(void) {
    const ampi_gemm_isa plain = ampi_gemm_isa_now(), words = ampi_gemm_isa_pairs();
    ampi_image image;
    ampi_product s;
    memset(&image, 0, sizeof image);
    memset(&s, 0, sizeof s);
    image.kernel_h = image.kernel_w = 3;
    image.rows = image.cols = 224;
    image.height = image.width = 224;
    image.mul_h = image.mul_w = image.div_h = image.div_w = image.step_h = image.step_w = 1;
    for (s.m = 1; s.m < 160; s.m++)
        for (s.n = 1; s.n < 160; s.n++)
            for (s.k = 1; s.k < 260; s.k += 3) {
                s.b.image = NULL;
                check(&plain, &s);
                check(&words, &s);
                s.b.image = &image;
                check(&plain, &s);
            }
    printf("isa %d: %u plans, %u of %u floats at most\n", (int)amp_cpu_isa(), (unsigned)checked, (unsigned)most,
           (unsigned)AMPI_GEMM_STACK);
    printf("%d passed, %d failed\n", most <= AMPI_GEMM_STACK, most > AMPI_GEMM_STACK);
    return most > AMPI_GEMM_STACK;
}
