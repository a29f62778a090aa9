// Attention of query rows over one piece of keys and values, written in the blocks of 16 that an
// instruction set provides. Included once per instruction set, after its block types.
//
// A row's result depends on the row and its visible keys alone: it has the same bits however many
// rows are computed together and whatever keys they see.

constexpr int kRows = 3;

inline const uint8_t* block(const uint8_t* base, const KeyBlocks& blocks, int b) {
  return base + blocks.ids[b] * blocks.stride;
}

// Set scores of hidden keys to -infinity; return the largest visible score.
inline float hide_the_rest(const QueryRow& row, int num_keys, float* s) {
  float top = -INFINITY;
  for (int t = 0; t < row.keys; ++t) top = s[t] > top ? s[t] : top;
  for (int t = row.keys; t < num_keys; ++t) s[t] = -INFINITY;
  return top;
}

// Replace scores by exponentials; return their sum, added in a fixed order.
inline float exponentials(float* s, float top, int num_keys) {
  float sums[kPage] = {}, total = 0.0f;
  for (int t = 0; t < num_keys; t += kPage)
    for (int i = 0; i < kPage; ++i) {
      const float below = s[t + i] - top;  // keeps NaN
      s[t + i] = below <= 0.0f ? exp_of(below) : below;
      sums[i] += s[t + i];
    }
  for (int i = 0; i < kPage; ++i) total += sums[i];
  return total;
}

template <int R>
void some_rows(const QueryRow* rows, const KeyBlocks& blocks, int dim) {
  alignas(64) float s[R][kPiece], q[R][kMaxHeadDim];
  const int keys = most_keys(rows, R), num_blocks = (keys + kPage - 1) / kPage;
  for (int r = 0; r < R; ++r)
    for (int d = 0; d < dim; ++d) {
      uint16_t half;
      std::memcpy(&half, rows[r].q + 2 * d, 2);
      q[r][d] = from_bf16(half);
    }
  for (int b = 0; b < num_blocks; ++b) {
    const uint8_t* from = block(blocks.k, blocks, b);
    Floats sum[R];
    for (int r = 0; r < R; ++r) sum[r] = floats(0.0f);
    for (int d = 0; d < dim; d += 2) {
      const Bytes pairs = load_bytes(from + size_t(d) * 2 * kPage);
      const Floats first = firsts(pairs), second = seconds(pairs);
      for (int r = 0; r < R; ++r)
        sum[r] = fma(second, floats(q[r][d + 1]), fma(first, floats(q[r][d]), sum[r]));
    }
    for (int r = 0; r < R; ++r) store(s[r] + b * kPage, sum[r]);
  }
  for (int r = 0; r < R; ++r) {
    const float top = hide_the_rest(rows[r], num_blocks * kPage, s[r]);
    rows[r].out[dim] = top;
    rows[r].out[dim + 1] = exponentials(s[r], top, num_blocks * kPage);
  }
  for (int d = 0; d < dim; d += kPage) {
    Floats sum[R];
    for (int r = 0; r < R; ++r) sum[r] = floats(0.0f);
    for (int t = 0; t < keys; t += 2) {
      const uint8_t* from = block(blocks.v, blocks, t / kPage);
      const Bytes pairs = load_bytes(from + (size_t(t % kPage / 2) * dim + d) * 4);
      const Floats first = firsts(pairs), second = seconds(pairs);
      for (int r = 0; r < R; ++r) {
        sum[r] = fma(first, floats(s[r][t]), sum[r]);
        if (t + 1 < keys) sum[r] = fma(second, floats(s[r][t + 1]), sum[r]);  // else undefined
      }
    }
    for (int r = 0; r < R; ++r) store(rows[r].out + d, sum[r]);
  }
}

struct Halves {  // 14-bit token weights of a piece in two halves, see kFull
  uint8_t high[kPiece], low[kPiece];
  float scale;
};

