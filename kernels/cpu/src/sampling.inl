// Chooses a token as kernels/sampling.py does, in loops of 16 that compilers vectorise. Included once
// per instruction set, inside its own namespace.

constexpr int kLanes = 16;

// Return -log(-log1p(-u)), where u in (0, 1) is the hash of token `id` and the key.
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

struct Likeliest {
  float logit;
  int32_t id;  // ties: the lowest; -1 if the row has no finite maximum
};

Likeliest likeliest(const float* logits, int32_t n) {
  float best[kLanes];
  int32_t at[kLanes], broken[kLanes];
  for (int l = 0; l < kLanes; ++l) best[l] = -INFINITY, at[l] = n, broken[l] = 0;
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float x = logits[i + l];
      broken[l] |= !(x < INFINITY);  // NaN or infinity
      at[l] = x > best[l] ? i + l : at[l];
      best[l] = x > best[l] ? x : best[l];
    }
  for (; i < n; ++i) {
    broken[0] |= !(logits[i] < INFINITY);
    if (logits[i] > best[0]) best[0] = logits[i], at[0] = i;
  }
  for (int l = 1; l < kLanes; ++l) {
    broken[0] |= broken[l];
    if (best[l] > best[0] || (best[l] == best[0] && at[l] < at[0])) best[0] = best[l], at[0] = at[l];
  }
  return {best[0], broken[0] || at[0] == n ? -1 : at[0]};
}

// Return the argmax of scaled logits + noise; ties give the lowest id. -infinity is never drawn.
int32_t draw(const Choice& c, float top, float inverse) {
  float best[kLanes];
  int32_t at[kLanes];
  for (int l = 0; l < kLanes; ++l) best[l] = -INFINITY, at[l] = c.n;
  int32_t i = 0;
  for (; i + kLanes <= c.n; i += kLanes) {
    float scores[kLanes];
    for (int l = 0; l < kLanes; ++l)
      scores[l] = (c.logits[i + l] - top) * inverse + gumbel(uint32_t(i + l), c.first, c.second);
    for (int l = 0; l < kLanes; ++l) {
      at[l] = scores[l] > best[l] ? i + l : at[l];
      best[l] = scores[l] > best[l] ? scores[l] : best[l];
    }
  }
  for (; i < c.n; ++i) {
    const float score = (c.logits[i] - top) * inverse + gumbel(uint32_t(i), c.first, c.second);
    if (score > best[0]) best[0] = score, at[0] = i;
  }
  for (int l = 1; l < kLanes; ++l)
    if (best[l] > best[0] || (best[l] == best[0] && at[l] < at[0])) best[0] = best[l], at[0] = at[l];
  return at[0];
}

struct Candidate {
  float scaled;  // 0 for the likeliest
  int32_t id;
  bool operator<(const Candidate& other) const {  // likelier first; ties: lower id first
    return scaled != other.scaled ? scaled > other.scaled : id < other.id;
  }
};

double mass_of_all(const Choice& c, float top, float inverse) {
  double total = 0.0;
  for (int32_t i = 0; i < c.n;) {
    const int32_t end = i + 64 * kLanes < c.n ? i + 64 * kLanes : c.n;
    float sums[kLanes] = {};
    for (; i + kLanes <= end; i += kLanes)
      for (int l = 0; l < kLanes; ++l) sums[l] += exp_of((c.logits[i + l] - top) * inverse);
    for (; i < end; ++i) sums[0] += exp_of((c.logits[i] - top) * inverse);
    for (int l = 0; l < kLanes; ++l) total += sums[l];
  }
  return total;
}

double mass_of(const std::vector<Candidate>& kept) {
  double total = 0.0;
  for (const Candidate& one : kept) total += exp_of(one.scaled);
  return total;
}

// Collect all ids with a scaled logit of at least `cut`, ascending.
void collect(const Choice& c, float top, float inverse, float cut, std::vector<Candidate>& kept) {
  kept.clear();
  for (int32_t i = 0; i < c.n; i += kLanes) {
    const int32_t end = i + kLanes < c.n ? i + kLanes : c.n;
    float most = -INFINITY;
    for (int32_t j = i; j < end; ++j) most = c.logits[j] > most ? c.logits[j] : most;
    if (!((most - top) * inverse >= cut)) continue;
    for (int32_t j = i; j < end; ++j) {
      const float scaled = (c.logits[j] - top) * inverse;
      if (scaled >= cut && scaled > -INFINITY) kept.push_back({scaled, j});
    }
  }
}

// Keep the ids that top_k and top_p allow. A few ids usually suffice, so try ever lower cuts.
void keep(const Choice& c, float top, float inverse, std::vector<Candidate>& kept) {
  const bool by_count = c.top_k > 0 && c.top_k < c.n, by_mass = c.top_p < 1.0f;
  if (!by_count && !by_mass) return collect(c, top, inverse, std::log(c.min_p), kept);
  double total = by_count ? 0.0 : mass_of_all(c, top, inverse);
  for (const float cut : {-4.6f, -9.2f, -13.8f, -INFINITY}) {
    collect(c, top, inverse, cut, kept);
    if (by_count ? int64_t(kept.size()) >= c.top_k : mass_of(kept) >= c.top_p * total) break;
  }
  if (by_count && int64_t(kept.size()) > c.top_k) {
    std::nth_element(kept.begin(), kept.begin() + c.top_k, kept.end());
    kept.resize(c.top_k);
  }
  if (by_count) total = mass_of(kept);
  if (by_mass) {
    std::sort(kept.begin(), kept.end());
    double before = 0.0;
    size_t count = 0;
    while (count < kept.size() && (count == 0 || before < c.top_p * total))
      before += exp_of(kept[count++].scaled);
    kept.resize(count);
  }
}

int32_t draw_filtered(const Choice& c, float top, float inverse) {
  thread_local std::vector<Candidate> kept;
  keep(c, top, inverse, kept);
  const float least = c.min_p > 0.0f ? std::log(c.min_p) : -INFINITY;
  Candidate winner{-INFINITY, c.n};
  for (const Candidate& one : kept) {
    if (one.scaled < least) continue;
    const Candidate scored{one.scaled + gumbel(uint32_t(one.id), c.first, c.second), one.id};
    if (scored < winner) winner = scored;
  }
  return winner.id;
}

int32_t choose(const Choice& c) {
  const Likeliest best = likeliest(c.logits, c.n);
  if (best.id < 0 || c.temperature <= 0.0f) return best.id;
  const float inverse = 1.0f / c.temperature;
  const bool filtered = (c.top_k > 0 && c.top_k < c.n) || c.top_p < 1.0f || c.min_p > 0.0f;
  return filtered ? draw_filtered(c, best.logit, inverse) : draw(c, best.logit, inverse);
}
