// y = x W^T on quantised rows and packed weights, AVX-512 VNNI.
//
// Weights are the unsigned operand (int8 is biased by 128), activations the signed one: four bytes
// of a row, broadcast, meet 16 outputs x 4 inputs of a block. Sums within a group are integers and
// the groups are added in ascending order, so a row's result depends on nothing but the row.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")
#include "common.h"
#include "ops.h"
#include "simd512.h"

namespace tokenloom {
namespace {

constexpr int kMaxRows = 6;       // of a tile: 6 x 2 sums and totals fill the registers
constexpr int kChunkRows = 36;
constexpr int kGroupBlocks = 8;  // even, so that gate and up stay together

struct Job {
  const Weight& w;
  const Activations& x;
  const Output& out;
  size_t bytes, scales;  // of a block

  Job(const Weight& weight, const Activations& activations, const Output& output)
      : w(weight), x(activations), out(output), bytes(block_bytes(w.kind, w.k_pad)),
        scales(block_scales(w.kind, w.k_pad)) {}
  const uint8_t* data(int block) const { return w.data + size_t(block) * bytes; }
  const uint16_t* scale(int block) const { return w.scales + size_t(block) * scales; }
  const int8_t* row(int r) const { return x.q + size_t(r) * w.k_pad; }
  float row_scale(int r, int g) const { return x.scales[size_t(r) * (w.k_pad / kGroup) + g]; }
  const int32_t* sums(int r) const { return x.sums + size_t(r) * (w.k_pad / kSubgroup); }
};

inline __m512 load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512 load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// acc[r][t] += the products of `steps` x 4 inputs.
template <int MR, int NT>
inline void dot(const uint8_t* const w[NT], const int8_t* const a[MR], int steps,
                __m512i acc[MR][NT]) {
#pragma GCC unroll 4
  for (int i = 0; i < steps; ++i) {
    __m512i wv[NT];
    for (int t = 0; t < NT; ++t) wv[t] = load512(w[t] + 64 * i);
    for (int r = 0; r < MR; ++r) {
      const __m512i av = broadcast4(a[r] + 4 * i);
      for (int t = 0; t < NT; ++t) acc[r][t] = _mm512_dpbusd_epi32(acc[r][t], wv[t], av);
    }
  }
}

template <int MR, int NT, int KIND>
inline void dot_int8(const Job& job, int r0, int b0, __m512 y[MR][NT]) {
  constexpr int kSize = KIND == kInt8 ? kGroup : kSubgroup;
  const uint8_t* w[NT];
  const uint16_t* scales[NT];
  const int8_t* a[MR];
  for (int t = 0; t < NT; ++t) w[t] = job.data(b0 + t), scales[t] = job.scale(b0 + t);
  for (int r = 0; r < MR; ++r) a[r] = job.row(r0 + r);
  for (int g = 0; g < job.w.k_pad / kSize; ++g) {
    __m512i acc[MR][NT];
    for (int r = 0; r < MR; ++r) {
      const int32_t* sums = job.sums(r0 + r) + g * (kSize / kSubgroup);
      const int32_t sum = KIND == kInt8 ? sums[0] + sums[1] : sums[0];
      for (int t = 0; t < NT; ++t) acc[r][t] = _mm512_set1_epi32(-128 * sum);
    }
    dot<MR, NT>(w, a, kSize / 4, acc);
    for (int t = 0; t < NT; ++t) {
      const __m512 scale = KIND == kInt8 ? load_bf16(scales[t]) : load_f16(scales[t]);
      for (int r = 0; r < MR; ++r) {
        const __m512 both = _mm512_mul_ps(
            scale, _mm512_set1_ps(job.row_scale(r0 + r, g * kSize / kGroup)));
        y[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][t]), both, y[r][t]);
      }
      w[t] += kSize * kBlock;
      scales[t] += kBlock;
    }
    for (int r = 0; r < MR; ++r) a[r] += kSize;
  }
}

