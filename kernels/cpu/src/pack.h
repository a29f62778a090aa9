// Formats of unpacked weight rows, and the job that packs them.
#pragma once
#include "common.h"

namespace tokenloom {

enum RowFormat : int32_t {
  kFloatToInt8 = 0,  // float32 rows to kInt8
  kFloatToInt4 = 1,  // float32 rows to kInt4
  kGgufQ4_0 = 2,     // GGUF rows to kInt4, exactly
  kGgufQ4_1 = 3,
  kGgufQ8_0 = 4,  // to kInt8Sub, exactly
};

struct PackJob {
  const uint8_t* rows;
  int64_t row_bytes;
  uint8_t* data;
  uint16_t* scales;
  int32_t n, k, k_pad, format;
  int32_t first_block, block_step;  // rows 16 b to 16 b + 15 go to block first_block + b * block_step
  int32_t threads;
};

// Pack rows; return false if the format does not support their shape.
bool pack_rows(const PackJob& job);

}  // namespace tokenloom
