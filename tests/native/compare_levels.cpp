// Holds every level of the native library that this machine runs against level 0, on random
// weights, rows, keys and values. For machines that the Python tests do not see: `make cross` runs
// it for another architecture in an emulator. Exit status 0: all agree.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "../../kernels/cpu/src/common.h"
#include "../../kernels/cpu/src/ops.h"
#include "../../kernels/cpu/src/pack.h"

using namespace tokenloom;

extern "C" {
int32_t tl_best_isa();
int32_t tl_pack(const PackJob*);
}

namespace {

std::mt19937 random_bits(7);
int failures = 0;

float normal() { return std::normal_distribution<float>()(random_bits); }

void expect_close(const char* what, const std::vector<float>& got, const std::vector<float>& wanted) {
  float most = 0.0f, worst = 0.0f;
  for (float x : wanted) most = std::max(most, std::fabs(x));
  for (size_t i = 0; i < wanted.size(); ++i) worst = std::max(worst, std::fabs(got[i] - wanted[i]));
  const bool fine = worst <= 1e-2f * most;  // attention rounds probabilities in its own ways
  std::printf("%-36s worst %.2e of %.2e%s\n", what, worst, most, fine ? "" : "  WRONG");
  failures += !fine;
}

// A of k inputs and B of all outputs, random but for what pads them.
struct RandomPart {
  std::vector<uint16_t> a, b;
  LoraPart part;

  RandomPart(int rank, int n, int k, int block_step = 1, int first_block = 0)
      : a(lora_a(k, 0, round_up(rank, kLoraRanks)) + kLoraLine),
        part{nullptr, nullptr, rank, first_block, block_step, blocks(n) / block_step} {
    b.resize(part.num_blocks * lora_block_size(part));
    for (int j = 0; j < rank; ++j) {
      for (int i = 0; i < k; ++i) a[lora_a(k, i, j)] = to_bf16(normal() / std::sqrt(float(k)));
      for (int t = 0; t < part.num_blocks; ++t)
        for (int o = 0; o < kBlock; ++o)
          b[t * lora_block_size(part) + lora_b(j, o)] = to_bf16(normal());
    }
    part.a = a.data(), part.b = b.data();
  }
};

// Rows of one product on their way through the operations of a level.
struct Product {
  const Weight& w;
  const std::vector<float>& x;
  int rows, epilogue;
  std::vector<const LoraLinear*> adapters;  // of the rows; or empty

