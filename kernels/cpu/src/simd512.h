// Blocks of 16 in one register and small helpers: AVX-512 with VNNI. Include only from files
// compiled for it.
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

// Prefetch memory needed in about a microsecond, into L2: L1 is too small to keep it that long.
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

// AttentionOps::merge.
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

// -- blocks of 16 outputs, keys or values in one register, as used by gemm.inl

constexpr int kMaxRows = 6;   // rows of a tile of two blocks: 12 sums and 12 totals fill the registers
constexpr int kTileBlocks = 2;
constexpr int kRowsOfPair = kMaxRows;
constexpr int kUnroll = 16;  // with less the compiler keeps totals in memory
constexpr int kLoraRows = 4;

struct Ints { __m512i v; };
struct Floats { __m512 v; };
struct Bytes { __m512i v; };   // 16 x 4
struct Biased { __m512i v; };  // 16 x 4, value + 128

inline Ints ints(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Floats floats(float x) { return {_mm512_set1_ps(x)}; }
inline Floats floats(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

// Initial sum that removes the bias from products with values that add up to `sum`.
inline Ints start(int32_t sum) { return ints(-128 * sum); }
inline Biased load_biased(const uint8_t* p) { return {load512(p)}; }
inline Bytes load_bytes(const uint8_t* p) { return {load512(p)}; }
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return low_nibbles({_mm512_srli_epi16(x.v, 4)}); }
// Return acc + the dot product of each four bytes with four values.
inline Ints dot(Ints acc, Biased w, const int8_t* four) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(four))};
}
inline Ints dot(Ints acc, Bytes w, const int8_t* four) {  // w in 0..15
  return {_mm512_dpbusd_epi32(acc.v, w.v, broadcast4(four))};
}

inline Floats load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline Floats load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(tail_mask(count), p)};
}
inline void store(float* p, int count, Floats x) {
  _mm512_mask_storeu_ps(p, tail_mask(count), x.v);
}
inline Floats silu(Floats x) {
  const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), x.v));
  return {_mm512_div_ps(x.v, _mm512_add_ps(_mm512_set1_ps(1.0f), e))};
}
// Return the first (or second) bf16 of each of 16 pairs.
inline Floats firsts(Bytes x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))}; }
inline Floats seconds(Bytes x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(int32_t(0xffff0000))))};
}
// Return lanes p[0], p[1], p[0], p[1], ...
inline Floats alternate(const float* p) {
  double both;
  std::memcpy(&both, p, 8);
  return {_mm512_castpd_ps(_mm512_set1_pd(both))};
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
}  // namespace tokenloom
