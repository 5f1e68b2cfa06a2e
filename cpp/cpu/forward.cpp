#include "cpu/forward.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>

#include "cpu/guarded.h"
#include "cpu/isa.h"
#include "cpu/thread_pool.h"
#include "preflash/mask_range.h"

namespace preflash::cpu {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr int kPrefetchKeys = 8;  // how far ahead of the copy into scratch a key's rows are fetched
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// What all items of a launch have in common.
struct Launch {
  const ForwardParams& params;
  const Variant& variant;
  const TileShape& tile;
  const IsaKernels& isa;
  LogitRule logits;
  bool bf16_pairs = false;  // q and k stay bfloat16, two to a unit

  int panel_rows = 0;
  int units = 0;  // 32-bit units of a q or k row
  int ld_k = 0;
  int ld_v = 0;
  int mask_words = 0;  // keep words of a row and tile

  int padded_rows() const { return ceil_div(tile.m, panel_rows) * panel_rows; }
  std::int64_t element_size() const { return size_of(variant.q_dtype); }
};

LogitRule logit_rule(const Variant& variant, const ForwardParams& params) {
  if (variant.logits == Logits::kSoftCap && params.soft_cap > 0.0f) {
    return {.cap = static_cast<float>(params.soft_cap * kLog2E),
            .scale_in_cap = params.sm_scale / params.soft_cap};
  }
  // NOTE: a factor <= 0 would turn the -inf of a masked key into +inf or NaN, so the sign of such a
  // scale, 0 for 0, is multiplied into the scores: that is exact.
  const auto scale = static_cast<float>(params.sm_scale * kLog2E);
  if (scale > 0.0f) return {.factor = scale};
  if (scale < 0.0f) return {.factor = -scale, .sign = -1.0f};
  return {.sign = scale};
}

Launch make_launch(const Variant& variant, const TileShape& tile, const ForwardParams& params) {
  Launch launch{.params = params,
                .variant = variant,
                .tile = tile,
                .isa = isa_kernels(),
                .logits = logit_rule(variant, params)};
  const int lanes = launch.isa.lanes;
  launch.bf16_pairs =
      variant.q_dtype == DType::kBFloat16 && launch.isa.attend_bf16_pairs != nullptr;
  launch.panel_rows = kRowVecs * lanes;
  launch.units = launch.bf16_pairs ? params.head_dim_qk / 2 : params.head_dim_qk;
  launch.ld_k = ceil_div(launch.units, lanes) * lanes;
  launch.ld_v = ceil_div(params.head_dim_vo, lanes) * lanes;
  launch.mask_words = ceil_div(tile.n, kMaskWordKeys);
  return launch;
}

// One thread's buffers, kept from launch to launch and grown when a launch needs more.
class Scratch {
 public:
  float* q;             // [panels][units][panel rows], or [rows][ld_k] in a panel of few rows
  float* q_rows;        // [panel_rows][ld_k], before they are transposed
  float* k;             // [tile n][ld_k]
  float* v;             // [tile n][ld_v]
  float* scores;        // [tile n][panel_rows]
  float* o;             // [padded rows][ld_v]
  float* row_max;       // [padded rows]
  float* row_sum;       // [padded rows]
  float* rescale;       // [panel_rows]
  std::uint32_t* keep;  // [mask_words][panel_rows]

  static Scratch& of_this_thread(const Launch& launch) {
    thread_local Scratch scratch;
    scratch.lay_out(launch);
    return scratch;
  }

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

