// The C ABI, bound by kernels/cpu/native.py. The caller keeps alive all memory it passes.
#include <cstdlib>
#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "engine.h"
#include "pack.h"

using namespace tokenloom;

namespace {

// Instruction set levels; each includes those below it.
enum Isa : int32_t {
#if defined(__x86_64__)
  kAnyMachine, kAvx2, kAvxVnni, kAvx512, kAvx512Bf16
#else
  kAnyMachine, kNeonDotprod
#endif
};

#if defined(__x86_64__)
// __builtin_cpu_supports does not know AVX-VNNI before GCC 13.
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

int32_t best_isa() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  if (avx512) return __builtin_cpu_supports("avx512bf16") ? kAvx512Bf16 : kAvx512;
  return avx2 && has_avx_vnni() ? kAvxVnni : avx2 ? kAvx2 : kAnyMachine;
#elif defined(__aarch64__) && defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? kNeonDotprod : kAnyMachine;
#elif defined(__aarch64__) && defined(__APPLE__)
  return kNeonDotprod;  // every Apple silicon has it
#else
  return kAnyMachine;
#endif
}

Choose choose_op(int32_t isa) {
#if defined(__x86_64__)
  if (isa >= kAvx512) return kChooseAvx512;
  if (isa >= kAvx2) return kChooseAvx2;
#endif
  return kChoosePortable;
}

}  // namespace

namespace tokenloom {

const LinearOps* linear_ops(int32_t isa) {
#if defined(__x86_64__)
  if (isa >= kAvx512) return &kLinearAvx512;
  if (isa == kAvxVnni) return &kLinearAvxVnni;
  if (isa == kAvx2) return &kLinearAvx2;
#elif defined(__aarch64__)
  if (isa >= kNeonDotprod) return &kLinearNeon;
#endif
  return &kLinearPortable;
}

const AttentionOps* attention_ops(int32_t isa, int32_t kv_kind) {
  const bool int8 = kv_kind == kKvInt8;
#if defined(__x86_64__)
  if (isa >= kAvx512 && int8) return &kAttentionInt8Avx512;
  if (isa >= kAvx512Bf16) return &kAttentionAvx512;
  if (isa == kAvxVnni && int8) return &kAttentionInt8AvxVnni;
  if (isa >= kAvx2) return int8 ? &kAttentionInt8Avx2 : &kAttentionAvx2;
#elif defined(__aarch64__)
  if (isa >= kNeonDotprod) return int8 ? &kAttentionInt8Neon : &kAttentionNeon;
#endif
  return int8 ? &kAttentionInt8Portable : &kAttentionPortable;
}

}  // namespace tokenloom

#define TL_EXPORT __attribute__((visibility("default")))

extern "C" {

// Return the highest level that this machine runs. Lower levels also run, with close results.
TL_EXPORT int32_t tl_best_isa() { return best_isa(); }

TL_EXPORT int64_t tl_block_bytes(int32_t kind, int32_t k_pad) { return int64_t(block_bytes(kind, k_pad)); }
TL_EXPORT int64_t tl_block_scales(int32_t kind, int32_t k_pad) { return int64_t(block_scales(kind, k_pad)); }

// Return freed memory to the system; loading frees much of it.
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
  engine->linear = linear_ops(isa);
  engine->attention = attention_ops(isa, shape->kv_kind);
  return engine;
}

// Pin thread i to cpus[i] from the next step on; one entry per thread.
TL_EXPORT void tl_engine_pin(Engine* engine, const int32_t* cpus) {
  engine->cpus.assign(cpus, cpus + engine->shape.threads);
}

TL_EXPORT void tl_engine_free(Engine* engine) { delete engine; }
TL_EXPORT const char* tl_engine_linear(const Engine* engine) { return engine->linear->name; }
TL_EXPORT const char* tl_engine_attention(const Engine* engine) { return engine->attention->name; }

// Read seconds[kPhases] since the last call (unless null), then count from zero.
TL_EXPORT void tl_engine_profile(Engine* engine, double* seconds) {
  for (int i = 0; i < kPhases; ++i) {
    if (seconds) seconds[i] = engine->seconds[i];
    engine->seconds[i] = 0.0;
  }
  engine->profiling = true;
}

TL_EXPORT void tl_engine_forward(Engine* engine, const Step* step) { engine->forward(*step); }

// Choose a token per row. Waking threads costs as much as one or two rows.
TL_EXPORT void tl_choose(Choice* choices, int32_t count, int32_t threads, int32_t isa) {
  const Choose choose = choose_op(isa);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count > 2 && threads > 1)
  for (int32_t i = 0; i < count; ++i) choices[i].id = choose(choices[i]);
}

// Multiply x [rows, k] float32 with `w` on one thread, for tests and benchmarks.
TL_EXPORT void tl_linear(const Weight* w, const float* x, int32_t rows, float* out, int64_t stride,
               int32_t epilogue, int32_t isa) {
  const LinearOps* ops = linear_ops(isa);
  const size_t size = size_t(rows) * w->k_pad;
  std::vector<int8_t> q(size);
  std::vector<float> scales(size / kGroup), x_sums(size / kSubgroup);
  std::vector<int32_t> sums(size / kSubgroup);
  const Activations to{q.data(), scales.data(), sums.data(), x_sums.data()};
  for (int r = 0; r < rows; ++r)
    ops->quantise_row(x + size_t(r) * w->k, w->k, w->k_pad, to.from(r, w->k_pad));
  ops->gemm(*w, to, rows, {out, size_t(stride), epilogue}, 0, 1);
}

}
