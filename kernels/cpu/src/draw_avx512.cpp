// The draw, compiled for AVX-512.
#if defined(__x86_64__)
#include <cmath>

#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#include "ops.h"

namespace tokenloom {
namespace avx512 {
#include "draw.inl"
}
const Draw kDrawAvx512 = avx512::draw;
}  // namespace tokenloom
#pragma GCC pop_options
#endif