// Multiply exponentials by value scales and split them in halves; return NaN if one is NaN, else 0.
inline float weigh(const KeyBlocks& blocks, int keys, int num_keys, int dim, float* s, Halves& w) {
  float most = 0.0f, broken = 0.0f;
  for (int t = 0; t < keys; ++t) {
    float scale;
    std::memcpy(&scale, block(blocks.v, blocks, t / kPage) + size_t(dim) * kPage + t % kPage * 4, 4);
    s[t] *= scale;
    broken += s[t] * 0.0f;
    most = s[t] > most ? s[t] : most;
  }
  const float inverse = most > 0.0f ? kFull / most : 0.0f;
  for (int t = 0; t < num_keys; ++t) {
    const float n = t < keys ? s[t] * inverse : 0.0f;
    const int weight = n >= 0.0f ? int(n + 0.5f) : 0;
    w.high[t] = uint8_t(weight >> 7);
    w.low[t] = uint8_t(weight & 127);
  }
  w.scale = most / kFull;
  return broken;
}

template <int R>
void some_int8_rows(const QueryRow* rows, const KeyBlocks& blocks, int dim) {
  alignas(64) float s[R][kPiece];
  Halves w[R];
  const int keys = most_keys(rows, R), num_blocks = (keys + kPage - 1) / kPage;
  float scale[R];
  int32_t sums[R];
  for (int r = 0; r < R; ++r) {
    std::memcpy(&scale[r], rows[r].q + dim, 4);
    std::memcpy(&sums[r], rows[r].q + dim + 4, 4);
  }
  for (int b = 0; b < num_blocks; ++b) {
    const uint8_t* from = block(blocks.k, blocks, b);
    Ints sum[R];
    for (int r = 0; r < R; ++r) sum[r] = start(sums[r]);
    for (int d = 0; d < dim; d += 4) {
      const Biased bytes = load_biased(from + size_t(d) * kPage);
      for (int r = 0; r < R; ++r)
        sum[r] = dot(sum[r], bytes, reinterpret_cast<const int8_t*>(rows[r].q) + d);
    }
    const Floats scales = load(reinterpret_cast<const float*>(from + size_t(dim) * kPage));
    for (int r = 0; r < R; ++r)
      store(s[r] + b * kPage, floats(sum[r]) * (floats(scale[r]) * scales));
  }
  for (int r = 0; r < R; ++r) {
    const float top = hide_the_rest(rows[r], num_blocks * kPage, s[r]);
    rows[r].out[dim] = top;
    rows[r].out[dim + 1] = exponentials(s[r], top, num_blocks * kPage);
    rows[r].out[dim + 1] += weigh(blocks, rows[r].keys, num_blocks * kPage, dim, s[r], w[r]);
  }
  for (int d = 0; d < dim; d += kPage) {
    Ints high[R], low[R];
    for (int r = 0; r < R; ++r) high[r] = low[r] = ints(0);
    for (int t = 0; t < num_blocks * kPage; t += 4) {
      const uint8_t* from = block(blocks.v, blocks, t / kPage);
      const Bytes bytes = load_bytes(from + (size_t(t % kPage / 4) * dim + d) * 4);
      for (int r = 0; r < R; ++r) {
        high[r] = dot_signed(high[r], bytes, w[r].high + t);
        low[r] = dot_signed(low[r], bytes, w[r].low + t);
      }
    }
    for (int r = 0; r < R; ++r)
      store(rows[r].out + d,
            fma(floats(high[r]), floats(128.0f), floats(low[r])) * floats(w[r].scale));
  }
}

[[maybe_unused]] void piece(const QueryRow* rows, int num_rows, const KeyBlocks& blocks,
                            const KeyBlocks*, int dim) {
  for (int r = 0; r < num_rows; r += kRows)
    with_rows<kRows>(num_rows - r, [&](auto count) { some_rows<count()>(rows + r, blocks, dim); });
}

void int8_piece(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks*,
                int dim) {
  for (int r = 0; r < num_rows; r += kRows)
    with_rows<kRows>(num_rows - r, [&](auto count) {
      some_int8_rows<count()>(rows + r, blocks, dim);
    });
}
