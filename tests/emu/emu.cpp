/* emu.cpp - the small CUDA runtime of cuda_runtime.h and cublas_v2.h.
   Bottom up: reports, fibers, a cluster's threads, warp operations, PTX instructions, those of Hopper, memory, streams,
   capture, the runtime's calls, cuBLAS. */
#define EMU_IMPLEMENTATION
#include "cublas_v2.h"
#include "cuda.h"

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#define ASAN_UNPOISON_MEMORY_REGION(p, n) ((void)(p), (void)(n))
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

/* ---- Reports and the schedule ---------------------------------------------------------------------------- */

struct Controls {
    int schedule = EMU_FORWARD;
    uint64_t random = 1;
    bool eager = false;
    int devices = 1, arch = 0;
    size_t memory = (size_t)4 << 30;
    int registers = 168;
    unsigned cluster_limit = 8;
    long syncs = 0, launches = 0, kernels = 0, allocs = 0, failures = 0, wgmmas = 0;
    long fail_alloc = 0, fail_launch = 0, fail_call = 0;
    Controls() {
        if (const char* s = getenv("EMU_SCHEDULE"))
            set_schedule(*s == 'f' ? EMU_FORWARD : *s == 'r' ? EMU_REVERSE : *s == 'd' ? EMU_DEEP : atoi(s));
        if (const char* s = getenv("EMU_DEVICES")) devices = atoi(s);
    }
    void set_schedule(int s) { schedule = s; random = 88172645463325252u + (uint64_t)s * 2654435761u; }
};
/* Made at its first use: emu_set_arch runs before main. */
Controls& ctl() { static Controls controls; return controls; }

/* Below n, from a xorshift stream. */
unsigned draw(unsigned n) {
    uint64_t& r = ctl().random;
    r ^= r << 13; r ^= r >> 7; r ^= r << 17;
    return (unsigned)((r >> 32) * n >> 32);
}

/* One of n candidates, in the order of the schedule. */
size_t choose(size_t n) {
    return ctl().schedule == EMU_FORWARD ? 0 : ctl().schedule < 0 ? n - 1 : draw((unsigned)n);
}

bool running_kernel = false;

[[noreturn]] void die(const char* format, ...) __attribute__((format(printf, 1, 2)));
void die(const char* format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "emu: ");
    if (running_kernel)
        fprintf(stderr, "kernel %ld, block (%u, %u, %u), thread (%u, %u, %u): ", ctl().kernels, blockIdx.x, blockIdx.y,
                blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    _Exit(EMU_EXIT);
}

/* ---- Fibers: a stack and a place to go on ---------------------------------------------------------------- */

struct Fiber {
    void* sp;               /* where its registers are saved while it is away */
    const void* low;        /* the stack's lowest address */
    size_t size;
    void* sanitizer;        /* the address sanitizer's own state */
};
Fiber main_fiber, *running = &main_fiber, *came_from;
std::vector<Fiber*>& idle_fibers = *new std::vector<Fiber*>; /* they live as long as the process */
void run_threads();

#ifdef __x86_64__
/* void emu_switch(void** save, void* to): keep this side's registers on its stack, take the other's. */
asm(".text\n.globl emu_switch\n.type emu_switch, @function\nemu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size emu_switch, .-emu_switch\n");
enum { SAVED_WORDS = 8, ENTRY_WORD = 6 }; /* six registers, the return address, and a word that aligns the stack */
#elif defined(__aarch64__)
asm(".text\n.globl emu_switch\n.type emu_switch, %function\nemu_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x2, sp\nstr x2, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n"
    ".size emu_switch, .-emu_switch\n");
enum { SAVED_WORDS = 20, ENTRY_WORD = 11 };
#else
#define EMU_UCONTEXT 1
} // namespace
#include <ucontext.h>
namespace {
#endif
} // namespace

#ifdef EMU_UCONTEXT
static void emu_switch(void** save, void* to) {
    ucontext_t here;
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}
#else
extern "C" void emu_switch(void** save, void* to);
#endif

namespace {

void arrived() {
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(running->sanitizer, &came_from->low, &came_from->size);
#endif
}

void switch_to(Fiber* to) {
    came_from = running;
    running = to;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&came_from->sanitizer, to->low, to->size);
#endif
    emu_switch(&came_from->sp, to->sp);
    arrived();
}

void fiber_entry() {
    arrived();
    run_threads();
}

/* A stack of 256 KiB above a page that must not be touched. */
Fiber* new_fiber() {
    const size_t size = 256 << 10, page = 4096 * 16;
    char* memory = (char*)mmap(nullptr, size + page, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE)) die("no memory for a thread's stack");
    Fiber* f = new Fiber{ nullptr, memory + page, size, nullptr };
#ifdef EMU_UCONTEXT
    ucontext_t* context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = memory + page;
    context->uc_stack.ss_size = size;
    makecontext(context, fiber_entry, 0);
    f->sp = context;
#else
    void** sp = (void**)(memory + page + size) - SAVED_WORDS;
    sp[ENTRY_WORD] = (void*)fiber_entry;
    f->sp = sp;
#endif
    return f;
}

Fiber* take_fiber() {
    if (idle_fibers.empty()) return new_fiber();
    Fiber* f = idle_fibers.back();
    idle_fibers.pop_back();
    return f;
}

/* ---- A block's threads ----------------------------------------------------------------------------------- */

/* What the lanes of a warp do together, given each taking lane's argument (null for the others). */
struct WarpOp {
    const char* name;
    void (*run)(void* const* args, unsigned lanes);
    bool whole;             /* all 32 lanes must take part */
};

struct PendingCopy { char* dst; const char* src; int size, bytes, group; };
enum State { READY, AT_BARRIER, AT_NAMED, AT_CLUSTER, AT_MBARRIER, IN_WARP, DONE };
struct Thread {
    uint3 index;
    Fiber* fiber;           /* null until it starts */
    State state;
    const char* what;       /* what it waits for, and the line that asked */
    int line, predicate;
    unsigned mask;
    const WarpOp* op;
    void* arg;
    std::vector<PendingCopy> copies;
    int groups;             /* copy groups committed */
    const void* barrier;    /* at which it waits, and for the end of a phase of which parity */
    unsigned parity;
    bool waited;            /* griddepcontrol.wait */
};

/* A block of the cluster that runs. */
enum { MAX_THREADS = 1024, MAX_CLUSTER = 8, NAMED_BARRIERS = 16 };
struct Cta {
    uint3 index;
    int live;
    int waiting, count, arrived;     /* at the barrier; the last barrier's predicates and threads */
    int at_named[NAMED_BARRIERS];
    char* shared;
};
enum { ALL_THREADS = MAX_THREADS * MAX_CLUSTER, ALL_WARPS = ALL_THREADS / 32 };
struct Cluster {
    emu_work* work;
    Thread thread[ALL_THREADS];
    Cta cta[MAX_CLUSTER];
    int ctas, size, all;             /* blocks, threads of a block, threads */
    bool early;                      /* the kernel may start before the one in front of it has ended */
    int live, current, at_cluster;
    unsigned alive[ALL_WARPS], in_warp[ALL_WARPS];
    int ready[ALL_THREADS];          /* a circular buffer of threads that can go on */
    unsigned head, ready_count;
    size_t shared_size;
} b;
Cta& cta_of(int id) { return b.cta[id / b.size]; }
Cta& here() { return cta_of(b.current); }

void push_ready(int id) {
    b.thread[id].state = READY;
    b.ready[(b.head + b.ready_count++) % ALL_THREADS] = id;
}

int pop_ready() {
    if (ctl().schedule > 0) {
        unsigned pick = (b.head + draw(b.ready_count)) % ALL_THREADS;
        std::swap(b.ready[pick], b.ready[b.head % ALL_THREADS]);
    }
    b.ready_count--;
    if (ctl().schedule == EMU_DEEP) return b.ready[(b.head + b.ready_count) % ALL_THREADS];
    return b.ready[b.head++ % ALL_THREADS];
}

/* Threads `first` to `last` that are in `state` and in `lanes` (of the warp that begins at `first`) may go on. */
void release(int first, int last, State state, unsigned lanes) {
    bool reverse = ctl().schedule == EMU_REVERSE;
    for (int i = first; i <= last; i++) {
        int id = reverse ? first + last - i : i;
        if (b.thread[id].state == state && (lanes >> (id & 31) & 1)) push_ready(id);
    }
}

/* Nobody can go on: say who waits for what. */
[[noreturn]] void report_stuck() {
    std::map<std::pair<int, std::string>, std::vector<int>> groups;
    for (int i = 0; i < b.all; i++) {
        const Thread& t = b.thread[i];
        char text[96];
        snprintf(text, sizeof text, t.state == IN_WARP ? "%s (line %d, mask 0x%08x)" : "%s (line %d)", t.what, t.line, t.mask);
        if (t.state != DONE) groups[std::make_pair(t.line, std::string(text))].push_back(i);
    }
    std::string text;
    for (const auto& g : groups) {
        char part[160];
        snprintf(part, sizeof part, "%s%zu of %d threads (first: %d) wait at %s", text.empty() ? "" : "; ",
                 g.second.size(), b.all, g.second[0], g.first.second.c_str());
        text += part;
    }
    die("deadlock, or a barrier that not all threads reach: %s", text.c_str());
}

/* Make thread `id` the running one. Fibers change only if it has one of its own, or if this one is in use. */
void go_to(int id, bool fiber_is_free) {
    Thread& t = b.thread[id];
    b.current = id;
    threadIdx = t.index;
    blockIdx = cta_of(id).index;
    if (!t.fiber && fiber_is_free) return;
    if (fiber_is_free) idle_fibers.push_back(running);
    Fiber* to = t.fiber ? t.fiber : take_fiber();
    if (to != running) switch_to(to);
}

/* The next thread to run. The copy engine works when nobody else can, and in a random schedule in between. */
bool engine_step();
int next_thread() {
    if (ctl().schedule > 0 && draw(4) == 0) engine_step();
    while (b.ready_count == 0)
        if (!engine_step()) report_stuck();
    return pop_ready();
}

/* The current thread has to wait (or was released at once, and may be chosen again). */
void leave() { go_to(next_thread(), false); }

/* Marks the current thread as waiting. */
Thread& wait_as(State state, const char* what, int line) {
    if (!running_kernel) die("%s outside of a kernel", what);
    Thread& t = b.thread[b.current];
    t.state = state;
    t.what = what;
    t.line = line;
    return t;
}

void try_barrier(Cta& c) {
    if (c.live == 0 || c.waiting != c.live) return;
    const Thread* first = nullptr;
    int begin = (int)(&c - b.cta) * b.size;
    c.count = 0;
    c.arrived = c.live;
    for (int i = begin; i < begin + b.size; i++) {
        const Thread& t = b.thread[i];
        if (t.state != AT_BARRIER) continue;
        if (!first) first = &t;
        if (t.line != first->line || t.what != first->what) report_stuck();
        c.count += t.predicate != 0;
    }
    c.waiting = 0;
    release(begin, begin + b.size - 1, AT_BARRIER, ~0u);
}

void barrier(const char* what, int line, int predicate) {
    wait_as(AT_BARRIER, what, line).predicate = predicate;
    here().waiting++;
    try_barrier(here());
    leave();
}

/* bar.sync with a number of its own, for `count` threads of the block. */
void named_barrier(int number, int count, int line) {
    Thread& t = wait_as(AT_NAMED, "a named barrier", line);
    Cta& c = here();
    int begin = (int)(&c - b.cta) * b.size;
    t.parity = (unsigned)number;
    if (++c.at_named[number] == count) {
        for (int i = begin; i < begin + b.size; i++)
            if (b.thread[i].state == AT_NAMED && b.thread[i].parity == t.parity) {
                if (b.thread[i].line != line) report_stuck();
                push_ready(i);
            }
        c.at_named[number] = 0;
    }
    leave();
}

