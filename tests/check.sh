#!/bin/sh
# check.sh - everything beyond `make test`. Run it through `make check`. CC, LEAN, PYTHON and DATA come from it:
# PYTHON needs numpy, torch and safetensors (timm, for LAMB, transformers), DATA is a directory of MNIST files; what is absent is
# skipped with a line. Each step is a process of its own, JOBS at a time (default: the processors), the long ones first.
# It prints one line with its seconds, of a clock and of the processors; the output of a failed one follows it. STEP=n in the
# environment runs the n-th step alone, STEP=list prints their names. SEED (default: the date) is that of the steps that draw
# something new each day; they print it.
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-cc}; LEAN=${LEAN:-}; PYTHON=${PYTHON:-python3}; DATA=${DATA:-}; STEP=${STEP:-}
SEED=${SEED:-$(date +%Y%m%d)}
JOBS=${JOBS:-$(nproc 2> /dev/null || echo 2)}
all=build/check; out=$all/$STEP
strict="-Wall -Wextra -pedantic -Wconversion -Wshadow -Wcast-qual -Wdouble-promotion -Wundef -Wcast-align -Werror"
threads="-std=gnu99 -O2 -fopenmp -ffp-contract=fast $LEAN"
fma=; grep -q ' fma ' /proc/cpuinfo 2> /dev/null && fma=-DTEST_FMA      # as in the Makefile
few="env TEST_EVERY=8"          # of the long lists of products and convolutions every eighth, with each type
sanitize="-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all $LEAN"
steps=0; skipped=0
export OMP_WAIT_POLICY=passive      # more threads than processors, or a busy machine: threads that spin take minutes
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1
[ -n "$STEP" ] || rm -rf $all
[ "$STEP" = list ] && out=$all
mkdir -p "$out"

have() { command -v "$1" > /dev/null 2>&1; }
skip() { skipped=$((skipped + 1)); [ -n "$STEP" ] || echo "skipped: $1"; }
processor_seconds() { # of this shell and what it has run
    times > $out/times
    cpu=$(awk '{ gsub(/[ms]/, " "); s += 60 * $1 + $2 + 60 * $3 + $4 } END { printf "%.0f", s }' $out/times)
}
step() { # step NAME COMMAND...: counts it, or, where it is the one to run, runs it and keeps its output in a file
    name=$1; shift; steps=$((steps + 1))
    [ "$STEP" != list ] || echo "$steps $name"
    [ "$STEP" = $steps ] || return 0
    start=$(date +%s)
    if "$@" > $out/log 2>&1; then
        processor_seconds
        echo "ok      $name ($(($(date +%s) - start)) s, $cpu s)"; : > $out/ok
        grep -E '^skipped|^[0-9.]+ (%|faults)[, ]|SURVIVED' $out/log
    else echo "FAILED  $name: $*"; tail -n 40 $out/log; fi
    exit 0
}

# --- objects that several steps link ---------------------------------------------------------------
object() { make -s build/$1/impl.o B=build/$1 CC="$CC" CFLAGS="$2"; }
if [ -z "$STEP" ]; then
    { object asan "$sanitize"; object debug "-O0 $LEAN"; } & { object omp "$threads"; object fast "-Ofast $LEAN"; } &
    object pic "-O1 -fPIC $LEAN" & wait
fi

# --- the same bits ----------------------------------------------------------------------------------------
step "the same bits: compilers, processors, systems" env FEW=1 sh tests/test_bits.sh build/bits/few.md

cross() { # the parts with NEON code, under qemu; of its many products and convolutions every 60th
    export TEST_EVERY=60
    aarch64-linux-gnu-gcc -std=c99 -O2 -c tests/impl.c -o $out/arm.o || return 1
    for t in half gemm conv scaler optim ops nan; do
        aarch64-linux-gnu-gcc -std=c99 -O2 tests/test_$t.c $out/arm.o -o $out/arm_$t -lm &&
        qemu-aarch64 -L /usr/aarch64-linux-gnu $out/arm_$t || return 1
    done
}
if have aarch64-linux-gnu-gcc && have qemu-aarch64; then step "aarch64 under qemu" cross; else skip "no aarch64 compiler or qemu"; fi

