#!/bin/sh
# cuda.sh - amp_cuda.cuh with NVIDIA's compiler.   sh tests/cuda.sh build | report | objects | test | bench | demo [DATA_DIR]
#   build    compiles it without a warning: as C++14 for every architecture that nvcc knows and for sm_90a, as C++17
#            without cuBLAS, and the examples as C++20
#   report   registers, shared memory and stack of every kernel, per architecture; fails if one spills, or if a Hopper
#            product has not the registers by which it is chosen, or waits for each wgmma by itself
#   objects  compiles what `test` and `bench` need, for the GPU that is here or H100 and H200; they take it if nothing changed
#   test     the tests of tests/emu on a real GPU
#   bench [--dry-run] [--limit SECONDS] [PART...]
#            measures on a real GPU, part by part; none = all. A part has 4 minutes at most, all together SECONDS. Each writes
#            to build/cuda/parts/PART.md as it goes; one that is done is not run again before that directory is removed or
#            the code changes; one that fails stops no other. All of them go to tests/bench/results/DATE-cuda-GPU.md, or
#            into the directory OUT. --dry-run goes through the parts without a GPU, with small sizes: kernels emulated,
#            PyTorch on the CPU
#   demo     examples/train_cuda.cu
# Where nvcc or a GPU is missing, `test`, `bench` and `demo` say so and succeed; `build` and `report` need only nvcc.
# Parts, in the order of their worth:
#   test steps shares bits                   the tests; tests/bench/bench_cuda.cu
#   eager cudnn                              PyTorch beside them: tests/bench/bench_cuda.py, where PYTHON has it
#   attention                                attention by itself, and PyTorch's
#   memcheck racecheck initcheck synccheck   compute-sanitizer over every test program
#   compiled-gpt2 compiled-resnet34 compiled-mobilenet compiled-rest    PyTorch with torch.compile
#   gemm passes torch-passes portable        products, on Hopper also by the kernels for other GPUs; unscale and Adam
set -u
DRY=${DRY:-}
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
    # shellcheck disable=SC2086
    "$NVCC" $FLAGS -std=c++17 -arch=sm_80 -c -o "$B/cuda/bench_cuda.o" tests/bench/bench_cuda.cu || return 1
    echo "tests/bench/bench_cuda.cu"
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
    # what is older than a header, or not there, is made
    [ -z "$(find amp.h amp_cuda.cuh tests/impl_cuda.cu -newer "$B/cuda/all_14.o" 2>&1)" ] || compile 14 "$ARCHS" || return 1
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

# --- programs for the GPU: in $D, compiled as $CODE says ---

here() {
    D=$B/cuda/hopper CODE=$(gencode 90a)
    if have_gpu && [ "$(native)" = "-arch=native" ]; then D=$B/cuda/native CODE=-arch=native; fi
}
# Each source by itself, as many at a time as there are processors, if one of the files has changed since.
objects() {
    mkdir -p "$D"
    sum=$(cat amp.h amp_cuda.cuh tests/*.h tests/impl_cuda.cu tests/emu/*.h tests/emu/*.cpp tests/bench/*.h \
          tests/bench/*.cu | cksum)
    [ "$(cat "$D/sum" 2> /dev/null)" != "$sum" ] || return 0
    # shellcheck disable=SC2016
    printf '%s\n' tests/impl_cuda.cu tests/bench/bench_cuda.cu tests/emu/test_cuda_*.cpp | xargs -P "$(nproc)" -I '{}' \
        sh -c '$1 -std=c++17 -c -x cu "$3" -o "$2/$(basename "$3" | sed "s/\..*//").o"' sh "$NVCC $FLAGS $CODE" "$D" '{}' \
        && echo "$sum" > "$D/sum"
}
# Objects that come from another machine may not fit here: then they are made anew.
programs() {
    link || { rm -f "$D/sum"; link; }
}
link() {
    objects || return 1
    # shellcheck disable=SC2016
    { test_programs; echo "$D/bench_cuda"; } | xargs -P "$(nproc)" -I '{}' \
        sh -c '$1 "$2.o" "$3/impl_cuda.o" -o "$2" -lcublas' sh "$NVCC $CODE" '{}' "$D" && "$D/bench_cuda" > /dev/null
}
test_programs() { for t in tests/emu/test_cuda_*.cpp; do echo "$D/$(basename "$t" .cpp)"; done; }

run_tests() {
    have_gpu || { echo "skipped: no GPU"; return 0; }
    here
    programs || return 1
    tests
}
tests() {
    # shellcheck disable=SC2046
    if [ -n "$DRY" ]; then test_programs; else JOBS=${JOBS:-4} sh tests/run.sh "all tests on the GPU" $(test_programs); fi
}

# --- bench ---

PARTS="test steps shares bits eager cudnn attention memcheck compiled-gpt2 compiled-resnet34 racecheck initcheck synccheck
       compiled-mobilenet compiled-rest gemm passes torch-passes portable"
PARTS_DIR=${PARTS_DIR:-$B/cuda/parts}

bench() {
    limit=100000 parts=
    while [ $# -gt 0 ]; do
        case $1 in
            --dry-run) DRY=1 ;;
            --limit) limit=${2:?seconds}; shift ;;
            *) parts="$parts $1" ;;
        esac
        shift
    done
    until=$(($(date +%s) + limit))
    if [ -n "$DRY" ]; then
        PARTS_DIR=$B/cuda/dry
        rm -rf "$PARTS_DIR"
        make -s "$B/emu800_bench" || return 1
    else
        have_gpu || { echo "skipped: no GPU (--dry-run needs none)"; return 0; }
        here
        programs || return 1
        cmp -s "$D/sum" "$PARTS_DIR/sum" || rm -rf "$PARTS_DIR"         # of other code
    fi
    mkdir -p "$PARTS_DIR"
    [ -n "$DRY" ] || cp "$D/sum" "$PARTS_DIR/sum"
    export PARTS_DIR DRY NVCC B
    bad=0
    for part in ${parts:-$PARTS}; do
        left=$((until - $(date +%s)))
        if grep -q "^($part: done" "$PARTS_DIR/$part.md" 2> /dev/null; then echo "$part: done before"; continue; fi
        if [ $left -lt 15 ]; then echo "$part: no time left"; bad=1; continue; fi
        began=$(date +%s)
        timeout -k 5 $((left < 240 ? left : 240)) sh "$0" part "$part" >> "$PARTS_DIR/$part.md" 2>&1
        status=$?
        said="done"
        [ $status = 0 ] || { said="FAILED, status $status"; bad=1; }
        printf '\n(%s: %s, %d s)\n' "$part" "$said" $(($(date +%s) - began)) >> "$PARTS_DIR/$part.md"
        tail -n 1 "$PARTS_DIR/$part.md"
        collect
    done
    return $bad
}
collect() {
    if [ -n "$DRY" ]; then to=$B/cuda/dry.md gpu="no GPU"
    else
        gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1 | sed 's/,/, driver/')
        to=${OUT:-tests/bench/results}/$(date +%F)-cuda-$(echo "${gpu%,*}" | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//; s/-.*//').md
    fi
    {
        echo "# $gpu, nvcc $("$NVCC" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p'), $(date +%F)"
        echo "Medians; larger ratios are better for amp."
        for p in $PARTS; do [ ! -f "$PARTS_DIR/$p.md" ] || cat "$PARTS_DIR/$p.md"; done
    } > "$to"
}