void try_cluster() {
    if (b.live == 0 || b.at_cluster != b.live) return;
    b.at_cluster = 0;
    release(0, b.all - 1, AT_CLUSTER, ~0u);
}

/* If every lane that thread `id` waits for is there, carry the operation out and release them. */
void try_warp(int id) {
    const Thread& t = b.thread[id];
    int warp = id / 32;
    unsigned lanes = t.mask & b.alive[warp];
    if (t.op->whole && lanes != 0xffffffffu)
        die("%s (line %d) needs all 32 lanes of the warp, 0x%08x are left", t.what, t.line, lanes);
    if ((b.in_warp[warp] & lanes) != lanes) return;
    void* args[32] = {};
    for (int i = 0; i < 32; i++) {
        const Thread& other = b.thread[warp * 32 + i];
        if (!(lanes >> i & 1)) continue;
        if (other.mask != t.mask || other.op != t.op || other.line != t.line) return;
        args[i] = other.arg;
    }
    t.op->run(args, lanes);
    b.in_warp[warp] &= ~lanes;
    release(warp * 32, std::min(warp * 32 + 31, b.all - 1), IN_WARP, lanes);
}

void warp_meet(const WarpOp& op, unsigned mask, void* arg, int line) {
    Thread& t = wait_as(IN_WARP, op.name, line);
    unsigned lane = (unsigned)b.current & 31;
    if (!(mask >> lane & 1)) die("%s (line %d): the mask 0x%08x does not name the calling lane %u", op.name, line, mask, lane);
    t.mask = mask;
    t.op = &op;
    t.arg = arg;
    b.in_warp[b.current / 32] |= 1u << lane;
    try_warp(b.current);
    leave();
}

/* The current thread has returned; those that waited for it alone may go on. */
void engine_thread_ends();
void finish_thread() {
    int id = b.current, warp = id / 32;
    engine_thread_ends();
    if (b.early && !b.thread[id].waited) die("a thread of a kernel that may start early ends without griddepcontrol.wait");
    b.thread[id].state = DONE;
    b.thread[id].copies.clear();
    b.live--;
    here().live--;
    b.alive[warp] &= ~(1u << (id & 31));
    try_barrier(here());
    try_cluster();
    for (int i = warp * 32; i < std::min(warp * 32 + 32, b.all); i++)
        if (b.thread[i].state == IN_WARP) try_warp(i);
}

/* A fiber's life: run threads that have not started, one after the other, until one that has can go on. */
void run_threads() {
    for (;;) {
        b.thread[b.current].fiber = running;
        b.work->thread();
        finish_thread();
        if (b.live == 0) {
            idle_fibers.push_back(running);
            switch_to(&main_fiber);
        } else {
            go_to(next_thread(), true);
        }
    }
}

/* Bytes that are a NaN as half, bfloat16, float and double (a signalling one in the last), and a far index. */
void poison(char* p, size_t size) {
    const unsigned char pattern[2] = { 0xf4, 0x7f };
    for (size_t i = 0; i < size; i++) p[i] = (char)pattern[i & 1];
}

void engine_begin();
void engine_end();
void run_cluster() {
    b.live = b.all;
    b.at_cluster = 0;
    b.head = b.ready_count = 0;
    for (int w = 0; w * 32 < b.all; w++) {
        int lanes = std::min(32, b.all - 32 * w);
        b.alive[w] = lanes == 32 ? ~0u : (1u << lanes) - 1;
        b.in_warp[w] = 0;
    }
    for (int i = 0; i < b.all; i++) {
        b.thread[i].fiber = nullptr;
        b.thread[i].groups = 0;
        b.thread[i].waited = false;
        b.thread[i].state = READY;
    }
    for (int c = 0; c < b.ctas; c++) {
        b.cta[c].live = b.size;
        b.cta[c].waiting = 0;
        std::fill(b.cta[c].at_named, b.cta[c].at_named + NAMED_BARRIERS, 0);
        poison(b.cta[c].shared, b.shared_size);
    }
    engine_begin();
    release(0, b.all - 1, READY, ~0u);
    go_to(pop_ready(), false);
    engine_end();
}

/* Shared memory is an allocation of exactly the launch's size, so that the sanitizer sees its end. It begins as AMPI_SHARED
   says, at a multiple of 128 bytes and no more. */
enum { SHARED_ALIGNMENT = 128 };
char* new_shared(char* old, size_t size) {
    if (old) ASAN_UNPOISON_MEMORY_REGION(old - SHARED_ALIGNMENT, SHARED_ALIGNMENT);
    free(old ? old - SHARED_ALIGNMENT : nullptr);
    void* p = nullptr;
    if (posix_memalign(&p, 1024, SHARED_ALIGNMENT + std::max(size, (size_t)1))) die("no memory for shared memory");
    ASAN_POISON_MEMORY_REGION(p, SHARED_ALIGNMENT);
    return (char*)p + SHARED_ALIGNMENT;
}
void size_shared(size_t size, int ctas) {
    for (int c = 0; c < ctas; c++)
        if (!b.cta[c].shared || size != b.shared_size) b.cta[c].shared = new_shared(b.cta[c].shared, size);
    for (int c = ctas; c < MAX_CLUSTER && size != b.shared_size; c++)
        if (b.cta[c].shared) b.cta[c].shared = new_shared(b.cta[c].shared, size);
    b.shared_size = size;
}

unsigned long long gcd(unsigned long long x, unsigned long long y) { return y ? gcd(y, x % y) : x; }

/* `cluster` blocks that are neighbours in x run together. */
void run_kernel(emu_work* work, dim3 grid, dim3 block, size_t shared, unsigned cluster, bool early) {
    if (running_kernel) die("a kernel is launched from a kernel");
    ctl().kernels++;
    running_kernel = true;
    b.work = work;
    b.size = (int)(block.x * block.y * block.z);
    b.ctas = (int)cluster;
    b.early = early;
    b.all = b.size * b.ctas;
    gridDim = grid;
    blockDim = block;
    size_shared(shared, b.ctas);
    for (int i = 0; i < b.all; i++) {
        unsigned u = (unsigned)(i % b.size);
        b.thread[i].index = make_uint3(u % block.x, u / block.x % block.y, u / (block.x * block.y));
    }
    /* Cluster i is start + i * step modulo their number: each once, for a step that has no common factor with it. */
    unsigned long long n = (unsigned long long)grid.x / cluster * grid.y * grid.z, start = 0, step = 1;
    if (ctl().schedule == EMU_REVERSE) { start = n - 1; step = n - 1; }
    if (ctl().schedule > 0) {
        start = draw((unsigned)n);
        do step = 1 + draw((unsigned)n); while (gcd(step, n) != 1);
    }
    unsigned long long id = start, row = grid.x / cluster;
    for (unsigned long long i = 0; i < n; i++, id = (id + step) % n) {
        for (unsigned c = 0; c < cluster; c++)
            b.cta[c].index = make_uint3((unsigned)(id % row) * cluster + c, (unsigned)(id / row % grid.y),
                                        (unsigned)(id / (row * grid.y)));
        run_cluster();
    }
    running_kernel = false;
}

/* ---- Warp operations ------------------------------------------------------------------------------------- */

void do_nothing(void* const*, unsigned) {}
const WarpOp op_syncwarp = { "__syncwarp", do_nothing, false };

struct BallotArg { int predicate; unsigned result; };
void do_ballot(void* const* args, unsigned lanes) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++)
        if ((lanes >> i & 1) && static_cast<BallotArg*>(args[i])->predicate) result |= 1u << i;
    for (int i = 0; i < 32; i++)
        if (lanes >> i & 1) static_cast<BallotArg*>(args[i])->result = result;
}
const WarpOp op_ballot = { "a vote", do_ballot, false };

struct ShuffleArg { uint64_t value, result; unsigned operand; int width; };
/* The lane that `lane` reads; out of its segment of `width` lanes it keeps its own value. */
template <emu_shuffle kind> int shuffle_source(int lane, unsigned operand, int width) {
    int base = lane & ~(width - 1), last = base + width - 1, source = lane;
    if (kind == emu_shuffle_index) source = base + (int)(operand & (unsigned)(width - 1));
    if (kind == emu_shuffle_up) source = lane - (int)(operand & 31);
    if (kind == emu_shuffle_down) source = lane + (int)(operand & 31);
    if (kind == emu_shuffle_xor) source = lane ^ (int)(operand & 31);
    bool outside = kind == emu_shuffle_up ? source < base : source > last;
    return outside ? lane : source;
}
template <emu_shuffle kind> void do_shuffle(void* const* args, unsigned lanes) {
    for (int i = 0; i < 32; i++) {
        if (!(lanes >> i & 1)) continue;
        ShuffleArg* a = static_cast<ShuffleArg*>(args[i]);
        int source = shuffle_source<kind>(i, a->operand, a->width);
        a->result = lanes >> source & 1 ? static_cast<ShuffleArg*>(args[source])->value : ~(uint64_t)0;
    }
}
const WarpOp op_shuffle[4] = { { "__shfl_sync", do_shuffle<emu_shuffle_index>, false },
                               { "__shfl_up_sync", do_shuffle<emu_shuffle_up>, false },
                               { "__shfl_down_sync", do_shuffle<emu_shuffle_down>, false },
                               { "__shfl_xor_sync", do_shuffle<emu_shuffle_xor>, false } };

/* ---- PTX instructions ------------------------------------------------------------------------------------ */

void need_arch(int arch, const char* what, int line) {
    if (ctl().arch < arch) die("%s (line %d) needs sm_%d, this is sm_%d", what, line, arch / 10, ctl().arch / 10);
}

/* `size` bytes at p must be aligned and lie in this block's shared memory. */
void check_shared(const void* p, size_t size, const char* what, int line) {
    if ((uintptr_t)p % size) die("%s (line %d): the shared address %p is not %zu-byte aligned", what, line, p, size);
    if ((uintptr_t)p < (uintptr_t)here().shared || (uintptr_t)p + size > (uintptr_t)here().shared + b.shared_size)
        die("%s (line %d): the address %p is not in the block's %zu bytes of shared memory at %p", what, line, p,
            b.shared_size, (void*)here().shared);
}

/* Lane 8j+i names row i of matrix j. Without .trans lane L gets the elements 2(L%4), 2(L%4)+1 of row L/4; with it, those
   of column L/4. */
struct LdmatrixArg { uint32_t* r; const void* row; };
template <int N, bool TRANS> void do_ldmatrix(void* const* args, unsigned) {
    for (int j = 0; j < N; j++) {
        uint16_t m[8][8];
        for (int i = 0; i < 8; i++) memcpy(m[i], static_cast<LdmatrixArg*>(args[8 * j + i])->row, 16);
        for (int lane = 0; lane < 32; lane++) {
            int g = lane / 4, c = lane % 4 * 2;
            uint16_t lo = TRANS ? m[c][g] : m[g][c], hi = TRANS ? m[c + 1][g] : m[g][c + 1];
            static_cast<LdmatrixArg*>(args[lane])->r[j] = lo | (uint32_t)hi << 16;
        }
    }
}

template <int N, bool TRANS> void ldmatrix(uint32_t* r, const void* smem, int line) {
    static const WarpOp op = { "ldmatrix", do_ldmatrix<N, TRANS>, true };
    /* sm_75 wants a valid address in every lane, later ones in those that name a row. */
    if ((b.current & 31) < 8 * N || ctl().arch < 800) check_shared(smem, 16, "ldmatrix", line);
    LdmatrixArg arg = { r, smem };
    warp_meet(op, 0xffffffffu, &arg, line);
}

float bf16_value(uint16_t h) { return emu_bits<float>((uint32_t)h << 16); }

