// LoRA products, written in the blocks of 16 of an instruction set. Included by gemm.inl.
//
// A row is summed in one order, whatever its batch-mates. The few KB of each adapter for a product
// lie at another address, so they are prefetched: else half of the time is lost waiting for memory.

constexpr size_t kAhead = 512;  // values to prefetch ahead in the current part
constexpr int kFirst = 16;      // cache lines to prefetch of the next part

inline void prefetch_first(const uint16_t* values) {
  for (int i = 0; values && i < kFirst; ++i) prefetch(values + i * 32);
}

// Return B of the part's first block at or after `b`, or null.
inline const uint16_t* first_block(const LoraPart& part, int b) {
  const int from = std::max(b, part.first_block);
  const uint16_t* values = lora_block(part, from);
  return values || part.block_step == 1 ? values : lora_block(part, from + 1);
}

// Add B low[r] to out[r] for one block and R rows with the same adapter.
template <int R>
inline void expand_block(const uint16_t* b, int rank, const float* low, size_t low_stride,
                         float* out, size_t stride) {
  Floats even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = load(out + r * stride, kBlock), odd[r] = floats(0.0f);
  for (int j = 0; j < rank; j += 2, b += 2 * kBlock) {
    prefetch(b + kAhead);
    const Bytes raw = load_bytes(reinterpret_cast<const uint8_t*>(b));
    const Floats first = firsts(raw), second = seconds(raw);
    for (int r = 0; r < R; ++r) {
      even[r] = fma(floats(low[r * low_stride + j]), first, even[r]);
      odd[r] = fma(floats(low[r * low_stride + j + 1]), second, odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * stride, kBlock, even[r] + odd[r]);
}

template <int R>
void expand_most(const uint16_t* b, int rank, const float* low, size_t low_stride, int rows,
                 float* out, size_t stride) {
  for (; rows >= R; rows -= R, low += R * low_stride, out += R * stride)
    expand_block<R>(b, rank, low, low_stride, out, stride);
  if constexpr (R > 1)
    if (rows) expand_most<R / 2>(b, rank, low, low_stride, rows, out, stride);
}

// Compute what adapters add to `rows` in `blocks`, into out.delta. Rows with the same adapter are
// computed together, part by part, since each part is contiguous in memory.
void expand(const Output& out, Rows rows, Rows blocks) {
  for (int r = rows.begin, end; r < rows.end; r = end) {
    const LoraLinear* linear = out.adapters[r].linear;
    for (end = r + 1; end < rows.end && out.adapters[end].linear == linear;) ++end;
    float* to = out.delta + size_t(r - rows.begin) * out.delta_width;
    std::fill_n(to, size_t(end - r) * out.delta_width, 0.0f);
    if (end < rows.end && out.adapters[end].linear)
      for (const LoraPart& part : out.adapters[end].linear->parts)
        prefetch_first(first_block(part, blocks.begin));
    for (int p = 0; linear && p < kLoraParts; ++p)
      for (int b = blocks.begin; b < blocks.end; ++b) {
        const LoraPart& part = linear->parts[p];
        if (const uint16_t* values = lora_block(part, b))
          expand_most<kLoraRows>(values, part.rank, out.adapters[r].low + p * out.low_stride,
                                 kLoraParts * out.low_stride, end - r,
                                 to + (b - blocks.begin) * kBlock, out.delta_width);
      }
  }
}

// Compute A x for R rows of one adapter. Four sums per lane hide the latency of the additions.
template <int R>
void shrink(const LoraPart& part, const float* x, size_t stride, int k, float* low,
            size_t low_stride) {
  const int whole = k / kLoraInputs;
  for (int j = 0; j < part.rank; j += kLoraRanks) {
    Floats sums[R][4];
    for (int r = 0; r < R; ++r)
      for (int s = 0; s < 4; ++s) sums[r][s] = floats(0.0f);
    const uint16_t* a = part.a + lora_a(k, 0, j);
    const auto add = [&](int line, const float* from, size_t between, int s) {
      prefetch(a + line * kLoraLine + kAhead);
      const Bytes raw = load_bytes(reinterpret_cast<const uint8_t*>(a + line * kLoraLine));
      const Floats first = firsts(raw), second = seconds(raw);
      for (int r = 0; r < R; ++r) {
        sums[r][s] = fma(alternate(from + r * between), first, sums[r][s]);
        sums[r][s + 1] = fma(alternate(from + r * between + 2), second, sums[r][s + 1]);
      }
    };
    int line = 0;
    for (; line + 2 <= whole; line += 2) {
      add(line, x + line * kLoraInputs, stride, 0);
      add(line + 1, x + (line + 1) * kLoraInputs, stride, 2);
    }
    if (line < whole) add(line, x + line * kLoraInputs, stride, 0);
    if (const int left = k % kLoraInputs) {
      float tail[R][kLoraInputs] = {};
      for (int r = 0; r < R; ++r) std::copy_n(x + r * stride + k - left, left, tail[r]);
      add(whole, tail[0], kLoraInputs, 2);
    }
    for (int r = 0; r < R; ++r) {
      float both[kBlock];
      store(both, kBlock, (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]));
      for (int n = 0; n < kLoraRanks; ++n)
        low[r * low_stride + j + n] = both[2 * n] + both[2 * n + 1];
    }
  }
}

template <int R>
void shrink_most(const LoraPart& part, const float* x, size_t stride, int rows, int k, float* low,
                 size_t low_stride) {
  for (; rows >= R; rows -= R, x += R * stride, low += R * low_stride)
    shrink<R>(part, x, stride, k, low, low_stride);
  if constexpr (R > 1)
    if (rows) shrink_most<R / 2>(part, x, stride, rows, k, low, low_stride);
}

void shrink_rows(const LoraPart& part, const LoraPart* next, const float* x, size_t stride,
                 int rows, int k, float* low, size_t low_stride) {
  if (next) prefetch_first(next->a);
  shrink_most<kLoraRows>(part, x, stride, rows, k, low, low_stride);
}