# One part, in a process of its own.
part() {
    here
    if [ -n "$DRY" ]; then program="$B/emu800_bench --tiny" rows="gpt2 model_gpt2 separable lenet5:64 784x512" where="--device cpu --tiny"
    else program=$D/bench_cuda rows="" where=""; fi
    # shellcheck disable=SC2086
    case $1 in
        gemm | passes) $program $1 ;;
        steps | shares) $program $1 $rows ;;
        bits) [ -z "$DRY" ] || rows="gpt2 784x512"
              $program bits $rows; ok=$?
              $program bits $rows > "$PARTS_DIR/bits.again" || ok=1
              if other=$(grep -vxFf "$PARTS_DIR/bits.md" "$PARTS_DIR/bits.again"); then
                  printf '\nIn a second process:\n\n%s\n' "$other"; ok=1
              else printf '\nA second process gave the same bits.\n'; fi
              return $ok ;;
        portable) D=$B/cuda/portable CODE="-arch=sm_90"
                  [ -n "$DRY" ] || { programs && program=$D/bench_cuda; } || return 1
                  printf '\nBelow: the kernels for other GPUs.\n' && $program gemm ;;
        eager | cudnn) torch $1 ;;
        attention) $program attention && torch attention ;;
        torch-passes) torch passes ;;
        compiled-rest) torch compiled vgg16 stack separable ;;
        compiled-*) torch compiled "${1#compiled-}" ;;
        test) tests ;;
        memcheck | racecheck | initcheck | synccheck) sanitize "$1" ;;
        *) echo "no such part"; return 2 ;;
    esac
}
torch() {
    python=${PYTHON:-python3}
    "$python" -c "import torch" 2> /dev/null || { echo "skipped: $python has no PyTorch"; return 0; }
    # shellcheck disable=SC2046,SC2086
    "$python" tests/bench/bench_cuda.py "$@" $where --results \
        $(for own in steps shares passes attention; do ls "$PARTS_DIR/$own.md" 2> /dev/null; done)
}
# A row as soon as a program has ended; what the tool found first stands below it.
sanitize() {
    printf '\n### compute-sanitizer, %s\n\n' "$1"
    if [ -n "$DRY" ]; then test_programs; return 0; fi
    api=
    [ "$1" != memcheck ] || api="--report-api-errors no"    # tests ask for what is refused
    # shellcheck disable=SC2016
    test_programs | xargs -P 8 -I '{}' sh -c '
        compute-sanitizer --tool $1 $2 --error-exitcode 99 --print-limit 5 "$3" > "$3.$1" 2>&1; status=$?
        echo "$(basename "$3"): status $status; $(grep "SUMMARY\|^[0-9]* passed," "$3.$1" | tr -d = | tr "\n" ";")"
        [ $status = 0 ] || { grep "^=====" "$3.$1" | head -n 12; exit 1; }' sh "$1" "$api" '{}'
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
    objects) here; objects ;;
    test) run_tests ;;
    bench) shift; bench "$@" ;;
    part) part "$2" ;;
    demo) demo "${2:-}" ;;
    *) sed -n '2,/^set -u/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2 ;;
esac