# --- AVX-512 where there is none -----------------------------------------------------------------------------
if grep -q avx512bw /proc/cpuinfo 2> /dev/null; then skip "AVX-512 in C: the processor has it"
elif echo '#include <simde/x86/avx512.h>' | $CC -E - > /dev/null 2>&1; then step "AVX-512 in C" sh tests/avx512.sh
else skip "SIMDe (libsimde-dev) is not here"; fi

# --- CUDA ----------------------------------------------------------------------------------------------------
# Only the products have code of their own for 7.5 and for 9.0.
emulated() { # emulated ARCHITECTURE TESTS
    arch=$1; shift
    make -s test-emu B=build/emu$arch EMU_ARCH=$arch EMU_TESTS="$(printf "build/emu$arch/emu${arch}_%s " "$@")"
}
if have g++; then
    step "CUDA on the CPU, sm_800" emulated 800 $(ls tests/emu/test_*.cpp | sed 's,.*/\(.*\)\.cpp,\1,; /hopper/d')
    step "CUDA on the CPU, sm_900" emulated 900 test_cuda_hopper test_emu
else skip "g++ is not here"; fi
if have nvcc; then step "amp_cuda.cuh with nvcc" env ARCHS="75 90a" sh -c "make -s cuda && make -s cuda-report"; else skip "nvcc is not here"; fi

