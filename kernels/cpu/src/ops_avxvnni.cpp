// The operations that multiply bytes, for AVX-VNNI; the others are those of AVX2.
#if defined(__x86_64__)
#include <cmath>

#include "common.h"
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#include "ops.h"
#define TOKENLOOM_AVXVNNI

namespace tokenloom {
namespace {
#include "math.inl"
}
}  // namespace tokenloom

#include "simd256.h"

namespace tokenloom {
namespace {
namespace avxvnni {
#include "rows.inl"
#include "heads.inl"
#include "gemm.inl"
#include "attention.inl"
}
}  // namespace
const LinearOps kLinearAvxVnni{"avx_vnni", avxvnni::gemm, avxvnni::quantise_row,
                               avxvnni::rms_norm_row,
                                avxvnni::shrink_rows};
const AttentionOps kAttentionInt8AvxVnni{"avx_vnni", avxvnni::int8_piece, avxvnni::merge,
                                    avxvnni::rotate, avxvnni::store_int8_query,
                                    avxvnni::store_int8_token};
}  // namespace tokenloom
#pragma GCC pop_options
#endif
