// Partial loads, partial stores and silu through memory, for instruction sets without masks.

inline Floats load(const float* p, int count) {
  if (count >= kBlock) return load(p);
  float values[kBlock] = {};
  for (int i = 0; i < count; ++i) values[i] = p[i];
  return load(values);
}

inline void store(float* p, int count, Floats x) {
  if (count >= kBlock) return store(p, x);
  float values[kBlock];
  store(values, x);
  for (int i = 0; i < count; ++i) p[i] = values[i];
}

inline Floats silu(Floats x) {
  float values[kBlock];
  store(values, x);
  for (int i = 0; i < kBlock; ++i) {
    const float part = 1.0f + exp_of(values[i] < 0.0f ? values[i] : -values[i]);
    values[i] = values[i] * (values[i] < 0.0f ? part - 1.0f : 1.0f) / part;
  }
  return load(values);
}