/* With g = lane/4 and t = lane%4, and two elements in a register: A's register i holds row g + 8(i%2), columns
   2t + 8(i/2) and the next; B's register i holds column g, rows 2t + 8i and the next; D's element i is row
   g + 8(i/2), column 2t + i%2. The sum is taken in double and rounded once. */
struct MmaArg { float* d; const uint32_t *a, *b; };
template <int K, float (*VALUE)(uint16_t)> void do_mma(void* const* args, unsigned) {
    double A[16][K], B[K][8];
    for (int lane = 0; lane < 32; lane++) {
        const MmaArg* m = static_cast<MmaArg*>(args[lane]);
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < K / 4; i++)
            for (int e = 0; e < 2; e++) A[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + e] = (double)VALUE((uint16_t)(m->a[i] >> 16 * e));
        for (int i = 0; i < K / 8; i++)
            for (int e = 0; e < 2; e++) B[2 * t + 8 * i + e][g] = (double)VALUE((uint16_t)(m->b[i] >> 16 * e));
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            float* d = &static_cast<MmaArg*>(args[lane])->d[i];
            int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
            double sum = (double)*d;
            for (int k = 0; k < K; k++) sum += A[row][k] * B[k][column];
            *d = (float)sum;
        }
}

template <int K, float (*VALUE)(uint16_t)>
void mma(float* d, const uint32_t* pa, const uint32_t* pb, const char* name, int arch, int line) {
    static const WarpOp op = { name, do_mma<K, VALUE>, true };
    need_arch(arch, name, line);
    MmaArg arg = { d, pa, pb };
    warp_meet(op, 0xffffffffu, &arg, line);
}

void copy_async(void* smem, const void* gmem, int size, int bytes, int line) {
    need_arch(800, "cp.async", line);
    check_shared(smem, (size_t)size, "cp.async", line);
    if (bytes < 0 || bytes > size) die("cp.async (line %d): %d of %d bytes", line, bytes, size);
    if ((uintptr_t)gmem % (unsigned)size) die("cp.async (line %d): the global address %p is not %d-byte aligned", line, gmem, size);
    char unused[16];
    if (bytes) memcpy(unused, gmem, (size_t)bytes); /* the source is readable now, as it must be */
    Thread& t = b.thread[b.current];
    poison(static_cast<char*>(smem), (size_t)size);
    t.copies.push_back(PendingCopy{ static_cast<char*>(smem), static_cast<const char*>(gmem), size, bytes, t.groups });
}

} // namespace

void* emu_shared() { return here().shared; }
void __syncthreads(int line) { barrier("__syncthreads", line, 0); }
int __syncthreads_or(int p, int line) { barrier("__syncthreads_or", line, p); return here().count != 0; }
int __syncthreads_and(int p, int line) { barrier("__syncthreads_and", line, p); return here().count == here().arrived; }
int __syncthreads_count(int p, int line) { barrier("__syncthreads_count", line, p); return here().count; }
void __syncwarp(unsigned mask, int line) { warp_meet(op_syncwarp, mask, nullptr, line); }
unsigned __activemask() { return 1u << (b.current & 31); }
unsigned __ballot_sync(unsigned mask, int predicate, int line) {
    BallotArg arg = { predicate, 0 };
    warp_meet(op_ballot, mask, &arg, line);
    return arg.result;
}
uint64_t emu_shfl(emu_shuffle kind, unsigned mask, uint64_t value, unsigned operand, int width, int line) {
    if (width < 1 || width > 32 || (width & (width - 1))) die("a shuffle (line %d): the width %d is not a power of two up to 32", line, width);
    ShuffleArg arg = { value, 0, operand, width };
    warp_meet(op_shuffle[kind], mask, &arg, line);
    return arg.result;
}

void ampi_ptx_ldmatrix_x4(uint32_t (&r)[4], const void* smem, int line) { ldmatrix<4, false>(r, smem, line); }
void ampi_ptx_ldmatrix_x2(uint32_t (&r)[2], const void* smem, int line) { ldmatrix<2, false>(r, smem, line); }
void ampi_ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem, int line) { ldmatrix<4, true>(r, smem, line); }
void ampi_ptx_ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem, int line) { ldmatrix<2, true>(r, smem, line); }
void ampi_ptx_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&bb)[2], int line) {
    mma<16, ampi_ptx_f32_from_f16>(d, a, bb, "mma.m16n8k16.f16", 800, line);
}
void ampi_ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&bb)[2], int line) {
    mma<16, bf16_value>(d, a, bb, "mma.m16n8k16.bf16", 800, line);
}
void ampi_ptx_mma_f16_k8(float (&d)[4], const uint32_t (&a)[2], uint32_t bb, int line) {
    mma<8, ampi_ptx_f32_from_f16>(d, a, &bb, "mma.m16n8k8.f16", 750, line);
}
void ampi_ptx_cp_async16(void* smem, const void* gmem, int bytes, int line) { copy_async(smem, gmem, 16, bytes, line); }
void ampi_ptx_cp_async8(void* smem, const void* gmem, int bytes, int line) { copy_async(smem, gmem, 8, bytes, line); }
void ampi_ptx_cp_async4(void* smem, const void* gmem, int bytes, int line) { copy_async(smem, gmem, 4, bytes, line); }
void ampi_ptx_cp_async_commit() { b.thread[b.current].groups++; }
void emu_cp_async_wait(int groups_left) {
    Thread& t = b.thread[b.current];
    size_t done = 0;
    for (; done < t.copies.size() && t.copies[done].group < t.groups - groups_left; done++) {
        const PendingCopy& c = t.copies[done];
        memset(c.dst, 0, (size_t)c.size);
        if (c.bytes) memcpy(c.dst, c.src, (size_t)c.bytes);
    }
    t.copies.erase(t.copies.begin(), t.copies.begin() + (long)done);
}

