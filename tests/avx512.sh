#!/bin/sh
# avx512.sh: the code for AVX-512 where the processor has only AVX2: the tests of what is computed, over intrinsics in C
# (impl_avx512.c; needs SIMDe, Debian's libsimde-dev). Minutes. EVERY: of the many products and convolutions every
# that many-th.
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}; out=build/avx512
echo '#include <simde/x86/avx512.h>' | $CC -E - > /dev/null 2>&1 || { echo "SIMDe is not here (libsimde-dev)"; exit 1; }
rm -rf $out; mkdir -p $out

# amp.h but for what C cannot stand in for: targets, cpuid, the code for the matrix unit, assembly.
sed -e 's/AMPI_TARGET(",avx512f[^"]*")/AMPI_TARGET("")/' \
    -e 's/^#if AMPI_PAIRS && defined(__linux__) \\$/#if 0 \\/' \
    -e 's/^AMPI_FN amp_isa ampi_widest_isa(void) {$/& if (AMPI_AVX512) return AMP_ISA_AVX512;/' \
    -e 's/^        && ampi_cpu_has(7, 1, AMPI_EAX, 1u << 5);$/        ;/' amp.h > $out/amp.h
changed=$(diff amp.h $out/amp.h | grep -c '^<')
[ "$changed" -eq 6 ] || { echo "FAILED: $changed lines of amp.h changed, not 6"; exit 1; }

# Not optimised: gcc takes minutes over the intrinsics otherwise, and then has NaNs of other signs.
$CC -std=gnu99 -w -Wno-psabi -O0 -mavx2 -mfma -mf16c -I$out -c tests/impl_avx512.c -o $out/impl.o || exit 1
for t in half gemm conv scaler optim ops attention nan; do
    $CC -std=c99 -O2 -DTEST_FMA tests/test_$t.c $out/impl.o -o $out/test_$t -lm || exit 1
done
TEST_EVERY=${EVERY:-60} AMP_ISA=avx512 sh tests/run.sh "AVX-512 in C" $out/test_half $out/test_gemm $out/test_conv $out/test_scaler \
    $out/test_optim $out/test_ops $out/test_attention $out/test_nan
