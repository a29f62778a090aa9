// The tables of functions that an instruction set provides.
#pragma once
#include <type_traits>

#include "common.h"

namespace tokenloom {

struct LinearOps {
  const char* name;
  // Thread `tid` of `threads` computes its share of the outputs of all rows.
  void (*gemm)(const Weight&, const Activations&, int rows, const Output&, int tid, int threads);
  // One row: q = round(x * 127 / max|x|) in each group of 64, and what else is told of it; see
  // Rounding. `to` begins with this row.
  void (*quantise_row)(const float* x, int k, int k_pad, const Activations& to);
  // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
  void (*rms_norm_row)(const float* x, const float* weight, float eps, int k, float* y);
  // low = A x of one part, for rows that lie `stride` and `low_stride` floats apart; `next`, or null,
  // is the part that comes after it.
  void (*shrink_rows)(const LoraPart&, const LoraPart* next, const float* x, size_t stride,
                      int rows, int k, float* low, size_t low_stride);
};

// One query row of an attention unit: a token's head against the first keys of a piece.
struct QueryRow {
  const uint8_t* q;  // see query_bytes; scaled by 1 / sqrt(head_dim)
  float* out;        // [dim + 2]: values not yet divided by the sum, the maximum, the sum
  int32_t keys;      // of the piece, that this row may see; at least 1
};

// A piece of one kv head: up to 256 keys in blocks of 16 tokens, see KvKind.
struct KeyBlocks {
  const uint8_t* k;  // block b at k + ids[b] * stride
  const uint8_t* v;
  const int32_t* ids;
  size_t stride;  // bytes
  int32_t count;
};

// With keys and values in 8 bits, a probability times its token's scale is taken as 14 bits of the
// piece's largest, in two halves of 7: that costs far less than the 8 bits of what it weighs.
constexpr float kFull = 16383.0f;

struct AttentionOps {
  const char* name;
  // `next` is what this thread works on after `blocks`: fetched from memory meanwhile; or null.
  void (*piece)(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks* next,
                int dim);
  // out = out merged with part, both as QueryRow::out.
  void (*merge)(float* out, const float* part, int dim);
  // A head turned by the angles of its position ([half] cosines, then sines), and scaled.
  void (*rotate)(float* head, const float* cos_sin, int half, float scale);
  // To [head_dim padded to dim]: see query_bytes.
  void (*store_query)(const float* q, int head_dim, int dim, uint8_t* out);
  // Key and value of one head as token `o` of a block; what pads a head in 8 bits is zero. See KvKind.
  void (*store_token)(const float* k, const float* v, int o, int head_dim, int dim, uint8_t* keys,
                      uint8_t* values);
};

namespace {  // internal: its code must not be shared between files for different machines

// Keys that some of the rows see.
inline int most_keys(const QueryRow* rows, int count) {
  int keys = 0;
  for (int r = 0; r < count; ++r) keys = rows[r].keys > keys ? rows[r].keys : keys;
  return keys;
}

// Calls f with the number of rows, 1 to MOST, as a constant.
template <int MOST, class F>
inline void with_rows(int rows, const F& f) {
  if (rows >= MOST) return f(std::integral_constant<int, MOST>{});
  if constexpr (MOST > 1) with_rows<MOST - 1>(rows, f);
}

}  // namespace

// How to choose a token from a row of logits; see kernels/sampling.py.
struct Choice {
  const float* logits;  // [n]
  int32_t n;
  float temperature;  // 0: the likeliest
  int32_t top_k;      // off: 0 or less
  float top_p, min_p;
  uint32_t first, second;  // the key of the draw
  int32_t id;              // the answer; -1 where the logits allow none
};

using Choose = int32_t (*)(const Choice&);

// For a level of the machine, see api.cpp.
const LinearOps* linear_ops(int32_t isa);
const AttentionOps* attention_ops(int32_t isa, int32_t kv_kind);

extern const LinearOps kLinearPortable;
extern const Choose kChoosePortable;
extern const AttentionOps kAttentionPortable, kAttentionInt8Portable;
#if defined(__x86_64__)
extern const LinearOps kLinearAvx2, kLinearAvxVnni, kLinearAvx512;
extern const AttentionOps kAttentionAvx2, kAttentionAvx512;
extern const AttentionOps kAttentionInt8Avx2, kAttentionInt8AvxVnni, kAttentionInt8Avx512;
extern const Choose kChooseAvx2, kChooseAvx512;
#elif defined(__aarch64__)
extern const LinearOps kLinearNeon;
extern const AttentionOps kAttentionNeon, kAttentionInt8Neon;
#endif

}  // namespace tokenloom