template <int MR, int NT>
inline void dot_int4(const Job& job, int r0, int b0, __m512 y[MR][NT]) {
  const __m512i mask = _mm512_set1_epi8(0x0f);
  const uint8_t* w[NT];
  const uint16_t* scales[NT];
  for (int t = 0; t < NT; ++t) w[t] = job.data(b0 + t), scales[t] = job.scale(b0 + t);
  for (int g = 0; g < job.w.k_pad / kSubgroup; ++g) {
    __m512i acc[MR][NT];
    for (int r = 0; r < MR; ++r)
      for (int t = 0; t < NT; ++t) acc[r][t] = _mm512_setzero_si512();
    for (int p = 0; p < kSubgroup / 8; ++p) {
      __m512i low[NT], high[NT];
      for (int t = 0; t < NT; ++t) {
        const __m512i raw = load512(w[t] + 64 * p);
        low[t] = _mm512_and_si512(raw, mask);
        high[t] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
      }
      for (int r = 0; r < MR; ++r) {
        const int8_t* a = job.row(r0 + r) + g * kSubgroup + 8 * p;
        const __m512i first = broadcast4(a), second = broadcast4(a + 4);
        for (int t = 0; t < NT; ++t) {
          acc[r][t] = _mm512_dpbusd_epi32(acc[r][t], low[t], first);
          acc[r][t] = _mm512_dpbusd_epi32(acc[r][t], high[t], second);
        }
      }
    }
    for (int t = 0; t < NT; ++t) {
      const __m512 scale = load_f16(scales[t]), minimum = load_f16(scales[t] + kBlock);
      for (int r = 0; r < MR; ++r) {
        const __m512 row = _mm512_set1_ps(job.row_scale(r0 + r, g * kSubgroup / kGroup));
        const __m512 sum = _mm512_set1_ps(float(job.sums(r0 + r)[g]));
        __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(acc[r][t]), scale);
        part = _mm512_fmadd_ps(sum, minimum, part);
        y[r][t] = _mm512_fmadd_ps(part, row, y[r][t]);
      }
      w[t] += kSubgroup * kBlock / 2;
      scales[t] += 2 * kBlock;
    }
  }
}

