// Types and helpers shared by all instruction sets. Torch and Python must not enter.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

// For functions whose arguments must stay in the caller's registers.
#define TL_INLINE [[gnu::always_inline]] inline

namespace tokenloom {

constexpr int kPage = 16;    // tokens in a block of the KV cache
constexpr int kPiece = 256;  // keys that one unit of attention reduces before the pieces are merged
constexpr int kBlock = 16;   // outputs in a packed block of weights
constexpr int kGroup = 64;   // inputs that share a scale in activations and int8 weights
constexpr int kMaxHeadDim = 512;
constexpr int kSubgroup = 32;  // inputs that share a scale in 4-bit weights, as in GGUF

enum WeightKind : int32_t { kInt8 = 0, kInt4 = 1, kInt8Sub = 2 };

// Keys and values of 16 tokens of one kv head, `dim` being head_dim padded to 16:
//   kKvBf16   keys [dim / 2][16 tokens][2] bf16; values [8 pairs of tokens][dim][2] bf16
//   kKvInt8   keys [dim / 4][16 tokens][4] of q + 128, values [4][dim][4 tokens] of q; behind each
//             of them the scales [16 tokens] float: x = scale * q
enum KvKind : int32_t { kKvBf16 = 0, kKvInt8 = 1 };

static inline size_t kv_block_bytes(int kind, int dim) {
  return size_t(kPage) * (kind == kKvInt8 ? dim + sizeof(float) : dim * sizeof(uint16_t));
}

// Bytes of a query row: [dim] bf16, or [dim] q, then the scale (float) and the sum of q (int32).
static inline size_t query_bytes(int kind, int dim) {
  return kind == kKvInt8 ? dim + 2 * sizeof(float) : dim * sizeof(uint16_t);
}

// y = x W^T with W [n, k], packed in blocks of 16 outputs; k is padded with zeros to k_pad.
//   kInt8     data [block][k_pad / 4][16 outputs][4 inputs] of q + 128,
//             scales [block][k_pad / 64][16] bf16; w = scale * q
//   kInt4     data [block][k_pad / 8][16][4]: low nibbles hold inputs 8p..8p+3, high nibbles
//             8p+4..8p+7; scales [block][k_pad / 32][2][16] f16: scale, minimum; w = scale * q + min
//   kInt8Sub  data as kInt8, scales [block][k_pad / 32][16] f16; w = scale * q
struct Weight {
  const uint8_t* data;
  const uint16_t* scales;
  const float* bias;  // [n padded to 16], in the order of the blocks, or null
  int32_t n, k, k_pad, kind;
};

// Quantised rows of activations: x ~ scale * q with one scale per 64 inputs.
struct Activations {
  int8_t* q;       // [rows, k_pad]; zero beyond k
  float* scales;   // [rows, k_pad / 64]
  int32_t* sums;   // [rows, k_pad / 32], sums of q
  float* x_sums;   // sums * scale, factor of the 4-bit weights' minima

