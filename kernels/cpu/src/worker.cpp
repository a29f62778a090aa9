#include "worker.h"

#include <omp.h>

#include <algorithm>
#include <cmath>

namespace tokenloom {
namespace {

constexpr int kManyUnits = 4;     // per thread
constexpr int kRowsTogether = 8;  // quantised together while they are in L1

// A thread's buffers; no two uses of one overlap.
thread_local std::vector<float> floats;
thread_local std::vector<float> deltas;
thread_local std::vector<QueryRow> query_rows;
thread_local std::vector<float*> wholes;
thread_local std::vector<uint16_t> gathered;
thread_local std::vector<int32_t> block_ids;

// Copy tokens from pages smaller than a block into the block layout (kKvBf16).
void gather(const uint8_t* cache, const int32_t* pages, int first, int keys, int page_size,
            size_t stride, int dim, bool as_keys, uint16_t* out) {
  for (int t = 0; t < keys; ++t) {
    const int position = first + t;
    const auto* from = reinterpret_cast<const uint16_t*>(
                           cache + pages[position / page_size] * stride) +
                       size_t(position % page_size) * dim;
    uint16_t* block = out + size_t(t / kPage) * kPage * dim;
    const int o = t % kPage;
    if (as_keys) {
      for (int d = 0; d < dim; d += 2) {
        block[d * kPage + 2 * o] = from[d];
        block[d * kPage + 2 * o + 1] = from[d + 1];
      }
    } else {
      for (int d = 0; d < dim; ++d) block[(o / 2 * dim + d) * 2 + o % 2] = from[d];
    }
  }
}

}  // namespace

void Worker::done(Phase phase) {
  if (threads > 1) lost += e.barrier.wait();
  if (!e.profiling || tid != 0) return;
  const double now = omp_get_wtime();
  if (since > 0.0) e.seconds[phase] += now - since;
  since = now;
}

void Worker::embed() {
  const Share share(step.num_tokens, tid, threads);
  for (int t = share.begin; t < share.end; ++t) {
    float* x = e.x.data() + size_t(t) * e.shape.hidden;
    unpack_row(e.embedding, step.input_ids[t], x);
    if (!e.token_adapters.empty() && e.token_adapters[t])
      add_embedding(*e.token_adapters[t], step.input_ids[t], x);
  }
}

void Worker::add_embedding(const LoraAdapter& adapter, int id, float* x) {
  const LoraPart& part = adapter.embedding.parts[0];
  const uint16_t* low = part.a + size_t(id) * round_up(part.rank, 2);
  for (int b = 0; b < part.num_blocks; ++b) {
    const uint16_t* values = lora_block(part, b);
    const int count = std::min(kBlock, e.shape.hidden - b * kBlock);
    for (int j = 0; values && j < part.rank; ++j)
      for (int o = 0; o < count; ++o)
        x[b * kBlock + o] += from_bf16(low[j]) * from_bf16(values[lora_b(j, o)]);
  }
}

// Return what the row's adapter changes of a linear map, or null if nothing.
const LoraLinear* Worker::change_of(int row, int linear) const {
  const LoraAdapter* adapter = e.token_adapters[linear == kHeadLinear ? step.samples[row] : row];
  if (!adapter) return nullptr;
  const LoraLinear& change = linear == kHeadLinear ? adapter->head : adapter->linears[linear];
  for (const LoraPart& part : change.parts)
    if (part.rank) return &change;
  return nullptr;
}

// Compute A x of rows for the next product, rows with the same adapter together.
void Worker::shrink(const float* x, size_t stride, int k, Rows rows, int linear) {
  const size_t row_stride = kLoraParts * e.low_stride;
  for (int r = rows.begin, end; r < rows.end; r = end) {
    const LoraLinear* change = change_of(r, linear);
    const LoraLinear* next = nullptr;
    for (end = r; end < rows.end && (next = change_of(end, linear)) == change; ++end)
      e.row_adapters[end] = {change, e.low.data() + end * row_stride};
    for (int p = 0; change && p < kLoraParts; ++p) {
      const LoraPart* following = p + 1 < kLoraParts ? &change->parts[p + 1] : nullptr;
      if (!following || !following->rank) following = next ? next->parts : nullptr;
      if (change->parts[p].rank)
        e.linear->shrink_rows(change->parts[p], following, x + (r - rows.begin) * stride, stride,
                              end - r, k, e.row_adapters[r].low + p * e.low_stride, row_stride);
    }
  }
}

// Quantise rows for the map `next`, and compute A x with adapters. `x` points to rows.begin.
void Worker::quantise(const float* x, size_t stride, const Weight& next, Rows rows, int linear) {
  const int k_pad = next.k_pad;
  for (int first = rows.begin; first < rows.end; first += kRowsTogether) {
    const Rows some{first, std::min(first + kRowsTogether, rows.end)};
    if (!e.token_adapters.empty()) shrink(x, stride, next.k, some, linear);
    for (int r = some.begin; r < some.end; ++r, x += stride)
      e.linear->quantise_row(x, next.k, k_pad, e.activations().from(r, k_pad));
  }
}

void Worker::norm_and_quantise(const float* x, const float* weight, const Weight& next, int rows,
                               int linear) {
  const Share share(rows, tid, threads);
  const size_t k = next.k;
  floats.resize(kRowsTogether * k);
  for (int first = share.begin; first < share.end; first += kRowsTogether) {
    const Rows some{first, std::min(first + kRowsTogether, share.end)};
    for (int r = some.begin; r < some.end; ++r)
      e.linear->rms_norm_row(x + r * k, weight, e.shape.eps, next.k,
                             floats.data() + (r - first) * k);
    quantise(floats.data(), k, next, some, linear);
  }
}

void Worker::quantise_rows(const float* x, size_t stride, const Weight& next, int rows,
                           int linear) {
  const Share share(rows, tid, threads);
  quantise(x + share.begin * stride, stride, next, share, linear);
}

void Worker::gemm(const Weight& w, int rows, Output out) {
  const auto changes = [](const RowAdapter& row) { return row.linear != nullptr; };
  const auto first = e.row_adapters.begin();
  if (!e.token_adapters.empty() && std::any_of(first, first + rows, changes)) {
    deltas.resize(kChunkRows * kDeltaWidth);
    out.adapters = e.row_adapters.data(), out.low_stride = e.low_stride, out.delta = deltas.data();
  }
  e.linear->gemm(w, e.activations(), rows, out, tid, threads);
}

void Worker::rotate_and_store(const Layer& layer) {
  const Shape& s = e.shape;
  const size_t width = size_t(s.heads + 2 * s.kv_heads) * s.head_dim;
  const float scale = 1.0f / std::sqrt(float(s.head_dim));
  const Share share(step.num_tokens, tid, threads);
  for (const Request& request : e.requests) {
    const int end = std::min(share.end, request.first_token + request.extend);
    for (int t = std::max(share.begin, request.first_token); t < end; ++t) {
      float* qkv = e.qkv.data() + size_t(t) * width;
      const int position = e.plan.positions[t];
      for (int h = 0; h < s.heads; ++h) {
        float* q = qkv + size_t(h) * s.head_dim;
        rotate(q, layer.q_norm, position, scale);
        e.attention->store_query(q, s.head_dim, e.dim, query(t, h));
      }
      for (int h = 0; h < s.kv_heads; ++h) {
        float* k = qkv + size_t(s.heads + h) * s.head_dim;
        rotate(k, layer.k_norm, position, 1.0f);
        store_key_value(layer, request, position, h, k, k + size_t(s.kv_heads) * s.head_dim);
      }
    }
  }
}

void Worker::rotate(float* head, const float* norm, int position, float scale) {
  const int dim = e.shape.head_dim;
  if (norm) e.linear->rms_norm_row(head, norm, e.shape.eps, dim, head);
  e.attention->rotate(head, e.shape.cos_sin + size_t(position) * dim, dim / 2, scale);
}

void Worker::store_key_value(const Layer& layer, const Request& request, int position, int head,
                             const float* k, const float* v) {
  const int page_size = e.shape.page_size, dim = e.dim, head_dim = e.shape.head_dim;
  const int page = request.pages[position / page_size], offset = position % page_size;
  size_t at = (size_t(page) * e.shape.kv_heads + head) * e.head_bytes();
  if (page_size >= kPage) at += size_t(offset / kPage) * kv_block_bytes(e.shape.kv_kind, dim);
  if (page_size >= kPage) {
    e.attention->store_token(k, v, offset % kPage, head_dim, dim, layer.k_cache + at,
                             layer.v_cache + at);
    return;
  }
  auto* keys = reinterpret_cast<uint16_t*>(layer.k_cache + at) + size_t(offset) * dim;
  auto* values = reinterpret_cast<uint16_t*>(layer.v_cache + at) + size_t(offset) * dim;
  for (int d = 0; d < head_dim; ++d) keys[d] = to_bf16(k[d]), values[d] = to_bf16(v[d]);
}

// The heads of a unit are contiguous in memory, so one thread takes all of them if there are enough
// units. Taking the next task early lets a thread prefetch its keys.
void Worker::attend(const Layer& layer) {
  const int kv_heads = e.shape.kv_heads, units = int(e.plan.units.size());
  const int tasks = units * kv_heads, grain = units >= kManyUnits * threads ? kv_heads : 1;
  const auto after = [&](int task) {
    if ((task + 1) % grain) return task + 1;
    return e.next_task.fetch_add(grain, std::memory_order_relaxed);
  };
  for (int task = after(-1), next; task < tasks; task = next) {
    next = after(task);
    const Unit& unit = e.plan.units[task / kv_heads];
    const int first = std::max(0, unit.piece);
    const int last = unit.piece < 0 ? last_position(unit) / kPiece : first;
    for (int piece = first; piece <= last; ++piece) {
      const Work work{&unit, piece, task % kv_heads};
      Work following{&unit, piece + 1, task % kv_heads};
      if (piece == last && next < tasks) {
        const Unit& other = e.plan.units[next / kv_heads];
        following = {&other, std::max(0, other.piece), next % kv_heads};
      }
      run_piece(layer, work, piece < last || next < tasks ? &following : nullptr);
    }
  }
}

int Worker::last_position(const Unit& unit) const {
  return e.plan.positions[e.plan.tokens[unit.first + unit.count - 1]];
}

uint8_t* Worker::query(int token, int head) {
  return e.queries.data() + (size_t(token) * e.shape.heads + head) *
                                query_bytes(e.shape.kv_kind, e.dim);
}

float* Worker::partial(int slot, int head) {
  return e.partial.data() + (size_t(slot) * e.shape.heads + head) * (e.dim + 2);
}

void Worker::run_piece(const Layer& layer, const Work& work, const Work* following) {
  const Unit& unit = *work.unit;
  const int group = e.shape.heads / e.shape.kv_heads, size = e.dim + 2;
  const bool merge = unit.piece < 0 && work.piece > 0;  // a span merges into its earlier pieces
  query_rows.clear();
  wholes.clear();
  floats.resize(size_t(unit.count) * group * size);
  for (int i = 0; i < unit.count; ++i) {
    const int t = e.plan.tokens[unit.first + i];
    const int keys = std::min(kPiece, e.plan.positions[t] + 1 - work.piece * kPiece);
    if (keys <= 0) continue;
    const int slot = e.plan.slots[t] + std::max(0, unit.piece);
    for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) {
      wholes.push_back(partial(slot, head));
      float* out = merge ? floats.data() + query_rows.size() * size : wholes.back();
      query_rows.push_back({query(t, head), out, keys});
    }
  }
  const KeyBlocks blocks = key_blocks(layer, work);
  KeyBlocks next{};
  const bool ahead = following && e.shape.page_size == kPage;  // else block_ids is in use
  if (ahead) next = key_blocks(layer, *following);
  e.attention->piece(query_rows.data(), int(query_rows.size()), blocks, ahead ? &next : nullptr,
                     e.dim);
  if (merge)
    for (size_t r = 0; r < query_rows.size(); ++r)
      e.attention->merge(wholes[r], query_rows[r].out, e.dim);
}

