// One thread's work in a step. All threads call every method, each for its share; call `done` before
// reading what another thread computed.
#pragma once
#include "engine.h"

namespace tokenloom {

// One piece of a unit, for one kv head.
struct Work {
  const Unit* unit;
  int piece, kv_head;
};

struct Worker {
  Engine& e;
  const Step& step;
  int tid, threads;
  double since = 0.0;  // end of the last phase, when profiling
  double lost = 0.0;   // seconds spent waiting for other threads

  // Wait until all threads have done their share of `phase`.
  void done(Phase phase);

  void embed();
  // Normalise and quantise rows for the map `next`; `linear` is its index in an adapter.
  void norm_and_quantise(const float* x, const float* weight, const Weight& next, int rows,
                         int linear);
  void quantise_rows(const float* x, size_t stride, const Weight& next, int rows, int linear);
  void gemm(const Weight& w, int rows, Output out);
  void rotate_and_store(const Layer& layer);  // fills queries and the KV pages
  void attend(const Layer& layer);
  void merge_and_quantise(const Weight& o, int linear);  // merges pieces in order, divides by the sum
  void gather_samples();

 private:
  void quantise(const float* x, size_t stride, const Weight& next, Rows rows, int linear);
  const LoraLinear* change_of(int row, int linear) const;
  void shrink(const float* x, size_t stride, int k, Rows rows, int linear);
  void add_embedding(const LoraAdapter& adapter, int id, float* x);
  float* partial(int slot, int head);
  void rotate(float* head, const float* norm, int position, float scale);
  void store_key_value(const Layer& layer, const Request& request, int position, int head,
                       const float* k, const float* v);
  void run_piece(const Layer& layer, const Work& work, const Work* following);
  KeyBlocks key_blocks(const Layer& layer, const Work& work);
  int last_position(const Unit& unit) const;
  uint8_t* query(int token, int head);
};

}  // namespace tokenloom