 private:
  void lay_out(const Launch& launch) {
    const std::size_t rows = launch.padded_rows(), panel = launch.panel_rows;
    const std::size_t keys = launch.tile.n, ld_k = launch.ld_k, ld_v = launch.ld_v;
    auto place = [&](std::byte* base) {
      std::size_t used = 0;
      auto take = [&]<class T>(T*& pointer, std::size_t count) {
        if (base != nullptr) pointer = reinterpret_cast<T*>(base + used);
        used += ceil_div(count * sizeof(T), std::size_t{kCacheLine}) * kCacheLine;
      };
      take(q, rows * ld_k);
      take(q_rows, panel * ld_k);
      take(k, keys * ld_k);
      take(v, keys * ld_v);
      take(scores, keys * panel);
      take(o, rows * ld_v);
      take(row_max, rows);
      take(row_sum, rows);
      take(rescale, panel);
      take(keep, launch.mask_words * panel);
      return used;
    };
    const std::size_t needed = place(nullptr);
    if (needed > size_) {
      release();
      memory_ = static_cast<std::byte*>(operator new(needed, std::align_val_t{kCacheLine}));
      size_ = needed;
    }
    place(memory_);
  }
  void release() {
    operator delete(memory_, std::align_val_t{kCacheLine});
    memory_ = nullptr;
    size_ = 0;
  }

  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
};

// Up to 32 bits of the packed mask from bit `begin`, reading only the bytes that hold them.
std::uint32_t mask_bits_from(const std::uint8_t* bytes, std::int64_t begin, int count) {
  const int shift = static_cast<int>(begin & 7);
  const int num_bytes = ceil_div(shift + count, 8);
  std::uint64_t bits = 0;
  for (int i = 0; i < num_bytes; ++i) {
    bits |= static_cast<std::uint64_t>(bytes[(begin >> 3) + i]) << (8 * i);
  }
  return static_cast<std::uint32_t>(bits >> shift);
}

// Bits [begin, end) of a word, both clamped to [0, 32].
std::uint32_t bit_range(int begin, int end) {
  begin = std::clamp(begin, 0, 32);
  end = std::clamp(end, 0, 32);
  if (begin >= end) return 0;
  return static_cast<std::uint32_t>((std::uint64_t{1} << end) - (std::uint64_t{1} << begin));
}

// The LSE of a row of maximum `raw`, taken before the factor, and weights that add up to `sum`.
PartialLse row_lse(const Launch& launch, float raw, float sum) {
  if (sum == 0.0f) return {.high = 0.0f, .low = -kInfinity};
  const float factor = launch.logits.factor, product = raw * factor;
  const bool huge = std::abs(product) >= launch.isa.huge_logit;
  if (!huge) return {.high = product, .low = std::log2(sum)};

  constexpr float kLargest = std::numeric_limits<float>::max();
  const float high = std::clamp(product, -kLargest, kLargest);
  const float rest = std::fma(raw, factor, -high);
  // NOTE: the rest, up to half an ulp of the product, may not push the bits of log2(sum) out of
  // `low`: equal keys in several chunks need those. From 2^30 on keys that differ do so by 64 at
  // least, so that only who is larger counts: the rest keeps its order when it is made to stay
  // below 64.
  const int shift = std::min(0, 30 - std::ilogb(high));
  return {.high = high, .low = std::log2(sum) + std::ldexp(rest, shift)};
}

enum class Kept { kNone, kSome, kAll };

// One work item: a tile of packed rows of one KV head against one KV chunk.
class Item {
 public:
  Item(const Launch& launch, const WorkItem& item, Scratch& scratch)
      : launch_(launch),
        params_(launch.params),
        item_(item),
        request_(launch.params.requests[item.request]),
        scratch_(scratch),
        bounds_{.qo_len = request_.qo_len,
                .kv_len = request_.kv_len,
                .window_left = params_.window_left,
                .causal = params_.causal},
        rows_(static_cast<int>(std::min<std::int64_t>(
            rows_per_tile(traits_of(launch.variant.family).tile_rows, launch.tile.m,
                          params_.group_size),
            std::int64_t{request_.qo_len} * params_.group_size - item.row_begin))) {}

  void run() {
    const std::int64_t chunk_begin = std::int64_t{item_.chunk} * request_.chunk_keys;
    const KeySpan chunk{
        .begin = static_cast<int>(std::min<std::int64_t>(chunk_begin, request_.kv_len)),
        .end = static_cast<int>(
            std::min<std::int64_t>(chunk_begin + request_.chunk_keys, request_.kv_len))};
    const RowSpan span = tokens(0, rows_);
    const TileRange tiles =
        touched_tiles(bounds_, span, chunk, launch_.tile.n, launch_.variant.mask);
    const KeySpan touched = touched_keys(bounds_, span);
    const KeySpan wanted{std::max(touched.begin, chunk.begin), std::min(touched.end, chunk.end)};
    std::fill_n(scratch_.row_max, launch_.padded_rows(), -kInfinity);
    std::fill_n(scratch_.row_sum, launch_.padded_rows(), 0.0f);
    std::fill_n(scratch_.o, std::int64_t{rows_} * launch_.ld_v, 0.0f);
    if (tiles.count() > 0) load_queries();
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int tile_begin = tile * launch_.tile.n;
      const KeySpan keys{std::max(wanted.begin, tile_begin),
                         std::min(wanted.end, tile_begin + launch_.tile.n)};
      load_keys_and_values(keys, tile_begin, wanted.end);
      for (int row = 0; row < rows_; row += launch_.panel_rows) attend(row, keys, tile_begin);
    }
    for (int row = 0; row < rows_; ++row) write_row(row);
  }