KeyBlocks Worker::key_blocks(const Layer& layer, const Work& work) {
  const int page_size = e.shape.page_size, first = work.piece * kPiece;
  const int32_t* pages = work.unit->pages;
  const int keys = std::min(kPiece, last_position(*work.unit) + 1 - first);
  const int count = (keys + kPage - 1) / kPage;
  const size_t head = e.head_bytes(), stride = head * e.shape.kv_heads;
  const uint8_t* k = layer.k_cache + work.kv_head * head;
  const uint8_t* v = layer.v_cache + work.kv_head * head;
  if (page_size == kPage) return {k, v, pages + first / kPage, stride, count};
  block_ids.resize(count);
  if (page_size > kPage) {  // number the blocks: a page of a head has several
    const size_t per_page = page_size / kPage;
    for (int b = 0; b < count; ++b) {
      const int at = first / kPage + b;
      block_ids[b] = int32_t(pages[at / per_page] * per_page * e.shape.kv_heads + at % per_page);
    }
    return {k, v, block_ids.data(), kv_block_bytes(e.shape.kv_kind, e.dim), count};
  }
  const size_t block = size_t(kPage) * e.dim;  // elements
  gathered.resize(2 * count * block);
  gather(k, pages, first, keys, page_size, stride, e.dim, true, gathered.data());
  gather(v, pages, first, keys, page_size, stride, e.dim, false, gathered.data() + count * block);
  for (int b = 0; b < count; ++b) block_ids[b] = b;
  const auto* base = reinterpret_cast<const uint8_t*>(gathered.data());
  const size_t bytes = block * sizeof(uint16_t);
  return {base, base + count * bytes, block_ids.data(), bytes, count};
}

void Worker::merge_and_quantise(const Weight& o, int linear) {
  const Share share(step.num_tokens, tid, threads);
  for (int t = share.begin; t < share.end; ++t) {
    float* out = e.attended.data() + size_t(t) * o.k;
    for (int h = 0; h < e.shape.heads; ++h) {
      float* whole = partial(e.plan.slots[t], h);
      for (int slot = e.plan.slots[t] + 1; slot < e.plan.slots[t + 1]; ++slot)
        e.attention->merge(whole, partial(slot, h), e.dim);
      const float inverse = 1.0f / whole[e.dim + 1];
      for (int d = 0; d < e.shape.head_dim; ++d)
        out[h * e.shape.head_dim + d] = whole[d] * inverse;
    }
  }
  quantise(e.attended.data() + size_t(share.begin) * o.k, o.k, o, share, linear);
}

void Worker::gather_samples() {
  const Share share(step.num_samples, tid, threads);
  const size_t hidden = e.shape.hidden;
  for (int i = share.begin; i < share.end; ++i)
    std::copy_n(e.x.data() + step.samples[i] * hidden, hidden, e.sample_x.data() + i * hidden);
}

}  // namespace tokenloom
