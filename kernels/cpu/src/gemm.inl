// y = x W^T on quantised rows and packed weights, written in the blocks of 16 that an instruction
// set provides. Included once per instruction set, after its block types.
//
// Sums within a group are integers and groups are added in ascending order, so a row's result
// depends on that row alone.

constexpr int kGroupBlocks = 8;  // even, so that gate and up stay together

#include "lora.inl"

struct Job {
  const Weight& w;
  const Activations& x;
  Output out;
  size_t bytes, scales;  // per block
  int delta_row = 0, delta_block = 0;  // first row and block in out.delta

  Job(const Weight& weight, const Activations& activations, const Output& output)
      : w(weight), x(activations), out(output), bytes(block_bytes(w.kind, w.k_pad)),
        scales(block_scales(w.kind, w.k_pad)) {}
  const uint8_t* data(int block) const { return w.data + size_t(block) * bytes; }
  const uint16_t* scale(int block) const { return w.scales + size_t(block) * scales; }
  const int8_t* row(int r) const { return x.q + size_t(r) * w.k_pad; }
  float row_scale(int r, int g) const { return x.scales[size_t(r) * (w.k_pad / kGroup) + g]; }
  const float* delta_of(int r, int block) const {
    return out.delta + (r - delta_row) * out.delta_width + (block - delta_block) * kBlock;
  }
  const int32_t* sums(int r) const { return x.sums + size_t(r) * (w.k_pad / kSubgroup); }
  const float* x_sums(int r) const { return x.x_sums + size_t(r) * (w.k_pad / kSubgroup); }
};

// Add the products of `steps` x 4 inputs to acc[r][t].
template <int MR, int NT>
TL_INLINE void products(const uint8_t* const w[NT], const int8_t* const a[MR], int steps,
                     Ints acc[MR][NT]) {
#pragma GCC unroll kUnroll
  for (int i = 0; i < steps; ++i) {
    Biased wv[NT];
    for (int t = 0; t < NT; ++t) wv[t] = load_biased(w[t] + 4 * kBlock * i);
    for (int r = 0; r < MR; ++r)
      for (int t = 0; t < NT; ++t) acc[r][t] = dot(acc[r][t], wv[t], a[r] + 4 * i);
  }
}

template <int MR, int NT, int KIND>
TL_INLINE void dot_int8(const Job& job, int r0, int b0, Floats y[MR][NT]) {
  constexpr int kSize = KIND == kInt8 ? kGroup : kSubgroup;
  const uint8_t* w[NT];
  const uint16_t* scales[NT];
  const int8_t* a[MR];
  for (int t = 0; t < NT; ++t) w[t] = job.data(b0 + t), scales[t] = job.scale(b0 + t);
  for (int r = 0; r < MR; ++r) a[r] = job.row(r0 + r);
  for (int g = 0; g < job.w.k_pad / kSize; ++g) {
    Ints acc[MR][NT];
    for (int r = 0; r < MR; ++r) {
      const int32_t* sums = job.sums(r0 + r) + g * (kSize / kSubgroup);
      for (int t = 0; t < NT; ++t)
        acc[r][t] = start(KIND == kInt8 ? sums[0] + sums[1] : sums[0]);
    }
    products<MR, NT>(w, a, kSize / 4, acc);
    for (int t = 0; t < NT; ++t) {
      const Floats scale = KIND == kInt8 ? load_bf16(scales[t]) : load_f16(scales[t]);
      for (int r = 0; r < MR; ++r) {
        const Floats both = scale * floats(job.row_scale(r0 + r, g * kSize / kGroup));
        y[r][t] = fma(floats(acc[r][t]), both, y[r][t]);
      }
      w[t] += kSize * kBlock;
      scales[t] += kBlock;
    }
    for (int r = 0; r < MR; ++r) a[r] += kSize;
  }
}