 private:
  int panel_live(int row) const { return std::min(launch_.panel_rows, rows_ - row); }
  // A panel that one vector holds is one vector wide.
  int panel_ld(int row) const {
    return panel_live(row) <= launch_.isa.lanes ? launch_.isa.lanes : launch_.panel_rows;
  }
  int token(int row) const { return (item_.row_begin + row) / params_.group_size; }
  int head(int row) const {
    return item_.kv_head * params_.group_size + (item_.row_begin + row) % params_.group_size;
  }
  RowSpan tokens(int row, int count) const { return {token(row), token(row + count - 1)}; }

  // A row of q or k into 32-bit units, zero up to ld_k.
  void load_units(const std::byte* source, float* target) const {
    if (launch_.bf16_pairs) {
      std::memcpy(target, source, static_cast<std::size_t>(launch_.units) * sizeof(float));
    } else {
      launch_.isa.widen(launch_.variant.q_dtype, source, target, launch_.units);
    }
    std::fill(target + launch_.units, target + launch_.ld_k, 0.0f);
  }

  void load_queries() const {
    for (int row = 0; row < rows_; row += launch_.panel_rows) {
      const int live = panel_live(row), ld = panel_ld(row);
      float* panel = scratch_.q + std::int64_t{row} * launch_.ld_k;
      float* rows = live <= kFewRows ? panel : scratch_.q_rows;
      for (int i = 0; i < live; ++i) {
        const std::int64_t offset =
            (std::int64_t{request_.qo_begin} + token(row + i)) * params_.q.stride_token +
            head(row + i) * params_.q.stride_head;
        load_units(static_cast<const std::byte*>(params_.q.data) + offset * launch_.element_size(),
                   rows + i * launch_.ld_k);
      }
      if (live <= kFewRows) continue;
      std::fill(rows + live * launch_.ld_k, rows + ld * launch_.ld_k, 0.0f);
      for (int unit = 0; unit < launch_.units; ++unit) {
        for (int i = 0; i < ld; ++i) panel[unit * ld + i] = rows[i * launch_.ld_k + unit];
      }
    }
  }

  // The row of a request's key, through the page table where there is one.
  const std::byte* kv_row(const KvTensor& tensor, int key) const {
    std::int64_t offset = item_.kv_head * tensor.stride_head;
    if (params_.page_indices == nullptr) {
      offset += (std::int64_t{request_.kv_begin} + key) * tensor.stride_token;
    } else {
      const std::int64_t entry = std::int64_t{request_.kv_begin} + key / params_.page_size;
      offset += params_.page_indices[entry] * tensor.stride_page +
                key % params_.page_size * tensor.stride_token;
    }
    return static_cast<const std::byte*>(tensor.data) + offset * launch_.element_size();
  }

  // The rows of one head lie far apart in a cache of many heads, where hardware does not prefetch.
  void prefetch_row(const std::byte* row, int head_dim) const {
    for (std::int64_t byte = 0; byte < head_dim * launch_.element_size(); byte += kCacheLine) {
      __builtin_prefetch(row + byte);
    }
  }

  // The rows of one tile's keys into scratch; the item will go on as far as key `end`.
  void load_keys_and_values(KeySpan keys, int tile_begin, int end) const {
    for (int key = keys.begin; key < keys.end; ++key) {
      if (key + kPrefetchKeys < end) {
        prefetch_row(kv_row(params_.k, key + kPrefetchKeys), params_.head_dim_qk);
        prefetch_row(kv_row(params_.v, key + kPrefetchKeys), params_.head_dim_vo);
      }
      float* k = scratch_.k + std::int64_t{key - tile_begin} * launch_.ld_k;
      float* v = scratch_.v + std::int64_t{key - tile_begin} * launch_.ld_v;
      load_units(kv_row(params_.k, key), k);
      launch_.isa.widen(launch_.variant.kv_dtype, kv_row(params_.v, key), v, params_.head_dim_vo);
      std::fill(v + params_.head_dim_vo, v + launch_.ld_v, 0.0f);
    }
  }

  // The keep bits of one token for the 32 keys from `begin`.
  std::uint32_t keep_word(int token, int begin) const {
    std::uint32_t word =
        bit_range(bounds_.first_key(token) - begin, bounds_.end_key(token) - begin);
    if (launch_.variant.mask == Mask::kCustom && word != 0) {
      const int count = std::min(kMaskWordKeys, request_.kv_len - begin);
      word &= mask_bits_from(params_.extras.mask_bits + request_.mask_begin,
                             std::int64_t{token} * request_.kv_len + begin, count);
    }
    return word;
  }

