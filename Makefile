# amp - `make help` lists what there is to do. Needs a C compiler and make, nothing else.
CC      ?= cc
# What cannot run here is left out: without the kernels for AVX-512 amp.h compiles in half the time.
PROCESSOR := $(shell grep -sm1 '^flags' /proc/cpuinfo)
LEAN    := $(if $(PROCESSOR),$(if $(filter avx512bw,$(PROCESSOR)),,-DAMP_NO_AVX512))
# Lines for debuggers, no variables: those take gcc half as long again, and with sanitizers minutes.
CFLAGS  ?= -O2 -g1 $(LEAN)
STRICT   = -std=c99 -Wall -Wextra -pedantic -Wconversion -Wshadow -Wcast-qual -Wdouble-promotion
# The references of tests use the processor's fma where it has one.
FMA     := $(if $(filter fma,$(PROCESSOR)),-DTEST_FMA)
LDLIBS   = -lm
B       ?= build
DATA    ?=
PYTHON  ?= python3

# The long ones first.
TESTS    = conv ops attention gemm nan optim half scaler checkpoint model train parts custom fit policy files report data gpt alloc hostile sequence generate text
EXAMPLES = train_small fit_lenet own_loop_fp32 own_loop gpt manual_lenet report custom gan fgsm

# Parallel builds unless the user says otherwise. (A + before a recipe: makes started by its script share the jobs.)
ifeq ($(MAKELEVEL)$(filter -j%,$(MAKEFLAGS)),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif

.PHONY: all demo gpt lessons lessons-web lesson grade slides examples test test-bits test-avx512 bench bench-quick bench-old budget bench-counts coverage mutants mutants-emu check test-emu
.PHONY: cuda cuda-report test-cuda bench-cuda demo-cuda demo-mpi clean help
all: examples demo-program

demo: $(B)/demo ## train LeNet-5 in FP32 and in mixed precision, side by side; DATA=dir reads MNIST files
	@$(B)/demo $(if $(DATA),"$(DATA)")

gpt: $(B)/gpt ## train a small GPT on a text; DATA=file reads one; GPT="O1 bf16 --steps 5000": options of examples/gpt.c
	@$(B)/gpt --svg $(B)/gpt.svg $(GPT) $(if $(DATA),"$(DATA)")

# The course. Tables are kept in build/lessons, pictures and the page in LESSONS_TO.
LESSONS    := $(sort $(patsubst examples/lessons/%.c,%,$(wildcard examples/lessons/[0-9]*.c)))
LESSONS_TO ?= examples/lessons
RESULTS    := $(lastword $(sort $(wildcard tests/bench/results/*-train.md)))
lessons: $(LESSONS:%=$(B)/lessons/%) $(B)/lessons/pictures ## the course: run all lessons and write examples/lessons/index.html (two minutes)
	@for l in $(LESSONS); do sh examples/lessons/run.sh $(B)/lessons/$$l $(LESSONS_TO) || exit 1; done
	@$(B)/lessons/pictures $(LESSONS_TO) $(RESULTS)
	@sh examples/lessons/page.sh $(LESSONS_TO) $(B)/lessons > $(LESSONS_TO)/index.html
	@echo "The course as a page: $(LESSONS_TO)/index.html"

LESSON = $(filter $(N)_% 0$(N)_%,$(LESSONS))
CLASS = CC="$(CC)" FLAGS="$(STRICT) $(CFLAGS)" GAPS="$(GAPS)" sh examples/lessons/class.sh
lesson: $(if $(SRC),$(B)/impl.o,$(LESSON:%=$(B)/lessons/%)) ## run one lesson: make lesson N=3; SRC=mine/03.c: a version of your own (GAPS=1: with a gap to fill)
	@[ -n "$(LESSON)" ] || { echo "make lesson N=...: one of $(LESSONS)"; exit 1; }
	@$(if $(SRC),$(CLASS) lesson $(LESSON) "$(SRC)" $(B),sh examples/lessons/run.sh $< $(LESSONS_TO))

grade: $(LESSON:%=$(B)/lessons/%) $(B)/impl.o ## compare your version with the lesson, number by number: make grade N=3 SRC=mine/03.c; EX=1: with the answer to exercise 1
	@[ -n "$(LESSON)" ] && [ -n "$(SRC)" ] || { echo "make grade N=3 SRC=mine/03.c"; exit 1; }
	@$(CLASS) grade $(LESSON) "$(SRC)" $(B) $(EX)

lessons-web: lessons ## the same page, whose lessons run in the browser (zig, or the Python package ziglang; minutes)
	@PYTHON="$(PYTHON)" sh examples/lessons/web.sh $(LESSONS_TO)/index.html $(B)

slides: lessons ## slides of all lessons, as one file: build/slides.html
	@sh examples/lessons/class.sh slides $(LESSONS_TO)/index.html > $(B)/slides.html
	@echo "Slides: $(B)/slides.html"

test: $(B)/impl.o $(TESTS:%=$(B)/test_%) ## run all tests (pure C, a minute); build/test_gemm order: tests with that in their name
	@sh tests/run.sh "all tests" $(TESTS:%=$(B)/test_%)

# Which kernels amp.h takes; make bench holds the peers to the same.
ifdef ISA
export AMP_ISA = $(ISA)
endif

# Without the CPU's vector paths: the same bits, and a third of the time to compile. nvcc makes one operation of a product
# and a sum wherever the code lets it: so does gcc here, where the CPU can (below -O2 by the last of these options).
EMU_ARCH ?= 800
EMU_FUSED := $(if $(filter fma,$(PROCESSOR)),-mfma -ffp-contract=fast -fexpensive-optimizations)
EMU_FLAGS = -std=c++14 -g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
            -Wall -Wextra -Wshadow -Wcast-qual -Wdouble-promotion -Wno-psabi -Werror=switch -Itests/emu -DAMP_NO_SIMD $(EMU_FUSED)
EMU_TESTS = $(patsubst tests/emu/%.cpp,$(B)/emu$(EMU_ARCH)_%,$(wildcard tests/emu/test_*.cpp))
test-emu: $(EMU_TESTS) ## run the CUDA kernels on the CPU, thread by thread, under sanitizers; EMU_ARCH=750|800|900; build/emu800_test_cuda_nn pool: tests with that in their name
	@sh tests/run.sh "CUDA on the CPU, sm_$(EMU_ARCH)" $^

test-bits: ## the same bits: every compiler, emulator and instruction set found here against one known hash (minutes)
	@CC="$(CC)" sh tests/test_bits.sh

test-avx512: ## the code for AVX-512 in plain C, where the processor has none (SIMDe: libsimde-dev; minutes)
	@CC="$(CC)" sh tests/avx512.sh

bench: $(B)/bench ## speed beside PyTorch, OpenBLAS and NumPy, where PYTHON has them, and the limits (minutes); ISA=avx2
	@if $(PYTHON) -c ""; then $(PYTHON) tests/bench/bench.py $< "$(CC) $(BENCH_CFLAGS)"; else $<; fi

bench-quick: $(B)/bench ## the same for fewer sizes; ONLY=train, CLOCK=processor on a busy machine
	@if $(PYTHON) -c ""; then $(PYTHON) tests/bench/bench.py $< "$(CC) $(BENCH_CFLAGS)" quick; else $< quick; fi

# The header of another commit, with the benchmark of its day.
OLD     ?= HEAD
OLD_DIR  = $(B)/old-$(shell git rev-parse --short $(OLD))
bench-old: $(B)/bench ## speed beside the header of commit OLD, which git's history holds (python); ONLY=gemm, ISA=avx2
	@mkdir -p $(OLD_DIR) && git archive $(OLD) amp.h tests/bench examples | tar -x -C $(OLD_DIR)
	@[ -x $(OLD_DIR)/bench ] || $(CC) $(STRICT) -w $(BENCH_CFLAGS) $(OLD_DIR)/tests/bench/bench.c -o $(OLD_DIR)/bench $(LDLIBS)
	@$(PYTHON) tests/bench/old.py $(OLD_DIR)/bench $< $(ONLY)

budget: ## tokens, machine code, length and depth of functions against their budgets (python)
	@CC="$(CC)" PYTHON="$(PYTHON)" sh tests/tools/budget.sh

bench-counts: ## instructions of the hot paths, written to tests/bench/counts.txt; `make check` compares (valgrind)
	@CC="$(CC)" sh tests/bench/counts.sh record

coverage: ## how many lines of amp.h the tests reach, and which ones never; fails below 95 % (gcc, gcov)
	+@LEAN="$(LEAN)" sh tests/tools/coverage.sh 95

# Drawn by the date unless the user says otherwise.
SEED  ?= $(shell date +%Y%m%d)
COUNT ?=
mutants: ## plant random faults in amp.h, one a copy, and see that tests fail; COUNT=300 SEED=7 (python, hours)
	@$(PYTHON) tests/tools/mutants.py amp.h $(or $(COUNT),300) $(SEED) --table

mutants-emu: ## the same in amp_cuda.cuh, with the tests of test-emu; COUNT=60 SEED=7 (python, hours)
	@$(PYTHON) tests/tools/mutants.py amp_cuda.cuh $(or $(COUNT),60) $(SEED)

check: $(TESTS:%=$(B)/test_%) $(B)/train_small demo-program ## everything else that CI runs: compilers, sanitizers, exhaustive conversions, references, proofs
	+@CC="$(CC)" LEAN="$(LEAN)" PYTHON="$(PYTHON)" DATA="$(DATA)" sh tests/check.sh

cuda: ## compile amp_cuda.cuh for every architecture that nvcc knows (needs nvcc, no GPU)
	@B=$(B) sh tests/cuda.sh build

cuda-report: ## registers, shared memory and spills of every kernel (needs nvcc, no GPU)
	@B=$(B) sh tests/cuda.sh report

test-cuda: ## the kernel tests on a real GPU
	@B=$(B) sh tests/cuda.sh test

bench-cuda: ## on a real GPU: tests, training beside PyTorch, operators, sanitizers; PARTS="steps shares", or --dry-run without one
	@B=$(B) PYTHON=$(PYTHON) sh tests/cuda.sh bench $(PARTS)

demo-cuda: ## the demo on a GPU; DATA=dir reads MNIST files
	@B=$(B) sh tests/cuda.sh demo $(if $(DATA),"$(DATA)")

demo-mpi: ## one network trained by 1 to 4 processes (Open MPI: openmpi-bin, libopenmpi-dev)
	+@sh tests/check_mpi.sh demo

examples: $(EXAMPLES:%=$(B)/%) ## build the examples

.PHONY: demo-program
demo-program: $(B)/demo

clean: ## remove build output
	rm -rf $(B)

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r t d; do printf '  make %-12s %s\n' "$$t" "$$d"; done

$(B):
	@mkdir -p $(B)

$(B)/impl.o: tests/impl.c amp.h | $(B)
	@echo "Compiling amp.h, once: about 8 seconds of one core."
	$(CC) $(STRICT) $(CFLAGS) -c $< -o $@

# With threads, where the compiler has OpenMP.
BENCH_CFLAGS = -O2 -fopenmp
$(B)/bench: tests/bench/bench.c $(wildcard tests/bench/*.h) amp.h examples/chart.h | $(B)
	@$(CC) $(STRICT) $(BENCH_CFLAGS) $< -o $@ $(LDLIBS) 2> $@.log || $(CC) $(STRICT) -O2 $< -o $@ $(LDLIBS)

# Compiled beside impl.o, then linked with it.
.SECONDARY:
$(B)/test_%.o: tests/test_%.c $(wildcard tests/*.h tests/bench/gpt.h examples/*.h) amp.h | $(B)
	$(CC) $(STRICT) $(CFLAGS) $(FMA) -c $< -o $@

$(B)/test_%: $(B)/test_%.o $(B)/impl.o
	$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS)

$(B)/emu.o: tests/emu/emu.cpp tests/emu/cuda_runtime.h tests/emu/cuda.h tests/emu/cublas_v2.h | $(B)
	$(CXX) $(EMU_FLAGS) -c $< -o $@

$(B)/emu$(EMU_ARCH)_impl.o: tests/impl_cuda.cu amp.h amp_cuda.cuh tests/emu/cuda_runtime.h | $(B)
	$(CXX) $(EMU_FLAGS) -DAMP_EMU_ARCH=$(EMU_ARCH) -x c++ -c $< -o $@

$(B)/emu$(EMU_ARCH)_%: tests/emu/%.cpp tests/test.h $(wildcard tests/emu/*.h) amp.h amp_cuda.cuh $(B)/emu.o $(B)/emu$(EMU_ARCH)_impl.o
	$(CXX) $(EMU_FLAGS) -DAMP_EMU_ARCH=$(EMU_ARCH) $< $(B)/emu.o $(B)/emu$(EMU_ARCH)_impl.o -o $@ $(LDLIBS)

# This lesson has an amp.h of its own, with threads where the compiler has OpenMP.
$(B)/lessons/12_same_bits: examples/lessons/12_same_bits.c amp.h $(wildcard examples/*.h) | $(B)
	@mkdir -p $(@D)
	@echo "Compiling lesson 12/$(words $(LESSONS)), with an amp.h of its own"
	@$(CC) $(STRICT) $(CFLAGS) -fopenmp $< -o $@ $(LDLIBS) 2> $@.log || $(CC) $(STRICT) $(CFLAGS) $< -o $@ $(LDLIBS)

# The GPU's benchmark, to be tried with --tiny.
$(B)/emu$(EMU_ARCH)_bench: tests/bench/bench_cuda.cu $(wildcard tests/bench/*.h tests/emu/*.h) amp.h amp_cuda.cuh $(B)/emu.o $(B)/emu$(EMU_ARCH)_impl.o
	$(CXX) $(EMU_FLAGS) -std=c++17 -DAMP_EMU_ARCH=$(EMU_ARCH) -x c++ $< -x none $(B)/emu.o $(B)/emu$(EMU_ARCH)_impl.o -o $@ $(LDLIBS)

# A user compiles an example alone, as README shows. Here it leaves out the implementation, as if it had been included
# before, and takes that of the tests: examples, lessons, one compilation of amp.h.
NUMBER = $(patsubst 0%,%,$(firstword $(subst _, ,$(@F))))
$(B)/%: examples/%.c amp.h $(wildcard examples/*.h examples/lessons/*.h) $(B)/impl.o | $(B)
	@mkdir -p $(@D)
	@echo "Compiling $(if $(filter lessons/0% lessons/1%,$*),lesson $(NUMBER)/$(words $(LESSONS)),$*)"
	@$(CC) $(STRICT) $(CFLAGS) -DAMPI_IMPLEMENTATION_ONCE $< $(B)/impl.o -o $@ $(LDLIBS)