inline __m512 silu(__m512 x) {
  const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

template <int MR, int NT, int EPI>
inline void finish(const Job& job, int r0, int b0, __m512 y[MR][NT]) {
  if (job.w.bias)
    for (int t = 0; t < NT; ++t) {
      const __m512 bias = _mm512_loadu_ps(job.w.bias + (b0 + t) * kBlock);
      for (int r = 0; r < MR; ++r) y[r][t] = _mm512_add_ps(y[r][t], bias);
    }
  if constexpr (EPI == kSiluMul) {
    for (int t = 0; t + 1 < NT; t += 2)
      for (int r = 0; r < MR; ++r) {
        float* out = job.out.data + (r0 + r) * job.out.stride + (b0 + t) / 2 * kBlock;
        _mm512_storeu_ps(out, _mm512_mul_ps(silu(y[r][t]), y[r][t + 1]));
      }
    return;
  }
  for (int t = 0; t < NT; ++t) {
    const int column = (b0 + t) * kBlock;
    const __mmask16 mask = tail_mask(job.w.n - column);
    for (int r = 0; r < MR; ++r) {
      float* out = job.out.data + (r0 + r) * job.out.stride + column;
      if constexpr (EPI == kAdd)
        y[r][t] = _mm512_add_ps(y[r][t], _mm512_maskz_loadu_ps(mask, out));
      _mm512_mask_storeu_ps(out, mask, y[r][t]);
    }
  }
}

template <int MR, int NT, int KIND, int EPI>
void tile(const Job& job, int r0, int b0) {
  __m512 y[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) y[r][t] = _mm512_setzero_ps();
  if constexpr (KIND == kInt4)
    dot_int4<MR, NT>(job, r0, b0, y);
  else
    dot_int8<MR, NT, KIND>(job, r0, b0, y);
  finish<MR, NT, EPI>(job, r0, b0, y);
}

// The weights that come next: fetched from memory while this panel is computed with.
inline void prefetch(const Job& job, int block, Share lines) {
  if (block >= blocks(job.w.n)) return;
  const char* next = reinterpret_cast<const char*>(job.data(block));
  for (int i = lines.begin; i < lines.end; ++i)
    _mm_prefetch(next + size_t(i) * 64, _MM_HINT_T0);
}

// Rows [begin, end) against NT blocks, in passes of nearly equal numbers of rows.
template <int NT, int KIND, int EPI>
void panel(const Job& job, int begin, int end, int b0) {
  const int rows = end - begin, passes = (rows + kMaxRows - 1) / kMaxRows;
  for (int p = 0; p < passes; ++p) {
    const Share share(rows, p, passes);
    const int r = begin + share.begin;
    if (begin == 0 && passes > 1) prefetch(job, b0 + NT, Share(int(NT * job.bytes / 64), p, passes));
    switch (share.size()) {
      case 1: tile<1, NT, KIND, EPI>(job, r, b0); break;
      case 2: tile<2, NT, KIND, EPI>(job, r, b0); break;
      case 3: tile<3, NT, KIND, EPI>(job, r, b0); break;
      case 4: tile<4, NT, KIND, EPI>(job, r, b0); break;
      case 5: tile<5, NT, KIND, EPI>(job, r, b0); break;
      case 6: tile<6, NT, KIND, EPI>(job, r, b0); break;
    }
  }
}

// Some rows stay in the first-level cache while a few blocks, held by the second, pass over them.
template <int KIND, int EPI>
void columns(const Job& job, int rows, Share share) {
  for (int group = share.begin; group < share.end; group += kGroupBlocks) {
    const int last = share.end < group + kGroupBlocks ? share.end : group + kGroupBlocks;
    for (int r = 0; r < rows; r += kChunkRows) {
      const int end = rows < r + kChunkRows ? rows : r + kChunkRows;
      int b = group;
      for (; b + 2 <= last; b += 2) panel<2, KIND, EPI>(job, r, end, b);
      if constexpr (EPI != kSiluMul)
        if (b < last) panel<1, KIND, EPI>(job, r, end, b);
    }
  }
}

template <int KIND>
void choose(const Job& job, int rows, Share share) {
  switch (job.out.epilogue) {
    case kStore: columns<KIND, kStore>(job, rows, share); break;
    case kAdd: columns<KIND, kAdd>(job, rows, share); break;
    default: columns<KIND, kSiluMul>(job, rows, share); break;
  }
}

void gemm(const Weight& w, const Activations& x, int rows, const Output& out, int tid,
          int threads) {
  const Job job(w, x, out);
  const int unit = out.epilogue == kSiluMul ? 2 : 1;  // gate and up stay together
  Share share(blocks(w.n) / unit, tid, threads);
  share.begin *= unit;
  share.end *= unit;
  switch (w.kind) {
    case kInt8: choose<kInt8>(job, rows, share); break;
    case kInt4: choose<kInt4>(job, rows, share); break;
    default: choose<kInt8Sub>(job, rows, share); break;
  }
}

inline __m512 load_tail(const float* x, int left) {
  return left > 0 ? _mm512_maskz_loadu_ps(tail_mask(left), x) : _mm512_setzero_ps();
}

void quantise_row(const float* x, int k, int k_pad, int8_t* q, float* scales, int32_t* sums) {
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
    scales[i / kGroup] = rounding.scale;
    __m512i n[4];
    for (int j = 0; j < 4; ++j) {
      n[j] = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(v[j], inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(q + i + 16 * j), _mm512_cvtsepi32_epi8(n[j]));
    }
    sums[i / kSubgroup] = _mm512_reduce_add_epi32(_mm512_add_epi32(n[0], n[1]));
    sums[i / kSubgroup + 1] = _mm512_reduce_add_epi32(_mm512_add_epi32(n[2], n[3]));
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

const LinearOps kLinearAvx512{"avx512_vnni", gemm, quantise_row, rms_norm_row};

}  // namespace tokenloom