  // Fills scratch_.keep for a panel and the keys of one tile, and says what it came to.
  Kept fill_keep(int row, KeySpan keys, int tile_begin) const {
    const int live = panel_live(row), ld = panel_ld(row);
    std::uint32_t any = 0, missing = 0;
    const int first_word = (keys.begin - tile_begin) / kMaskWordKeys;
    const int end_word = ceil_div(keys.end - tile_begin, kMaskWordKeys);
    for (int index = first_word; index < end_word; ++index) {
      const int begin = tile_begin + index * kMaskWordKeys;
      const std::uint32_t wanted = bit_range(keys.begin - begin, keys.end - begin);
      std::uint32_t* words = scratch_.keep + index * ld;
      for (int i = 0; i < live; ++i) {
        const bool same_token = i > 0 && token(row + i) == token(row + i - 1);
        words[i] = same_token ? words[i - 1] : keep_word(token(row + i), begin) & wanted;
        any |= words[i];
        missing |= wanted & ~words[i];
      }
      std::fill(words + live, words + ld, 0u);
    }
    return any == 0 ? Kept::kNone : missing == 0 ? Kept::kAll : Kept::kSome;
  }

  // One panel of rows against the keys of one tile.
  void attend(int row, KeySpan keys, int tile_begin) const {
    const RowSpan span = tokens(row, panel_live(row));
    const KeySpan touched = touched_keys(bounds_, span);
    keys = {std::max(keys.begin, touched.begin), std::min(keys.end, touched.end)};
    if (keys.begin >= keys.end) return;
    const bool all_in_bounds =
        bounds_.first_key(span.last) <= keys.begin && keys.end <= bounds_.end_key(span.first);
    const bool masked = !all_in_bounds || launch_.variant.mask == Mask::kCustom;
    const Kept kept = masked ? fill_keep(row, keys, tile_begin) : Kept::kAll;
    if (kept == Kept::kNone) return;

    const PanelStep step{
        .q = scratch_.q + std::int64_t{row} * launch_.ld_k,
        .ld = panel_ld(row),
        .units = launch_.units,
        .rows = panel_live(row),
        .k = scratch_.k,
        .ld_k = launch_.ld_k,
        .v = scratch_.v,
        .ld_v = launch_.ld_v,
        .vo_vecs = launch_.ld_v / launch_.isa.lanes,
        .key_begin = keys.begin - tile_begin,
        .key_end = keys.end - tile_begin,
        .keep = kept == Kept::kAll ? nullptr : scratch_.keep,
        .logits = launch_.logits,
        .scores = scratch_.scores,
        .rescale = scratch_.rescale,
        .row_max = scratch_.row_max + row,
        .row_sum = scratch_.row_sum + row,
        .o = scratch_.o + std::int64_t{row} * launch_.ld_v,
    };
    (launch_.bf16_pairs ? launch_.isa.attend_bf16_pairs : launch_.isa.attend)(step);
  }

  // Normalises a row and writes it where the plan says: to o and lse, or to the item's partials.
  void write_row(int row) const {
    const float sum = scratch_.row_sum[row];
    const bool empty = sum == 0.0f;
    float* o = scratch_.o + std::int64_t{row} * launch_.ld_v;
    // NOTE: a row that kept nothing may hold 0 * NaN from its neighbours' keys.
    if (empty) std::fill_n(o, params_.head_dim_vo, 0.0f);
    const float scale = empty ? 1.0f : params_.out_scale / sum;
    const PartialLse lse = row_lse(launch_, scratch_.row_max[row], sum);

    if (item_.partial_row != WorkItem::kFinal) {
      const std::int64_t place = std::int64_t{item_.partial_row} + row;
      launch_.isa.narrow(DType::kFloat32, o, scale, params_.partial_o + place * params_.head_dim_vo,
                         params_.head_dim_vo);
      params_.partial_lse[place] = lse;
      return;
    }
    const std::int64_t qo_row = std::int64_t{request_.qo_begin} + token(row);
    const std::int64_t offset = qo_row * params_.o.stride_token + head(row) * params_.o.stride_head;
    launch_.isa.narrow(launch_.variant.q_dtype, o, scale,
                       static_cast<std::byte*>(params_.o.data) + offset * launch_.element_size(),
                       params_.head_dim_vo);
    if (params_.lse.data != nullptr) {
      params_.lse.data[qo_row * params_.lse.stride_token + head(row) * params_.lse.stride_head] =
          (lse.high + lse.low) * params_.lse.scale;
    }
  }

  const Launch& launch_;
  const ForwardParams& params_;
  const WorkItem& item_;
  const RequestInfo& request_;
  Scratch& scratch_;
  const MaskBounds bounds_;
  const int rows_;
};

}  // namespace

LaunchError run_forward(const Variant& variant, const TileShape& tile, const ForwardParams& params,
                        int num_threads) {
  return guarded([&] {
    const Launch launch = make_launch(variant, tile, params);
    parallel_for(params.num_items, num_threads, [&](int index) {
      Item(launch, params.items[index], Scratch::of_this_thread(launch)).run();
    });
  });
}

}  // namespace preflash::cpu
