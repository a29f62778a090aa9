// Attention like attention_avx512.cpp over int8 keys and values, with AVX-512 VNNI.
//
// The 32-bit integer sums are exact.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")
#include "common.h"
#include "ops.h"
#include "simd512.h"

namespace tokenloom {
namespace {

#include "heads.inl"

constexpr int kRows = 6;
constexpr int kAhead = 3;  // blocks to prefetch ahead

struct Weights {  // token weights of a piece, for one row
  alignas(64) float s[kPiece];
  uint8_t high[kPiece], low[kPiece];
  float scale;
};

inline const uint8_t* block(const uint8_t* base, const KeyBlocks& blocks, int b) {
  return base + blocks.ids[b] * blocks.stride;
}

template <int R>
void scores(const QueryRow* rows, const KeyBlocks& blocks, int num_blocks, int dim, bool cold,
            Weights* w) {
  const size_t bytes = kv_block_bytes(kKvInt8, dim);
  float scale[R];
  int32_t offset[R];
  for (int r = 0; r < R; ++r) {
    std::memcpy(&scale[r], rows[r].q + dim, 4);
    std::memcpy(&offset[r], rows[r].q + dim + 4, 4);
  }
  for (int b = 0; b < num_blocks; ++b) {
    const uint8_t* keys = block(blocks.k, blocks, b);
    if (cold) fetch(block(blocks.v, blocks, b), bytes);
    if (cold && b + kAhead < num_blocks) fetch(block(blocks.k, blocks, b + kAhead), bytes);
    __m512i even[R], odd[R];  // two chains hide the latency of the dot product
    for (int r = 0; r < R; ++r) {
      even[r] = _mm512_set1_epi32(-128 * offset[r]);  // keys are stored 128 higher
      odd[r] = _mm512_setzero_si512();
    }
    for (int d = 0; d < dim; d += 8) {
      const __m512i first = load512(keys + d * kPage), second = load512(keys + (d + 4) * kPage);
      for (int r = 0; r < R; ++r) {
        even[r] = _mm512_dpbusd_epi32(even[r], first, broadcast4(rows[r].q + d));
        odd[r] = _mm512_dpbusd_epi32(odd[r], second, broadcast4(rows[r].q + d + 4));
      }
    }
    const __m512 scales = _mm512_loadu_ps(keys + dim * kPage);
    for (int r = 0; r < R; ++r) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(even[r], odd[r]));
      const __m512 both = _mm512_mul_ps(_mm512_set1_ps(scale[r]), scales);
      _mm512_store_ps(w[r].s + b * kPage, _mm512_mul_ps(sum, both));
    }
  }
}

// Convert scores to integer weights, zero beyond the row's keys.
inline void softmax(Weights& w, const QueryRow& row, const KeyBlocks& blocks, int num_blocks,
                    int dim) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY), zero = _mm512_setzero_ps();
  __m512 high = lowest;
  for (int i = 0; i < row.keys; i += 16)
    high = _mm512_max_ps(high, _mm512_mask_loadu_ps(lowest, tail_mask(row.keys - i), w.s + i));
  const float top = _mm512_reduce_max_ps(high);
  __m512 total = zero, most = zero;
  for (int b = 0; b < num_blocks; ++b) {
    const int i = b * kPage;
    const __mmask16 seen = i < row.keys ? tail_mask(row.keys - i) : 0;
    const __m512 e = exp512(_mm512_sub_ps(_mm512_load_ps(w.s + i), _mm512_set1_ps(top)));
    const __m512 scales = _mm512_loadu_ps(block(blocks.v, blocks, b) + dim * kPage);
    const __m512 weight = _mm512_maskz_mul_ps(seen, e, scales);
    total = _mm512_add_ps(total, _mm512_maskz_mov_ps(seen, e));
    total = _mm512_fmadd_ps(weight, zero, total);  // weight * 0 carries NaN into the sum
    most = _mm512_max_ps(most, weight);
    _mm512_store_ps(w.s + i, weight);
  }
  const float largest = _mm512_reduce_max_ps(most);
  const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? kFull / largest : 0.0f);
  for (int i = 0; i < num_blocks * kPage; i += 16) {
    const __m512i n = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(w.s + i), inverse));
    const __m512i lower = _mm512_and_si512(n, _mm512_set1_epi32(127));
    const __m512i upper = _mm512_srli_epi32(n, 7);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(w.low + i), _mm512_cvtepi32_epi8(lower));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(w.high + i), _mm512_cvtepi32_epi8(upper));
  }
  w.scale = largest / kFull;
  row.out[dim] = top;
  row.out[dim + 1] = _mm512_reduce_add_ps(total);
}

// Compute 16 Z output values of each row, four tokens at a time.
template <int R, int Z>
void values(const Weights* w, const KeyBlocks& blocks, const KeyBlocks* next, int num_blocks,
            int dim, int d0, const QueryRow* rows) {
  __m512i high[R][Z], low[R][Z];
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) high[r][z] = low[r][z] = _mm512_setzero_si512();
  for (int b = 0; b < num_blocks; ++b) {
    if (next && b < next->count) fetch(block(next->k, *next, b), kv_block_bytes(kKvInt8, dim));
    const uint8_t* from = block(blocks.v, blocks, b);
    for (int t = 0; t < kPage; t += 4) {
      const uint8_t* quad = from + (size_t(t / 4) * dim + d0) * 4;
      __m512i v[Z];
      for (int z = 0; z < Z; ++z) v[z] = load512(quad + 64 * z);
      for (int r = 0; r < R; ++r) {
        const __m512i upper = broadcast4(w[r].high + b * kPage + t);
        const __m512i lower = broadcast4(w[r].low + b * kPage + t);
        for (int z = 0; z < Z; ++z) {
          high[r][z] = _mm512_dpbusd_epi32(high[r][z], upper, v[z]);
          low[r][z] = _mm512_dpbusd_epi32(low[r][z], lower, v[z]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) {
      const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r][z]), _mm512_set1_ps(128.0f),
                                           _mm512_cvtepi32_ps(low[r][z]));
      _mm512_storeu_ps(rows[r].out + d0 + 16 * z,
                       _mm512_mul_ps(whole, _mm512_set1_ps(w[r].scale)));
    }
}

template <int R>
void some_rows(const QueryRow* rows, const KeyBlocks& blocks, const KeyBlocks* next, int dim,
               bool cold) {
  Weights w[R];
  const int keys = most_keys(rows, R), num_blocks = (keys + kPage - 1) / kPage;
  scores<R>(rows, blocks, num_blocks, dim, cold, w);
  for (int r = 0; r < R; ++r) softmax(w[r], rows[r], blocks, num_blocks, dim);
  int d = 0;
  for (; d + 32 <= dim; d += 32, next = nullptr)
    values<R, 2>(w, blocks, next, num_blocks, dim, d, rows);
  for (; d < dim; d += 16, next = nullptr)
    values<R, 1>(w, blocks, next, num_blocks, dim, d, rows);
}

void piece(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks* next,
           int dim) {
  for (int r = 0; r < num_rows; r += kRows, next = nullptr)
    with_rows<kRows>(num_rows - r, [&](auto count) {
      some_rows<count()>(rows + r, blocks, next, dim, r == 0);
    });
}

}  // namespace

const AttentionOps kAttentionInt8Avx512{"avx512_vnni", piece, merge512, rotate,
                                       store_int8_query, store_int8_token};

}  // namespace tokenloom
#endif
