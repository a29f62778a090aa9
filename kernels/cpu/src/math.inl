// Elementary functions that compilers vectorise. Included once per instruction set.

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

// exp of x <= 0: Cephes' polynomial; 0 if the result would not be a normal number.
static inline float exp_of(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  const float n = float(int32_t(clamped * 1.44269504f - 0.5f));
  const float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return x > -87.0f ? p * power : 0.0f;
}
