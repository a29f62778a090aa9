// Blocks of 16 in two registers: AVX2, with the dot product of AVX-VNNI where TOKENLOOM_AVXVNNI is
// defined. Include only from files compiled for it.
#pragma once
#include <immintrin.h>

#include <cstring>

namespace tokenloom {
namespace {

constexpr int kMaxRows = 4;  // rows of a tile of one block: 8 sums and 4 weights in registers
constexpr int kTileBlocks = 1;
constexpr int kRowsOfPair = 2;
constexpr int kUnroll = 4;
constexpr int kLoraRows = 1;

struct Ints { __m256i v[2]; };
struct Floats { __m256 v[2]; };
struct Bytes { __m256i v[2]; };  // 16 x 4

inline Ints ints(int32_t x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
inline Floats floats(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
inline Floats floats(Ints x) { return {{_mm256_cvtepi32_ps(x.v[0]), _mm256_cvtepi32_ps(x.v[1])}}; }
inline Floats operator+(Floats a, Floats b) {
  return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}};
}
inline Floats operator*(Floats a, Floats b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i broadcast4(const void* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return _mm256_set1_epi32(dword);
}
inline Bytes load_bytes(const void* p) {
  return {{load256(p), load256(static_cast<const uint8_t*>(p) + 32)}};
}
inline Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {{_mm256_and_si256(x.v[0], mask), _mm256_and_si256(x.v[1], mask)}};
}
inline Bytes high_nibbles(Bytes x) {
  return low_nibbles({{_mm256_srli_epi16(x.v[0], 4), _mm256_srli_epi16(x.v[1], 4)}});
}

#if defined(TOKENLOOM_AVXVNNI)

inline __m256i dot(__m256i acc, __m256i u, __m256i s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }

struct Biased { __m256i v[2]; };  // value + 128
inline Ints start(int32_t sum) { return ints(-128 * sum); }
inline Biased load_biased(const uint8_t* p) { return {{load256(p), load256(p + 32)}}; }
inline Ints dot(Ints acc, const Biased& w, const int8_t* four) {
  const __m256i a = broadcast4(four);
  return {{dot(acc.v[0], w.v[0], a), dot(acc.v[1], w.v[1], a)}};
}

#else

// Dot product of unsigned u and signed s. Pairs are added in 16 bits: |u * s| must be below 16384.
inline __m256i dot(__m256i acc, __m256i u, __m256i s) {
  const __m256i pairs = _mm256_maddubs_epi16(u, s);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Magnitudes keep products below that bound; biased bytes would not.
struct Biased { __m256i magnitude[2], value[2]; };
inline Ints start(int32_t) { return ints(0); }
inline Biased load_biased(const uint8_t* p) {
  const __m256i bias = _mm256_set1_epi8(-128);
  const __m256i a = _mm256_xor_si256(load256(p), bias), b = _mm256_xor_si256(load256(p + 32), bias);
  return {{_mm256_abs_epi8(a), _mm256_abs_epi8(b)}, {a, b}};
}
inline Ints dot(Ints acc, const Biased& w, const int8_t* four) {
  const __m256i a = broadcast4(four);
  return {{dot(acc.v[0], w.magnitude[0], _mm256_sign_epi8(a, w.value[0])),
           dot(acc.v[1], w.magnitude[1], _mm256_sign_epi8(a, w.value[1]))}};
}

#endif

inline Ints dot(Ints acc, const Bytes& w, const int8_t* four) {  // w in 0..15
  const __m256i a = broadcast4(four);
  return {{dot(acc.v[0], w.v[0], a), dot(acc.v[1], w.v[1], a)}};
}
inline Ints dot_signed(Ints acc, const Bytes& v, const uint8_t* four) {  // four in 0..127
  const __m256i a = broadcast4(four);
  return {{dot(acc.v[0], a, v.v[0]), dot(acc.v[1], a, v.v[1])}};
}

inline __m256 widen_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 widen_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Floats load_bf16(const uint16_t* p) { return {{widen_bf16(p), widen_bf16(p + 8)}}; }
inline Floats load_f16(const uint16_t* p) { return {{widen_f16(p), widen_f16(p + 8)}}; }
// Return the first (or second) bf16 of each of 16 pairs.
inline Floats firsts(const Bytes& x) {
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(x.v[0], 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(x.v[1], 16))}};
}
inline Floats seconds(const Bytes& x) {
  const __m256i mask = _mm256_set1_epi32(int32_t(0xffff0000));
  return {{_mm256_castsi256_ps(_mm256_and_si256(x.v[0], mask)),
           _mm256_castsi256_ps(_mm256_and_si256(x.v[1], mask))}};
}
// Return lanes p[0], p[1], p[0], p[1], ...
inline Floats alternate(const float* p) {
  double both;
  std::memcpy(&both, p, 8);
  const __m256 v = _mm256_castpd_ps(_mm256_set1_pd(both));
  return {{v, v}};
}
inline Floats load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.v[0]);
  _mm256_storeu_ps(p + 8, x.v[1]);
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

#include "lanes.inl"

}  // namespace
}  // namespace tokenloom
