#!/bin/sh
# cuda.sh - amp_cuda.cuh with NVIDIA's compiler.   sh tests/cuda.sh build | report | test | demo [DATA_DIR]
#   build   compiles it for every architecture that nvcc knows, as C++14 and C++17, without a warning
#   report  registers, shared memory and stack of every kernel, per architecture; fails if one spills
#   test    the tests of tests/emu on a real GPU
#   demo    examples/train_cuda.cu
# Where nvcc or a GPU is missing, `test` and `demo` say so and succeed; `build` and `report` need only nvcc.
set -u
NVCC=${NVCC:-nvcc}
B=${B:-build}
mkdir -p "$B/cuda"
if ! command -v "$NVCC" > /dev/null 2>&1; then echo "skipped: no nvcc"; exit 0; fi
FLAGS="-O2 -Wno-deprecated-gpu-targets -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wshadow"
ARCHS=$("$NVCC" --list-gpu-arch | sed -n 's/compute_//p' | awk '$1 >= 75')

gencode() { for a in $ARCHS; do printf -- '-gencode arch=compute_%s,code=sm_%s ' "$a" "$a"; done; }
have_gpu() { command -v nvidia-smi > /dev/null 2>&1 && nvidia-smi -L 2> /dev/null | grep -q GPU; }

build() {
    for std in 14 17; do
        # shellcheck disable=SC2046,SC2086
        "$NVCC" $FLAGS -std=c++$std --threads 2 $(gencode) -c -o "$B/cuda/all_$std.o" -x cu tests/impl_cuda.cu || return 1
        echo "amp_cuda.cuh: C++$std, architectures" $ARCHS
    done
    # shellcheck disable=SC2086
    "$NVCC" $FLAGS -std=c++17 -DAMP_NO_CUBLAS -arch=sm_80 -c -o "$B/cuda/no_cublas.o" tests/impl_cuda.cu &&
        echo "amp_cuda.cuh: without cuBLAS"
    for example in train_cuda own_loop train_nccl; do
        if [ $example = train_nccl ] && ! echo '#include <nccl.h>' | "$NVCC" -E -x cu - > /dev/null 2>&1; then
            echo "skipped: examples/train_nccl.cu, no nccl.h"
            continue
        fi
        # shellcheck disable=SC2086
        "$NVCC" $FLAGS -Xcompiler -Wno-missing-field-initializers -std=c++20 -arch=sm_80 -c -o "$B/cuda/$example.o" examples/$example.cu || return 1
        echo "examples/$example.cu"
    done
}

report() {
    # shellcheck disable=SC2046,SC2086
    [ -f "$B/cuda/all_17.o" ] || "$NVCC" $FLAGS -std=c++17 --threads 2 $(gencode) -c -o "$B/cuda/all_17.o" tests/impl_cuda.cu || return 1
    cuobjdump --dump-resource-usage "$B/cuda/all_17.o" 2> /dev/null | c++filt -_ | awk '
        /arch =/ { arch = $3 }
        /Function/ { name = $0; sub(/^ *Function /, "", name); sub(/:$/, "", name); sub(/^void /, "", name); sub(/\(.*/, "", name) }
        /REG:/ {
            for (i = 1; i <= NF; i++) { split($i, f, ":"); v[f[1]] = f[2] }
            printf "%-7s %-58s %4d registers %6d bytes shared %5d stack %5d local\n", arch, name, v["REG"], v["SHARED"], v["STACK"], v["LOCAL"]
            kernels++; if (v["LOCAL"] > 0 || v["STACK"] > 0) { bad++; spilled = spilled "\n  " arch " " name }
        }
        END { printf "%d kernels, %d of them with stack or local memory%s\n", kernels, bad, spilled; exit bad > 0 || kernels == 0 }'
}

run_tests() {
    have_gpu || { echo "skipped: no GPU"; return 0; }
    programs=
    # shellcheck disable=SC2086
    "$NVCC" $FLAGS -std=c++17 -arch=native -c -x cu tests/impl_cuda.cu -o "$B/cuda/impl.o" || return 1
    for t in tests/emu/test_cuda_*.cpp; do
        name=$(basename "$t" .cpp)
        # shellcheck disable=SC2086
        "$NVCC" $FLAGS -std=c++17 -arch=native -c -x cu "$t" -o "$B/cuda/$name.o" || return 1
        "$NVCC" -arch=native "$B/cuda/$name.o" "$B/cuda/impl.o" -o "$B/cuda/$name" -lcublas || return 1
        programs="$programs $B/cuda/$name"
    done
    # shellcheck disable=SC2086
    sh tests/run.sh "all tests on the GPU" $programs
}

demo() {
    have_gpu || { echo "skipped: no GPU (make demo runs on the CPU)"; return 0; }
    # shellcheck disable=SC2086
    "$NVCC" -O2 -std=c++20 -arch=native examples/train_cuda.cu -o "$B/demo_cuda" -lcublas || return 1
    "$B/demo_cuda" --svg "$B/demo_cuda.svg" ${1:+"$1"}
}

case ${1:-} in
    build) build ;;
    report) report ;;
    test) run_tests ;;
    demo) demo "${2:-}" ;;
    *) sed -n '2,7p' "$0"; exit 2 ;;
esac
