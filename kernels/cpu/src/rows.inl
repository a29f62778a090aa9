// Operations on single rows in plain C++, for compilers to vectorise. Included once per instruction
// set, inside its own namespace.

void quantise_row(const float* x, int k, int k_pad, const Activations& to) {
  for (int i = 0; i < k_pad; i += kGroup) {
    const int count = k - i < kGroup ? (k > i ? k - i : 0) : kGroup;
    const Rounding rounding = rounding_of(x + i, count);
    to.scales[i / kGroup] = rounding.scale;
    int32_t sums[2] = {0, 0};
    for (int j = 0; j < kGroup; ++j) {
      const int n = j < count ? rounding.round(x[i + j]) : 0;
      to.q[i + j] = int8_t(n);
      sums[j / kSubgroup] += n;
    }
    for (int s = 0; s < 2; ++s) {
      to.sums[i / kSubgroup + s] = sums[s];
      to.x_sums[i / kSubgroup + s] = float(sums[s]) * rounding.scale;
    }
  }
}

void rms_norm_row(const float* x, const float* weight, float eps, int k, float* y) {
  float squares = 0.0f;
  for (int i = 0; i < k; ++i) squares += x[i] * x[i];
  const float inverse = 1.0f / std::sqrt(squares / float(k) + eps);
  for (int i = 0; i < k; ++i) y[i] = x[i] * inverse * weight[i];
}

// AttentionOps::merge.
void merge(float* out, const float* part, int dim) {
  const float top = out[dim] > part[dim] ? out[dim] : part[dim];
  const float mine = std::exp(out[dim] - top), theirs = std::exp(part[dim] - top);
  for (int d = 0; d < dim; ++d) out[d] = out[d] * mine + part[d] * theirs;
  out[dim + 1] = out[dim + 1] * mine + part[dim + 1] * theirs;
  out[dim] = top;
}
