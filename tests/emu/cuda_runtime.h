/* cuda_runtime.h - a small CUDA runtime that runs kernels on the CPU, thread by thread. For tests only.

   It stands in for the header of the CUDA toolkit: `g++ -std=c++14 -Itests/emu test.cpp tests/emu/emu.cpp`. With
   -fsanitize=address every shared-memory, device-memory and host access of a kernel is checked. The rules that
   the hardware leaves open are used against the program: work on a stream runs as late as possible, asynchronous
   copies land at their wait, fresh memory is NaN, and the order of threads and blocks can be changed
   (emu_set_schedule). Misuse that is undefined on the hardware (a barrier that not all threads reach, a
   misaligned ldmatrix, ...) ends the process with a sentence on stderr and the exit status EMU_EXIT.

   One host thread. One device. Kernels take no static __shared__ variables: AMPI_SHARED gives the dynamic ones.
   Names that CUDA itself does not have begin with emu_ (the controls of a test, at the end of the file). */
#ifndef AMP_EMU_CUDA_RUNTIME_H
#define AMP_EMU_CUDA_RUNTIME_H

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define AMP_CUDA_EMU 1
#define CUDART_VERSION 12040
#ifndef AMP_EMU_ARCH
#define AMP_EMU_ARCH 800
#endif
#define __CUDA_ARCH__ AMP_EMU_ARCH /* host and device are compiled in one pass */
#if AMP_EMU_ARCH == 900
#define __CUDA_ARCH_FEAT_SM90_ALL 1 /* as sm_90a */
#endif

/* ---- The language ---------------------------------------------------------------------------------------- */

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define AMPI_SHARED(type, name) type* name = static_cast<type*>(emu_shared())

#define EMU_VECTOR(T, name)                                                                             \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                  \
    struct name##3 { T x, y, z; };                                                                      \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                  \
    inline name##2 make_##name##2(T x, T y) { return name##2{ x, y }; }                                 \
    inline name##3 make_##name##3(T x, T y, T z) { return name##3{ x, y, z }; }                         \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return name##4{ x, y, z, w }; }
EMU_VECTOR(signed char, char)
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(short, short)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(long long, longlong)
EMU_VECTOR(unsigned long long, ulonglong)
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
#undef EMU_VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned nx = 1, unsigned ny = 1, unsigned nz = 1) : x(nx), y(ny), z(nz) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

/* The block's dynamic shared memory: exactly the launch's size, poisoned at the block's start. */
void* emu_shared();

/* Barriers. The line of the call is kept: threads that wait at two different barriers are an error. */
#define EMU_LINE int line = __builtin_LINE()
void __syncthreads(EMU_LINE);
int __syncthreads_or(int predicate, EMU_LINE);
int __syncthreads_and(int predicate, EMU_LINE);
int __syncthreads_count(int predicate, EMU_LINE);
void __syncwarp(unsigned mask = 0xffffffffu, EMU_LINE);

/* Warp votes and shuffles. A lane that has exited is not waited for; what is read from it is 0xff bytes. */
unsigned __ballot_sync(unsigned mask, int predicate, EMU_LINE);
inline int __any_sync(unsigned mask, int predicate, EMU_LINE) { return __ballot_sync(mask, predicate, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, EMU_LINE) { return __ballot_sync(mask, !predicate, line) == 0; }
unsigned __activemask(); /* the calling lane alone: all that is guaranteed */

enum emu_shuffle { emu_shuffle_index, emu_shuffle_up, emu_shuffle_down, emu_shuffle_xor };
uint64_t emu_shfl(emu_shuffle kind, unsigned mask, uint64_t value, unsigned operand, int width, int line);
template <typename T>
T emu_shfl_any(emu_shuffle kind, unsigned mask, T value, unsigned operand, int width, int line) {
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "4 or 8 bytes are shuffled");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = emu_shfl(kind, mask, bits, operand, width, line);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <typename T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32, EMU_LINE) {
    return emu_shfl_any(emu_shuffle_index, mask, value, (unsigned)lane, width, line);
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_LINE) {
    return emu_shfl_any(emu_shuffle_up, mask, value, delta, width, line);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_LINE) {
    return emu_shfl_any(emu_shuffle_down, mask, value, delta, width, line);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_LINE) {
    return emu_shfl_any(emu_shuffle_xor, mask, value, (unsigned)lanes, width, line);
}

