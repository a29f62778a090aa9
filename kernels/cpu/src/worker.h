// What one thread does while a step runs. Every method is called by all threads and works on this
// thread's share; `done` stands between a method and those that read its results.
#pragma once
#include "engine.h"

namespace tokenloom {

// A piece of a unit for one kv head.
struct Work {
  const Unit* unit;
  int piece, kv_head;
};

struct Worker {
  Engine& e;
  const Step& step;
  int tid, threads;
  double since = 0.0;  // when the last phase was done, if phases are counted
  double lost = 0.0;   // seconds spent waiting for other threads

  // All threads have done their share of `phase`.
  void done(Phase phase);

  void embed();
  // Rows on their way into the map `next`; `linear` is its place in an adapter, or kHeadLinear.
  void norm_and_quantise(const float* x, const float* weight, const Weight& next, int rows,
                         int linear);
  void quantise_rows(const float* x, size_t stride, const Weight& next, int rows, int linear);
  void gemm(const Weight& w, int rows, Output out);
  void rotate_and_store(const Layer& layer);  // queries as attention takes them, keys and values to pages
  void attend(const Layer& layer);
  void merge_and_quantise(const Weight& o, int linear);  // pieces of each head in order, then divided
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