float ampi_ptx_f32_from_f16(uint16_t h) {
    unsigned sign = (unsigned)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31) return emu_bits<float>(mantissa ? 0x7fffffffu : sign | 0x7f800000u);
    if (exponent) return emu_bits<float>(sign | (exponent + 112) << 23 | mantissa << 13);
    float value = (float)mantissa / 16777216.0f; /* a multiple of 2^-24 */
    return sign ? -value : value;
}
uint16_t ampi_ptx_f16_from_f32(float f) {
    uint32_t bits = emu_bits<uint32_t>(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7fff;
    if (magnitude >= 0x47800000) return (uint16_t)(sign | 0x7c00); /* 65536 and above, infinity */
    if (magnitude < 0x38800000) /* below 2^-14: a multiple of 2^-24, rounded to even by the conversion */
        return (uint16_t)(sign | (uint32_t)std::nearbyint((double)emu_bits<float>(magnitude) * 16777216.0));
    magnitude -= 112u << 23;
    return (uint16_t)(sign | (magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13); /* a carry may make it infinite */
}
void ampi_ptx_grid_wait() { b.thread[b.current].waited = true; }
float emu_f32_from_bf16(uint32_t h) {
    uint32_t bits = h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
uint16_t ampi_ptx_bf16_from_f32(float f) {
    need_arch(800, "cvt.rn.bf16.f32", 0);
    uint32_t bits = emu_bits<uint32_t>(f);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

namespace {

/* ---- PTX instructions of Hopper -------------------------------------------------------------------------- */

/* The copy engine and the Tensor Cores work as late as they may in the schedule "forward" (the engine when no thread can
   go on, a wgmma at its wait), at once in "reverse", else at random. */
bool at_once() { return ctl().schedule == EMU_REVERSE || (ctl().schedule > 0 && draw(2)); }

/* Addresses of shared memory as instructions have them: a window that begins with a kilobyte of the system's, one for each
   block of the cluster; the block's number lies in bits 24 and up. */
enum { WINDOW = 1024 + SHARED_ALIGNMENT, WINDOW_BITS = 24 };
uint32_t window_of(const Cta& c, const void* p) {
    return (uint32_t)(&c - b.cta) << WINDOW_BITS | ((uint32_t)((const char*)p - c.shared) + WINDOW);
}
char* from_window(const Cta& c, uint32_t address, uint32_t size, const char* what) {
    address &= (1u << WINDOW_BITS) - 1;
    if (address < WINDOW || address + size > WINDOW + b.shared_size)
        die("%s: 0x%x is not an address of shared memory", what, address);
    return c.shared + (address - WINDOW);
}
/* Swizzles exchange chunks of 16 bytes: bits 4 and up of an address are changed by bits 7 and up, as many as there are
   in a row of 32, 64 or 128 bytes. */
uint32_t swizzled(uint32_t address, uint32_t row_bytes) { return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4); }

/* A barrier in shared memory. */
struct Mbarrier {
    int count, left;        /* arrivals of a phase; those to come */
    long bytes;             /* announced and not yet come; less than 0 if they come first */
    unsigned phase;
    int maker;
    bool published;
};
struct BulkLoad { CUtensorMap map; Cta* cta; uint32_t to; char* barrier; int at[3]; };
struct BulkStore {
    CUtensorMap map;
    const Cta* cta;
    uint32_t from;
    int at[3], group;
    bool read;
    std::vector<char> box;
};

/* A wgmma that has been issued, as one warp sees it: its 16 rows. The sums live apart from the registers until the wait. */
struct WgmmaKey {
    uint64_t a, b;
    int n, trans_a, trans_b, bf16, add;
    bool operator!=(const WgmmaKey& o) const {
        return a != o.a || b != o.b || n != o.n || trans_a != o.trans_a || trans_b != o.trans_b || bf16 != o.bf16
               || add != o.add;
    }
};
struct Wgmma { WgmmaKey key; float* d; int group; bool done; };
struct Sums { std::vector<float*> lanes; std::vector<float> rows; };    /* rows: 16 x n */
struct WarpMma {
    bool fenced;
    int groups;
    std::deque<Wgmma> jobs;
    std::map<float*, Sums> sums;
    std::vector<WgmmaKey> history;
};

struct Engine {
    std::map<char*, Mbarrier> barriers;
    std::deque<BulkLoad> loads;
    std::map<int, std::deque<BulkStore>> stores;
    std::map<int, int> store_groups;
    std::vector<WarpMma> warps;
    std::vector<int> registers;                                  /* of each warp, per thread */
    struct Written { long when; int warp; unsigned lanes; };
    std::map<char*, Written> written;                            /* chunks, by stmatrix */
    std::vector<long> fenced;                                    /* when each thread fenced last */
    long clock;
} engine;

/* --- tensor maps */

struct TensorMap {
    char* address;
    uint64_t sides[3], strides[3];
    uint32_t box[3], element, row_bytes;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "a map fits");

TensorMap tensor_of(const CUtensorMap& map) {
    TensorMap t;
    memcpy(&t, &map, sizeof t);
    return t;
}

/* Element e of the chunk at byte x of row (y, z) of the box at `at`, in global memory; null outside of the tensor. */
char* element_of(const TensorMap& t, const int at[3], uint32_t x, uint32_t y, uint32_t z, uint32_t e) {
    const int64_t p[3] = { at[0] + (int64_t)(x / t.element + e), at[1] + (int64_t)y, at[2] + (int64_t)z };
    for (int i = 0; i < 3; i++)
        if (p[i] < 0 || (uint64_t)p[i] >= t.sides[i]) return nullptr;
    return t.address + p[0] * (int64_t)t.element + p[1] * (int64_t)t.strides[1] + p[2] * (int64_t)t.strides[2];
}
/* Takes a box chunk by chunk: from global memory to shared memory; from there to `linear`, which is not swizzled; from
   `linear` to global memory. A chunk that begins within its row is written whole, beyond the row's end too: seen on an
   H100, in no document. */
enum BoxWay { BOX_IN, BOX_READ, BOX_WRITE };
void copy_box(const CUtensorMap& map, const int at[3], const Cta& cta, uint32_t shared, char* linear, BoxWay way) {
    TensorMap t = tensor_of(map);
    uint32_t row = t.box[0] * t.element, offset = 0;
    for (uint32_t z = 0; z < t.box[2]; z++)
        for (uint32_t y = 0; y < t.box[1]; y++)
            for (uint32_t x = 0; x < row; x += 16, offset += 16) {
                char* chunk = way == BOX_WRITE ? linear + offset
                                               : from_window(cta, swizzled(shared + offset, t.row_bytes), 16, "a bulk copy");
                char* first = element_of(t, at, x, y, z, 0);
                bool whole = first && element_of(t, at, x, y, z, 16 / t.element - 1);
                if (way == BOX_READ) memcpy(linear + offset, chunk, 16);
                if (way == BOX_IN && whole) memcpy(chunk, first, 16);
                if (way == BOX_WRITE && first) memcpy(first, chunk, 16);
                for (uint32_t e = 0; e < 16 / t.element && way == BOX_IN && !whole; e++) {
                    char *near = chunk + e * t.element, *far = element_of(t, at, x, y, z, e);
                    if (far) memcpy(near, far, t.element);
                    else memset(near, 0, t.element);
                }
            }
}
uint32_t box_bytes(const TensorMap& t) { return t.box[0] * t.box[1] * t.box[2] * t.element; }

/* --- barriers */

Mbarrier& find_barrier(char* p, const char* what) {
    auto found = engine.barriers.find(p);
    if (found == engine.barriers.end()) die("%s: there is no barrier at %p", what, (void*)p);
    return found->second;
}
void check_published(const Mbarrier& m, const char* what) {
    if (!m.published) die("%s: the barrier was made without fence.mbarrier_init", what);
}
/* Ends the phase if everything has come. */
void try_phase(char* p, Mbarrier& m) {
    if (m.left < 0) die("more arrivals than the %d that a barrier waits for", m.count);
    if (m.left == 0 && m.bytes < 0) die("more bytes come than a barrier was told to wait for");
    if (m.left || m.bytes) return;
    m.phase++;
    m.left = m.count;
    for (int i = 0; i < b.all; i++) {
        Thread& t = b.thread[i];
        if (t.state == AT_MBARRIER && t.barrier == p && (m.phase & 1) != t.parity) push_ready(i);
    }
}

/* --- the copy engine */

/* Carries out one load, if there is one: the oldest, the newest, or any. */
bool engine_step() {
    if (engine.loads.empty()) return false;
    size_t pick = choose(engine.loads.size());
    BulkLoad load = engine.loads[pick];
    engine.loads.erase(engine.loads.begin() + (long)pick);
    copy_box(load.map, load.at, *load.cta, load.to, nullptr, BOX_IN);
    Mbarrier& m = find_barrier(load.barrier, "a bulk load");
    m.bytes -= box_bytes(tensor_of(load.map));
    try_phase(load.barrier, m);
    return true;
}

/* What the copy engine reads must have been fenced by those that wrote it. */
void check_fenced(const BulkStore& s) {
    char* first = from_window(*s.cta, s.from, box_bytes(tensor_of(s.map)), "a bulk store");
    auto i = engine.written.lower_bound(first), end = engine.written.lower_bound(first + box_bytes(tensor_of(s.map)));
    for (; i != end; ++i)
        for (int lane = 0; lane < 32; lane++)
            if ((i->second.lanes >> lane & 1) && engine.fenced[(size_t)(i->second.warp * 32 + lane)] < i->second.when)
                die("a bulk store reads what thread %d wrote, which has not executed fence.proxy.async since",
                    i->second.warp * 32 + lane);
}
void read_store(BulkStore& s) {
    if (s.read) return;
    s.box.resize(box_bytes(tensor_of(s.map)));
    copy_box(s.map, s.at, *s.cta, s.from, s.box.data(), BOX_READ);
    s.read = true;
}
void write_store(BulkStore& s) {
    read_store(s);
    copy_box(s.map, s.at, *s.cta, s.from, s.box.data(), BOX_WRITE);
}
/* Of the current thread's groups at most `left` are not read. */
void wait_stores(int left) {
    for (BulkStore& s : engine.stores[b.current])
        if (s.group < engine.store_groups[b.current] - left) read_store(s);
}
void engine_thread_ends() {
    for (const BulkStore& s : engine.stores[b.current])
        if (!s.read) die("a thread ends before its bulk store has been read (cp.async.bulk.wait_group)");
    if (!engine.warps[(size_t)b.current / 32].jobs.empty()) die("a warp ends before its wgmma");
}
void engine_begin() {
    engine = Engine();
    engine.warps.resize((size_t)(b.all + 31) / 32);
    engine.registers.assign(engine.warps.size(), ctl().registers);
    engine.fenced.assign((size_t)b.all, 0);
}
/* Writes that nobody waited for are done now; loads that nobody waited for are an error, and so are registers that the
   launch did not bring: the warps that take them would wait for ever. */
void engine_end() {
    for (auto& list : engine.stores)
        for (BulkStore& s : list.second) write_store(s);
    if (!engine.loads.empty()) die("a cluster ends before its bulk loads");
    int warps = b.size / 32, all = 0;
    for (int w = 0; w < warps; w++) all += engine.registers[(size_t)w] * 32;
    bool moved = false;
    for (int r : engine.registers) moved = moved || r != ctl().registers;
    if (moved && all > std::min(65536, ctl().registers * b.size))
        die("setmaxnreg: the warps of a block have %d registers in the end, of %d", all, ctl().registers * b.size);
}

/* --- wgmma */

/* One operand's element (i, k) as the descriptor has it: i along m or n. PTX ISA, "Matrix Descriptor Format" and "Shared
   Memory Matrix Layout": along k, rows of the swizzle's width, eight of them together, then the stride; across k,
   rows of the swizzle's width along i, eight of them along k together, then the stride along k and the leading
   offset along i. */
struct Descriptor {
    uint32_t start, leading, stride, row_bytes;
    explicit Descriptor(uint64_t d) {
        const uint64_t unused = ~((uint64_t)0x3fff | (uint64_t)0x3fff << 16 | (uint64_t)0x3fff << 32 | (uint64_t)3 << 62);
        if (d & unused) die("wgmma: bits of the descriptor 0x%llx are set that should not be", (unsigned long long)d);
        start = (uint32_t)(d & 0x3fff) << 4;
        leading = (uint32_t)(d >> 16 & 0x3fff) << 4;
        stride = (uint32_t)(d >> 32 & 0x3fff) << 4;
        row_bytes = 256u >> (d >> 62);
        if (d >> 62 == 0) die("wgmma: a descriptor without a swizzle is not emulated");
    }
    uint32_t at(uint32_t i, uint32_t k, int trans) const {
        uint32_t wide = row_bytes / 2, address;
        if (trans) address = start + i / wide * leading + i % wide * 2 + k / 8 * stride + k % 8 * row_bytes;
        else address = start + i / 8 * stride + i % 8 * row_bytes + k * 2;
        return swizzled(address, row_bytes);
    }
};
__attribute__((optimize("O3")))
void read_operand(float* out, const Cta& c, uint64_t d, int trans, int bf16, uint32_t first, uint32_t count) {
    Descriptor descriptor(d);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; k < 16; k++) {
            uint16_t h;
            memcpy(&h, from_window(c, descriptor.at(first + i, k, trans), 2, "wgmma"), 2);
            out[k * count + i] = bf16 ? bf16_value(h) : ampi_ptx_f32_from_f16(h);
        }
}
/* The sum of 16 products is taken in double and rounded once. Without checks: it is where the time goes. */
__attribute__((no_sanitize("address", "undefined"), optimize("O3")))
void multiply_rows(float* rows, const float* a, const float* bb, int n, int add) {
    double sum[256];
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < n; j++) sum[j] = add ? (double)rows[i * n + j] : 0;
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < n; j++) sum[j] += (double)a[k * 16 + i] * (double)bb[k * n + j];
        for (int j = 0; j < n; j++) rows[i * n + j] = (float)sum[j];
    }
}
void run_wgmma(WarpMma& w, Wgmma& job, int warp) {
    static float a[16 * 16], right[16 * 256];
    const Cta& c = cta_of(warp * 32);
    if (job.done) return;
    read_operand(a, c, job.key.a, job.key.trans_a, job.key.bf16, (uint32_t)warp % 4 * 16, 16);
    read_operand(right, c, job.key.b, job.key.trans_b, job.key.bf16, 0, (uint32_t)job.key.n);
    multiply_rows(w.sums[job.d].rows.data(), a, right, job.key.n, job.key.add);
    job.done = true;
}
void run_all_wgmma(WarpMma& w, int warp) {
    for (Wgmma& job : w.jobs) run_wgmma(w, job, warp);
}

/* Registers of lane l: of each 8 columns, element e is row l/4 + 8*(e/2), column 2*(l%4) + e%2. */
template <typename F> void for_sums(const Sums& s, int n, F f) {
    for (int lane = 0; lane < 32; lane++)
        for (int r = 0; r < n / 2; r++)
            f(s.lanes[(size_t)lane][r], (lane / 4 + r % 4 / 2 * 8) * n + r / 4 * 8 + lane % 4 * 2 + r % 2);
}

struct WgmmaArg { float* d; WgmmaKey key; };
void do_wgmma(void* const* args, unsigned) {
    int warp = b.current / 32, first = warp / 4 * 4;
    WarpMma& w = engine.warps[(size_t)warp];
    const WgmmaArg& mine = *static_cast<WgmmaArg*>(args[0]);
    for (int i = 1; i < 32; i++)
        if (static_cast<WgmmaArg*>(args[i])->key != mine.key) die("wgmma: the lanes of a warp disagree");
    for (int other = first; other < first + 4; other++) {
        const std::vector<WgmmaKey>& list = engine.warps[(size_t)other].history;
        if (list.size() > w.history.size() && list[w.history.size()] != mine.key)
            die("wgmma: the warps of a warpgroup disagree");
    }
    if (!w.fenced) die("wgmma without wgmma.fence since the registers were last touched");
    w.history.push_back(mine.key);
    if (!w.sums.count(mine.d)) {
        Sums& s = w.sums[mine.d];
        s.rows.resize((size_t)(16 * mine.key.n));
        for (int i = 0; i < 32; i++) s.lanes.push_back(static_cast<WgmmaArg*>(args[i])->d);
        for_sums(s, mine.key.n, [&](float& reg, int at) { s.rows[(size_t)at] = reg; });
    }
    for_sums(w.sums[mine.d], mine.key.n, [](float& reg, int) { reg = NAN; });      /* not to be read before the wait */
    w.jobs.push_back(Wgmma{ mine.key, mine.d, w.groups, false });
    ctl().wgmmas++;
    if (at_once()) run_all_wgmma(w, warp);
}
void do_wgmma_fence(void* const*, unsigned) { engine.warps[(size_t)b.current / 32].fenced = true; }
void do_wgmma_commit(void* const*, unsigned) { engine.warps[(size_t)b.current / 32].groups++; }
/* Sums whose last wgmma is done go back to the registers. */
void do_wgmma_wait(void* const* args, unsigned) {
    int warp = b.current / 32;
    WarpMma& w = engine.warps[(size_t)warp];
    std::set<float*> under_way;
    while (!w.jobs.empty() && w.jobs.front().group < w.groups - *static_cast<int*>(args[0])) {
        run_wgmma(w, w.jobs.front(), warp);
        w.jobs.pop_front();
    }
    for (const Wgmma& job : w.jobs) under_way.insert(job.d);
    for (auto i = w.sums.begin(); i != w.sums.end();) {
        int n = (int)i->second.rows.size() / 16;
        if (under_way.count(i->first)) { ++i; continue; }
        for_sums(i->second, n, [&](float& reg, int at) { reg = i->second.rows[(size_t)at]; });
        i = w.sums.erase(i);
    }
    w.fenced = w.fenced && !w.sums.empty();
}

/* --- others of a whole warp */