  std::vector<float> run(int level) const {
    const LinearOps& ops = *linear_ops(level);
    const int width = epilogue == kSiluMul ? w.n / 2 : w.n;
    const size_t size = size_t(rows) * w.k_pad;
    std::vector<float> y(size_t(rows) * width, 1.0f);
    std::vector<int8_t> q(size);
    std::vector<float> scales(size / kGroup), x_sums(size / kSubgroup);
    std::vector<int32_t> sums(size / kSubgroup);
    const Activations to{q.data(), scales.data(), sums.data(), x_sums.data()};
    for (int r = 0; r < rows; ++r)
      ops.quantise_row(&x[size_t(r) * w.k], w.k, w.k_pad, to.from(r, w.k_pad));
    Output out{y.data(), size_t(width), epilogue};
    constexpr size_t kLowStride = 32;
    std::vector<float> low(rows * kLoraParts * kLowStride), delta(kChunkRows * kDeltaWidth);
    std::vector<RowAdapter> of_rows;
    for (size_t r = 0; r < adapters.size(); ++r) {
      of_rows.push_back({adapters[r], &low[r * kLoraParts * kLowStride]});
      for (int p = 0; adapters[r] && p < kLoraParts; ++p)
        if (adapters[r]->parts[p].rank)
          ops.shrink_rows(adapters[r]->parts[p], nullptr, &x[r * w.k], w.k, 1, w.k,
                          of_rows[r].low + p * kLowStride, kLoraParts * kLowStride);
    }
    if (!adapters.empty())
      out.adapters = of_rows.data(), out.low_stride = kLowStride, out.delta = delta.data();
    ops.gemm(w, to, rows, out, 0, 1);
    return y;
  }
};

void compare_linear(int isa, int kind, int n, int k, int rows, int epilogue) {
  const int k_pad = round_up(k, kGroup);
  std::vector<float> values(size_t(n) * k), x(size_t(rows) * k);
  for (float& v : values) v = normal();
  for (float& v : x) v = normal();
  std::vector<uint8_t> data(blocks(n) * block_bytes(kind, k_pad));
  std::vector<uint16_t> scales(blocks(n) * block_scales(kind, k_pad));
  std::vector<float> bias(size_t(blocks(n)) * kBlock, 0.5f);
  PackJob job{};
  job.rows = reinterpret_cast<const uint8_t*>(values.data());
  job.row_bytes = int64_t(k) * 4;
  job.data = data.data(), job.scales = scales.data();
  job.n = n, job.k = k, job.k_pad = k_pad;
  job.format = kind == kInt4 ? kFloatToInt4 : kFloatToInt8;
  job.block_step = 1, job.threads = 1;
  tl_pack(&job);
  const Weight weight{data.data(), scales.data(), bias.data(), n, k, k_pad, kind};
  // One adapter of a single part, one that treats gate and up apart.
  const RandomPart whole(5, n, k), gate(1, n, k, 2, 0), up(24, n, k, 2, 1);
  const LoraLinear one{{whole.part}}, two{{gate.part, up.part}};
  const LoraLinear* const in_turn[] = {nullptr, &one, &one, &one, &two};
  Product product{weight, x, rows, epilogue, {}};
  for (bool with_adapters : {false, true}) {
    for (int r = 0; with_adapters && r < rows; ++r)
      product.adapters.push_back(in_turn[(r + 1) % 5]);
    char what[64];
    std::snprintf(what, sizeof what, "level %d kind %d %dx%dx%d e%d%s", isa, kind, rows, n, k,
                  epilogue, with_adapters ? " adapters" : "");
    expect_close(what, product.run(isa), product.run(0));
  }
}

void compare_attention(int isa, int kind, int dim, int rows, int keys) {
  const size_t bytes = kv_block_bytes(kind, dim);
  const int count = (keys + kPage - 1) / kPage;
  std::vector<uint8_t> k(bytes * count), v(bytes * count), q(query_bytes(kind, dim) * rows);
  std::vector<int32_t> ids(count);
  for (int b = 0; b < count; ++b) ids[b] = count - 1 - b;
  const auto fill = [&](std::vector<uint8_t>& cache, bool biased) {
    for (int b = 0; b < count; ++b) {
      uint8_t* block = cache.data() + b * bytes;
      for (int i = 0; i < kPage * dim; ++i) {
        const uint16_t half = to_bf16(normal());
        if (kind == kKvBf16) std::memcpy(block + 2 * i, &half, 2);
        if (kind == kKvInt8) block[i] = uint8_t(int(random_bits() % 255) - 127 + (biased ? 128 : 0));
      }
      const float scale = 0.01f;
      for (int i = 0; kind == kKvInt8 && i < kPage; ++i)
        std::memcpy(block + kPage * dim + 4 * i, &scale, 4);
    }
  };
  fill(k, true), fill(v, false);
  std::vector<float> wanted(size_t(rows) * (dim + 2)), got = wanted;
  const auto run = [&](int level, std::vector<float>& out) {
    std::vector<QueryRow> query;
    for (int r = 0; r < rows; ++r)
      query.push_back({q.data() + r * query_bytes(kind, dim), &out[r * (dim + 2)], keys - r % 3});
    const KeyBlocks blocks{k.data(), v.data(), ids.data(), bytes, count};
    attention_ops(level, kind)->piece(query.data(), rows, blocks, nullptr, dim);
  };
  for (int r = 0; r < rows; ++r) {
    uint8_t* row = q.data() + r * query_bytes(kind, dim);
    int32_t sum = 0;
    for (int d = 0; d < dim; ++d) {
      const uint16_t half = to_bf16(0.2f * normal());
      const int n = int(random_bits() % 255) - 127;
      sum += n;
      if (kind == kKvBf16) std::memcpy(row + 2 * d, &half, 2);
      if (kind == kKvInt8) row[d] = uint8_t(int8_t(n));
    }
    const float scale = 0.003f;
    if (kind == kKvInt8) std::memcpy(row + dim, &scale, 4), std::memcpy(row + dim + 4, &sum, 4);
  }
  run(0, wanted), run(isa, got);
  char what[64];
  std::snprintf(what, sizeof what, "level %d kv %d dim %d %dx%d", isa, kind, dim, rows, keys);
  expect_close(what, got, wanted);
}

}  // namespace

int main() {
  for (int isa = 1; isa <= tl_best_isa(); ++isa) {
    for (int kind : {kInt8, kInt4})
      for (int rows : {1, 2, 3, 4, 5, 7, 40}) {
        compare_linear(isa, kind, 64, 576, rows, kStore);
        compare_linear(isa, kind, 41, 100, rows, kAdd);
        compare_linear(isa, kind, 96, 64, rows, kSiluMul);
      }
    for (int kind : {kKvBf16, kKvInt8})
      for (int rows : {1, 2, 3, 7})
        for (int keys : {3, 16, 17, 256}) compare_attention(isa, kind, rows % 2 ? 64 : 80, rows, keys);
  }
  std::printf("levels 1 to %d: %d differ\n", tl_best_isa(), failures);
  return failures != 0 || tl_best_isa() == 0;
}