/* Atomics: threads change over only inside this runtime, so plain code is atomic. Only CUDA's own types. */
#define EMU_ATOMIC(T, name, update)                                                                     \
    inline T name(T* p, T v) { T old = *p; *p = (T)(update); return old; }
#define EMU_ATOMIC_INT(T)                                                                               \
    EMU_ATOMIC(T, atomicMin, v < old ? v : old)                                                         \
    EMU_ATOMIC(T, atomicMax, v > old ? v : old)                                                         \
    EMU_ATOMIC(T, atomicExch, v)                                                                        \
    EMU_ATOMIC(T, atomicAnd, old & v)                                                                   \
    EMU_ATOMIC(T, atomicOr, old | v)                                                                    \
    EMU_ATOMIC(T, atomicXor, old ^ v)                                                                   \
    inline T atomicCAS(T* p, T compare, T v) { T old = *p; if (old == compare) *p = v; return old; }
EMU_ATOMIC_INT(int)
EMU_ATOMIC_INT(unsigned)
EMU_ATOMIC_INT(unsigned long long)
EMU_ATOMIC(int, atomicAdd, (unsigned)old + (unsigned)v)
EMU_ATOMIC(unsigned, atomicAdd, old + v)
EMU_ATOMIC(unsigned long long, atomicAdd, old + v)
EMU_ATOMIC(float, atomicAdd, old + v)
EMU_ATOMIC(double, atomicAdd, old + v)
EMU_ATOMIC(int, atomicSub, (unsigned)old - (unsigned)v)
EMU_ATOMIC(unsigned, atomicSub, old - v)
EMU_ATOMIC(unsigned, atomicInc, old >= v ? 0 : old + 1)
EMU_ATOMIC(float, atomicExch, v)
#undef EMU_ATOMIC
#undef EMU_ATOMIC_INT
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

template <typename T> T __ldg(const T* p) { return *p; }
template <typename T> T __ldcs(const T* p) { return *p; }
template <typename T> T __ldcg(const T* p) { return *p; }
template <typename T> void __stcs(T* p, T v) { *p = v; }
template <typename T> void __stcg(T* p, T v) { *p = v; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1u) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    __extension__ typedef unsigned __int128 wide;
    return (unsigned long long)((wide)a * b >> 64);
}

template <typename To, typename From> To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits in another type");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
inline int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return (int)(__double_as_longlong(x) & 0xffffffff); }

/* Arithmetic that is never contracted into a fused multiply-add: through memory, so that no compiler can. */
#define EMU_ARITHMETIC(T, p, s)                                                                         \
    inline T __##p##add_rn(T a, T b) { volatile T x = a, y = b, r = x + y; return r; }                  \
    inline T __##p##sub_rn(T a, T b) { volatile T x = a, y = b, r = x - y; return r; }                  \
    inline T __##p##mul_rn(T a, T b) { volatile T r = a * b; return r; }                                \
    inline T __##p##div_rn(T a, T b) { volatile T r = a / b; return r; }                                \
    inline T __##p##sqrt_rn(T a) { return std::sqrt(a); }                                               \
    inline T __##p##rcp_rn(T a) { return (T)1 / a; }                                                    \
    inline T __##s##_rn(T a, T b, T c) { return std::fma(a, b, c); }