# --- the tests again, in other builds -----------------------------------------------------------------
step "address and undefined-behaviour sanitizers" $few make -s test B=build/asan CC="$CC" CFLAGS="$sanitize"
# What an optimiser would drop is read here.
sanitize_debug() {
    export TEST_EVERY=25
    $CC -std=c99 -O0 ${sanitize#-O1} -c tests/impl.c -o $out/impl.o || return 1
    for t in scaler conv model train; do
        $CC -std=c99 $sanitize tests/test_$t.c $out/impl.o -o $out/$t -lm && $out/$t || return 1
    done
}
step "the sanitizers in a build for debugging" sanitize_debug
# gcc's do not see where a pointer is formed from NULL or outside of its array.
pointers() {
    export TEST_EVERY=5
    clang -std=c99 -O1 -g1 -DAMP_NO_AVX512 -fsanitize=pointer-overflow -fno-sanitize-recover=all -c tests/impl.c -o $out/impl.o || return 1
    for t in gemm conv ops scaler optim train; do
        clang -std=c99 -O1 $fma -fsanitize=pointer-overflow tests/test_$t.c $out/impl.o -o $out/$t -lm && $out/$t || return 1
    done
}
if have clang; then step "clang's sanitizer of pointers" pointers; fi
# 300 faults take hours; here two. One that survives is printed, and no failure: that many would be chance.
step "planted faults, two: seed $SEED" $PYTHON tests/tools/mutants.py amp.h 2 "$SEED" --least 50
if have clang; then step "clang" $few make -s test B=build/clang CC=clang CFLAGS="-O2 $LEAN"; else skip "clang is not here"; fi
threaded() {
    OMP_NUM_THREADS=3 $few make -s test B=build/omp CC="$CC" CFLAGS="$threads" TESTS="$(sed -n 's/^TESTS *= //p' Makefile) openmp"
}
step "OpenMP, contraction allowed" threaded
small_stack() { # KB, the implementation's object, tests: the operators need no more than amp.h says
    k=$1; o=$2; shift 2
    for t in "$@"; do
        $CC -std=c99 -O2 $fma tests/test_$t.c $o -o $out/stack_$t -lm && (ulimit -s $k && TEST_EVERY=25 $out/stack_$t) || return 1
    done
}
clang_small_stack() {
    clang -std=c99 -O0 $LEAN -c tests/impl.c -o $out/O0.o && small_stack 192 $out/O0.o conv gemm
}
step "a stack of 128 KB" small_stack 128 build/impl.o ops conv gemm model
step "a stack of 128 KB in a build for debugging" small_stack 128 build/debug/impl.o ops conv gemm model
if have clang; then step "a stack of 192 KB in clang's" clang_small_stack; fi
# nan and ops set each instruction set themselves, whatever the environment says.
chosen() { # chosen ISA
    t=$(sed -n 's/^TESTS *= //p' Makefile | tr ' ' '\n' | grep -vxE 'ops|nan|data|files' | xargs)
    AMP_ISA=$1 $few make -s test CC="$CC" TESTS="$t"
}
step "AMP_ISA=scalar" chosen scalar
if grep -q avx512bw /proc/cpuinfo 2> /dev/null; then step "AMP_ISA=avx2" chosen avx2; fi
unit_in_c() { # the code for a matrix unit where there is none
    $CC -std=c99 -O2 -mfma -ffp-contract=off tests/test_gemm.c tests/impl_amx.c -o $out/unit -lm && AMP_ISA=avx512 $out/unit fast_sums
}
if grep -q avx512_bf16 /proc/cpuinfo 2> /dev/null && ! grep -q amx_bf16 /proc/cpuinfo; then
    step "a matrix unit in plain C" unit_in_c
else skip "a matrix unit in plain C: not without AVX-512, nor where there is one"; fi
fast() { # the bits may differ, the rest must hold: conversions, checks for inf and NaN, NaNs that operators hand on, training
    $CC -std=c99 -Ofast -DAMPI_IMPLEMENTATION_ONCE examples/own_loop.c build/fast/impl.o -o $out/loop -lm && $out/loop || return 1
    for t in test_half test_scaler test_nan test_hostile fuzz/soak_training; do
        $CC -std=c99 -Ofast tests/$t.c build/fast/impl.o -o $out/fast -lm && $out/fast || return 1
    done
}
step "-Ofast: conversions, checks and training" fast
told() { # told COMPILER FLAGS...: a build with other bits, as its self test says
    printf '#include "amp.h"\nint main(void) { const amp_logger l = { amp_log_stderr, NULL };' > $out/self.c
    printf ' return amp_self_test(&l) == AMP_ERR_UNSUPPORTED ? 0 : 1; }\n' >> $out/self.c
    "$@" -DAMP_NO_SIMD -c tests/impl.c -o $out/impl.o && $CC -I. $out/self.c $out/impl.o -o $out/self -lm && $out/self
}
reorder="-O2 -fassociative-math -fno-signed-zeros -fno-trapping-math"
if have gcc; then
    step "gcc -Ofast fails the self test" told gcc -Ofast
    step "gcc -fassociative-math fails the self test" told gcc $reorder
fi
if have clang; then
    step "clang -ffp-model=fast fails the self test" told clang -O2 -ffp-model=fast
    step "clang -fassociative-math fails the self test" told clang $reorder
fi
memcheck() { # leaks of a program; what is computed with memory that nothing was written to
    valgrind -q --error-exitcode=1 --leak-check=full build/train_small || return 1
    for t in conv ops; do
        $CC -std=c99 -O1 -g1 tests/test_$t.c build/impl.o -o $out/$t -lm && valgrind -q --error-exitcode=1 $out/$t exceptions || return 1
    done
}
if have valgrind; then step "valgrind" memcheck; else skip "valgrind is not here"; fi

# --- training ------------------------------------------------------------------------------------------------------
# results.md shows those on MNIST.
proof=build/proof.txt; [ -n "$DATA" ] || proof=build/proof_drawn.txt
step "training proofs" sh -c "$CC -std=c99 -O2 tests/prove_training.c build/impl.o -o $out/prove -lm && $out/prove 4 $DATA > $proof || { cat $proof; false; }"
if [ -z "$DATA" ]; then skip "no directory of MNIST files (DATA=...): training is proven on drawn digits"; fi
step "examples run" sh tests/check_examples.sh "$DATA"
if have mpicc && have mpirun; then step "several processes, by MPI" sh tests/check_mpi.sh
else skip "MPI is not here (openmpi-bin, libopenmpi-dev)"; fi

# --- all 2^32 floats -------------------------------------------------------------------------------------
exhaustive() { $CC -std=c99 $2 tests/fuzz/exhaustive_half.c $1 -o $out/exhaustive -lm && $out/exhaustive $3; }
step "all conversions of all floats" exhaustive build/impl.o -O2
step "all conversions, every 7th float, -Ofast" exhaustive build/fast/impl.o -Ofast 7

# --- hostile input -----------------------------------------------------------------------------------------
mutated() {
    $CC -std=c99 $sanitize tests/fuzz/fuzz_$1.c build/asan/impl.o -o $out/fuzz -lm || return 1
    for seed in 1 3 5 7; do $out/fuzz $2 $seed || return 1; done
}
for f in "checkpoint 20000" "idx 10000" "api 100000"; do step "mutated input: ${f% *}" mutated $f; done
fuzzed() { # fuzzed NAME SECONDS: libFuzzer, which begins with some of the inputs above and goes where code is new
    mkdir -p $out/corpus && $CC -std=c99 -O1 tests/fuzz/fuzz_$1.c build/impl.o -o $out/plain -lm && $out/plain 100 "$SEED" $out/corpus &&
    clang -std=c99 -O1 -g1 -DAMP_NO_SIMD -DAMP_FUZZER -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
        tests/fuzz/fuzz_$1.c tests/impl.c -o $out/fuzz -lm &&
    TMPDIR=$out $out/fuzz -seed="$SEED" -max_total_time=$2 -max_len=4096 -artifact_prefix=$out/ $out/corpus
}
if echo 'int LLVMFuzzerTestOneInput(void) { return 0; }' | clang -x c -fsanitize=fuzzer - -o $out/fuzzer 2> /dev/null; then
    for f in checkpoint idx; do step "libFuzzer for 30 s: $f, seed $SEED" fuzzed $f 30; done
else skip "libFuzzer is not here (clang, libclang-rt-14-dev)"; fi

# --- the same bits wherever arrays lie ----------------------------------------------------------------------
anywhere() {
    $CC -std=c99 -O2 -fopenmp tests/fuzz/fuzz_bits.c build/omp/impl.o -o $out/omp -lm && $out/omp 2000 &&
    $CC -std=c99 $sanitize tests/fuzz/fuzz_bits.c build/asan/impl.o -o $out/fuzz -lm && $out/fuzz 1000 100000
}
step "random calls: the same bits for other addresses, workspaces, instruction sets, threads" anywhere

# --- long runs ---------------------------------------------------------------------------------------------
soak() { $CC -std=c99 -O2 tests/fuzz/soak_$1.c build/impl.o -o $out/soak -lm && $out/soak $2; }
step "soak: ten million windows of a scaler beside another model of it" soak scaler
step "soak: training where subnormals vanish and exceptions trap, then models for 10 s without a byte more" soak training 10

# --- threads --------------------------------------------------------------------------------------------
race_free() { # what threads share does not depend on the instruction set
    gcc -std=c99 -O1 -g1 -DAMP_NO_AVX512 -fsanitize=thread -pthread tests/test_threads.c tests/impl.c -o $out/threads -lm && $out/threads
}
if have gcc; then step "thread sanitizer: two models, first calls" race_free; else skip "gcc is not here"; fi
# The OpenMP runtimes are not built for ThreadSanitizer, so their barriers look like races; clang's has a tool, Archer,
# that tells of them. The one sentence left is about a mutex inside the runtime.
tsan_omp() { clang -std=c99 -O1 -g1 -DAMP_NO_AVX512 -fopenmp -fsanitize=thread "$@" -o $out/omp -lm; }
archer() {
    printf 'int main(void) {\n#pragma omp parallel\n    {}\n    return 0;\n}\n' > $out/omp.c
    tsan_omp $out/omp.c 2> /dev/null && ARCHER_OPTIONS=verbose=1 $out/omp 2>&1 | grep -q '^Archer detected'
}
race_free_omp() {
    archer || { echo "skipped: OpenMP threads, no Archer"; return 0; }
    echo "race_top:pthread_mutex" > $out/omp.quiet
    tsan_omp tests/test_openmp.c tests/impl.c && TSAN_OPTIONS=suppressions=$out/omp.quiet $out/omp
}
if have clang; then step "thread sanitizer: the OpenMP threads of one model" race_free_omp; else skip "clang is not here"; fi

# --- instructions of the hot paths ------------------------------------------------------------------------
step "instruction counts" env CC="$CC" sh tests/bench/counts.sh
step "budgets of tokens, functions, machine code and README" env CC="$CC" PYTHON="$PYTHON" sh tests/tools/budget.sh

# --- references that we did not write -------------------------------------------------------------------------
[ -n "$STEP" ] || export REFERENCES="$($PYTHON -c "import numpy, torch, safetensors; print(1)" 2> /dev/null)"
if [ -n "$REFERENCES" ]; then
    reference() { $CC -std=c99 -O2 -shared -fPIC build/pic/impl.o tests/reference/shim_*.c -o $out/libamp.so -lm && $PYTHON tests/reference/check_$1.py $out/libamp.so; }
    for f in half ops scaler optim checkpoint model; do step "against references: $f" reference $f; done
    [ -n "$STEP" ] || export TRANSFORMERS="$($PYTHON -c "import importlib.util; print(importlib.util.find_spec('transformers') and 1 or '')")"
    if [ -n "$TRANSFORMERS" ]; then step "against references: transformer" reference transformer
    else skip "python with transformers is not here"; fi
else skip "python with numpy, torch and safetensors is not here (PYTHON=...)"; fi
[ -n "$STEP" ] || export BINDING="$($PYTHON -c "import cffi; print(1)" 2> /dev/null)"
if [ -n "$BINDING" ]; then step "cffi reads the declarations" env CC="$CC" $PYTHON tests/reference/check_binding.py "$out"
else skip "python with cffi is not here"; fi

# --- compilers and option macros ----------------------------------------------------------------
compile_run() { # compile_run COMPILER FLAGS...: one file with the implementation, warning-free, and it runs
    "$@" $strict -DUSE_IMPLEMENTATION tests/compile.c -o $out/compile -lm && $out/compile
}
parse() { # parse COMPILER FLAGS...: the same, only read; the bits table builds and runs other levels
    "$@" $strict -DUSE_IMPLEMENTATION -fsyntax-only tests/compile.c
}
two_static_copies() {
    $CC -std=c99 $strict -DUSE_IMPLEMENTATION -DAMP_STATIC -c tests/compile.c -o $out/a.o &&
    $CC -std=c99 $strict -DUSE_IMPLEMENTATION -DAMP_STATIC -Dmain=other -c tests/compile.c -o $out/b.o &&
    $CC $out/a.o $out/b.o -o $out/two -lm && $out/two
}
# The header's own table of option macros, as flags; some need a value.
options=$(sed -n '/^\/\* Option macros/,/\*\//s/^     \(AMP_[A-Z0-9_]*\) .*/\1/p' amp.h |
    sed '/^AMP_IMPLEMENTATION$/d; s/^AMP_DEF$/AMP_DEF=extern/; s/^AMP_SELF$/AMP_SELF="amp.h"/; s/^AMP_LOG_DEFAULT$/AMP_LOG_DEFAULT=hear/')
every() { # every COMPILER: all option macros at once; AMP_DEF would undo AMP_STATIC
    compile_run "$1" -std=c99 -O0 -Wc++-compat $(printf '%s\n' "$options" | sed '/^AMP_DEF/d; s/^/-D/')
}
included() { # included COMPILER: a file without the implementation takes each option macro, but AMP_STATIC: one error there
    for macro in $options; do
        "$1" -std=c99 $strict -D$macro -fsyntax-only tests/compile.c > $out/said 2>&1; status=$?
        cat $out/said
        if [ "$macro" != AMP_STATIC ]; then [ $status -eq 0 ] || return 1
        else [ $status -ne 0 ] && [ "$(grep -cE '(error|warning):' $out/said)" -eq 1 ] && grep -q 'AMP_IMPLEMENTATION' $out/said || return 1; fi
    done
}
half_beside() { # half_beside COMPILER: a file that has the compiler's own half type; a compiler without it is passed
    printf '_Float16 own = 1.0f16;\n' > $out/half.c
    "$1" -std=c2x -c $out/half.c -o $out/half.o 2> /dev/null || { echo "no _Float16 in $1"; return 0; }
    { echo '#include "amp.h"'; echo 'extern float twice(_Float16 h);'
      echo 'float twice(_Float16 h) { amp_half a; memcpy(&a, &h, sizeof a); return 2.0f * amp_half_to_float(a); }'
      echo 'int main(void) { return twice((_Float16)1.5f) == 3.0f ? 0 : 1; }'; } | sed '1i #include <string.h>' > $out/half.c
    "$1" -std=c2x -I. $strict -Wno-pedantic $out/half.c build/impl.o -o $out/half -lm && $out/half
}
mingw() { # to Windows; under Wine, where it is, the program runs too, and files are saved and loaded by many processes
    x86_64-w64-mingw32-gcc -std=c99 -O1 $strict -Wc++-compat -DUSE_IMPLEMENTATION tests/compile.c -o $out/compile.exe -lm || return 1
    have wine || return 0
    export WINEDEBUG=-all WINEPREFIX=$PWD/$out/wine
    wine $out/compile.exe || return 1
    x86_64-w64-mingw32-gcc -std=c99 -O1 -DAMP_NO_SIMD -c tests/impl.c -o $out/impl.o || return 1
    for t in "files" "checkpoint -DTEST_FILES_ONLY"; do
        set -- $t
        x86_64-w64-mingw32-gcc -std=c99 -O1 tests/test_$1.c $2 $out/impl.o -o $out/test.exe -lm &&
        (cd $out && wine test.exe) || return 1
    done
}
msvc() { # msvc FLAGS...: clang with MSVC's macros, as clang-cl has them, before mingw-w64's headers of libc, whose va_arg lacks brackets
    set -- "$@" -isystem "$(echo '#include <stdio.h>' | x86_64-w64-mingw32-gcc -E - | sed -n 's/^# 1 "\(.*\)\/stdio.h".*/\1/p' | head -n 1)"
    { echo '#include <_mingw.h>'
      for m in NORETURN DEPRECATED; do printf '#undef __MINGW_ATTRIB_%s\n#define __MINGW_ATTRIB_%s\n' $m $m; done
      printf '#include <%s.h>\n' stdlib stdio string stdint stdarg math float process io; printf '#undef va_arg\n#define va_arg __builtin_va_arg\n#undef __attribute__\n'; } > $out/msvc.h
    for part in bits impl; do # its own headers of vectors leave out what the command line does not allow
        clang --target=x86_64-pc-windows-msvc -fms-compatibility-version=19.38 -include $out/msvc.h "$@" -std=c99 -O1 \
            -mno-stack-arg-probe -c tests/$part.c -o $out/$part.obj || return 1
    done
    echo 'int _fltused = 1;' > $out/fltused.c
    x86_64-w64-mingw32-gcc $out/bits.obj $out/impl.obj $out/fltused.c -o $out/msvc.exe || return 1
    have wine || return 0
    $CC -std=c99 -O1 tests/bits.c build/impl.o -o $out/bits -lm && $out/bits | grep hash > $out/here || return 1
    WINEDEBUG=-all WINEPREFIX=$PWD/$out/wine wine $out/msvc.exe | tr -d '\r' | grep hash | cmp - $out/here
}
# What windows.h defines, and amp.h may stand behind.
windows="-Dnear= -Dfar= -Dsmall=char -Dhyper=long -Dinterface=struct -DIN= -DOUT= -DOPTIONAL= -DERROR=0 -Dpascal= -Dcdecl="
wrapped() { # wrapped COMPILER: the include stands in an extern "C" of the host
    printf 'extern "C" {\n#include "amp.h"\n}\nint main() { amp_scaler s; return amp_scaler_init(&s, {}); }\n' > $out/wrapped.cpp
    "$1" -std=c++11 -I. $strict -fsyntax-only $out/wrapped.cpp && "$1" -std=c++11 -I. $strict -DAMP_IMPLEMENTATION -fsyntax-only $out/wrapped.cpp
}
for c in gcc clang clang-19; do
    have $c || { skip "$c is not here"; continue; }
    case $c in gcc) level=2;; *) level=0;; esac         # clang's warnings do not depend on it
    step "$c -std=c99 -O$level" compile_run $c -std=c99 -Wc++-compat -O$level
    step "$c, beside the names of windows.h" parse $c -std=c99 $windows
    step "$c, all option macros at once" every $c
    step "$c, option macros in a file that only includes" included $c
    step "$c, beside _Float16" half_beside $c
    for std in c11 c17 c2x gnu99; do step "$c -std=$std" parse $c -std=$std -Wc++-compat; done
    for macro in $options; do step "$c -D$macro" parse $c -std=c99 -Wc++-compat -D$macro; done
