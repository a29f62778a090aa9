// The decoder stack of one model on the CPU, called once per step. Owns its scratch memory; weights
// and KV cache belong to the caller.
#pragma once
#include <atomic>
#include <vector>

#include "common.h"
#include "ops.h"
#include "plan.h"

namespace tokenloom {

// Order of a layer's linear maps in LoraAdapter::linears, and an index for the head.
enum LinearOfLayer : int { kQkvLinear, kOLinear, kGateUpLinear, kDownLinear, kLinearsOfLayer };
constexpr int kHeadLinear = -1;

struct Shape {
  int32_t hidden, heads, kv_heads, head_dim, intermediate, vocab;
  int32_t num_layers, page_size, threads, kv_kind;
  float eps;
  const float* cos_sin;  // [positions, head_dim]: cosines, then sines, of head_dim / 2 pairs
};

// Caches hold [pages, kv_heads, blocks of 16 tokens], see KvKind. Pages smaller than a block are
// [page_size][dim] bf16, gathered when used; int8 does not support them.
struct Layer {
  Weight qkv, o, gate_up, down;
  const float *input_norm, *post_norm;  // [hidden]
  const float *q_norm, *k_norm;         // [head_dim] or null
  uint8_t *k_cache, *v_cache;
};

// An adapter for all layers; parts that it does not change have rank 0.
struct LoraAdapter {
  const LoraLinear* linears;  // [num_layers][qkv, o, gate_up, down]
  LoraLinear head, embedding;  // embedding uses parts[0]
};

struct Step {
  int32_t num_requests, num_tokens, num_samples;
  const int32_t *prefix_lens, *extend_lens, *rows;  // [num_requests]
  const int32_t* page_table;                        // [rows, page_table_stride]
  int64_t page_table_stride;
  const int32_t* input_ids;  // [num_tokens]
  const int32_t* samples;    // [num_samples], tokens that need logits
  float* logits;             // [num_samples, logits_stride]; vocab columns are written
  int64_t logits_stride;
  const LoraAdapter* const* adapters;  // [num_requests] of pointers or null; null if none
  int32_t max_rank;                    // largest rank of the adapters
};

// Profiled phases of a step; see Worker::done.
enum Phase : int32_t { kEmbed, kNorm, kQkv, kRotate, kAttend, kMerge, kO, kGateUp, kQuantise, kDown,
                       kHead, kPhases };

// A barrier for meetings microseconds apart: threads spin, and yield the core if it takes long.
class Barrier {
 public:
  void reset(int threads) { threads_ = threads; }

  // Wait for all threads; return the seconds lost, or 0 if spinning was enough.
  double wait() {
    const int phase = phase_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      waiting_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return 0.0;
    }
    return spin(phase);
  }

 private:
  double spin(int phase);
  int threads_ = 1;
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<int> phase_{0};
};

// Decides how many threads a step uses. If other processes preempt one thread, the others lose more
// by waiting than they compute: then fewer threads run for some steps before all are tried again,
// after longer intervals while the loss persists. Results do not depend on it.
class Crew {
 public:
  explicit Crew(int all) : all_(all) {}
  int threads() const { return rest_ > 0 ? few_ : all_; }
  void after(double lost, double elapsed);  // seconds; lost is the sum over threads

 private:
  int all_, few_ = 1;
  int rest_ = 0;    // steps left with few threads
  int next_ = 8;    // steps of the next such interval
};

struct Engine {
  Shape shape;
  std::vector<Layer> layers;
  Weight embedding, head;
  const float* final_norm;
  const LinearOps* linear;
  const AttentionOps* attention;

  int dim;              // head_dim padded to 16
  size_t inner_stride;  // of `hidden`, padded: rows a power of two apart share cache sets
  std::vector<Request> requests;
  Plan plan;
  Barrier barrier;
  Crew crew;
  bool profiling = false;
  double seconds[kPhases] = {};
  std::atomic<int> next_task{0};
  std::vector<double> lost;  // [threads]: seconds spent waiting in this step
  std::vector<int32_t> cpus;  // [threads], or empty to let the system place threads

  // Scratch [tokens, ...], grown as steps need it.
  std::vector<float> x, qkv, hidden, attended, sample_x;
  std::vector<float> partial;  // [slots, heads, dim + 2]
  std::vector<uint8_t> queries;  // [tokens, heads, query_bytes]
  std::vector<int8_t> q8;
  std::vector<float> q8_scales, q8_x_sums;
  std::vector<int32_t> q8_sums;
  Activations activations() { return {q8.data(), q8_scales.data(), q8_sums.data(), q8_x_sums.data()}; }
  std::vector<const LoraAdapter*> token_adapters;  // empty in a step without adapters
  std::vector<RowAdapter> row_adapters;            // [rows] of the next product
  std::vector<float> low;                          // [rows, parts, low_stride]
  size_t low_stride = 0;

  size_t head_bytes() const {  // bytes of one kv head in a page
    if (shape.page_size < kPage) return size_t(shape.page_size) * dim * sizeof(uint16_t);
    return size_t(shape.page_size / kPage) * kv_block_bytes(shape.kv_kind, dim);
  }

  Engine(const Shape&, const Layer*, const Weight& embedding, const Weight& head,
         const float* final_norm);
  void forward(const Step& step);

 private:
  void prepare(const Step& step);
  void prepare_adapters(const Step& step);
};

// Dequantise a row of a packed weight; the embedding lookup uses it.
void unpack_row(const Weight& w, int row, float* out);

}  // namespace tokenloom