EMU_ARITHMETIC(float, f, fmaf)
EMU_ARITHMETIC(double, d, fma)
#undef EMU_ARITHMETIC
inline float rsqrtf(float x) { return (float)(1.0 / std::sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __double2float_rn(double x) { return (float)x; }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }

#define EMU_MIN_MAX(R, A, B)                                                                            \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }                                        \
    inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(unsigned, unsigned, int)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef EMU_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

/* ---- PTX instructions, as documented in the PTX ISA ------------------------------------------------------ */

/* ldmatrix.sync.aligned.m8n8.x4/x2[.trans].shared.b16: 8x8 matrices of 16-bit elements; lane 8j+i names row i of
   matrix j. All 32 lanes take part. */
void ampi_ptx_ldmatrix_x4(uint32_t (&r)[4], const void* smem, EMU_LINE);
void ampi_ptx_ldmatrix_x2(uint32_t (&r)[2], const void* smem, EMU_LINE);
void ampi_ptx_ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem, EMU_LINE);
void ampi_ptx_ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem, EMU_LINE);

/* mma.sync.aligned.row.col.f32.(f16|bf16).(f16|bf16).f32, D += A B: m16n8k16, and m16n8k8. */
void ampi_ptx_mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_LINE);
void ampi_ptx_mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_LINE);
void ampi_ptx_mma_f16_k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b, EMU_LINE);

/* cp.async: `bytes` of 16 (8, 4) are read, the rest is zero. The copy lands at the wait that asks for it; until
   then its destination holds NaNs. */
void ampi_ptx_cp_async16(void* smem, const void* gmem, int bytes, EMU_LINE);
void ampi_ptx_cp_async8(void* smem, const void* gmem, int bytes, EMU_LINE);
void ampi_ptx_cp_async4(void* smem, const void* gmem, int bytes, EMU_LINE);
void ampi_ptx_cp_async_commit();
void emu_cp_async_wait(int groups_left);
template <int N> void ampi_ptx_cp_async_wait() { emu_cp_async_wait(N); }

/* atom.acq_rel.add of 1. */
inline uint32_t ampi_ptx_count(uint32_t* counter) { return atomicAdd(counter, 1u); }

/* griddepcontrol. Kernels run one after the other; one that may start early is told if a thread ends without it. */
void ampi_ptx_grid_wait();

/* cvt, round to nearest even; a NaN becomes the canonical one. f16x2 packs lo into the low half. */
float ampi_ptx_f32_from_f16(uint16_t h);
uint16_t ampi_ptx_f16_from_f32(float f);
uint16_t ampi_ptx_bf16_from_f32(float f);
inline uint32_t ampi_ptx_f16x2_from_f32(float lo, float hi) {
    return ampi_ptx_f16_from_f32(lo) | (uint32_t)ampi_ptx_f16_from_f32(hi) << 16;
}
inline uint32_t ampi_ptx_bf16x2_from_f32(float lo, float hi) {
    return ampi_ptx_bf16_from_f32(lo) | (uint32_t)ampi_ptx_bf16_from_f32(hi) << 16;
}
/* ex2.approx.ftz */
inline float ampi_ptx_exp2(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }
inline uint32_t ampi_ptx_add_f16x2(uint32_t a, uint32_t b) {
    return ampi_ptx_f16x2_from_f32(ampi_ptx_f32_from_f16((uint16_t)a) + ampi_ptx_f32_from_f16((uint16_t)b),
                                   ampi_ptx_f32_from_f16((uint16_t)(a >> 16)) + ampi_ptx_f32_from_f16((uint16_t)(b >> 16)));
}
float emu_f32_from_bf16(uint32_t h);
inline uint32_t ampi_ptx_add_bf16x2(uint32_t a, uint32_t b) {
    return ampi_ptx_bf16x2_from_f32(emu_f32_from_bf16(a & 0xffffu) + emu_f32_from_bf16(b & 0xffffu),
                                    emu_f32_from_bf16(a >> 16) + emu_f32_from_bf16(b >> 16));
}

/* ---- PTX instructions of Hopper, see amp_cuda.cuh -------------------------------------------------------- */

struct CUtensorMap;
uint32_t ampi_ptx_shared(const void* p);

/* What may be misused ends the process: a barrier that was never made or not published, more arrivals or bytes than it
   waits for, a store of what was not fenced, registers read before their wgmma is waited for (they are NaN). */
