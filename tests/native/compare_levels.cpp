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
void tl_linear(const Weight*, const float*, int32_t, float*, int64_t, int32_t, int32_t, int8_t*,
               float*, int32_t*);
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
  std::printf("%-28s worst %.2e of %.2e%s\n", what, worst, most, fine ? "" : "  WRONG");
  failures += !fine;
}

void compare_linear(int isa, int kind, int n, int k, int rows, int epilogue) {
  const int k_pad = round_up(k, kGroup);
  std::vector<float> w(size_t(n) * k), x(size_t(rows) * k);
  for (float& v : w) v = normal();
  for (float& v : x) v = normal();
  std::vector<uint8_t> data(blocks(n) * block_bytes(kind, k_pad));
  std::vector<uint16_t> scales(blocks(n) * block_scales(kind, k_pad));
  std::vector<float> bias(size_t(blocks(n)) * kBlock, 0.5f);
  PackJob job{};
  job.rows = reinterpret_cast<const uint8_t*>(w.data());
  job.row_bytes = int64_t(k) * 4;
  job.data = data.data(), job.scales = scales.data();
  job.n = n, job.k = k, job.k_pad = k_pad;
  job.format = kind == kInt4 ? kFloatToInt4 : kFloatToInt8;
  job.block_step = 1, job.threads = 1;
  tl_pack(&job);
  const Weight weight{data.data(), scales.data(), bias.data(), n, k, k_pad, kind};
  const int width = epilogue == kSiluMul ? n / 2 : n;
  std::vector<float> wanted(size_t(rows) * width, 1.0f), got = wanted;
  std::vector<int8_t> q(size_t(rows) * k_pad);
  std::vector<float> row_scales(size_t(rows) * k_pad / kGroup);
  std::vector<int32_t> sums(size_t(rows) * k_pad / kSubgroup);
  for (auto [level, out] : {std::pair{0, &wanted}, std::pair{isa, &got}})
    tl_linear(&weight, x.data(), rows, out->data(), width, epilogue, level, q.data(),
              row_scales.data(), sums.data());
  char what[64];
  std::snprintf(what, sizeof what, "level %d kind %d %dx%dx%d e%d", isa, kind, rows, n, k, epilogue);
  expect_close(what, got, wanted);
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