done
if have gcc; then       # its warnings depend on the level
    step "gcc -O0" compile_run gcc -std=c99 -O0
    step "gcc -Ofast -DAMP_NO_SIMD" compile_run gcc -std=c99 -Ofast -DAMP_NO_SIMD
    step "gcc -O3 -march=native -flto" compile_run gcc -std=c99 -O3 -march=native -flto
fi
for c in g++ clang++; do
    have $c || { skip "$c is not here"; continue; }
    case $c in g++) level=1;; *) level=0;; esac
    step "$c -std=c++11" compile_run $c -x c++ -std=c++11 -O$level
    step "$c, in an extern \"C\"" wrapped $c
    for std in c++14 c++17 c++20 c++2b; do step "$c -std=$std" parse $c -x c++ -std=$std; done
done
if have tcc; then step "tcc" sh -c "tcc -DUSE_IMPLEMENTATION tests/compile.c -o $out/tcc -lm && $out/tcc"; else skip "tcc is not here"; fi
if have x86_64-w64-mingw32-gcc; then
    step "mingw-w64 -std=c99" mingw
    step "mingw-w64 -std=gnu17" parse x86_64-w64-mingw32-gcc -std=gnu17
    step "mingw-w64, behind windows.h" parse x86_64-w64-mingw32-gcc -std=c99 -include windows.h