void ampi_ptx_mbarrier_init(uint64_t* barrier, uint32_t count, EMU_LINE);
void ampi_ptx_mbarrier_publish();
void ampi_ptx_mbarrier_expect(uint64_t* barrier, uint32_t bytes, EMU_LINE);
void ampi_ptx_mbarrier_arrive(uint64_t* barrier, EMU_LINE);
void ampi_ptx_mbarrier_wait(uint64_t* barrier, uint32_t parity, EMU_LINE);

inline void ampi_ptx_tma_prefetch(const CUtensorMap*) {}
void ampi_ptx_tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z, EMU_LINE);
void ampi_ptx_tma_store(const CUtensorMap* map, const void* from, int x, int y, int z, EMU_LINE);
void ampi_ptx_bulk_commit();
void emu_bulk_wait_read(int groups_left);
template <int N> void ampi_ptx_bulk_wait_read() { emu_bulk_wait_read(N); }
void ampi_ptx_fence_async();

void ampi_ptx_stmatrix_x4(void* p, const uint32_t (&r)[4], EMU_LINE);
int ampi_ptx_elect(EMU_LINE);
void ampi_ptx_cluster_sync(EMU_LINE);
void ampi_ptx_group_sync(uint32_t group, uint32_t threads, EMU_LINE);
float4 ampi_ptx_load_there(const void* p, uint32_t rank, EMU_LINE);
void emu_set_warp_registers(int count, int line);
template <int N> void ampi_ptx_give_registers(EMU_LINE) { emu_set_warp_registers(N, line); }
template <int N> void ampi_ptx_take_registers(EMU_LINE) { emu_set_warp_registers(N, line); }

void emu_wgmma(float* d, int n, int trans_a, int trans_b, int bf16, uint64_t a, uint64_t b, int add, int line);
template <int TRANS_A, int TRANS_B, int BF16, int M>
void ampi_ptx_wgmma(float (&d)[M], uint64_t a, uint64_t b, int add, EMU_LINE) {
    emu_wgmma(d, 2 * M, TRANS_A, TRANS_B, BF16, a, b, add, line);
}
void ampi_ptx_wgmma_fence(EMU_LINE);
void ampi_ptx_wgmma_commit(EMU_LINE);
void emu_wgmma_wait(int groups_left, int line);
template <int N> void ampi_ptx_wgmma_wait(EMU_LINE) { emu_wgmma_wait(N, line); }
template <int M> void ampi_ptx_wgmma_wait_all(float (&)[M], EMU_LINE) { emu_wgmma_wait(0, line); }

/* ---- The host's runtime ---------------------------------------------------------------------------------- */