void do_elect(void* const* args, unsigned) {
    size_t chosen = choose(32);
    for (size_t i = 0; i < 32; i++) *static_cast<int*>(args[i]) = i == chosen;
}
struct StmatrixArg { char* row; const uint32_t* r; };
void do_stmatrix(void* const* args, unsigned) {
    engine.clock++;
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 8; i++) {
            char* row = static_cast<StmatrixArg*>(args[8 * j + i])->row;
            for (int c = 0; c < 4; c++) memcpy(row + 4 * c, &static_cast<StmatrixArg*>(args[4 * i + c])->r[j], 4);
            engine.written[row] = Engine::Written{ engine.clock, b.current / 32, 15u << 4 * i };
        }
}
void do_registers(void* const* args, unsigned) { engine.registers[(size_t)b.current / 32] = *static_cast<int*>(args[0]); }
/* The lanes of a warp together, on sm_90. */
void hopper_meet(const WarpOp& op, void* arg, int line) {
    need_arch(900, op.name, line);
    warp_meet(op, 0xffffffffu, arg, line);
}

} // namespace

uint32_t ampi_ptx_shared(const void* p) { return window_of(here(), p); }

void ampi_ptx_mbarrier_init(uint64_t* p, uint32_t count, int line) {
    need_arch(900, "mbarrier.init", line);
    check_shared(p, 8, "mbarrier.init", line);
    if (count < 1 || count >= 1u << 20) die("mbarrier.init (line %d): a count of %u", line, count);
    if (engine.barriers.count((char*)p)) die("mbarrier.init (line %d): there is a barrier already", line);
    engine.barriers[(char*)p] = Mbarrier{ (int)count, (int)count, 0, 0, b.current, false };
}
void ampi_ptx_mbarrier_publish() {
    for (auto& m : engine.barriers)
        if (m.second.maker == b.current) m.second.published = true;
}
void ampi_ptx_mbarrier_expect(uint64_t* p, uint32_t bytes, int line) {
    check_shared(p, 8, "mbarrier.arrive.expect_tx", line);
    Mbarrier& m = find_barrier((char*)p, "mbarrier.arrive.expect_tx");
    m.bytes += bytes;
    m.left--;
    if (m.bytes >= 1 << 20) die("mbarrier.arrive.expect_tx (line %d): %ld bytes", line, m.bytes);
    try_phase((char*)p, m);
}
void ampi_ptx_mbarrier_arrive(uint64_t* p, int line) {
    check_shared(p, 8, "mbarrier.arrive", line);
    Mbarrier& m = find_barrier((char*)p, "mbarrier.arrive");
    check_published(m, "mbarrier.arrive");
    m.left--;
    try_phase((char*)p, m);
}
void ampi_ptx_mbarrier_wait(uint64_t* p, uint32_t parity, int line) {
    check_shared(p, 8, "mbarrier.try_wait", line);
    Mbarrier& m = find_barrier((char*)p, "mbarrier.try_wait");
    if (parity > 1) die("mbarrier.try_wait (line %d): a parity of %u", line, parity);
    if ((m.phase & 1) != parity) return;
    Thread& t = wait_as(AT_MBARRIER, parity ? "a barrier's phase of parity 1" : "a barrier's phase of parity 0", line);
    t.barrier = p;
    t.parity = parity;
    leave();
}

void ampi_ptx_tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z, int line) {
    need_arch(900, "cp.async.bulk.tensor", line);
    TensorMap t = tensor_of(*map);
    if ((uintptr_t)map % 64) die("cp.async.bulk.tensor (line %d): the tensor map is not aligned", line);
    check_shared(to, 128, "cp.async.bulk.tensor", line);
    check_shared(barrier, 8, "cp.async.bulk.tensor", line);
    check_published(find_barrier((char*)barrier, "cp.async.bulk.tensor"), "cp.async.bulk.tensor");
    BulkLoad load = { *map, &here(), window_of(here(), to), (char*)barrier, { x, y, z } };
    poison(from_window(here(), load.to, box_bytes(t), "cp.async.bulk.tensor"), box_bytes(t));
    engine.loads.push_back(load);
    if (ctl().schedule == EMU_REVERSE) engine_step();
}
void ampi_ptx_tma_store(const CUtensorMap* map, const void* from, int x, int y, int z, int line) {
    need_arch(900, "cp.async.bulk.tensor", line);
    check_shared(from, 128, "cp.async.bulk.tensor", line);
    BulkStore s = { *map, &here(), window_of(here(), from), { x, y, z }, engine.store_groups[b.current], false, {} };
    check_fenced(s);
    engine.stores[b.current].push_back(s);
    if (at_once()) read_store(engine.stores[b.current].back());
}
void ampi_ptx_bulk_commit() { engine.store_groups[b.current]++; }
void emu_bulk_wait_read(int groups_left) { wait_stores(groups_left); }
void ampi_ptx_fence_async() { engine.fenced[(size_t)b.current] = ++engine.clock; }

void ampi_ptx_stmatrix_x4(void* p, const uint32_t (&r)[4], int line) {
    static const WarpOp op = { "stmatrix", do_stmatrix, true };
    StmatrixArg arg = { (char*)p, r };
    check_shared(p, 16, "stmatrix", line);
    hopper_meet(op, &arg, line);
}
int ampi_ptx_elect(int line) {
    static const WarpOp op = { "elect.sync", do_elect, true };
    int mine = 0;
    hopper_meet(op, &mine, line);
    return mine;
}
void ampi_ptx_cluster_sync(int line) {
    need_arch(900, "barrier.cluster", line);
    wait_as(AT_CLUSTER, "the cluster's barrier", line);
    b.at_cluster++;
    try_cluster();
    leave();
}
void ampi_ptx_group_sync(uint32_t group, uint32_t threads, int line) {
    if (group >= NAMED_BARRIERS) die("bar.sync (line %d): barrier %u", line, group);
    named_barrier((int)group, (int)threads, line);
}
float4 ampi_ptx_load_there(const void* p, uint32_t rank, int line) {
    float4 v;
    check_shared(p, 16, "ld.shared::cluster", line);
    if (rank >= (uint32_t)b.ctas) die("mapa (line %d): block %u of a cluster of %d", line, rank, b.ctas);
    memcpy(&v, b.cta[rank].shared + ((const char*)p - here().shared), sizeof v);
    return v;
}
void emu_set_warp_registers(int count, int line) {
    static const WarpOp op = { "setmaxnreg", do_registers, true };
    if (count < 24 || count > 256 || count % 8) die("setmaxnreg (line %d): %d registers", line, count);
    hopper_meet(op, &count, line);
}

void emu_wgmma(float* d, int n, int trans_a, int trans_b, int bf16, uint64_t a, uint64_t bb, int add, int line) {
    static const WarpOp op = { "wgmma", do_wgmma, true };
    WgmmaArg arg = { d, { a, bb, n, trans_a, trans_b, bf16, add != 0 } };
    hopper_meet(op, &arg, line);
}
void ampi_ptx_wgmma_fence(int line) {
    static const WarpOp op = { "wgmma.fence", do_wgmma_fence, true };
    hopper_meet(op, nullptr, line);
}
void ampi_ptx_wgmma_commit(int line) {
    static const WarpOp op = { "wgmma.commit_group", do_wgmma_commit, true };
    hopper_meet(op, nullptr, line);
}
void emu_wgmma_wait(int groups_left, int line) {
    static const WarpOp op = { "wgmma.wait_group", do_wgmma_wait, true };
    hopper_meet(op, &groups_left, line);
}

