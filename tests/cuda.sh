#!/bin/sh
# cuda.sh - amp_cuda.cuh with NVIDIA's compiler.   sh tests/cuda.sh build | report | test | bench | demo [DATA_DIR]
#   build   compiles it without a warning: as C++14 for every architecture that nvcc knows and for sm_90a, as C++17
#           without cuBLAS, and the examples as C++20
#   report  registers, shared memory and stack of every kernel, per architecture; fails if one spills, or if a Hopper
#           product has not the registers by which it is chosen, or waits for each wgmma by itself
#   test    the tests of tests/emu on a real GPU
#   bench   tests/bench/bench_cuda.cu on a real GPU
#   demo    examples/train_cuda.cu
# Where nvcc or a GPU is missing, `test`, `bench` and `demo` say so and succeed; `build` and `report` need only nvcc.
set -u
NVCC=${NVCC:-nvcc}
B=${B:-build}
mkdir -p "$B/cuda"
if ! command -v "$NVCC" > /dev/null 2>&1; then echo "skipped: no nvcc"; exit 0; fi
FLAGS="-O2 -Wno-deprecated-gpu-targets -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wshadow"
# ARCHS: some of them only. sm_90a holds the Hopper kernel, which no other architecture has; from CUDA 12 on.
MAJOR=$("$NVCC" --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
ARCHS=${ARCHS:-$("$NVCC" --list-gpu-arch | sed -n 's/compute_//p' |
        awk -v major="$MAJOR" '$1 >= 75 { print } $1 == 90 && major >= 12 { print "90a" }')}

gencode() { for a in "$@"; do printf -- '-gencode arch=compute_%s,code=sm_%s ' "$a" "$a"; done; }
# The GPU that is here: by its full name where nvcc's own choice leaves the letter out.
native() {
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1)
    if [ "$capability" = 9.0 ] && [ "$MAJOR" -ge 12 ]; then gencode 90a; else echo "-arch=native"; fi
}
have_gpu() { command -v nvidia-smi > /dev/null 2>&1 && nvidia-smi -L 2> /dev/null | grep -q GPU; }

# compile STANDARD ARCHITECTURES: one object with code for all of them; what ptxas says of the kernels goes to a log.
compile() {
    # shellcheck disable=SC2046,SC2086
    "$NVCC" $FLAGS -std=c++$1 --threads 0 $(gencode $2) -Xptxas -v -c -o "$B/cuda/all_$1.o" -x cu tests/impl_cuda.cu \
        2> "$B/cuda/all_$1.log" || { grep -v "^ptxas info\|bytes stack frame" "$B/cuda/all_$1.log"; return 1; }
    echo "amp_cuda.cuh: C++$1, architectures" $2
}

# The device's code does not depend on the language, nor its warnings on how the host's is optimised.
build() {
    FLAGS="$FLAGS -Xcompiler -O0"
    compile 14 "$ARCHS" || return 1
    FLAGS="$FLAGS -DAMP_NO_SIMD"        # the rest is for the device: without the CPU's vector paths, in half the time
    # shellcheck disable=SC2086
    "$NVCC" $FLAGS -std=c++17 -DAMP_NO_CUBLAS -arch=sm_80 -c -o "$B/cuda/no_cublas.o" tests/impl_cuda.cu || return 1
    echo "amp_cuda.cuh: C++17, without cuBLAS"
    for example in train_cuda own_loop train_nccl; do
        if [ $example = train_nccl ] && ! echo '#include <nccl.h>' | "$NVCC" -E -x cu - > /dev/null 2>&1; then
            echo "skipped: examples/train_nccl.cu, no nccl.h"
            continue
        fi
        # shellcheck disable=SC2086
        "$NVCC" $FLAGS -Xcicc -O0 -Xptxas -O0 -Xcompiler -Wno-missing-field-initializers -std=c++20 -arch=sm_80 -c -o "$B/cuda/$example.o" examples/$example.cu || return 1
        echo "examples/$example.cu"
    done
}

