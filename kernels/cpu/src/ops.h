// Tables of the functions that an instruction set provides.
#pragma once
#include <type_traits>

#include "common.h"

namespace tokenloom {

struct LinearOps {
  const char* name;
  // Compute thread `tid`'s share of the outputs, for all rows.
  void (*gemm)(const Weight&, const Activations&, int rows, const Output&, int tid, int threads);
  // Quantise one row: q = round(x * 127 / max|x|) per group of 64, with scales and sums; see
  // Rounding. `to` starts at this row.
  void (*quantise_row)(const float* x, int k, int k_pad, const Activations& to);
  // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
  void (*rms_norm_row)(const float* x, const float* weight, float eps, int k, float* y);
  // low = A x of one part; rows of x and low are `stride` and `low_stride` floats apart. `next` is
  // the part to prefetch, or null.
  void (*shrink_rows)(const LoraPart&, const LoraPart* next, const float* x, size_t stride,
                      int rows, int k, float* low, size_t low_stride);
};

// A query row (one head of a token) that attends to the first `keys` keys of a piece.
struct QueryRow {
  const uint8_t* q;  // layout: query_bytes; scaled by 1 / sqrt(head_dim)
  float* out;        // [dim + 2]: weighted values (not divided by the sum), maximum, sum
  int32_t keys;      // visible keys of the piece, at least 1
};

// A piece of one kv head: up to 256 keys in blocks of 16 tokens, see KvKind.
struct KeyBlocks {
  const uint8_t* k;  // block b at k + ids[b] * stride
  const uint8_t* v;
  const int32_t* ids;
  size_t stride;  // bytes
  int32_t count;
};

// With int8 values, a token's weight (exponential times scale) is rounded to 14 bits of the piece's
// largest, in two halves of 7 bits. The error is far below that of the 8-bit values.
constexpr float kFull = 16383.0f;

struct AttentionOps {
  const char* name;
  // Attend to `blocks`, and prefetch `next`, this thread's next blocks, unless null.
  void (*piece)(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks* next,
                int dim);
  // Merge `part` into `out`; both as QueryRow::out.
  void (*merge)(float* out, const float* part, int dim);
  // Rotate a head by its position's angles ([half] cosines, then sines), and scale it.
  void (*rotate)(float* head, const float* cos_sin, int half, float scale);
  // Store a query padded to dim; layout: query_bytes.
  void (*store_query)(const float* q, int head_dim, int dim, uint8_t* out);
  // Store one head's key and value as token `o` of a block (KvKind); int8 padding is set to zero.
  void (*store_token)(const float* k, const float* v, int o, int head_dim, int dim, uint8_t* keys,
                      uint8_t* values);
};

namespace {  // internal: its code must not be shared between files for different machines

// Return the largest number of keys that a row sees.
inline int most_keys(const QueryRow* rows, int count) {
  int keys = 0;
  for (int r = 0; r < count; ++r) keys = rows[r].keys > keys ? rows[r].keys : keys;
  return keys;
}

// Call f with `rows`, 1 to MOST, as a compile-time constant.
template <int MOST, class F>
inline void with_rows(int rows, const F& f) {
  if (rows >= MOST) return f(std::integral_constant<int, MOST>{});
  if constexpr (MOST > 1) with_rows<MOST - 1>(rows, f);
}

}  // namespace

// A row of logits and how to choose its token; see kernels/sampling.py.
struct Choice {
  const float* logits;  // [n]
  int32_t n;
  float temperature;  // 0: take the likeliest
  int32_t top_k;      // 0 or less: off
  float top_p, min_p;
  uint32_t first, second;  // stream_key in kernels/sampling.py
  int32_t id;              // result; -1 if the logits allow no choice
};

using Choose = int32_t (*)(const Choice&);

// Return the operations for an instruction set level, see api.cpp.
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
