// Attention of query rows over one piece of keys and values with AVX-512 BF16.
//
// A row's result depends on the row and its visible keys alone: scores key by key, one maximum and
// one sum per piece, in a fixed order. It has the same bits however many rows are computed together
// and whatever keys they see.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include "common.h"
#include "ops.h"
#include "simd512.h"

namespace tokenloom {
namespace {

#include "heads.inl"

constexpr int kRows = 6;
constexpr int kAhead = 3;  // blocks to prefetch ahead

inline __m512bh bf16(__m512i v) { return (__m512bh)v; }

inline const uint16_t* block(const uint8_t* base, const KeyBlocks& blocks, int b) {
  return reinterpret_cast<const uint16_t*>(base + blocks.ids[b] * blocks.stride);
}

template <int R>
void scores(const QueryRow* rows, const KeyBlocks& blocks, int num_blocks, int dim,
            bool cold, float (*s)[kPiece]) {
  const size_t bytes = kv_block_bytes(kKvBf16, dim);
  for (int b = 0; b < num_blocks; ++b) {
    const uint16_t* keys = block(blocks.k, blocks, b);
    if (cold) fetch(block(blocks.v, blocks, b), bytes);
    if (cold && b + kAhead < num_blocks) fetch(block(blocks.k, blocks, b + kAhead), bytes);
    __m512 even[R], odd[R];  // two chains hide the latency of the dot product
    for (int r = 0; r < R; ++r) even[r] = odd[r] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 4) {
      const __m512bh first = bf16(load512(keys + d * kPage));
      const __m512bh second = bf16(load512(keys + (d + 2) * kPage));
      for (int r = 0; r < R; ++r) {
        even[r] = _mm512_dpbf16_ps(even[r], first, bf16(broadcast4(rows[r].q + 2 * d)));
        odd[r] = _mm512_dpbf16_ps(odd[r], second, bf16(broadcast4(rows[r].q + 2 * d + 4)));
      }
    }
    for (int r = 0; r < R; ++r)
      _mm512_storeu_ps(s[r] + b * kPage, _mm512_add_ps(even[r], odd[r]));
  }
}

// Convert scores to exponentials in bf16, zero beyond the row's keys.
inline void softmax(const float* s, uint16_t* p, const QueryRow& row, int num_blocks, int dim) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  __m512 high = lowest;
  for (int i = 0; i < row.keys; i += 16)
    high = _mm512_max_ps(high, _mm512_mask_loadu_ps(lowest, tail_mask(row.keys - i), s + i));
  const float top = _mm512_reduce_max_ps(high);
  __m512 total = _mm512_setzero_ps();
  for (int i = 0; i < num_blocks * kPage; i += 16) {
    const __mmask16 seen = i < row.keys ? tail_mask(row.keys - i) : 0;
    const __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(s + i), _mm512_set1_ps(top));
    const __m512 e = _mm512_maskz_mov_ps(seen, exp512(shifted));
    total = _mm512_add_ps(total, e);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), (__m256i)_mm512_cvtneps_pbh(e));
  }
  row.out[dim] = top;
  row.out[dim + 1] = _mm512_reduce_add_ps(total);
}

// Compute 16 Z output values of each row, two tokens at a time. Tokens beyond `keys` are undefined.
template <int R, int Z>
void values(const uint16_t (*p)[kPiece], const KeyBlocks& blocks, const KeyBlocks* next, int keys,
            int dim, int d0, const QueryRow* rows) {
  __m512 acc[R][Z];
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) acc[r][z] = _mm512_setzero_ps();
  for (int t = 0; t < keys; t += 2) {
    const int b = t / kPage;
    if (next && t % kPage == 0 && b < next->count)
      fetch(block(next->k, *next, b), kv_block_bytes(kKvBf16, dim));
    const uint16_t* pair = block(blocks.v, blocks, b) + (size_t(t % kPage / 2) * dim + d0) * 2;
    const __m512i keep = _mm512_set1_epi32(t + 1 < keys ? -1 : 0xffff);
    __m512bh v[Z];
    for (int z = 0; z < Z; ++z) v[z] = bf16(_mm512_and_si512(load512(pair + 32 * z), keep));
    for (int r = 0; r < R; ++r) {
      const __m512bh weights = bf16(broadcast4(p[r] + t));
      for (int z = 0; z < Z; ++z) acc[r][z] = _mm512_dpbf16_ps(acc[r][z], v[z], weights);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int z = 0; z < Z; ++z) _mm512_storeu_ps(rows[r].out + d0 + 16 * z, acc[r][z]);
}

template <int R>
void some_rows(const QueryRow* rows, const KeyBlocks& blocks, const KeyBlocks* next, int dim,
               bool cold) {
  alignas(64) float s[R][kPiece];
  alignas(64) uint16_t p[R][kPiece];
  const int keys = most_keys(rows, R), num_blocks = (keys + kPage - 1) / kPage;
  scores<R>(rows, blocks, num_blocks, dim, cold, s);
  for (int r = 0; r < R; ++r) softmax(s[r], p[r], rows[r], num_blocks, dim);
  int d = 0;
  for (; d + 64 <= dim; d += 64, next = nullptr)
    values<R, 4>(p, blocks, next, keys, dim, d, rows);
  for (; d < dim; d += 16, next = nullptr) values<R, 1>(p, blocks, next, keys, dim, d, rows);
}

void piece(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks* next,
           int dim) {
  for (int r = 0; r < num_rows; r += kRows, next = nullptr)
    with_rows<kRows>(num_rows - r, [&](auto count) {
      some_rows<count()>(rows + r, blocks, next, dim, r == 0);
    });
}

}  // namespace

const AttentionOps kAttentionAvx512{"avx512_bf16", piece, merge512, rotate, store_query,
                                   store_token};

}  // namespace tokenloom
#endif
