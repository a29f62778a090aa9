// Small AVX-512 helpers. Include only from files compiled for AVX-512.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstring>

namespace tokenloom {
namespace {

inline __m512i load512(const void* p) { return _mm512_loadu_si512(p); }

inline __m512i broadcast4(const void* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm512_set1_epi32(dword);
}

// Ask for memory that is needed in a microsecond or so. Into the second cache: the first is too
// small to hold it so long.
inline void fetch(const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64)
    _mm_prefetch(static_cast<const char*>(from) + i, _MM_HINT_T1);
}

inline __mmask16 tail_mask(int count) {
  return count >= 16 ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
}

// exp(x): 2^n times Cephes' polynomial on [-ln2/2, ln2/2]; relative error below 2e-7.
inline __m512 exp512(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.3f)), _mm512_set1_ps(88.3f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// The merge of AttentionOps.
inline void merge512(float* out, const float* part, int dim) {
  const float top = out[dim] > part[dim] ? out[dim] : part[dim];
  const float mine = std::exp(out[dim] - top), theirs = std::exp(part[dim] - top);
  const __m512 a = _mm512_set1_ps(mine), b = _mm512_set1_ps(theirs);
  for (int d = 0; d < dim; d += 16) {
    const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(out + d), a);
    _mm512_storeu_ps(out + d, _mm512_fmadd_ps(_mm512_loadu_ps(part + d), b, scaled));
  }
  out[dim + 1] = out[dim + 1] * mine + part[dim + 1] * theirs;
  out[dim] = top;
}

}  // namespace
}  // namespace tokenloom