template <int MR, int NT>
TL_INLINE void dot_int4(const Job& job, int r0, int b0, Floats y[MR][NT]) {
  const uint8_t* w[NT];
  const uint16_t* scales[NT];
  for (int t = 0; t < NT; ++t) w[t] = job.data(b0 + t), scales[t] = job.scale(b0 + t);
  for (int g = 0; g < job.w.k_pad / kSubgroup; ++g) {
    Ints acc[MR][NT];
    for (int r = 0; r < MR; ++r)
      for (int t = 0; t < NT; ++t) acc[r][t] = ints(0);
    for (int p = 0; p < kSubgroup / 8; ++p) {
      Bytes low[NT], high[NT];
      for (int t = 0; t < NT; ++t) {
        const Bytes raw = load_bytes(w[t] + 4 * kBlock * p);
        low[t] = low_nibbles(raw);
        high[t] = high_nibbles(raw);
      }
      for (int r = 0; r < MR; ++r) {
        const int8_t* a = job.row(r0 + r) + g * kSubgroup + 8 * p;
        for (int t = 0; t < NT; ++t)
          acc[r][t] = dot(dot(acc[r][t], low[t], a), high[t], a + 4);
      }
    }
    for (int t = 0; t < NT; ++t) {
      const Floats scale = load_f16(scales[t]), minimum = load_f16(scales[t] + kBlock);
      for (int r = 0; r < MR; ++r) {
        const Floats both = scale * floats(job.row_scale(r0 + r, g * kSubgroup / kGroup));
        y[r][t] = fma(floats(acc[r][t]), both, y[r][t]);
        y[r][t] = fma(floats(job.x_sums(r0 + r)[g]), minimum, y[r][t]);
      }
      w[t] += kSubgroup * kBlock / 2;
      scales[t] += 2 * kBlock;
    }
  }
}

template <int MR, int NT, int EPI>
TL_INLINE void finish(const Job& job, int r0, int b0, Floats y[MR][NT]) {
  if (job.w.bias)
    for (int t = 0; t < NT; ++t) {
      const Floats bias = load(job.w.bias + (b0 + t) * kBlock, kBlock);
      for (int r = 0; r < MR; ++r) y[r][t] = y[r][t] + bias;
    }
  if (job.out.adapters)
    for (int r = 0; r < MR; ++r)
      for (int t = 0; t < NT; ++t) y[r][t] = y[r][t] + load(job.delta_of(r0 + r, b0 + t), kBlock);
  if constexpr (EPI == kSiluMul) {
    for (int r = 0; r < MR; ++r) {
      float* out = job.out.data + (r0 + r) * job.out.stride + b0 / 2 * kBlock;
      store(out, kBlock, silu(y[r][0]) * y[r][1]);
    }
    return;
  }
  for (int t = 0; t < NT; ++t) {
    const int column = (b0 + t) * kBlock;
    const int count = job.w.n - column < kBlock ? job.w.n - column : kBlock;
    for (int r = 0; r < MR; ++r) {
      float* out = job.out.data + (r0 + r) * job.out.stride + column;
      if constexpr (EPI == kAdd) y[r][t] = y[r][t] + load(out, count);
      store(out, count, y[r][t]);
    }
  }
}

template <int MR, int NT, int KIND, int EPI>
void tile(const Job& job, int r0, int b0) {
  Floats y[MR][NT];
  for (int r = 0; r < MR; ++r)
    for (int t = 0; t < NT; ++t) y[r][t] = floats(0.0f);
  if constexpr (KIND == kInt4)
    dot_int4<MR, NT>(job, r0, b0, y);
  else
    dot_int8<MR, NT, KIND>(job, r0, b0, y);
  finish<MR, NT, EPI>(job, r0, b0, y);
}

// Prefetch the next panel's weights while this one is computed.
inline void prefetch_panel(const Job& job, int block, Share lines) {
  if (block >= blocks(job.w.n)) return;
  const uint8_t* next = job.data(block);
  for (int i = lines.begin; i < lines.end; ++i) prefetch(next + size_t(i) * 64);
}