#define EMU_ERRORS(X)                                                                                   \
    X(cudaSuccess, 0, "no error")                                                                       \
    X(cudaErrorInvalidValue, 1, "invalid argument")                                                     \
    X(cudaErrorMemoryAllocation, 2, "out of memory")                                                    \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                               \
    X(cudaErrorInvalidPitchValue, 12, "invalid pitch argument")                                         \
    X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                         \
    X(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version")  \
    X(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                    \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                     \
    X(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device") \
    X(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                            \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                   \
    X(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state")             \
    X(cudaErrorNotReady, 600, "device not ready")                                                       \
    X(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                         \
    X(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")                    \
    X(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                        \
    X(cudaErrorNotSupported, 801, "operation not supported")                                            \
    X(cudaErrorInvalidClusterSize, 912, "cluster misconfiguration")                                     \
    X(cudaErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")       \
    X(cudaErrorStreamCaptureInvalidated, 901, "operation failed due to a previous error during capture")\
    X(cudaErrorStreamCaptureMerge, 902, "operation would result in a merge of separate capture sequences") \
    X(cudaErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began")     \
    X(cudaErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                        \
    X(cudaErrorStreamCaptureIsolation, 905, "dependency created on uncaptured work in another stream")  \
    X(cudaErrorStreamCaptureImplicit, 906, "operation would make the legacy stream depend on a capturing stream") \
    X(cudaErrorCapturedEvent, 907, "operation not permitted on an event last recorded in a capturing stream") \
    X(cudaErrorUnknown, 999, "unknown error")
#define EMU_ENUM(name, value, text) name = value,
enum cudaError { EMU_ERRORS(EMU_ENUM) };
#undef EMU_ENUM
typedef cudaError cudaError_t;

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
typedef struct CUgraphNode_st* cudaGraphNode_t;
typedef void (*cudaHostFn_t)(void*);
#define cudaStreamLegacy ((cudaStream_t)0x1)
#define cudaStreamPerThread ((cudaStream_t)0x2)

enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum { cudaEventRecordDefault = 0, cudaEventWaitDefault = 0 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };
enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0, cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2, cudaMemoryTypeManaged = 3
};
struct cudaPointerAttributes { cudaMemoryType type; int device; void* devicePointer; void* hostPointer; };
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeThreadLocal = 1, cudaStreamCaptureModeRelaxed = 2
};
enum cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1, cudaStreamCaptureStatusInvalidated = 2
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA, maxDynamicSharedSizeBytes;
    int preferredShmemCarveout;
};
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxBlockDimX = 2, cudaDevAttrMaxBlockDimY = 3,
    cudaDevAttrMaxBlockDimZ = 4, cudaDevAttrMaxGridDimX = 5, cudaDevAttrMaxGridDimY = 6, cudaDevAttrMaxGridDimZ = 7,
    cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10, cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrL2CacheSize = 38, cudaDevAttrMaxThreadsPerMultiProcessor = 39,
    cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrCooperativeLaunch = 95,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97, cudaDevAttrReservedSharedMemoryPerBlock = 111,
    cudaDevAttrMemoryPoolsSupported = 115
};
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin;
    int regsPerBlock, warpSize, maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], major, minor;
    int multiProcessorCount, maxThreadsPerMultiProcessor, l2CacheSize, concurrentKernels, unifiedAddressing;
};

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attr, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);

cudaError_t cudaMalloc(void** p, size_t size);
cudaError_t cudaFree(void* p);
cudaError_t cudaMallocAsync(void** p, size_t size, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* p, cudaStream_t stream);
cudaError_t cudaMallocHost(void** p, size_t size);
cudaError_t cudaHostAlloc(void** p, size_t size, unsigned flags);
cudaError_t cudaFreeHost(void* p);
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p);
template <typename T> cudaError_t cudaMalloc(T** p, size_t size) { return cudaMalloc((void**)p, size); }
template <typename T> cudaError_t cudaMallocAsync(T** p, size_t size, cudaStream_t stream) {
    return cudaMallocAsync((void**)p, size, stream);
}
template <typename T> cudaError_t cudaMallocHost(T** p, size_t size, unsigned flags = 0) {
    return cudaHostAlloc((void**)p, size, flags);
}
template <typename T> cudaError_t cudaHostAlloc(T** p, size_t size, unsigned flags) {
    return cudaHostAlloc((void**)p, size, flags);
}

cudaError_t cudaMemcpy(void* dst, const void* src, size_t n, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t n, cudaMemcpyKind kind, cudaStream_t stream = 0);
cudaError_t cudaMemcpy2D(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = 0);
cudaError_t cudaMemset(void* p, int value, size_t n);
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t stream = 0);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* data);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = 0);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end);
cudaError_t cudaEventDestroy(cudaEvent_t event);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id = 0);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, cudaGraphNode_t* error_node, char* log,
                                 size_t log_size);
cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count);

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          size_t shared);
template <typename... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute((const void*)kernel, attribute, value);
}
template <typename... P> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(P...)) {
    return cudaFuncGetAttributes(attributes, (const void*)kernel);
}
template <typename... P>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(P...), int threads,
                                                          size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, (const void*)kernel, threads, shared);
}

/* ---- Launch ---------------------------------------------------------------------------------------------- */