/* What the documentation asks of a tensor map without interleaving. */
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sides, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* every, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    TensorMap t = {};
    bool good = rank == 3 && (uintptr_t)map % 64 == 0 && (uintptr_t)address % 16 == 0
                && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE;
    if (ctl().arch < 900 || !good) return CUDA_ERROR_INVALID_VALUE;
    t.address = (char*)address;
    t.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    t.row_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 16u : 16u << swizzle;
    t.strides[0] = t.element;
    for (int i = 0; i < 3; i++) {
        t.sides[i] = sides[i];
        t.box[i] = box[i];
        if (i > 0) t.strides[i] = strides[i - 1];
        good = good && sides[i] >= 1 && sides[i] <= (cuuint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256 && every[i] == 1;
        good = good && (i == 0 || (t.strides[i] % 16 == 0 && t.strides[i] < (cuuint64_t)1 << 40));
    }
    uint32_t row = box[0] * t.element;
    good = good && row % 16 == 0 && (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || row <= t.row_bytes);
    memset(map, 0, sizeof *map);
    if (good) memcpy(map, &t, sizeof t);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- Memory ---------------------------------------------------------------------------------------------- */

namespace {

enum Place { PAGEABLE, PINNED, WRITE_COMBINED, DEVICE };
struct Allocation { size_t size; Place place; bool to_be_freed; int device; };
std::map<uintptr_t, Allocation> allocations;
size_t live_bytes, device_bytes;

/* Device memory can be touched only while there is one of these: the host's own accesses are reported. */
int device_open = 0;
void shade_device(bool poison) {
    for (const auto& a : allocations) {
        if (a.second.place != DEVICE) continue;
        if (poison) ASAN_POISON_MEMORY_REGION((void*)a.first, a.second.size);
        else ASAN_UNPOISON_MEMORY_REGION((void*)a.first, a.second.size);
    }
}
struct DeviceOpen {
    DeviceOpen() { if (device_open++ == 0) shade_device(false); }
    ~DeviceOpen() { if (--device_open == 0) shade_device(true); }
};

cudaError_t allocate(void** p, size_t size, Place place) {
    if (!p) return cudaErrorInvalidValue;
    *p = nullptr;
    if (ctl().fail_alloc && --ctl().fail_alloc == 0) {
        ctl().failures++;
        return cudaErrorMemoryAllocation;
    }
    if (size == 0) return cudaSuccess;
    if (place == DEVICE && (size > ctl().memory || device_bytes > ctl().memory - size)) return cudaErrorMemoryAllocation;
    if (posix_memalign(p, 256, size)) return *p = nullptr, cudaErrorMemoryAllocation;
    memset(*p, 0xff, size);
    allocations[(uintptr_t)*p] = Allocation{ size, place, false, 0 };
    live_bytes += size;
    if (place == DEVICE) device_bytes += size;
    if (place == DEVICE && !device_open) ASAN_POISON_MEMORY_REGION(*p, size);
    ctl().allocs++;
    return cudaSuccess;
}

void deallocate(void* p) {
    auto found = allocations.find((uintptr_t)p);
    if (found->second.place == DEVICE) {
        ASAN_UNPOISON_MEMORY_REGION(p, found->second.size);
        device_bytes -= found->second.size;
    }
    live_bytes -= found->second.size;
    allocations.erase(found);
    free(p);
}

/* Is `p` the start of an allocation at `place` that nobody has freed? */
bool owns(void* p, bool device) {
    auto found = allocations.find((uintptr_t)p);
    return found != allocations.end() && (found->second.place == DEVICE) == device && !found->second.to_be_freed;
}

/* Where p lies; *size gets the bytes from p to the end of its allocation. */
Place place_of(const void* p, size_t* size) {
    auto above = allocations.upper_bound((uintptr_t)p);
    *size = SIZE_MAX;
    if (above == allocations.begin()) return PAGEABLE;
    --above;
    uintptr_t offset = (uintptr_t)p - above->first;
    if (offset >= above->second.size) return PAGEABLE;
    *size = above->second.size - offset;
    return above->second.place;
}

/* ---- Streams: queues that wait until somebody asks ------------------------------------------------------- */

typedef std::shared_ptr<CUstream_st> Stream;
typedef std::function<void()> Work;
struct After { Stream stream; uint64_t index; };    /* that many operations of the stream are done */
struct Op { Work work; std::vector<After> after; };

struct Node { Work work; std::vector<int> after; };
typedef std::vector<Node> Nodes;
struct Capture {
    Nodes nodes;
    CUstream_st* origin;
    cudaStreamCaptureMode mode;
    unsigned long long id;
    bool invalid;
};

} // namespace

struct CUstream_st {
    bool blocking;          /* ordered with the legacy stream */
    uint64_t queued, done;
    std::deque<Op> ops;
    std::shared_ptr<Capture> capture;
    std::vector<int> front; /* the nodes that its next captured operation follows */
};
struct CUevent_st {
    bool timing;
    After recorded;         /* stream is null: never recorded */
    std::shared_ptr<double> time;
    std::shared_ptr<Capture> capture;
    std::vector<int> front;
};
struct CUgraph_st { std::shared_ptr<Nodes> nodes; };
struct CUgraphExec_st { std::shared_ptr<Nodes> nodes; };

namespace {

Stream new_stream(bool blocking) {
    return std::make_shared<CUstream_st>(CUstream_st{ blocking, 0, 0, {}, nullptr, {} });
}
const Stream legacy = new_stream(true), per_thread = new_stream(true);
std::vector<Stream> streams = { legacy, per_thread }; /* destroyed ones too, until their work is done */
std::set<cudaStream_t> stream_handles;
std::set<cudaEvent_t> events;
std::set<cudaGraph_t> graphs;
std::set<cudaGraphExec_t> execs;
std::set<cublasHandle_t> blas_handles;
cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

Stream find_stream(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy) return legacy;
    if (handle == cudaStreamPerThread) return per_thread;
    for (const Stream& s : streams)
        if (s.get() == handle && stream_handles.count(handle)) return s;
    return nullptr;
}

/* Carry out the stream's operations up to the index-th, and first what they come after. */
void run_to(const Stream& s, uint64_t index) {
    DeviceOpen open;
    while (s->done < index) {
        Op op = std::move(s->ops.front());
        s->ops.pop_front();
        for (const After& a : op.after) run_to(a.stream, a.index);
        op.work();
        s->done++;
    }
}

void run_stream(const Stream& s) { run_to(s, s->queued); }

/* Everything: stream after stream, or in a random schedule an operation here and one there. */
void run_device() {
    DeviceOpen open;
    for (;;) {
        std::vector<Stream> pending;
        for (const Stream& s : streams)
            if (s->done < s->queued) pending.push_back(s);
        if (pending.empty()) break;
        const Stream& s = pending[choose(pending.size())];
        run_to(s, ctl().schedule > 0 ? s->done + 1 : s->queued);
    }
    streams.erase(std::remove_if(streams.begin(), streams.end(), [](const Stream& s) {
        return s != legacy && s != per_thread && !stream_handles.count(s.get());
    }), streams.end());
}

void wait_for(const Stream& s, uint64_t index) {
    ctl().syncs++;
    run_to(s, index);
}

/* Captures that a call which is unsafe during one would break. */
bool break_captures(bool relaxed_too) {
    bool any = false;
    for (const Stream& s : streams)
        if (s->capture && (relaxed_too || s->capture->mode != cudaStreamCaptureModeRelaxed)) any = s->capture->invalid = true;
    return any;
}
cudaError_t refuse_capture(const Stream& s) {
    s->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
}

/* Put work at the end of the stream, or into the graph that it captures. The legacy stream and the blocking ones wait
   for each other. */
cudaError_t push(const Stream& s, Work work, std::vector<After> after = {}) {
    if (s->capture) {
        Capture& c = *s->capture;
        if (c.invalid) return cudaErrorStreamCaptureInvalidated;
        c.nodes.push_back(Node{ std::move(work), s->front });
        s->front.assign(1, (int)c.nodes.size() - 1);
        return cudaSuccess;
    }
    if (s == legacy && break_captures(true)) return cudaErrorStreamCaptureImplicit;
    if (s == legacy) {
        for (const Stream& other : streams)
            if (other->blocking && other != s && other->done < other->queued) after.push_back(After{ other, other->queued });
    } else if (s->blocking && legacy->done < legacy->queued) {
        after.push_back(After{ legacy, legacy->queued });
    }
    s->ops.push_back(Op{ std::move(work), std::move(after) });
    s->queued++;
    const uint64_t most = 1024; /* a full queue: the device has begun */
    if (ctl().eager) run_stream(s);
    else if (s->queued - s->done > most) run_to(s, s->done + 1);
    return cudaSuccess;
}

/* ---- Copies ---------------------------------------------------------------------------------------------- */

struct Copy {
    char* dst;
    size_t dpitch;
    const char* src;
    size_t spitch, width, height;
    void run() const {
        for (size_t i = 0; i < height; i++) memmove(dst + i * dpitch, src + i * spitch, width);
    }
};

/* Where the copy goes from and to, if its ranges lie inside allocations and the direction is the one it says. */
cudaError_t check_copy(const Copy& c, cudaMemcpyKind kind, Place* to, Place* from) {
    size_t room_to, room_from;
    if ((unsigned)kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (c.height > 1 && (c.dpitch < c.width || c.spitch < c.width)) return cudaErrorInvalidPitchValue;
    if (!c.dst || !c.src) return cudaErrorInvalidValue;
    *to = place_of(c.dst, &room_to);
    *from = place_of(c.src, &room_from);
    if ((c.height - 1) * c.dpitch + c.width > room_to || (c.height - 1) * c.spitch + c.width > room_from)
        return cudaErrorInvalidValue;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind != cudaMemcpyDefault && (to_device != (*to == DEVICE) || from_device != (*from == DEVICE)))
        return cudaErrorInvalidValue;
    return cudaSuccess;
}

/* The bytes of the source as they are now, to be copied later. */
Work snapshot(const Copy& c) {
    auto bytes = std::make_shared<std::vector<char>>(c.width * c.height);
    Copy take = { bytes->data(), c.width, c.src, c.spitch, c.width, c.height };
    take.run();
    Copy give = { c.dst, c.dpitch, bytes->data(), c.width, c.width, c.height };
    return [give, bytes] { give.run(); };
}

/* The host waits: always for a blocking copy that has a host side; for an asynchronous one when a pageable buffer is
   written or staged, or when both sides are the host's. A pageable source is read in the call. */
cudaError_t copy(const Copy& c, cudaMemcpyKind kind, cudaStream_t handle, bool blocking) {
    Stream s = find_stream(handle);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (c.width == 0 || c.height == 0) return cudaSuccess;
    Place to, from;
    if (cudaError_t error = check_copy(c, kind, &to, &from)) return error;
    if (s->capture && (to == PAGEABLE || from == PAGEABLE)) return refuse_capture(s);
    bool staged = !blocking && from == PAGEABLE && to == DEVICE;
    bool wait = blocking ? to != DEVICE || from != DEVICE : to == PAGEABLE || (to != DEVICE && from != DEVICE);
    if (cudaError_t error = push(s, staged ? snapshot(c) : [c] { c.run(); })) return error;
    if (staged) ctl().syncs++;
    if (wait && !s->capture) wait_for(s, s->queued);
    return cudaSuccess;
}

cudaError_t fill(void* p, int value, size_t n, cudaStream_t handle) {
    Stream s = find_stream(handle);
    size_t room;
    if (!s) return cudaErrorInvalidResourceHandle;
    if (n == 0) return cudaSuccess;
    if (place_of(p, &room) == PAGEABLE || n > room) return cudaErrorInvalidValue;
    return push(s, [=] { memset(p, value, n); });
}

/* ---- Calls ----------------------------------------------------------------------------------------------- */

/* At the start of every call: is it the one that shall fail, is there a device? */
bool injected() {
    if (!ctl().fail_call || --ctl().fail_call) return false;
    ctl().failures++;
    return true;
}
cudaError_t enter() {
    if (running_kernel) die("a kernel calls the host's runtime");
    if (injected()) return cudaErrorUnknown;
    return ctl().devices ? cudaSuccess : cudaErrorNoDevice;
}
#define ENTER() do { if (cudaError_t entered = enter()) return fail(entered); } while (0)
#define REQUIRE(condition, error) do { if (!(condition)) return fail(error); } while (0)
/* For calls that may not be made while a stream captures, but in the relaxed mode. */
#define UNSAFE_IN_CAPTURE() REQUIRE(!break_captures(false), cudaErrorStreamCaptureUnsupported)

size_t shared_limit() {
    int arch = ctl().arch;
    size_t kib = arch < 800 ? 64 : arch >= 900 && arch < 1200 ? 227 : arch == 800 || arch == 870 ? 163 : 99;
    return kib << 10;
}
const size_t SHARED_PLAIN = 48 << 10, SHARED_RESERVED = 1 << 10;
size_t shared_per_multiprocessor() { return ctl().arch < 800 ? 64 << 10 : shared_limit() + SHARED_RESERVED; }
int threads_per_multiprocessor() { return ctl().arch < 800 ? 1024 : 2048; }
std::map<const void*, size_t> shared_allowed;

cudaError_t check_launch(const cudaLaunchConfig_t& c, const void* kernel) {
    dim3 g = c.gridDim, t = c.blockDim;
    if (!g.x || !g.y || !g.z || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) return cudaErrorInvalidConfiguration;
    if (!t.x || !t.y || !t.z || t.x > 1024 || t.y > 1024 || t.z > 64) return cudaErrorInvalidConfiguration;
    if ((uint64_t)t.x * t.y * t.z > MAX_THREADS) return cudaErrorInvalidConfiguration;
    auto allowed = shared_allowed.find(kernel);
    if (c.dynamicSmemBytes > (allowed == shared_allowed.end() ? SHARED_PLAIN : allowed->second)) return cudaErrorInvalidValue;
    return cudaSuccess;
}

/* Blocks of a cluster, neighbours in x, and an early start are all that may be asked of a launch. */
cudaError_t attributes_of(const cudaLaunchConfig_t& c, unsigned* cluster, bool* early) {
    *cluster = 1;
    *early = false;
    for (unsigned i = 0; i < c.numAttrs; i++) {
        const cudaLaunchAttributeValue& v = c.attrs[i].val;
        if (ctl().arch < 900) return cudaErrorNotSupported;
        if (c.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) *early = v.programmaticStreamSerializationAllowed;
        else if (c.attrs[i].id != cudaLaunchAttributeClusterDimension || v.clusterDim.y != 1 || v.clusterDim.z != 1)
            return cudaErrorNotSupported;
        else *cluster = v.clusterDim.x;
    }
    bool good = *cluster >= 1 && *cluster <= MAX_CLUSTER && c.gridDim.x % *cluster == 0
                && (*cluster == 1 || c.blockDim.x * c.blockDim.y * c.blockDim.z % 32 == 0);
    if (good && *cluster > ctl().cluster_limit) return cudaErrorInvalidClusterSize;
    return good ? cudaSuccess : cudaErrorInvalidConfiguration;
}

bool launch_fails() {
    ctl().launches++;
    if (!ctl().fail_launch || --ctl().fail_launch) return false;
    ctl().failures++;
    return true;
}

double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

/* A graph's nodes, each after those it depends on. */
void replay(const Nodes& nodes) {
    std::vector<size_t> waits(nodes.size());
    std::vector<std::vector<int>> followers(nodes.size());
    std::set<int> ready;
    for (size_t i = 0; i < nodes.size(); i++) {
        waits[i] = nodes[i].after.size();
        for (int n : nodes[i].after) followers[(size_t)n].push_back((int)i);
        if (!waits[i]) ready.insert((int)i);
    }
    while (!ready.empty()) {
        auto pick = ready.begin();
        std::advance(pick, (long)choose(ready.size()));
        int i = *pick;
        ready.erase(pick);
        nodes[(size_t)i].work();
        for (int n : followers[(size_t)i])
            if (--waits[(size_t)n] == 0) ready.insert(n);
    }
}

/* Does every node come before one of `ends`? (A node's predecessors have smaller numbers.) */
bool all_joined(const Nodes& nodes, const std::vector<int>& ends) {
    std::vector<bool> joined(nodes.size());
    for (int n : ends) joined[(size_t)n] = true;
    for (size_t i = nodes.size(); i-- > 0;) {
        if (!joined[i]) return false;
        for (int n : nodes[i].after) joined[(size_t)n] = true;
    }
    return true;
}

} // namespace

