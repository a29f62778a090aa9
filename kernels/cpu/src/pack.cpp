// Packs weights into the layouts of common.h, once at load, and unpacks rows.
#include "pack.h"

#include <algorithm>
#include <cmath>

#include "engine.h"

namespace tokenloom {
namespace {

uint16_t read16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

void pack_int8_row(const float* row, int k, int k_pad, int o, uint8_t* data, uint16_t* scales) {
  for (int g = 0; g < k_pad / kGroup; ++g) {
    const int count = std::min(kGroup, k - g * kGroup);
    float top = 0.0f;
    for (int i = 0; i < count; ++i) top = std::max(top, std::fabs(row[g * kGroup + i]));
    uint16_t scale = to_bf16(top / 127.0f);
    while (from_bf16(scale) * 127.5f < top) ++scale;  // round up until the largest value fits
    scales[g * kBlock + o] = scale;
    const float inverse = top > 0 ? 1.0f / from_bf16(scale) : 0.0f;
    for (int i = 0; i < count; ++i) {
      const float q = std::nearbyint(row[g * kGroup + i] * inverse);
      data[byte_at(g * kGroup + i, o)] = uint8_t(int(std::min(127.0f, std::max(-127.0f, q))) + 128);
    }
  }
}

// GGUF blocks of 32 inputs: Q4_0 = f16 d, 16 bytes; Q4_1 = f16 d, f16 m, 16 bytes; byte j holds
// inputs j and j + 16. Q8_0 = f16 d, 32 signed bytes.
void pack_q4_row(const uint8_t* row, int k, int o, bool has_minimum, uint8_t* data,
                 uint16_t* scales) {
  const size_t size = has_minimum ? 20 : 18;
  for (int g = 0; g < k / kSubgroup; ++g, row += size) {
    const float d = from_f16(read16(row));
    scales[2 * g * kBlock + o] = read16(row);
    scales[(2 * g + 1) * kBlock + o] = has_minimum ? read16(row + 2) : to_f16(-8.0f * d);
    const uint8_t* nibbles = row + size - 16;
    for (int i = 0; i < kSubgroup; ++i) {
      const uint8_t q = i < 16 ? nibbles[i] & 15 : nibbles[i - 16] >> 4;
      uint8_t& byte = data[(size_t(g) * 4 + i / 8) * 4 * kBlock + 4 * o + i % 4];
      byte = i % 8 < 4 ? (byte & 0xf0) | q : (byte & 0x0f) | uint8_t(q << 4);
    }
  }
}

void pack_q8_row(const uint8_t* row, int k, int o, uint8_t* data, uint16_t* scales) {
  for (int g = 0; g < k / kSubgroup; ++g, row += 34) {
    scales[g * kBlock + o] = read16(row);
    for (int i = 0; i < kSubgroup; ++i)
      data[byte_at(g * kSubgroup + i, o)] = uint8_t(int8_t(row[2 + i]) + 128);
  }
}

// Quantise groups of 32 floats to w ~ d q + m with 4-bit q: start from the range, then refit d and m
// to q twice by least squares.
void pack_int4_row(const float* row, int k, int k_pad, int o, uint8_t* data, uint16_t* scales) {
  for (int g = 0; g < k_pad / kSubgroup; ++g) {
    float w[kSubgroup];
    int q[kSubgroup];
    for (int i = 0; i < kSubgroup; ++i) {
      const int at = g * kSubgroup + i;
      w[i] = at < k ? row[at] : 0.0f;
    }
    float m = *std::min_element(w, w + kSubgroup);
    float d = (*std::max_element(w, w + kSubgroup) - m) / 15.0f;
    for (int round = 0;; ++round) {
      d = from_f16(to_f16(d));
      m = from_f16(to_f16(m));
      for (int i = 0; i < kSubgroup; ++i)
        q[i] = d != 0 ? int(std::min(15.0f, std::max(0.0f, std::nearbyint((w[i] - m) / d)))) : 0;
      if (round == 2) break;
      double n = kSubgroup, sq = 0, sqq = 0, sw = 0, sqw = 0;
      for (int i = 0; i < kSubgroup; ++i) sq += q[i], sqq += q[i] * q[i], sw += w[i], sqw += q[i] * w[i];
      const double det = n * sqq - sq * sq;
      if (det <= 0) continue;
      d = float((n * sqw - sq * sw) / det);
      m = float((sqq * sw - sq * sqw) / det);
    }
    scales[2 * g * kBlock + o] = to_f16(d);
    scales[(2 * g + 1) * kBlock + o] = to_f16(m);
    for (int i = 0; i < kSubgroup; ++i) {
      uint8_t& byte = data[(size_t(g) * 4 + i / 8) * 4 * kBlock + 4 * o + i % 4];
      byte = i % 8 < 4 ? (byte & 0xf0) | q[i] : (byte & 0x0f) | uint8_t(q[i] << 4);
    }
  }
}

}  // namespace

bool pack_rows(const PackJob& job) {
  const int kind = job.format == kGgufQ8_0 ? kInt8Sub
                   : job.format == kFloatToInt8 ? kInt8 : kInt4;
  const size_t bytes = block_bytes(kind, job.k_pad), scale_count = block_scales(kind, job.k_pad);
  if (job.k_pad % kGroup || job.k > job.k_pad) return false;
  if (job.format >= kGgufQ4_0 && job.k % kSubgroup) return false;
#pragma omp parallel for num_threads(job.threads)
  for (int b = 0; b < blocks(job.n); ++b) {
    const size_t target = size_t(job.first_block) + size_t(b) * job.block_step;
    uint8_t* data = job.data + target * bytes;
    uint16_t* scales = job.scales + target * scale_count;
    std::fill_n(data, bytes, uint8_t(kind == kInt4 ? 0 : 128));
    std::fill_n(scales, scale_count, uint16_t(0));
    for (int o = 0; o < kBlock && b * kBlock + o < job.n; ++o) {
      const uint8_t* row = job.rows + size_t(b * kBlock + o) * job.row_bytes;
      const float* values = reinterpret_cast<const float*>(row);
      switch (job.format) {
        case kFloatToInt8: pack_int8_row(values, job.k, job.k_pad, o, data, scales); break;
        case kFloatToInt4: pack_int4_row(values, job.k, job.k_pad, o, data, scales); break;
        case kGgufQ4_0: pack_q4_row(row, job.k, o, false, data, scales); break;
        case kGgufQ4_1: pack_q4_row(row, job.k, o, true, data, scales); break;
        default: pack_q8_row(row, job.k, o, data, scales); break;
      }
    }
  }
  return true;
}

void unpack_row(const Weight& w, int row, float* out) {
  const int o = row % kBlock;
  const uint8_t* data = w.data + row / kBlock * block_bytes(w.kind, w.k_pad);
  const uint16_t* scales = w.scales + row / kBlock * block_scales(w.kind, w.k_pad);
  for (int i = 0; i < w.k; ++i) {
    if (w.kind == kInt4) {
      const int g = i / kSubgroup;
      const uint8_t byte = data[size_t(i / 8) * 4 * kBlock + 4 * o + i % 4];
      out[i] = from_f16(scales[2 * g * kBlock + o]) * float(i % 8 < 4 ? byte & 15 : byte >> 4) +
               from_f16(scales[(2 * g + 1) * kBlock + o]);
    } else {
      const float scale = w.kind == kInt8 ? from_bf16(scales[i / kGroup * kBlock + o])
                                          : from_f16(scales[i / kSubgroup * kBlock + o]);
      out[i] = scale * float(int(data[byte_at(i, o)]) - 128);
    }
  }
}

}  // namespace tokenloom