  Activations from(size_t row, size_t k_pad) const {
    return {q + row * k_pad, scales + row * (k_pad / kGroup), sums + row * (k_pad / kSubgroup),
            x_sums + row * (k_pad / kSubgroup)};
  }
};

// What to do with a product: store it, add it to the output, or, if gate and up blocks alternate,
// store silu(gate) * up.
enum Epilogue : int32_t { kStore = 0, kAdd = 1, kSiluMul = 2 };

// A LoRA change y += B (A x) of num_blocks blocks of a linear map: first_block, first_block +
// block_step, ... The step is 1 for q, k and v, 2 for gate and up, whose blocks alternate.
struct LoraPart {
  const uint16_t* a;  // bf16, see lora_a; for an embedding [vocab][rank padded to 2]
  const uint16_t* b;  // [block], each as lora_b, already scaled
  int32_t rank, first_block, block_step, num_blocks;  // rank 0: no change; block_step 1 or 2
};

// Index of (rank j, input i of k) in A: [ranks / 8][inputs / 4][8 ranks][2][2], so that each of the 16
// dwords of a line holds inputs i and i + 2. Zero beyond k and the rank.
constexpr int kLoraInputs = 4, kLoraRanks = 8, kLoraLine = kLoraInputs * kLoraRanks;
static inline size_t lora_a(int k, int i, int j) {
  const int lines = (k + kLoraInputs - 1) / kLoraInputs, at = i % kLoraInputs;
  return (size_t(j / kLoraRanks) * lines + i / kLoraInputs) * kLoraLine +
         (j % kLoraRanks * 2 + at % 2) * 2 + at / 2;
}
// Index of (rank j, output o) in a block of B: [ranks / 2][16 outputs][2]. Zero beyond the rank.
static inline size_t lora_b(int j, int o) { return size_t(j / 2) * 2 * kBlock + 2 * o + j % 2; }

constexpr int kLoraParts = 3;
struct LoraLinear {
  LoraPart parts[kLoraParts];
};

// A row's adapter for a product; `linear` is null without one.
struct RowAdapter {
  const LoraLinear* linear;
  float* low;  // A x of each part, `low_stride` floats apart
};

// Rows of a product are computed in chunks, and what adapters add in kDeltaBlocks blocks at a time.
// One block of padding between rows of delta keeps a column out of the same few cache sets.
constexpr int kChunkRows = 36;
constexpr int kDeltaBlocks = 64;
constexpr int kDeltaWidth = (kDeltaBlocks + 1) * kBlock;

struct Output {
  float* data;
  size_t stride;  // floats between rows
  int32_t epilogue;
  const RowAdapter* adapters = nullptr;  // [rows], or null if no row has one
  size_t low_stride = 0;
  float* delta = nullptr;  // [kChunkRows][kDeltaWidth], this thread's, with adapters
  int delta_width = 0;     // floats between rows of delta
};

static inline size_t lora_block_size(const LoraPart& part) {
  return size_t(part.rank + part.rank % 2) * kBlock;
}

// Return the part's B for block `b` of the map, or null if the part does not change it.
static inline const uint16_t* lora_block(const LoraPart& part, int b) {
  const int offset = b - part.first_block, shift = part.block_step - 1;
  if (part.rank == 0 || offset < 0 || offset & shift) return nullptr;
  const int index = offset >> shift;
  return index < part.num_blocks ? part.b + index * lora_block_size(part) : nullptr;
}

static inline int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
static inline int blocks(int n) { return (n + kBlock - 1) / kBlock; }

static inline size_t block_bytes(int kind, int k_pad) {
  return size_t(k_pad) * kBlock / (kind == kInt4 ? 2 : 1);
}

// Number of 16-bit scales in a block.
static inline size_t block_scales(int kind, int k_pad) {
  if (kind == kInt8) return size_t(k_pad) / kGroup * kBlock;
  return size_t(k_pad) / kSubgroup * kBlock * (kind == kInt4 ? 2 : 1);
}

// Index of (input i, output o) in an int8 block.
static inline size_t byte_at(int i, int o) { return size_t(i / 4) * 4 * kBlock + o * 4 + i % 4; }

namespace {  // internal: its code must not be shared between files for different machines

// Items [begin, end); Share is thread `tid`'s part of `count` items.
struct Rows {
  int begin, end;
  int size() const { return end - begin; }
};

struct Share : Rows {
  Share(int count, int tid, int threads)
      : Rows{int(int64_t(count) * tid / threads), int(int64_t(count) * (tid + 1) / threads)} {}
};

// Rounding of a group of activations, from the bits of its largest magnitude; as bits, NaN is above
// infinity and infinity above all numbers. With NaN or infinity the scale is NaN, so the whole row
// becomes NaN. A magnitude too small to divide by is rounded to zero.
struct Rounding {
  bool finite;
  float scale, inverse;  // x ~ scale * q with q = round(x * inverse)
  explicit Rounding(uint32_t top_bits) : finite(top_bits < 0x7f800000) {
    float top;
    std::memcpy(&top, &top_bits, 4);
    scale = finite ? top / 127.0f : NAN;
    inverse = finite && top > 1e-36f ? 127.0f / top : 0.0f;
  }
  int round(float x) const { return finite ? int(std::nearbyint(x * inverse)) : 0; }
};

inline Rounding rounding_of(const float* x, int count) {
  uint32_t top = 0;
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return Rounding(top);
}

}  // namespace

static inline uint16_t to_bf16(float value) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float from_bf16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t to_f16(float value) {  // to nearest even; beyond the range: infinity
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x47800000) return uint16_t(sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (bits < 0x38800000) {  // subnormal: the sum with a power of two rounds at the right place
    float magic;
    std::memcpy(&magic, &bits, 4);
    magic += 0.5f;
    std::memcpy(&bits, &magic, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  const uint32_t odd = bits >> 13 & 1;
  return uint16_t(sign | (bits - 0x38000000 + 0xfff + odd) >> 13);
}

static inline float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 0x1f, rest = h & 0x3ff;
  float value;
  if (exponent == 0) {
    value = float(rest) * (1.0f / 16777216.0f);
    return sign ? -value : value;
  }
  const uint32_t bits =
      exponent == 31 ? sign | 0x7f800000 | rest << 13 : sign | (exponent + 112) << 23 | rest << 13;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace tokenloom