cudaError_t cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
#define EMU_CASE(name, value, text) case name: return #name;
    switch (error) { EMU_ERRORS(EMU_CASE) }
#undef EMU_CASE
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
#define EMU_CASE(name, value, text) case name: return text;
    switch (error) { EMU_ERRORS(EMU_CASE) }
#undef EMU_CASE
    return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 0;
    ENTER();
    *count = ctl().devices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    ENTER();
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    ENTER();
    REQUIRE(device == 0, cudaErrorInvalidDevice);
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    ENTER();
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
    ENTER();
    REQUIRE(device == 0, cudaErrorInvalidDevice);
    int arch = ctl().arch;
    *prop = cudaDeviceProp{ "emulated device", ctl().memory, SHARED_PLAIN, shared_per_multiprocessor(), shared_limit(),
                            65536, 32, MAX_THREADS, { 1024, 1024, 64 }, { 0x7fffffff, 65535, 65535 }, arch / 100,
                            arch / 10 % 10, 4, threads_per_multiprocessor(), 4 << 20, 1, 1 };
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device) {
    ENTER();
    REQUIRE(device == 0, cudaErrorInvalidDevice);
    const std::map<int, int> values = {
        { cudaDevAttrMaxThreadsPerBlock, MAX_THREADS }, { cudaDevAttrMaxBlockDimX, 1024 },
        { cudaDevAttrMaxBlockDimY, 1024 }, { cudaDevAttrMaxBlockDimZ, 64 }, { cudaDevAttrMaxGridDimX, 0x7fffffff },
        { cudaDevAttrMaxGridDimY, 65535 }, { cudaDevAttrMaxGridDimZ, 65535 },
        { cudaDevAttrMaxSharedMemoryPerBlock, (int)SHARED_PLAIN }, { cudaDevAttrWarpSize, 32 },
        { cudaDevAttrMultiProcessorCount, 4 }, { cudaDevAttrL2CacheSize, 4 << 20 },
        { cudaDevAttrMaxThreadsPerMultiProcessor, threads_per_multiprocessor() },
        { cudaDevAttrComputeCapabilityMajor, ctl().arch / 100 },
        { cudaDevAttrComputeCapabilityMinor, ctl().arch / 10 % 10 },
        { cudaDevAttrMaxSharedMemoryPerMultiprocessor, (int)shared_per_multiprocessor() },
        { cudaDevAttrCooperativeLaunch, 0 }, { cudaDevAttrMaxSharedMemoryPerBlockOptin, (int)shared_limit() },
        { cudaDevAttrReservedSharedMemoryPerBlock, ctl().arch < 800 ? 0 : (int)SHARED_RESERVED },
        { cudaDevAttrMemoryPoolsSupported, 1 },
    };
    auto found = values.find(attr);
    REQUIRE(found != values.end(), cudaErrorInvalidValue);
    *value = found->second;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    ENTER();
    UNSAFE_IN_CAPTURE();
    ctl().syncs++;
    run_device();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t size) {
    ENTER();
    UNSAFE_IN_CAPTURE();
    return fail(allocate(p, size, DEVICE));
}
cudaError_t cudaHostAlloc(void** p, size_t size, unsigned flags) {
    ENTER();
    UNSAFE_IN_CAPTURE();
    return fail(allocate(p, size, flags & cudaHostAllocWriteCombined ? WRITE_COMBINED : PINNED));
}
cudaError_t cudaMallocHost(void** p, size_t size) { return cudaHostAlloc(p, size, cudaHostAllocDefault); }
static cudaError_t free_at_once(void* p, bool device) {
    cudaError_t entered = enter();
    if (!p) return fail(entered);
    UNSAFE_IN_CAPTURE();
    REQUIRE(owns(p, device), cudaErrorInvalidValue);
    ctl().syncs++;
    run_device();
    deallocate(p);
    return fail(entered);
}
cudaError_t cudaFree(void* p) { return free_at_once(p, true); }
cudaError_t cudaFreeHost(void* p) { return free_at_once(p, false); }
cudaError_t cudaMallocAsync(void** p, size_t size, cudaStream_t stream) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    if (s->capture) return fail(refuse_capture(s));
    return fail(allocate(p, size, DEVICE));
}
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream) {
    cudaError_t entered = enter();
    Stream s = find_stream(stream);
    if (!p) return fail(entered);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    REQUIRE(owns(p, true), cudaErrorInvalidValue);
    if (s->capture) return fail(refuse_capture(s));
    allocations[(uintptr_t)p].to_be_freed = true;
    cudaError_t pushed = push(s, [p] { deallocate(p); });
    return fail(entered ? entered : pushed);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    ENTER();
    *free_bytes = ctl().memory - device_bytes;
    *total_bytes = ctl().memory;
    return cudaSuccess;
}
/* The device may see write-combined memory at an address of its own. */
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
    ENTER();
    size_t room;
    Place place = place_of(p, &room);
    void* v = const_cast<void*>(p);
    *a = cudaPointerAttributes{ cudaMemoryTypeUnregistered, -1, nullptr, v };
    if (place == PINNED) *a = cudaPointerAttributes{ cudaMemoryTypeHost, 0, v, v };
    void* elsewhere = (void*)((uintptr_t)p ^ (uintptr_t)1 << 46);
    if (place == WRITE_COMBINED) *a = cudaPointerAttributes{ cudaMemoryTypeHost, 0, elsewhere, v };
    if (place == DEVICE) {
        const int device = std::prev(allocations.upper_bound((uintptr_t)p))->second.device;
        *a = cudaPointerAttributes{ cudaMemoryTypeDevice, device, device ? nullptr : v, nullptr };
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind kind) {
    ENTER();
    return fail(copy(Copy{ (char*)dst, n, (const char*)src, n, n, 1 }, kind, nullptr, true));
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER();
    return fail(copy(Copy{ (char*)dst, n, (const char*)src, n, n, 1 }, kind, stream, false));
}
cudaError_t cudaMemcpy2D(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                         cudaMemcpyKind kind) {
    ENTER();
    return fail(copy(Copy{ (char*)dst, dpitch, (const char*)src, spitch, width, height }, kind, nullptr, true));
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER();
    return fail(copy(Copy{ (char*)dst, dpitch, (const char*)src, spitch, width, height }, kind, stream, false));
}
cudaError_t cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream) {
    ENTER();
    return fail(fill(p, value, n, stream));
}

/* ---- Streams and events */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    ENTER();
    REQUIRE(stream && flags <= cudaStreamNonBlocking, cudaErrorInvalidValue);
    streams.push_back(new_stream(flags != cudaStreamNonBlocking));
    *stream = streams.back().get();
    stream_handles.insert(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    ENTER();
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    cudaError_t entered = enter();
    Stream s = find_stream(stream);
    REQUIRE(s && s != legacy && s != per_thread, cudaErrorInvalidResourceHandle);
    if (s->capture) s->capture->invalid = true;
    stream_handles.erase(stream);
    return fail(entered);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    if (s->capture) return fail(refuse_capture(s));
    UNSAFE_IN_CAPTURE();
    wait_for(s, s->queued);
    return cudaSuccess;
}
/* Each query lets the device do one operation more, so that a loop of them ends. */
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    if (s->capture) return fail(refuse_capture(s));
    UNSAFE_IN_CAPTURE();
    if (s->done == s->queued) return cudaSuccess;
    run_to(s, s->done + 1);
    return fail(cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s && events.count(event), cudaErrorInvalidResourceHandle);
    if (event->capture) {
        REQUIRE(s != legacy, cudaErrorStreamCaptureImplicit);
        REQUIRE(!event->capture->invalid, cudaErrorStreamCaptureInvalidated);
        REQUIRE(event->capture->origin, cudaErrorCapturedEvent); /* of a capture that has ended */
        REQUIRE(!s->capture || s->capture == event->capture, cudaErrorStreamCaptureMerge);
        s->capture = event->capture;
        for (int n : event->front)
            if (std::find(s->front.begin(), s->front.end(), n) == s->front.end()) s->front.push_back(n);
        return cudaSuccess;
    }
    if (s->capture) s->capture->invalid = true;
    REQUIRE(!s->capture, cudaErrorStreamCaptureIsolation);
    if (!event->recorded.stream) return cudaSuccess;
    return fail(push(s, [] {}, { event->recorded }));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* data) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    return fail(push(s, [fn, data] {
        shade_device(true);
        fn(data);
        shade_device(false);
    }));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    ENTER();
    REQUIRE(event && flags < 8, cudaErrorInvalidValue);
    *event = new CUevent_st{ !(flags & cudaEventDisableTiming), { nullptr, 0 }, nullptr, nullptr, {} };
    events.insert(*event);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    cudaError_t entered = enter();
    REQUIRE(events.erase(event), cudaErrorInvalidResourceHandle);
    delete event;
    return fail(entered);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s && events.count(event), cudaErrorInvalidResourceHandle);
    if (s->capture) {
        REQUIRE(!s->capture->invalid, cudaErrorStreamCaptureInvalidated);
        event->capture = s->capture;
        event->front = s->front;
        return cudaSuccess;
    }
    auto time = std::make_shared<double>(0);
    if (cudaError_t error = push(s, [time] { *time = now_ms(); })) return fail(error);
    event->recorded = After{ s, s->queued };
    event->time = time;
    event->capture = nullptr;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER();
    REQUIRE(events.count(event), cudaErrorInvalidResourceHandle);
    if (event->capture) event->capture->invalid = true;
    REQUIRE(!event->capture, cudaErrorCapturedEvent);
    UNSAFE_IN_CAPTURE();
    const Stream& s = event->recorded.stream;
    if (!s || s->done >= event->recorded.index) return cudaSuccess;
    run_to(s, s->done + 1);
    return fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER();
    REQUIRE(events.count(event), cudaErrorInvalidResourceHandle);
    if (event->capture) event->capture->invalid = true;
    REQUIRE(!event->capture, cudaErrorCapturedEvent);
    UNSAFE_IN_CAPTURE();
    const Stream& s = event->recorded.stream;
    if (s && s->done < event->recorded.index) wait_for(s, event->recorded.index);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    ENTER();
    for (cudaEvent_t e : { start, end }) {
        REQUIRE(events.count(e) && e->timing && e->recorded.stream, cudaErrorInvalidResourceHandle);
        REQUIRE(!e->capture, cudaErrorCapturedEvent);
    }
    for (cudaEvent_t e : { start, end }) REQUIRE(e->recorded.stream->done >= e->recorded.index, cudaErrorNotReady);
    *ms = (float)(*end->time - *start->time);
    return cudaSuccess;
}

