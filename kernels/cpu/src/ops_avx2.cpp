// The operations for AVX2.
#if defined(__x86_64__)
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include "ops.h"

namespace tokenloom {
namespace {
#include "math.inl"
}
}  // namespace tokenloom

#include "simd256.h"

namespace tokenloom {
namespace {
namespace avx2 {
#include "rows.inl"
#include "heads.inl"
#include "gemm.inl"
#include "attention.inl"
#include "sampling.inl"
}
}  // namespace
const LinearOps kLinearAvx2{"avx2", avx2::gemm, avx2::quantise_row, avx2::rms_norm_row,
                                avx2::shrink_rows};
const AttentionOps kAttentionAvx2{"avx2", avx2::piece, avx2::merge, avx2::rotate,
                                    avx2::store_query, avx2::store_token};
const AttentionOps kAttentionInt8Avx2{"avx2", avx2::int8_piece, avx2::merge, avx2::rotate,
                                    avx2::store_int8_query, avx2::store_int8_token};
const Choose kChooseAvx2 = avx2::choose;
}  // namespace tokenloom
#pragma GCC pop_options
#endif
