// The Gumbel-max draw of kernels/sampling.py over a whole row, in plain loops of 16 that compilers
// vectorise. Included once per instruction set, inside a namespace of its own.

constexpr int kLanes = 16;

// Natural logarithm of a normal positive number: Cephes' polynomial, relative error below 1e-6.
static inline float log_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  float e = float(int32_t(bits >> 23) - 126);
  bits = (bits & 0x007fffff) | 0x3f000000;
  float m;
  std::memcpy(&m, &bits, 4);
  const bool low = m < 0.707106781f;
  e = low ? e - 1.0f : e;
  m = low ? m + m - 1.0f : m - 1.0f;
  const float z = m * m;
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z - 2.12194440e-4f * e - 0.5f * z;
  return m + y + 0.693359375f * e;
}

// -log(-log1p(-u)), u being the number in (0, 1) of token `id` under the key.
static inline float gumbel(uint32_t id, uint32_t first, uint32_t second) {
  uint32_t x = id + first;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x = (x ^ x >> 15) + second;
  x *= 0xd35a2d97u;
  x ^= x >> 15;
  float u = (float(int32_t(x & 0x7fffffff)) + 0.5f) * 4.656612873077393e-10f;
  u = u < 0.99999994f ? u : 0.99999994f;
  const float rest = 1.0f - u, rounded = 1.0f - rest;  // Kahan's log1p
  const float exact = rounded > 0.0f ? -log_of(rest) * (u / rounded) : u;
  return -log_of(exact);
}

// argmax of logits / temperature + noise; of ties the lowest id. -infinity is never drawn.
int32_t draw(const float* logits, int32_t n, float top, float temperature, uint32_t first,
             uint32_t second) {
  float best[kLanes];
  int32_t at[kLanes];
  for (int l = 0; l < kLanes; ++l) best[l] = -INFINITY, at[l] = n;
  const float inverse = 1.0f / temperature;
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    float scores[kLanes];
    for (int l = 0; l < kLanes; ++l)
      scores[l] = (logits[i + l] - top) * inverse + gumbel(uint32_t(i + l), first, second);
    for (int l = 0; l < kLanes; ++l) {
      at[l] = scores[l] > best[l] ? i + l : at[l];
      best[l] = scores[l] > best[l] ? scores[l] : best[l];
    }
  }
  for (; i < n; ++i) {
    const float score = (logits[i] - top) * inverse + gumbel(uint32_t(i), first, second);
    if (score > best[0]) best[0] = score, at[0] = i;
  }
  for (int l = 1; l < kLanes; ++l)
    if (best[l] > best[0] || (best[l] == best[0] && at[l] < at[0])) best[0] = best[l], at[0] = at[l];
  return at[0];
}