/* ---- Capture and graphs */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    static unsigned long long captures = 0;
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    REQUIRE(s != legacy, cudaErrorStreamCaptureUnsupported);
    REQUIRE(!s->capture, cudaErrorIllegalState);
    s->capture = std::make_shared<Capture>(Capture{ {}, s.get(), mode, ++captures, false });
    s->front.clear();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    cudaError_t entered = enter();
    Stream s = find_stream(stream);
    REQUIRE(s && graph, s ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    *graph = nullptr;
    std::shared_ptr<Capture> c = s->capture;
    REQUIRE(c, cudaErrorIllegalState);
    if (c->origin != s.get()) c->invalid = true;
    REQUIRE(c->origin == s.get(), cudaErrorStreamCaptureUnmatched);
    bool joined = all_joined(c->nodes, s->front);
    c->origin = nullptr;
    for (const Stream& other : streams)
        if (other->capture == c) other->capture = nullptr, other->front.clear();
    REQUIRE(!entered, entered);      /* a failure ends the capture too */
    REQUIRE(!c->invalid, cudaErrorStreamCaptureInvalidated);
    REQUIRE(joined, cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st{ std::make_shared<Nodes>(std::move(c->nodes)) };
    graphs.insert(*graph);
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s && status, s ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    *status = !s->capture            ? cudaStreamCaptureStatusNone
              : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                     : cudaStreamCaptureStatusActive;
    if (id && s->capture) *id = s->capture->id;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    return cudaStreamGetCaptureInfo(stream, status, nullptr);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    ENTER();
    REQUIRE(exec && graphs.count(graph), cudaErrorInvalidValue);
    *exec = new CUgraphExec_st{ graph->nodes };
    execs.insert(*exec);
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(exec, graph, flags);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, cudaGraphNode_t*, char*, size_t) {
    return cudaGraphInstantiate(exec, graph, 0ull);
}
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream) {
    ENTER();
    REQUIRE(execs.count(exec) && find_stream(stream), cudaErrorInvalidValue);
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    ENTER();
    Stream s = find_stream(stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    REQUIRE(execs.count(exec), cudaErrorInvalidValue);
    REQUIRE(!launch_fails(), cudaErrorLaunchOutOfResources);
    std::shared_ptr<Nodes> nodes = exec->nodes;
    return fail(push(s, [nodes] { replay(*nodes); }));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    cudaError_t entered = enter();
    REQUIRE(execs.erase(exec), cudaErrorInvalidValue);
    delete exec;
    return fail(entered);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    cudaError_t entered = enter();
    REQUIRE(graphs.erase(graph), cudaErrorInvalidValue);
    delete graph;
    return fail(entered);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    ENTER();
    REQUIRE(graphs.count(graph) && !nodes, cudaErrorInvalidValue); /* the number alone */
    *count = graph->nodes->size();
    return cudaSuccess;
}

/* ---- Kernels */

cudaError_t cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    ENTER();
    bool known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
    *f = known ? (void*)cuTensorMapEncodeTiled : nullptr;
    if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    ENTER();
    REQUIRE(kernel, cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    REQUIRE(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, cudaErrorInvalidValue);
    REQUIRE(value >= 0 && (size_t)value <= shared_limit(), cudaErrorInvalidValue);
    shared_allowed[kernel] = std::max((size_t)value, SHARED_PLAIN);
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void* kernel) {
    ENTER();
    REQUIRE(kernel, cudaErrorInvalidDeviceFunction);
    auto allowed = shared_allowed.find(kernel);
    size_t shared = allowed == shared_allowed.end() ? SHARED_PLAIN : allowed->second;
    *a = cudaFuncAttributes{ 0, 0, 0, MAX_THREADS, ctl().registers, ctl().arch / 10, ctl().arch / 10, 0, (int)shared, -1 };
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared) {
    ENTER();
    REQUIRE(kernel && blocks && threads > 0, cudaErrorInvalidValue);
    int by_threads = threads_per_multiprocessor() / ((threads + 31) / 32 * 32);
    size_t by_shared = shared_per_multiprocessor() / std::max((size_t)1, shared + (ctl().arch < 800 ? 0 : SHARED_RESERVED));
    *blocks = threads > MAX_THREADS ? 0 : (int)std::min((size_t)std::min(by_threads, 16), by_shared);
    return cudaSuccess;
}
cudaError_t emu_launch(const cudaLaunchConfig_t* config, const void* kernel, emu_work* work) {
    std::shared_ptr<emu_work> owned(work);
    ENTER();
    REQUIRE(config && kernel, cudaErrorInvalidValue);
    Stream s = find_stream(config->stream);
    REQUIRE(s, cudaErrorInvalidResourceHandle);
    unsigned cluster;
    bool early;
    if (cudaError_t error = check_launch(*config, kernel)) return fail(error);
    if (cudaError_t error = attributes_of(*config, &cluster, &early)) return fail(error);
    REQUIRE(!launch_fails(), cudaErrorLaunchOutOfResources);
    dim3 grid = config->gridDim, block = config->blockDim;
    size_t shared = config->dynamicSmemBytes;
    return fail(push(s, [=] { run_kernel(owned.get(), grid, block, shared, cluster, early); }));
}

/* ---- cuBLAS ---------------------------------------------------------------------------------------------- */

struct cublasContext { cudaStream_t stream; };

namespace {

struct Matrix {
    const void* data;
    cudaDataType type;
    long long ld, stride;
    size_t element_size() const { return type == CUDA_R_32F ? 4 : 2; }
    const char* at(long long i, long long j, long long batch) const {
        return (const char*)data + (size_t)(batch * stride + i + j * ld) * element_size();
    }
    double load(long long i, long long j, long long batch) const {
        uint32_t bits = 0;
        memcpy(&bits, at(i, j, batch), element_size());
        if (type == CUDA_R_32F) return (double)emu_bits<float>(bits);
        return (double)(type == CUDA_R_16F ? ampi_ptx_f32_from_f16((uint16_t)bits) : bf16_value((uint16_t)bits));
    }
    void store(long long i, long long j, long long batch, float value) const {
        uint32_t bits = emu_bits<uint32_t>(value);
        if (type == CUDA_R_16F) bits = ampi_ptx_f16_from_f32(value);
        if (type == CUDA_R_16BF) bits = ampi_ptx_bf16_from_f32(value);
        memcpy(const_cast<char*>(at(i, j, batch)), &bits, element_size());
    }
};

struct Gemm {
    bool ta, tb;
    int m, n, k, count;
    float alpha, beta;
    Matrix a, b, c;
    void run() const {
        for (int batch = 0; batch < count; batch++) run_one(batch);
    }
    void run_one(int batch) const {
        std::vector<double> pa((size_t)m * k), pb((size_t)n * k);
        for (int i = 0; i < m; i++)
            for (int l = 0; l < k; l++) pa[(size_t)i * k + l] = ta ? a.load(l, i, batch) : a.load(i, l, batch);
        for (int j = 0; j < n; j++)
            for (int l = 0; l < k; l++) pb[(size_t)j * k + l] = tb ? b.load(j, l, batch) : b.load(l, j, batch);
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++) {
                double sum = 0;
                for (int l = 0; l < k; l++) sum += pa[(size_t)i * k + l] * pb[(size_t)j * k + l];
                sum *= (double)alpha;
                if (beta != 0) sum += (double)beta * c.load(i, j, batch);
                c.store(i, j, batch, (float)sum);
            }
    }
};

cublasStatus_t check_gemm(const Gemm& g, cublasComputeType_t compute) {
    const std::set<int> types = { CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF };
    if (g.m < 0 || g.n < 0 || g.k < 0 || g.count < 0) return CUBLAS_STATUS_INVALID_VALUE;
    if (g.a.ld < std::max(1, g.ta ? g.k : g.m) || g.b.ld < std::max(1, g.tb ? g.n : g.k) || g.c.ld < std::max(1, g.m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (compute == CUBLAS_COMPUTE_16F || !types.count(g.a.type) || g.a.type != g.b.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (g.c.type != CUDA_R_32F && g.c.type != g.a.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (g.a.type == CUDA_R_16BF && ctl().arch < 800) return CUBLAS_STATUS_ARCH_MISMATCH;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t enter_blas(cublasHandle_t handle) {
    if (!blas_handles.count(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    return injected() ? CUBLAS_STATUS_INTERNAL_ERROR : CUBLAS_STATUS_SUCCESS;
}

} // namespace
#define ENTER_BLAS() do { if (cublasStatus_t entered = enter_blas(handle)) return entered; } while (0)

const char* cublasGetStatusName(cublasStatus_t status) {
#define EMU_CASE(name, value) case name: return #name;
    switch (status) { EMU_CUBLAS_STATUSES(EMU_CASE) }
#undef EMU_CASE
    return "unrecognized cuBLAS status";
}
const char* cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
    *handle = nullptr;
    if (injected() || !ctl().devices) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (break_captures(false)) return CUBLAS_STATUS_ALLOC_FAILED;
    if (ctl().fail_alloc && --ctl().fail_alloc == 0) return ctl().failures++, CUBLAS_STATUS_ALLOC_FAILED;
    *handle = new cublasContext{ nullptr };
    blas_handles.insert(*handle);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
    cublasStatus_t entered = enter_blas(handle);
    if (blas_handles.erase(handle)) delete handle;
    return entered;
}
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version) {
    if (handle) ENTER_BLAS();
    *version = 120400;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
    ENTER_BLAS();
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream) {
    ENTER_BLAS();
    *stream = handle->stream;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t) {
    ENTER_BLAS();
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes) {
    ENTER_BLAS();
    size_t room;
    bool good = bytes == 0 || ((uintptr_t)workspace % 256 == 0 && place_of(workspace, &room) == DEVICE && bytes <= room);
    return good ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode) {
    ENTER_BLAS();
    return mode == CUBLAS_POINTER_MODE_HOST ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                          int m, int n, int k, const void* alpha, const void* A, cudaDataType Atype,
                                          int lda, long long strideA, const void* B, cudaDataType Btype, int ldb,
                                          long long strideB, const void* beta, void* C, cudaDataType Ctype, int ldc,
                                          long long strideC, int count, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
    ENTER_BLAS();
    if (!alpha || !beta) return CUBLAS_STATUS_INVALID_VALUE;
    Gemm g = { transa != CUBLAS_OP_N, transb != CUBLAS_OP_N, m, n, k, count,
               *(const float*)alpha, *(const float*)beta,
               { A, Atype, lda, strideA }, { B, Btype, ldb, strideB }, { C, Ctype, ldc, strideC } };
    if (cublasStatus_t status = check_gemm(g, compute)) return status;
    if (!m || !n || !count) return CUBLAS_STATUS_SUCCESS;
    if (launch_fails()) return CUBLAS_STATUS_EXECUTION_FAILED;
    Stream s = find_stream(handle->stream);
    if (!s || push(s, [g] { g.run(); })) return CUBLAS_STATUS_EXECUTION_FAILED;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void* alpha, const void* A, cudaDataType Atype, int lda, const void* B,
                            cudaDataType Btype, int ldb, const void* beta, void* C, cudaDataType Ctype, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0, beta,
                                      C, Ctype, ldc, 0, 1, compute, algo);
}

/* ---- Controls -------------------------------------------------------------------------------------------- */

int emu_set_arch(int arch) {
    if (ctl().arch && ctl().arch != arch) die("files built for sm_%d and sm_%d are linked", ctl().arch / 10, arch / 10);
    return ctl().arch = arch;
}
void emu_set_schedule(int schedule) { ctl().set_schedule(schedule); }
void emu_set_eager(int eager) { ctl().eager = eager != 0; }
void emu_set_device_count(int count) { ctl().devices = count; }
void emu_set_memory_limit(size_t bytes) { ctl().memory = bytes; }
void emu_set_registers(int count) { ctl().registers = count; }
void emu_set_cluster_limit(unsigned most) { ctl().cluster_limit = most; }
void emu_move_to_device(const void* p, int device) { allocations.at((uintptr_t)p).device = device; }
long emu_wgmma_count() { return ctl().wgmmas; }
long emu_sync_count() { return ctl().syncs; }
long emu_launch_count() { return ctl().launches; }
long emu_kernel_count() { return ctl().kernels; }
long emu_alloc_count() { return ctl().allocs; }
size_t emu_live_bytes() { return live_bytes; }
int emu_live_objects() {
    return (int)(stream_handles.size() + events.size() + graphs.size() + execs.size() + blas_handles.size());
}
void emu_fail_alloc_at(long k) { ctl().fail_alloc = k; }
void emu_fail_launch_at(long k) { ctl().fail_launch = k; }
void emu_fail_any_call_at(long k) { ctl().fail_call = k; }
long emu_failures() { return ctl().failures; }
