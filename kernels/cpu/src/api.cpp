// The C ABI: pointers and sizes. The caller keeps alive whatever it passes.
#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "engine.h"
#include "pack.h"

using namespace tokenloom;

namespace {

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx512(bool bf16) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         (bf16 ? __builtin_cpu_supports("avx512bf16") : __builtin_cpu_supports("avx512vnni"));
#else
  return bf16 && false;
#endif
}

}  // namespace

#define TL_EXPORT __attribute__((visibility("default")))

extern "C" {

// 0: any machine, 1: AVX2, 2: AVX-512 with VNNI (and BF16 where there is)
TL_EXPORT int32_t tl_best_isa() { return has_avx512(false) ? 2 : has_avx2() ? 1 : 0; }

TL_EXPORT int64_t tl_block_bytes(int32_t kind, int32_t k_pad) { return int64_t(block_bytes(kind, k_pad)); }
TL_EXPORT int64_t tl_block_scales(int32_t kind, int32_t k_pad) { return int64_t(block_scales(kind, k_pad)); }

// Give freed memory back to the system: loading leaves much of it behind.
TL_EXPORT void tl_release_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

TL_EXPORT int32_t tl_pack(const PackJob* job) { return pack_rows(*job); }
TL_EXPORT void tl_unpack_row(const Weight* w, int32_t row, float* out) { unpack_row(*w, row, out); }

TL_EXPORT Engine* tl_engine_new(const Shape* shape, const Layer* layers, const Weight* embedding,
                      const Weight* head, const float* final_norm, int32_t isa) {
  auto* engine = new Engine(*shape, layers, *embedding, *head, final_norm);
  const bool int8 = shape->kv_kind == kKvInt8;
  if (int8) engine->attention = &kAttentionInt8Portable;
#if defined(__x86_64__)
  if (isa >= 1) {
    engine->linear = &kLinearAvx2;
    engine->attention = int8 ? &kAttentionInt8Avx2 : &kAttentionAvx2;
  }
  if (isa >= 2) {
    engine->linear = &kLinearAvx512;
    if (int8) engine->attention = &kAttentionInt8Avx512;
    if (!int8 && has_avx512(true)) engine->attention = &kAttentionAvx512;
  }
#endif
  return engine;
}

TL_EXPORT void tl_engine_free(Engine* engine) { delete engine; }
TL_EXPORT const char* tl_engine_linear(const Engine* engine) { return engine->linear->name; }
TL_EXPORT const char* tl_engine_attention(const Engine* engine) { return engine->attention->name; }

// Start counting seconds by phase, or read what was counted since; kPhases of them.
TL_EXPORT void tl_engine_profile(Engine* engine, double* seconds) {
  for (int i = 0; i < kPhases; ++i) {
    if (seconds) seconds[i] = engine->seconds[i];
    engine->seconds[i] = 0.0;
  }
  engine->profiling = true;
}

TL_EXPORT void tl_engine_forward(Engine* engine, const Step* step) { engine->forward(*step); }

// The token of each row. Waking threads costs as much as a row or two.
TL_EXPORT void tl_choose(Choice* choices, int32_t count, int32_t threads, int32_t isa) {
  Choose choose = kChoosePortable;
#if defined(__x86_64__)
  choose = isa >= 2 ? kChooseAvx512 : isa == 1 ? kChooseAvx2 : choose;
#endif
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count > 2 && threads > 1)
  for (int32_t i = 0; i < count; ++i) choices[i].id = choose(choices[i]);
}

// One product, for tests and benchmarks: rows [rows, k] of floats against `w`.
TL_EXPORT void tl_linear(const Weight* w, const float* x, int32_t rows, float* out, int64_t stride,
               int32_t epilogue, int32_t isa, int8_t* q, float* scales, int32_t* sums) {
  const LinearOps* ops = &kLinearPortable;
#if defined(__x86_64__)
  ops = isa >= 2 ? &kLinearAvx512 : isa == 1 ? &kLinearAvx2 : ops;
#endif
  for (int r = 0; r < rows; ++r)
    ops->quantise_row(x + size_t(r) * w->k, w->k, w->k_pad, q + size_t(r) * w->k_pad,
                      scales + size_t(r) * (w->k_pad / kGroup),
                      sums + size_t(r) * (w->k_pad / kSubgroup));
  ops->gemm(*w, {q, scales, sums}, rows, {out, size_t(stride), epilogue}, 0, 1);
}

}