else skip "no mingw-w64 compiler"; fi
if have x86_64-w64-mingw32-gcc && have clang; then
    step "clang as clang-cl" msvc $strict -Wno-pedantic
    step "clang as MSVC, but for vectors" msvc -U__clang__ -w
fi
c_alone() { # files by C's own functions
    $CC -std=c99 -O1 -DAMP_NO_SIMD $strict -U__unix__ tests/impl.c tests/test_checkpoint.c -o $out/c -lm &&
    (cd $out && ./c)
}
step "files without POSIX" c_alone
xml() { # pictures whose layers have hostile names, which an XML parser reads
    for t in picture_is_svg history_marks; do
        (cd $out && TEST_KEEP=1 ../../../build/test_report $t) || return 1
        $PYTHON -c "import sys, xml.dom.minidom as d; d.parse(sys.argv[1])" $out/report_test.svg || return 1
    done
}
step "pictures are XML" xml
step "two static copies in one program" two_static_copies

# --- what a linker sees -----------------------------------------------------------------------------
only_our_symbols() {
    foreign=$(nm -g --defined-only build/impl.o | awk '{print $3}' | grep -v -E '^amp_') && { echo "$foreign"; return 1; }
    objdump -t build/impl.o | awk '$0 ~ / O \.(data|bss)/ && $0 !~ /\.data\.rel\.ro/ {print $NF}' | grep -v -E '^ampi_(isa|amx)_cache$' > $out/state
    [ ! -s $out/state ] || { echo "writable state:"; cat $out/state; return 1; }
    return 0
}
step "public symbols begin with amp_, no writable state but two caches of cpuid" only_our_symbols
step "the header's text: table of contents, comments, ASCII" $PYTHON tests/tools/check_header.py amp.h README.md $CC
step "README's lines of make, CMake and meson" sh tests/tools/check_builds.sh
step "what README takes from examples and results" $PYTHON tests/tools/readme.py --check
step "the text of amp_cuda.cuh likewise" $PYTHON tests/tools/check_header.py amp_cuda.cuh