enum cudaLaunchAttributeID {
    cudaLaunchAttributeIgnore = 0, cudaLaunchAttributeClusterDimension = 4, cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
    char pad[64];
    struct { unsigned x, y, z; } clusterDim;
    int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute { cudaLaunchAttributeID id; char pad[4]; cudaLaunchAttributeValue val; };
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs; /* clusters in x, an early start; each once */
};

enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
cudaError_t cudaGetDriverEntryPoint(const char* name, void** f, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* found = 0);

/* A kernel with its arguments; thread() is one thread's run. */
struct emu_work {
    virtual void thread() = 0;
    virtual ~emu_work() {}
};

template <typename... P> struct emu_call : emu_work {
    void (*kernel)(P...);
    std::tuple<typename std::decay<P>::type...> args;
    template <typename... A> emu_call(void (*k)(P...), A&&... a) : kernel(k), args(static_cast<P>(a)...) {}
    void thread() override { apply(std::index_sequence_for<P...>()); }
    template <size_t... I> void apply(std::index_sequence<I...>) { kernel(std::get<I>(args)...); }
    static void* operator new(size_t size) { return aligned_alloc(64, (size + 63) / 64 * 64); } /* for tensor maps */
    static void operator delete(void* p) { free(p); }
};

/* Takes `work` over. */
cudaError_t emu_launch(const cudaLaunchConfig_t* config, const void* kernel, emu_work* work);

template <typename... P, typename... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), A&&... args) {
    static_assert(sizeof...(P) == sizeof...(A), "a kernel gets all its arguments");
    static_assert(sizeof(std::tuple<P...>) <= 4096, "kernel arguments take at most 4096 bytes");
    return emu_launch(config, (const void*)kernel, new emu_call<P...>(kernel, args...));
}

/* ---- Controls for tests ---------------------------------------------------------------------------------- */

#define EMU_EXIT 86 /* the exit status of a misuse report */

/* The order of threads, blocks and independent streams: forward, reverse, deep (a warp goes on as far as it can before
   another begins), or any positive seed for a random one. The environment variable EMU_SCHEDULE (forward, reverse,
   deep, or a number) sets it at the start. */
enum { EMU_FORWARD = 0, EMU_REVERSE = -1, EMU_DEEP = -2 };
void emu_set_schedule(int schedule);
void emu_set_eager(int eager);             /* 1: work runs in the call that queues it; 0: as late as it may */
void emu_set_device_count(int count);      /* 0 or 1; EMU_DEVICES at the start */
void emu_set_memory_limit(size_t bytes);   /* the device's size, at first 4 GiB */
void emu_set_registers(int count);         /* of every kernel, as cudaFuncGetAttributes tells; at first 168 */
void emu_set_cluster_limit(unsigned most); /* blocks of a cluster; a launch of larger ones is refused; at first 8 */
void emu_move_to_device(const void* p, int device); /* what cudaMalloc gave; calls go to device 0, which reaches no other */
long emu_wgmma_count();                    /* wgmma instructions, counted once for each warp */
long emu_sync_count();                     /* times the host waited for the device */
long emu_launch_count();                   /* kernel launches, and graph launches, that the host asked for */
long emu_kernel_count();                   /* kernels that ran, those of graphs included */
long emu_alloc_count();                    /* successful allocations, device and pinned host */
size_t emu_live_bytes();                   /* device and pinned host bytes not freed */
int emu_live_objects();                    /* streams, events, graphs and cuBLAS handles not destroyed */
/* The k-th call from now (1 is the next) fails, once; 0 turns it off. A call that frees or destroys does its work
   all the same. cudaGetLastError and the like never fail. */
void emu_fail_alloc_at(long k);
void emu_fail_launch_at(long k);
void emu_fail_any_call_at(long k);
long emu_failures();                       /* failures injected so far */

/* Every file that is linked must be built for the same AMP_EMU_ARCH. */
int emu_set_arch(int arch);
#ifndef EMU_IMPLEMENTATION
static const int emu_arch_of_this_file __attribute__((unused)) = emu_set_arch(AMP_EMU_ARCH);
#endif

#endif
