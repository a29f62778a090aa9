#include "engine.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "worker.h"

namespace tokenloom {
namespace {

constexpr int kSpins = 2000;           // about 20 microseconds
constexpr double kTooMuchLost = 0.4;  // fraction of the threads' time
constexpr int kLongestRest = 256;      // steps

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Pin the calling thread. If the system wakes two threads on one core, each of 300 barriers in a
// step costs a context switch, and steps take six times as long until one is moved.
void pin(int32_t cpu) {
#if defined(__linux__)
  thread_local int32_t pinned = -1;
  if (pinned == cpu) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);  // if refused, the system places the thread
  pinned = cpu;
#else
  (void)cpu;
#endif
}

template <class T>
void grow(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

void layer_forward(Worker& w, const Layer& layer) {
  Engine& e = w.e;
  const Shape& s = e.shape;
  const int tokens = w.step.num_tokens;
  const int first = int(&layer - e.layers.data()) * kLinearsOfLayer;
  w.norm_and_quantise(e.x.data(), layer.input_norm, layer.qkv, tokens, first + kQkvLinear);
  w.done(kNorm);
  w.gemm(layer.qkv, tokens, {e.qkv.data(), size_t(layer.qkv.n), kStore});
  w.done(kQkv);
  if (w.tid == 0) e.next_task.store(0, std::memory_order_relaxed);
  w.rotate_and_store(layer);
  w.done(kRotate);
  w.attend(layer);
  w.done(kAttend);
  w.merge_and_quantise(layer.o, first + kOLinear);
  w.done(kMerge);
  w.gemm(layer.o, tokens, {e.x.data(), size_t(s.hidden), kAdd});
  w.done(kO);
  w.norm_and_quantise(e.x.data(), layer.post_norm, layer.gate_up, tokens, first + kGateUpLinear);
  w.done(kNorm);
  w.gemm(layer.gate_up, tokens, {e.hidden.data(), e.inner_stride, kSiluMul});
  w.done(kGateUp);
  w.quantise_rows(e.hidden.data(), e.inner_stride, layer.down, tokens, first + kDownLinear);
  w.done(kQuantise);
  w.gemm(layer.down, tokens, {e.x.data(), size_t(s.hidden), kAdd});
  w.done(kDown);
}

}  // namespace

double Barrier::spin(int phase) {
  double since = 0.0;
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    if (spins < kSpins) {
      relax();
      continue;
    }
    if (since == 0.0) since = omp_get_wtime();
    sched_yield();
  }
  return since == 0.0 ? 0.0 : omp_get_wtime() - since;
}

void Crew::after(double lost, double elapsed) {
  if (rest_ > 0) {
    --rest_;
  } else if (lost > kTooMuchLost * all_ * elapsed) {
    few_ = std::max(1, all_ / 2);
    rest_ = next_;
    next_ = std::min(2 * next_, kLongestRest);
  } else {
    next_ = std::max(8, next_ / 2);
  }
}

Engine::Engine(const Shape& s, const Layer* first, const Weight& embed, const Weight& out,
               const float* norm)
    : shape(s), layers(first, first + s.num_layers), embedding(embed), head(out),
      final_norm(norm), linear(&kLinearPortable), attention(&kAttentionPortable),
      dim(round_up(s.head_dim, 16)), inner_stride(round_up(s.intermediate, kBlock) + kBlock),
      crew(s.threads) {}

void Engine::prepare(const Step& step) {
  requests.clear();
  int first = 0;
  for (int i = 0; i < step.num_requests; ++i) {
    const int32_t* pages = step.page_table + step.rows[i] * step.page_table_stride;
    requests.push_back({first, step.prefix_lens[i], step.extend_lens[i], pages});
    first += step.extend_lens[i];
  }
  plan.build(requests, shape.page_size);
  int wide = head.k_pad;
  for (const Layer& layer : layers)
    wide = std::max({wide, layer.qkv.k_pad, layer.o.k_pad, layer.gate_up.k_pad, layer.down.k_pad});
  const size_t tokens = std::max(step.num_tokens, step.num_samples);
  grow(x, tokens * shape.hidden);
  grow(sample_x, size_t(step.num_samples) * shape.hidden);
  grow(qkv, tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim);
  grow(hidden, tokens * inner_stride);
  grow(attended, tokens * shape.heads * shape.head_dim);
  grow(queries, tokens * shape.heads * query_bytes(shape.kv_kind, dim));
  grow(partial, size_t(plan.slots.back()) * shape.heads * (dim + 2));
  grow(q8, tokens * wide);
  grow(q8_scales, tokens * (wide / kGroup));
  grow(q8_sums, tokens * (wide / kSubgroup));
  grow(q8_x_sums, tokens * (wide / kSubgroup));
  prepare_adapters(step);
}

void Engine::prepare_adapters(const Step& step) {
  token_adapters.clear();
  if (!step.adapters) return;
  for (size_t i = 0; i < requests.size(); ++i)
    token_adapters.insert(token_adapters.end(), requests[i].extend, step.adapters[i]);
  low_stride = round_up(step.max_rank, kBlock);
  const size_t rows = std::max(step.num_tokens, step.num_samples);
  row_adapters.resize(rows);
  grow(low, rows * kLoraParts * low_stride);
}

void Engine::forward(const Step& step) {
  prepare(step);
  const double start = omp_get_wtime();
  lost.assign(shape.threads, 0.0);
#pragma omp parallel num_threads(crew.threads())
  {
    const int threads = omp_get_num_threads();
    if (omp_get_thread_num() == 0) barrier.reset(threads);
#pragma omp barrier
    if (!cpus.empty()) pin(cpus[omp_get_thread_num()]);
    Worker w{*this, step, omp_get_thread_num(), threads};
    w.done(kEmbed);
    w.embed();
    w.done(kEmbed);
    for (const Layer& layer : layers) layer_forward(w, layer);
    w.gather_samples();
    w.done(kHead);
    w.norm_and_quantise(sample_x.data(), final_norm, head, step.num_samples, kHeadLinear);
    w.done(kHead);
    w.gemm(head, step.num_samples, {step.logits, size_t(step.logits_stride), kStore});
    w.done(kHead);
    lost[w.tid] = w.lost;
  }
  crew.after(std::accumulate(lost.begin(), lost.end(), 0.0), omp_get_wtime() - start);
}

}  // namespace tokenloom
