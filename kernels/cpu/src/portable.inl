// The operations in plain C++, arranged for compilers to vectorise the 16 outputs, keys or values of
// a block. Included once per instruction set, inside its own namespace.

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }

// Compute the 16 outputs of row `r` for block `b`.
inline void dot_int8(const Weight& w, const Activations& x, int r, int b, int size, float y[]) {
  const uint8_t* data = w.data + b * block_bytes(w.kind, w.k_pad);
  const uint16_t* scales = w.scales + b * block_scales(w.kind, w.k_pad);
  const int8_t* a = x.q + size_t(r) * w.k_pad;
  const int32_t* sums = x.sums + size_t(r) * (w.k_pad / kSubgroup);
  for (int g = 0; g < w.k_pad / size; ++g) {
    int32_t acc[kBlock];
    const int32_t sum = size == kGroup ? sums[2 * g] + sums[2 * g + 1] : sums[g];
    for (int o = 0; o < kBlock; ++o) acc[o] = -128 * sum;
    for (int i = 0; i < size; i += 4, data += 4 * kBlock)
      for (int o = 0; o < kBlock; ++o)
        for (int j = 0; j < 4; ++j) acc[o] += int32_t(data[4 * o + j]) * a[g * size + i + j];
    const float row = x.scales[size_t(r) * (w.k_pad / kGroup) + g * size / kGroup];
    for (int o = 0; o < kBlock; ++o) {
      const uint16_t half = scales[g * kBlock + o];
      y[o] += float(acc[o]) * ((size == kGroup ? from_bf16(half) : from_f16(half)) * row);
    }
  }
}

inline void dot_int4(const Weight& w, const Activations& x, int r, int b, float y[]) {
  const uint8_t* data = w.data + b * block_bytes(w.kind, w.k_pad);
  const uint16_t* scales = w.scales + b * block_scales(w.kind, w.k_pad);
  const int8_t* a = x.q + size_t(r) * w.k_pad;
  const float* x_sums = x.x_sums + size_t(r) * (w.k_pad / kSubgroup);
  for (int g = 0; g < w.k_pad / kSubgroup; ++g) {
    int32_t acc[kBlock] = {};
    for (int i = 0; i < kSubgroup; i += 8, data += 4 * kBlock)
      for (int o = 0; o < kBlock; ++o)
        for (int j = 0; j < 4; ++j) {
          const uint8_t byte = data[4 * o + j];
          acc[o] += (byte & 15) * a[g * kSubgroup + i + j];
          acc[o] += (byte >> 4) * a[g * kSubgroup + i + 4 + j];
        }
    const float row = x.scales[size_t(r) * (w.k_pad / kGroup) + g * kSubgroup / kGroup];
    for (int o = 0; o < kBlock; ++o) {
      const float scale = from_f16(scales[2 * g * kBlock + o]);
      const float minimum = from_f16(scales[(2 * g + 1) * kBlock + o]);
      y[o] += float(acc[o]) * (scale * row) + x_sums[g] * minimum;
    }
  }
}

inline void dot_block(const Weight& w, const Activations& x, int r, int b, float y[]) {
  for (int o = 0; o < kBlock; ++o) y[o] = 0.0f;
  if (w.kind == kInt4)
    dot_int4(w, x, r, b, y);
  else
    dot_int8(w, x, r, b, w.kind == kInt8 ? kGroup : kSubgroup, y);
  if (w.bias)
    for (int o = 0; o < kBlock; ++o) y[o] += w.bias[b * kBlock + o];
}

// Add the LoRA change of row `r` to block `b`.
inline void expand(const Output& out, int r, int b, float y[]) {
  if (!out.adapters || !out.adapters[r].linear) return;
  for (int p = 0; p < kLoraParts; ++p) {
    const LoraPart& part = out.adapters[r].linear->parts[p];
    const uint16_t* values = lora_block(part, b);
    if (!values) continue;
    const float* low = out.adapters[r].low + p * out.low_stride;
    for (int j = 0; j < part.rank; ++j)
      for (int o = 0; o < kBlock; ++o) y[o] += low[j] * from_bf16(values[lora_b(j, o)]);
  }
}

void gemm(const Weight& w, const Activations& x, int rows, const Output& out, int tid,
          int threads) {
  const int unit = out.epilogue == kSiluMul ? 2 : 1;
  const Share share(blocks(w.n) / unit, tid, threads);
  for (int b = share.begin * unit; b < share.end * unit; b += unit)
    for (int r = 0; r < rows; ++r) {
      float y[kBlock], up[kBlock];
      float* to = out.data + r * out.stride + b / unit * kBlock;
      dot_block(w, x, r, b, y);
      expand(out, r, b, y);
      if (out.epilogue == kSiluMul) {
        dot_block(w, x, r, b + 1, up);
        expand(out, r, b + 1, up);
        for (int o = 0; o < kBlock; ++o) to[o] = silu(y[o]) * up[o];
        continue;
      }
      const int count = w.n - b * kBlock < kBlock ? w.n - b * kBlock : kBlock;
      for (int o = 0; o < count; ++o) to[o] = out.epilogue == kAdd ? to[o] + y[o] : y[o];
    }
}

