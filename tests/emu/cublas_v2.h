/* cublas_v2.h - the part of cuBLAS that a matrix product needs, computed in double precision. For tests only. */
#ifndef AMP_EMU_CUBLAS_V2_H
#define AMP_EMU_CUBLAS_V2_H

#include "cuda_runtime.h"

#define EMU_CUBLAS_STATUSES(X)                                                                          \
    X(CUBLAS_STATUS_SUCCESS, 0)                                                                         \
    X(CUBLAS_STATUS_NOT_INITIALIZED, 1)                                                                 \
    X(CUBLAS_STATUS_ALLOC_FAILED, 3)                                                                    \
    X(CUBLAS_STATUS_INVALID_VALUE, 7)                                                                   \
    X(CUBLAS_STATUS_ARCH_MISMATCH, 8)                                                                   \
    X(CUBLAS_STATUS_MAPPING_ERROR, 11)                                                                  \
    X(CUBLAS_STATUS_EXECUTION_FAILED, 13)                                                               \
    X(CUBLAS_STATUS_INTERNAL_ERROR, 14)                                                                 \
    X(CUBLAS_STATUS_NOT_SUPPORTED, 15)                                                                  \
    X(CUBLAS_STATUS_LICENSE_ERROR, 16)
#define EMU_ENUM(name, value) name = value,
typedef enum { EMU_CUBLAS_STATUSES(EMU_ENUM) } cublasStatus_t;
#undef EMU_ENUM

typedef struct cublasContext* cublasHandle_t;
typedef enum { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 } cudaDataType_t;
typedef cudaDataType_t cudaDataType;
typedef enum { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1, CUBLAS_OP_C = 2 } cublasOperation_t;
typedef enum {
    CUBLAS_DEFAULT_MATH = 0, CUBLAS_TENSOR_OP_MATH = 1, CUBLAS_PEDANTIC_MATH = 2, CUBLAS_TF32_TENSOR_OP_MATH = 3,
    CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
} cublasMath_t;
typedef enum {
    CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_PEDANTIC = 69,
    CUBLAS_COMPUTE_32F_FAST_16F = 74, CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77
} cublasComputeType_t;
typedef enum { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 } cublasGemmAlgo_t;
typedef enum { CUBLAS_POINTER_MODE_HOST = 0, CUBLAS_POINTER_MODE_DEVICE = 1 } cublasPointerMode_t;

cublasStatus_t cublasCreate(cublasHandle_t* handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t* stream);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes);
cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode); /* host only */
const char* cublasGetStatusName(cublasStatus_t status);
const char* cublasGetStatusString(cublasStatus_t status);

/* C = alpha op(A) op(B) + beta C, column-major: op(A) m x k, op(B) k x n. A and B are both 16F, 16BF or 32F, C is of
   their type or 32F; alpha and beta are floats on the host, read at the call. beta 0 does not read C. */
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n,
                            int k, const void* alpha, const void* A, cudaDataType Atype, int lda, const void* B,
                            cudaDataType Btype, int ldb, const void* beta, void* C, cudaDataType Ctype, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algo);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                          int m, int n, int k, const void* alpha, const void* A,
                                          cudaDataType Atype, int lda, long long strideA, const void* B,
                                          cudaDataType Btype, int ldb, long long strideB, const void* beta, void* C,
                                          cudaDataType Ctype, int ldc, long long strideC, int count,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algo);

#endif
