/* impl_cuda.cu - both headers' implementation as one unit, for the compile checks and the resource report. */
#define AMP_IMPLEMENTATION
#include "../amp_cuda.cuh"
