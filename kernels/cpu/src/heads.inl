// Rotates heads and stores queries, keys and values, in plain C++ for compilers to vectorise.
// Included once per instruction set, inside its own namespace. See AttentionOps.

inline void rotate(float* head, const float* cos_sin, int half, float scale) {
  for (int d = 0; d < half; ++d) {
    const float a = head[d], b = head[d + half], cos = cos_sin[d], sin = cos_sin[d + half];
    head[d] = (a * cos - b * sin) * scale;
    head[d + half] = (b * cos + a * sin) * scale;
  }
}

inline void store_query(const float* q, int head_dim, int dim, uint8_t* out) {
  auto* to = reinterpret_cast<uint16_t*>(out);
  for (int d = 0; d < head_dim; ++d) to[d] = to_bf16(q[d]);
  for (int d = head_dim; d < dim; ++d) to[d] = 0;
}

inline void store_token(const float* k, const float* v, int o, int head_dim, int dim,
                        uint8_t* keys, uint8_t* values) {
  uint16_t half[2][kMaxHeadDim];
  for (int d = 0; d < head_dim; ++d) half[0][d] = to_bf16(k[d]), half[1][d] = to_bf16(v[d]);
  for (int d = 0; d < head_dim; d += 2)  // head_dim is even
    std::memcpy(keys + (size_t(d) * kPage + 2 * o) * 2, half[0] + d, 4);
  auto* to = reinterpret_cast<uint16_t*>(values) + size_t(o / 2) * 2 * dim + o % 2;
  for (int d = 0; d < head_dim; ++d) to[2 * d] = half[1][d];
}

inline void store_int8_query(const float* q, int head_dim, int dim, uint8_t* out) {
  std::memset(out, 0, query_bytes(kKvInt8, dim));
  const Rounding rounding = rounding_of(q, head_dim);
  int32_t sum = 0;
  for (int d = 0; d < head_dim; ++d) {
    const int n = rounding.round(q[d]);
    out[d] = uint8_t(int8_t(n));
    sum += n;
  }
  std::memcpy(out + dim, &rounding.scale, 4);
  std::memcpy(out + dim + 4, &sum, 4);
}

inline void store_int8_token(const float* k, const float* v, int o, int head_dim, int dim,
                             uint8_t* keys, uint8_t* values) {
  const Rounding of_keys = rounding_of(k, head_dim), of_values = rounding_of(v, head_dim);
  for (int d = 0; d < dim; ++d) {
    const bool inside = d < head_dim;
    keys[size_t(d / 4) * 4 * kPage + o * 4 + d % 4] =
        uint8_t(128 + (inside ? of_keys.round(k[d]) : 0));
    values[(size_t(o / 4) * dim + d) * 4 + o % 4] =
        uint8_t(int8_t(inside ? of_values.round(v[d]) : 0));
  }
  std::memcpy(keys + size_t(dim) * kPage + o * 4, &of_keys.scale, 4);
  std::memcpy(values + size_t(dim) * kPage + o * 4, &of_values.scale, 4);
}
