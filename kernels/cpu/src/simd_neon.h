// Blocks of 16 in four registers: NEON with dot products. Include only from files compiled for it.
#pragma once
#include <arm_neon.h>

#include <cstring>

namespace tokenloom {
namespace {

constexpr int kMaxRows = 4;  // rows of a tile of one block: 16 sums and 4 weights in registers
constexpr int kTileBlocks = 1;
constexpr int kRowsOfPair = 2;
constexpr int kUnroll = 4;
constexpr int kLoraRows = 1;

struct Ints { int32x4_t v[4]; };
struct Floats { float32x4_t v[4]; };
struct Bytes { uint8x16_t v[4]; };   // 16 x 4
struct Biased { int8x16_t v[4]; };   // 16 x 4, without the bias

inline Ints ints(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {{v, v, v, v}};
}
inline Floats floats(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
template <class Out, class F>
inline Out each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}
inline Floats floats(Ints x) {
  return each<Floats>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline Floats operator+(Floats a, Floats b) {
  return each<Floats>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Floats operator*(Floats a, Floats b) {
  return each<Floats>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Floats fma(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}

inline int8x16_t broadcast4(const void* p) {
  int32_t dword;
  std::memcpy(&dword, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(dword));
}
inline Bytes load_bytes(const void* p) {
  return each<Bytes>([&](int i) { return vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i); });
}
inline Bytes low_nibbles(Bytes x) {
  return each<Bytes>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(15)); });
}
inline Bytes high_nibbles(Bytes x) {
  return each<Bytes>([&](int i) { return vshrq_n_u8(x.v[i], 4); });
}
inline Ints start(int32_t) { return ints(0); }
inline Biased load_biased(const uint8_t* p) {
  return each<Biased>([&](int i) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16 * i), vdupq_n_u8(128)));
  });
}
inline Ints dot(Ints acc, const Biased& w, const int8_t* four) {
  const int8x16_t a = broadcast4(four);
  return each<Ints>([&](int i) { return vdotq_s32(acc.v[i], w.v[i], a); });
}
inline Ints dot(Ints acc, const Bytes& w, const int8_t* four) {  // w in 0..15
  const int8x16_t a = broadcast4(four);
  return each<Ints>([&](int i) { return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(w.v[i]), a); });
}
inline Ints dot_signed(Ints acc, const Bytes& v, const uint8_t* four) {  // four in 0..127
  const int8x16_t a = broadcast4(four);
  return each<Ints>([&](int i) { return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(v.v[i]), a); });
}

inline Floats load_bf16(const uint16_t* p) {
  return each<Floats>([&](int i) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
  });
}
inline Floats load_f16(const uint16_t* p) {
  return each<Floats>([&](int i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
  });
}
// Return the first (or second) bf16 of each of 16 pairs.
inline Floats firsts(const Bytes& x) {
  return each<Floats>([&](int i) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(x.v[i]), 16));
  });
}
inline Floats seconds(const Bytes& x) {
  return each<Floats>([&](int i) {
    return vreinterpretq_f32_u32(
        vandq_u32(vreinterpretq_u32_u8(x.v[i]), vdupq_n_u32(0xffff0000)));
  });
}
// Return lanes p[0], p[1], p[0], p[1], ...
inline Floats alternate(const float* p) {
  const float32x2_t both = vld1_f32(p);
  const float32x4_t v = vcombine_f32(both, both);
  return {{v, v, v, v}};
}
inline Floats load(const float* p) {
  return each<Floats>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, Floats x) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

#include "lanes.inl"

}  // namespace
}  // namespace tokenloom
