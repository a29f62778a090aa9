// Linear maps with AVX-512 VNNI. Weights are the unsigned operand of its dot product (int8 is biased
// by 128), activations the signed one: four bytes of a row, broadcast, meet 16 outputs x 4 inputs.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")
#include "common.h"
#include "ops.h"
#include "simd512.h"

namespace tokenloom {
namespace {

#include "gemm.inl"

inline __m512 load_tail(const float* x, int left) {
  return left > 0 ? _mm512_maskz_loadu_ps(tail_mask(left), x) : _mm512_setzero_ps();
}

void quantise_row(const float* x, int k, int k_pad, const Activations& to) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int i = 0; i < k_pad; i += kGroup) {
    __m512 v[4];
    __m512i high = _mm512_setzero_si512();
    for (int j = 0; j < 4; ++j) {
      v[j] = load_tail(x + i + 16 * j, k - i - 16 * j);
      high = _mm512_max_epi32(high, _mm512_and_si512(_mm512_castps_si512(v[j]), magnitude));
    }
    const Rounding rounding(uint32_t(_mm512_reduce_max_epi32(high)));
    const __mmask16 finite = rounding.finite ? 0xffff : 0;
    const __m512 inverse = _mm512_set1_ps(rounding.inverse);
    to.scales[i / kGroup] = rounding.scale;
    __m512i n[4];
    for (int j = 0; j < 4; ++j) {
      n[j] = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(v[j], inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to.q + i + 16 * j), _mm512_cvtsepi32_epi8(n[j]));
    }
    for (int s = 0; s < 2; ++s) {
      const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(n[2 * s], n[2 * s + 1]));
      to.sums[i / kSubgroup + s] = sum;
      to.x_sums[i / kSubgroup + s] = float(sum) * rounding.scale;
    }
  }
}

void rms_norm_row(const float* x, const float* weight, float eps, int k, float* y) {
  __m512 squares = _mm512_setzero_ps();
  for (int i = 0; i < k; i += 16) {
    const __m512 v = load_tail(x + i, k - i);
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / float(k);
  const __m512 inverse = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (int i = 0; i < k; i += 16) {
    const __m512 v = _mm512_mul_ps(load_tail(x + i, k - i), inverse);
    _mm512_mask_storeu_ps(y + i, tail_mask(k - i),
                          _mm512_mul_ps(v, load_tail(weight + i, k - i)));
  }
}

}  // namespace

const LinearOps kLinearAvx512{"avx512_vnni", gemm, quantise_row, rms_norm_row,
                              shrink_rows};

}  // namespace tokenloom
#endif