void shrink_rows(const LoraPart& part, const LoraPart*, const float* x, size_t stride, int rows,
                 int k, float* low, size_t low_stride) {
  for (int r = 0; r < rows; ++r, x += stride, low += low_stride)
    for (int j = 0; j < part.rank; ++j) {
      low[j] = 0.0f;
      for (int i = 0; i < k; ++i) low[j] += x[i] * from_bf16(part.a[lora_a(k, i, j)]);
    }
}

inline const uint8_t* block_of(const uint8_t* base, const KeyBlocks& blocks, int t) {
  return base + blocks.ids[t / kPage] * blocks.stride;
}

void one_row(const QueryRow& row, const KeyBlocks& blocks, int dim) {
  float s[kPiece], q[kMaxHeadDim];
  const auto* query = reinterpret_cast<const uint16_t*>(row.q);
  for (int d = 0; d < dim; ++d) q[d] = from_bf16(query[d]);
  float top = -INFINITY;
  for (int t = 0; t < row.keys; ++t) {
    const auto* keys =
        reinterpret_cast<const uint16_t*>(block_of(blocks.k, blocks, t)) + t % kPage * 2;
    float sum = 0.0f;
    for (int d = 0; d < dim; d += 2) {
      sum += q[d] * from_bf16(keys[d * kPage]);
      sum += q[d + 1] * from_bf16(keys[d * kPage + 1]);
    }
    s[t] = sum;
    top = sum > top ? sum : top;
  }
  float total = 0.0f;
  for (int d = 0; d < dim; ++d) row.out[d] = 0.0f;
  for (int t = 0; t < row.keys; ++t) {
    const float p = std::exp(s[t] - top), weight = from_bf16(to_bf16(p));
    const auto* v = reinterpret_cast<const uint16_t*>(block_of(blocks.v, blocks, t)) +
                    size_t(t % kPage / 2) * dim * 2 + t % 2;
    total += p;
    for (int d = 0; d < dim; ++d) row.out[d] += weight * from_bf16(v[2 * d]);
  }
  row.out[dim] = top;
  row.out[dim + 1] = total;
}

inline float scale_of(const uint8_t* block, int t, int dim) {
  float scale;
  std::memcpy(&scale, block + size_t(dim) * kPage + t % kPage * 4, 4);
  return scale;
}

// Compute the scores of one row; return the largest.
float int8_scores(const QueryRow& row, const KeyBlocks& blocks, int dim, float* s) {
  const auto* q = reinterpret_cast<const int8_t*>(row.q);
  float scale, top = -INFINITY;
  std::memcpy(&scale, q + dim, 4);
  for (int t = 0; t < row.keys; ++t) {
    const uint8_t* block = block_of(blocks.k, blocks, t);
    const uint8_t* keys = block + t % kPage * 4;
    int32_t sum = 0;
    for (int d = 0; d < dim; d += 4)
      for (int i = 0; i < 4; ++i) sum += (int(keys[d * kPage + i]) - 128) * q[d + i];
    s[t] = float(sum) * (scale * scale_of(block, t, dim));
    top = s[t] > top ? s[t] : top;
  }
  return top;
}

void one_int8_row(const QueryRow& row, const KeyBlocks& blocks, int dim) {
  float s[kPiece], total = 0.0f, most = 0.0f;
  const float top = int8_scores(row, blocks, dim, s);
  for (int t = 0; t < row.keys; ++t) {
    const float p = std::exp(s[t] - top);
    s[t] = p * scale_of(block_of(blocks.v, blocks, t), t, dim);
    total += p + s[t] * 0.0f;  // s[t] * 0 carries NaN into the sum
    most = s[t] > most ? s[t] : most;
  }
  int32_t high[kMaxHeadDim] = {}, low[kMaxHeadDim] = {};
  const float inverse = most > 0.0f ? kFull / most : 0.0f;
  for (int t = 0; t < row.keys; ++t) {
    const float n = s[t] * inverse;
    const int weight = n >= 0.0f ? int(std::nearbyint(n)) : 0;
    const uint8_t* block = block_of(blocks.v, blocks, t);
    const auto* v = reinterpret_cast<const int8_t*>(block) + size_t(t % kPage / 4) * dim * 4 + t % 4;
    for (int d = 0; d < dim; ++d) {
      high[d] += (weight >> 7) * v[4 * d];
      low[d] += (weight & 127) * v[4 * d];
    }
  }
  for (int d = 0; d < dim; ++d)
    row.out[d] = (float(high[d]) * 128.0f + float(low[d])) * (most / kFull);
  row.out[dim] = top;
  row.out[dim + 1] = total;
}

void piece(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks*,
           int dim) {
  for (int r = 0; r < num_rows; ++r) one_row(rows[r], blocks, dim);
}

void int8_piece(const QueryRow* rows, int num_rows, const KeyBlocks& blocks, const KeyBlocks*,
                int dim) {
  for (int r = 0; r < num_rows; ++r) one_int8_row(rows[r], blocks, dim);
}
