// Options of one attention, the same for every request of a batch: what plan() takes besides
// lengths. Everything that needs options embeds this struct, so that an option is declared once.
#pragma once

#include <cstdint>

#include "preflash/types.h"

namespace preflash {

struct SplitPolicy {
  // Keys per KV chunk, rounded up to whole tiles; 0 lets the planner choose.
  std::int32_t fixed_split_size = 0;
  // One pass over the keys: with the promise of is_invariant(), or without it.
  bool disable = false;
  bool one_pass = false;

  // True if the bits of a request's rows depend on the request alone: not on the rest of the batch,
  // nor on how its prompt was cut.
  constexpr bool is_invariant() const { return disable || fixed_split_size > 0; }
  constexpr bool is_one_pass() const { return disable || one_pass; }

  friend bool operator==(const SplitPolicy&, const SplitPolicy&) = default;
};

// RoPE (Su et al., arXiv 2104.09864) in the form of Llama: dimension d of a row of D turns with
// dimension d + D / 2, by position / scale * theta^(-2 d / D) radians.
struct RopeOptions {
  // Doubles: half an ulp of a float32 scale is 2^-8 radians at position 2^17.
  double scale = 1.0;
  double theta = 1e4;

  friend bool operator==(const RopeOptions&, const RopeOptions&) = default;
};

// Use of a prepass: copies, made before the kernel runs, of what it would otherwise convert again
// for every query tile (core/prepass.h).
enum class Prepass : std::uint8_t {
  kAuto,    // if it is faster, as far as the workspace reaches
  kNever,   // results do not depend on the batch, or heads have factors
  kAlways,  // if the options have such a form and the workspace has room
};

struct AttentionOptions {
  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;  // multiples of 8, <= the compiled sizes
  std::int32_t head_dim_vo = 0;
  DType q_dtype = DType::kFloat16;
  DType kv_dtype = DType::kFloat16;
  DType o_dtype = DType::kFloat16;

  bool causal = false;  // ignored by callers when a custom mask is given
  // Queries of 16 bits over e4m3 keys may be rounded to e4m3, each row times a power of two.
  bool quantizes_q = false;
  std::int32_t window_left = -1;
  std::int32_t chunk_size = 0;  // MaskBounds::chunk_size
  Mask mask = Mask::kBounds;
  Position position = Position::kNone;
  Prepass prepass = Prepass::kAuto;
  RopeOptions rope;       // with Position::kRope
  float soft_cap = 0.0f;  // c: logit = c * tanh(sm_scale * qk / c); 0: off

  SplitPolicy split;

  // f > 0: a tile of keys whose logits all lie so far below their row's maximum so far that
  // exp(logit - maximum) < f / kv_len may be left out; 0: off.
  float skip_factor = 0.0f;

  constexpr std::int32_t gqa_ratio() const { return num_qo_heads / num_kv_heads; }
  // The most keys before a request's first row that the row sees, by window and chunks; -1: any
  // number.
  constexpr std::int32_t reach() const {
    if (chunk_size == 0) return window_left;
    return window_left >= 0 && window_left < chunk_size ? window_left : chunk_size - 1;
  }
  // True if KV chunks are counted from there, and not from key 0: so keys under a window are split
  // without knowing where it is. Batch-invariant plans split at fixed keys.
  constexpr bool chunks_begin_at_window() const {
    constexpr std::int32_t kMostReach = 1 << 22;  // else chunks have too high numbers
    return reach() >= 0 && reach() <= kMostReach && !split.is_invariant();
  }

  friend bool operator==(const AttentionOptions&, const AttentionOptions&) = default;
};

// Returns the variant that the options ask of the family, in the dtypes of the tensors.
// compiled_form() maps it to the variant that a kernel is compiled for.
inline Variant variant_of(const AttentionOptions& options, Family family,
                          TileClass tile_class = TileClass::kPrefill) {
  return {.family = family,
          .q_dtype = options.q_dtype,
          .kv_dtype = options.kv_dtype,
          .head_dim_qk = options.head_dim_qk,
          .head_dim_vo = options.head_dim_vo,
          .tile_class = tile_class,
          .logits = options.soft_cap > 0.0f ? Logits::kSoftCap : Logits::kPlain,
          .position = options.position,
          .mask = options.mask,
          .sparsity = options.skip_factor > 0.0f ? Sparsity::kSkipping : Sparsity::kDense};
}

}  // namespace preflash