template <int MR, int NT, int KIND, int EPI>
void rows_of_tile(const Job& job, int rows, int r0, int b0) {
  if (rows == MR) return tile<MR, NT, KIND, EPI>(job, r0, b0);
  if constexpr (MR > 1) rows_of_tile<MR - 1, NT, KIND, EPI>(job, rows, r0, b0);
}

// Multiply rows [begin, end) with NT blocks, in passes of nearly equal size.
template <int NT, int KIND, int EPI>
void panel(const Job& job, int begin, int end, int b0) {
  constexpr int kMost = NT == 1 ? kMaxRows : kRowsOfPair;
  const int rows = end - begin, passes = (rows + kMost - 1) / kMost;
  for (int p = 0; p < passes; ++p) {
    const Share share(rows, p, passes);
    if (begin == 0 && passes > 1)
      prefetch_panel(job, b0 + NT, Share(int(NT * job.bytes / 64), p, passes));
    rows_of_tile<kMost, NT, KIND, EPI>(job, share.size(), begin + share.begin, b0);
  }
}

// Keep a chunk of rows in the L1 cache while a few blocks stream over it from L2.
template <int KIND, int EPI>
void groups(const Job& job, Rows rows, Rows blocks) {
  constexpr int kTogether = EPI == kSiluMul ? 2 : kTileBlocks;
  for (int group = blocks.begin; group < blocks.end; group += kGroupBlocks) {
    const int last = std::min(blocks.end, group + kGroupBlocks);
    for (int r = rows.begin; r < rows.end; r += kChunkRows) {
      const int end = std::min(rows.end, r + kChunkRows);
      int b = group;
      for (; b + kTogether <= last; b += kTogether) panel<kTogether, KIND, EPI>(job, r, end, b);
      if constexpr (EPI != kSiluMul && kTogether > 1)
        if (b < last) panel<1, KIND, EPI>(job, r, end, b);
    }
  }
}

// With adapters, multiply one chunk of rows at a time. Few rows use the whole width of delta, since
// an adapter's B for many blocks is contiguous and so read at memory speed.
template <int KIND, int EPI>
void columns(Job& job, int rows, Share share) {
  if (!job.out.adapters) return groups<KIND, EPI>(job, {0, rows}, share);
  const int wide = rows > kChunkRows ? kGroupBlocks : kDeltaBlocks;
  job.out.delta_width = (wide + 1) * kBlock;
  for (int b = share.begin; b < share.end; b += wide)
    for (int r = 0; r < rows; r += kChunkRows) {
      const Rows some{r, std::min(rows, r + kChunkRows)}, blocks{b, std::min(share.end, b + wide)};
      expand(job.out, some, blocks);
      job.delta_row = r, job.delta_block = b;
      groups<KIND, EPI>(job, some, blocks);
    }
}

template <int KIND>
void by_epilogue(Job& job, int rows, Share share) {
  switch (job.out.epilogue) {
    case kStore: columns<KIND, kStore>(job, rows, share); break;
    case kAdd: columns<KIND, kAdd>(job, rows, share); break;
    default: columns<KIND, kSiluMul>(job, rows, share); break;
  }
}

void gemm(const Weight& w, const Activations& x, int rows, const Output& out, int tid,
          int threads) {
  Job job(w, x, out);
  const int unit = out.epilogue == kSiluMul ? 2 : 1;  // gate and up stay together
  Share share(blocks(w.n) / unit, tid, threads);
  share.begin *= unit;
  share.end *= unit;
  switch (w.kind) {
    case kInt8: by_epilogue<kInt8>(job, rows, share); break;
    case kInt4: by_epilogue<kInt4>(job, rows, share); break;
    default: by_epilogue<kInt8Sub>(job, rows, share); break;
  }
}