# --- what reads the source ------------------------------------------------------------------------------
# Switched off, each with its reason:
# cppcheck  uninitvar, uninitStructMember, ctuuninitvar: it does not follow a buffer filled through a pointer or by a
#           loop over a size >= 1; the sanitizers and valgrind watch these.
# Not run: gcc -fanalyzer (over five minutes on this file; with limits that end it, it misses a planted double free), and
# clang's analyzer on the bodies (clang-tidy reaches only what the including file calls; over a minute on the header itself).
# clang-tidy, here, as no comment in the header should talk to a tool:
#   bugprone-easily-swappable-parameters                  a, lda, b, ldb, ... is what operators take
#   bugprone-implicit-widening-of-multiplication-result   index of a tile, a lane or a small plane: bounded by constants
#   bugprone-misplaced-widening-cast                      the same, for planes of at most AMPI_POOL_BAND pixels
#   bugprone-macro-parentheses                            names and parameter lists in X-macros cannot have any
#   bugprone-narrowing-conversions                        int to char of a digit or of a byte that was just read
#   bugprone-not-null-terminated-result                   a memcpy into a buffer whose end is set separately
#   clang-analyzer-security.insecureAPI.*                 a copy of a short constant into a buffer made for it
tidy_off="-bugprone-easily-swappable-parameters,-bugprone-implicit-widening-of-multiplication-result"
tidy_off="$tidy_off,-bugprone-misplaced-widening-cast,-bugprone-macro-parentheses,-bugprone-narrowing-conversions"
tidy_off="$tidy_off,-bugprone-not-null-terminated-result,-clang-analyzer-security.insecureAPI.*"
# Between functions cppcheck tells calls apart by their place, and all calls of one macro have the same: no ctu* here.
quiet_cppcheck() {
    cppcheck --std=c99 --enable=warning,portability,performance --quiet --error-exitcode=1 --max-configs=1 -D__x86_64__ \
        --suppress=uninitvar --suppress=uninitStructMember --suppress=ctuuninitvar --suppress=ctunullpointer \
        tests/impl.c
}
if have cppcheck; then step "cppcheck" quiet_cppcheck; else skip "cppcheck is not here"; fi
if have clang-tidy; then step "clang-tidy" clang-tidy --quiet --checks="$tidy_off" tests/impl.c -- -std=c99; else skip "clang-tidy is not here"; fi

[ "$STEP" = list ] && exit 0
# --- run them ----------------------------------------------------------------------------------------------
seq "$steps" | xargs -P "$JOBS" -I{} env STEP={} SEED="$SEED" CC="$CC" LEAN="$LEAN" PYTHON="$PYTHON" DATA="$DATA" sh tests/check.sh
cat $proof 2> /dev/null
passed=$(ls $all/*/ok 2> /dev/null | wc -l)
echo "$passed passed, $((steps - passed)) failed, $skipped skipped"
[ "$passed" -eq "$steps" ]
