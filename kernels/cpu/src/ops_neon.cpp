// The operations for NEON with dot products (ARMv8.2).
#if defined(__aarch64__)
#include <cmath>

#include "common.h"
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#include "ops.h"

namespace tokenloom {
namespace {
#include "math.inl"
}
}  // namespace tokenloom

#include "simd_neon.h"

namespace tokenloom {
namespace {
namespace neon {
#include "rows.inl"
#include "heads.inl"
#include "gemm.inl"
#include "attention.inl"
}
}  // namespace
const LinearOps kLinearNeon{"neon_dotprod", neon::gemm, neon::quantise_row, neon::rms_norm_row,
                                neon::shrink_rows};
const AttentionOps kAttentionNeon{"neon", neon::piece, neon::merge, neon::rotate,
                                    neon::store_query, neon::store_token};
const AttentionOps kAttentionInt8Neon{"neon_dotprod", neon::int8_piece, neon::merge, neon::rotate,
                                    neon::store_int8_query, neon::store_int8_token};
}  // namespace tokenloom
#pragma GCC pop_options
#endif
