// Sampling, compiled for AVX-512.
#if defined(__x86_64__)
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#include "ops.h"

namespace tokenloom {
namespace avx512 {
#include "math.inl"
#include "sampling.inl"
}
const Choose kChooseAvx512 = avx512::choose;
}  // namespace tokenloom
#pragma GCC pop_options
#endif