report() {
    [ -f "$B/cuda/all_14.log" ] || compile 14 "$ARCHS" || return 1
    c++filt -_ < "$B/cuda/all_14.log" | awk '
        /Compiling entry function/ {
            arch = $NF; gsub(/\047/, "", arch)
            name = $0; sub(/^[^\047]*\047/, "", name); sub(/\047.*/, "", name); sub(/^void /, "", name); sub(/\(.*/, "", name)
        }
        /bytes stack frame/ { stack = $1; spills = $5 + $9 }
        /Used [0-9]+ registers/ {
            shared = 0
            for (i = 1; i <= NF; i++) { if ($i == "Used") registers = $(i + 1); if ($i ~ /^smem/) shared = $(i - 2) }
            printf "%-7s %-58s %4d registers %6d bytes shared %5d stack %5d spilled\n", arch, name, registers, shared, stack, spills
            kernels++; if (spills > 0 || stack > 0) { bad++; list = list "\n  " arch " " name }
            if (arch == "sm_90a" && name ~ /ampi_k_gemm_hopper/ && registers < 168) { hopper++; list = list "\n  too few registers: " name }
        }
        /Potential Performance Loss/ { hopper++; list = list "\n  " $0 }
        END { printf "%d kernels, %d of them with stack or spills%s\n", kernels, bad, list; exit bad + hopper > 0 || kernels == 0 }'
}

run_tests() {
    have_gpu || { echo "skipped: no GPU"; return 0; }
    programs=
    arch=$(native)
    # shellcheck disable=SC2086
    "$NVCC" $FLAGS -std=c++17 $arch -c -x cu tests/impl_cuda.cu -o "$B/cuda/impl.o" || return 1
    for t in tests/emu/test_cuda_*.cpp; do
        name=$(basename "$t" .cpp)
        # shellcheck disable=SC2086
        "$NVCC" $FLAGS -std=c++17 $arch -c -x cu "$t" -o "$B/cuda/$name.o" || return 1
        # shellcheck disable=SC2086
        "$NVCC" $arch "$B/cuda/$name.o" "$B/cuda/impl.o" -o "$B/cuda/$name" -lcublas || return 1
        programs="$programs $B/cuda/$name"
    done
    # shellcheck disable=SC2086
    JOBS=1 sh tests/run.sh "all tests on the GPU" $programs
}

# Compiled wherever nvcc is, so that it stays right; run where a GPU is. On Hopper the portable products too, which are
# what a build without the letter has.
compile_bench() {
    # shellcheck disable=SC2086
    "$NVCC" $FLAGS -std=c++17 $2 tests/bench/bench_cuda.cu -o "$1" -lcublas
}
# Beside PyTorch where python3 (PYTHON) has it, with this GPU.
bench() {
    have_gpu || { compile_bench "$B/cuda/bench" -arch=sm_80 && echo "skipped: no GPU"; return; }
    compile_bench "$B/cuda/bench" "$(native)" || return 1
    [ "$(native)" = "-arch=native" ] || compile_bench "$B/cuda/bench_portable" -arch=sm_90 || return 1
    bench_run "tests/bench/results/$(date +%F)-cuda-$(bench_gpu | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//; s/-.*//').md"
}
bench_gpu() { nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1; }
bench_run() {
    echo "# $(bench_gpu), $(date +%F)" > "$1"
    echo "Driver $(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1), nvcc $("$NVCC" --version |
        sed -n 's/.*release \([0-9.]*\).*/\1/p'). Medians; larger ratios are better for amp." >> "$1"
    "$B/cuda/bench" >> "$1" || return 1
    if "${PYTHON:-python3}" -c "import torch; torch.zeros(1).cuda()" 2> /dev/null; then
        "${PYTHON:-python3}" tests/bench/bench_cuda.py "$1" > "$1.torch" && cat "$1.torch" >> "$1"
        rm -f "$1.torch"
    fi
    if [ -x "$B/cuda/bench_portable" ]; then "$B/cuda/bench_portable" gemm >> "$1" || return 1; fi
    cat "$1"
}

demo() {
    have_gpu || { echo "skipped: no GPU (make demo runs on the CPU)"; return 0; }
    # shellcheck disable=SC2046
    "$NVCC" -O2 -std=c++20 $(native) examples/train_cuda.cu -o "$B/demo_cuda" -lcublas || return 1
    "$B/demo_cuda" --svg "$B/demo_cuda.svg" ${1:+"$1"}
}

case ${1:-} in
    build) build ;;
    report) report ;;
    test) run_tests ;;
    bench) bench ;;
    demo) demo "${2:-}" ;;
    *) sed -n '2,11p' "$0"; exit 2 ;;
esac
