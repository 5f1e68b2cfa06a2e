#include "cpu/forward.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>

#include "cpu/forward_mask.h"
#include "cpu/guarded.h"
#include "cpu/isa.h"
#include "cpu/item_timer.h"
#include "cpu/partial_lse.h"
#include "cpu/rotary.h"
#include "cpu/score_bias.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"
#include "preflash/mask_range.h"

namespace preflash::cpu {
namespace {

constexpr int kPrefetchKeys = 8;  // keys by which the prefetch is ahead of the copy into scratch

// Data common to all items of a segment.
struct Segment {
  const ForwardSegment& params;
  Family family;
  const TileShape& tile;
  const IsaKernels& isa;
  LogitRule logits;
  int most_few = kFewRows;  // 0 if a row's bits may not depend on the number of rows beside it
  bool bf16_pairs = false;  // q and k stay bfloat16, two to a unit
  std::optional<RotaryTable> rotary = {};
  ScratchShape shape = {};
};

LogitRule logit_rule(const ForwardSegment& params) {
  if (params.soft_cap > 0.0f) {
    return {.cap = static_cast<float>(params.soft_cap * kLog2E),
            .scale_in_cap = params.sm_scale / params.soft_cap};
  }
  // A factor <= 0 would turn the -inf of a masked key into +inf or NaN, so the sign of such a
  // scale, 0 for 0, is multiplied into the scores: that is exact.
  const auto scale = static_cast<float>(params.sm_scale * kLog2E);
  if (!ScoreBias::allows_factor(params, std::abs(scale))) return {.scale = scale};
  if (scale > 0.0f) return {.factor = scale};
  if (scale < 0.0f) return {.factor = -scale, .scale = -1.0f};
  return {.scale = scale};
}

Segment make_segment(const ForwardKernel& kernel, const ForwardSegment& params) {
  const TileShape& tile = kernel.tile;
  Segment segment{.params = params,
                  .family = kernel.variant.family,
                  .tile = tile,
                  .isa = isa_kernels(),
                  .logits = logit_rule(params),
                  .most_few = params.split.is_invariant() ? 0 : kFewRows};
  const int lanes = segment.isa.lanes, panel_rows = kRowVecs * lanes;
  const bool rotated = params.position == Position::kRope;
  if (rotated) {
    segment.rotary.emplace(params.rope, params.head_dim_qk, std::max(tile.m, tile.n));
  }
  // Rotated, a bfloat16 is a float32.
  segment.bf16_pairs = !rotated && params.q_dtype == DType::kBFloat16 &&
                       params.kv_dtype == DType::kBFloat16 &&
                       segment.isa.attend_bf16_pairs != nullptr;
  const int units = segment.bf16_pairs ? params.head_dim_qk / 2 : params.head_dim_qk;
  segment.shape = {.tile_rows = ceil_div(tile.m, panel_rows) * panel_rows,
                   .panel_rows = panel_rows,
                   .tile_keys = tile.n,
                   .units = units,
                   .ld_k = ceil_div(units, lanes) * lanes,
                   .ld_v = ceil_div(params.head_dim_vo, lanes) * lanes};
  return segment;
}

// Element `offset` of a tensor.
std::byte* element(void* data, std::int64_t offset, DType dtype) {
  return static_cast<std::byte*>(data) + offset * size_of(dtype);
}
const std::byte* element(const void* data, std::int64_t offset, DType dtype) {
  return static_cast<const std::byte*>(data) + offset * size_of(dtype);
}

// The LSE of a row of maximum `raw`, taken before the factor, and weights that add up to `sum`.
PartialLse row_lse(const Segment& segment, float raw, float sum, double left_for_lse) {
  if (sum == 0.0f) return kEmptyLse;
  // Weights are relative to the rounded product, those of a huge row to the exact one.
  const float factor = segment.logits.factor, product = raw * factor;
  const bool huge = std::abs(product) >= segment.isa.huge_logit;
  const double reference = huge ? static_cast<double>(raw) * factor : product;
  return lse_of(reference + left_for_lse, std::log2(sum));
}

// One work item: a tile of packed rows of one KV head against one KV chunk.
class Item {
 public:
  Item(const Segment& segment, const RequestInfo& request, const WorkItem& item, Scratch& scratch)
      : segment_(segment),
        params_(segment.params),
        shape_(segment.shape),
        item_(item),
        request_(request),
        scratch_(scratch),
        keep_(params_, request_),
        bias_(params_, keep_.bounds()),
        rows_{.row_begin = item.row_begin,
              .first_head = item.kv_head * params_.group_size,
              .group_size = params_.group_size},
        num_rows_(static_cast<int>(std::min<std::int64_t>(
            rows_per_tile(traits_of(segment.family).tile_rows, segment.tile.m, params_.group_size),
            std::int64_t{request_.qo_len} * params_.group_size - item.row_begin))) {}

  void run() {
    if (num_rows_ <= 0) return;  // the plan was made for longer requests (RequestLengths)
    const KeySpan chunk = chunk_of(item_, request_, params_.chunk_origin);
    const RowSpan span = rows_.tokens(0, num_rows_);
    const TileRange tiles =
        touched_tiles(keep_.bounds(), span, chunk, shape_.tile_keys, params_.mask);
    const KeySpan touched = touched_keys(keep_.bounds(), span);
    const KeySpan wanted{std::max(touched.begin, chunk.begin), std::min(touched.end, chunk.end)};
    std::fill_n(scratch_.row_max, shape_.tile_rows, -kInfinity);
    std::fill_n(scratch_.row_sum, shape_.tile_rows, 0.0f);
    std::fill_n(scratch_.o, std::int64_t{num_rows_} * shape_.ld_v, 0.0f);
    if (tiles.count() > 0) load_queries();
    bias_.fill_slopes(rows_, num_rows_, segment_.logits.factor, shape_, scratch_);
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int tile_begin = tile * shape_.tile_keys;
      const TileKeys all{.span = {tile_begin, tile_begin + shape_.tile_keys},
                         .tile_begin = tile_begin};
      const TileKeys keys = all.within(wanted);
      load_keys_and_values(keys, wanted.end);
      for (int row = 0; row < num_rows_; row += shape_.panel_rows) attend(panel_at(row), keys);
    }
    for (int row = 0; row < num_rows_; ++row) write_row(row);
  }

 private:
  // A panel that one vector holds is one vector wide.
  Panel panel_at(int row) const {
    const int live = std::min(shape_.panel_rows, num_rows_ - row);
    const int lanes = segment_.isa.lanes;
    return {.row = row, .live = live, .ld = live <= lanes ? lanes : shape_.panel_rows};
  }

  // A row of q or k into 32-bit units, zero up to ld_k.
  void load_units(const std::byte* source, DType dtype, float* target) const {
    if (segment_.bf16_pairs) {
      std::memcpy(target, source, static_cast<std::size_t>(shape_.units) * sizeof(float));
    } else {
      segment_.isa.widen(dtype, source, target, shape_.units);
    }
    std::fill(target + shape_.units, target + shape_.ld_k, 0.0f);
  }

  // Writes the angles of a position into scratch, unless they are there. Without RoPE does nothing.
  void set_origin(std::int64_t position) {
    if (!segment_.rotary || origin_ == position) return;
    origin_ = position;
    angles_ = segment_.rotary->origin(position, scratch_.angles);
  }
  // Turns a row by the angle of a position, the origin's and an offset.
  void rotate(float* row, int offset) const {
    if (!segment_.rotary) return;
    const RotaryTable& rotary = *segment_.rotary;
    segment_.isa.rotate(row, rotary.half(), angles_, rotary.offset(offset));
  }
  void rotate_query(float* row, int token) {
    if (!segment_.rotary) return;
    const std::int64_t position = std::int64_t{keep_.bounds().delta()} + token;
    set_origin(segment_.rotary->origin_of(position));
    rotate(row, static_cast<int>(position - *origin_));
  }

  // Multiplies a query row by the scales of both fp8 operands of its scores, q and k.
  void apply_scales(float* row, int head) const {
    const RunExtras& extras = params_.extras;
    if (extras.scale_q == nullptr && extras.scale_k == nullptr) return;
    const float of_q = extras.scale_q == nullptr ? 1.0f : extras.scale_q[head];
    const float of_k = extras.scale_k == nullptr ? 1.0f : extras.scale_k[item_.kv_head];
    for (int unit = 0; unit < shape_.units; ++unit) row[unit] *= of_q * of_k;
  }
  float out_scale() const {
    const float* of_v = params_.extras.scale_v;
    return of_v == nullptr ? params_.out_scale : params_.out_scale * of_v[item_.kv_head];
  }

  void load_queries() {
    for (int row = 0; row < num_rows_; row += shape_.panel_rows) {
      const auto [first, live, ld] = panel_at(row);
      float* panel = scratch_.q + std::int64_t{first} * shape_.ld_k;
      const bool few = live <= segment_.most_few;
      float* rows = few ? panel : scratch_.q_rows;
      for (int i = 0; i < live; ++i) {
        const std::int64_t offset =
            (std::int64_t{request_.qo_begin} + rows_.token(row + i)) * params_.q.stride_token +
            rows_.head(row + i) * params_.q.stride_head;
        load_units(element(params_.q.data, offset, params_.q_dtype), params_.q_dtype,
                   rows + i * shape_.ld_k);
        apply_scales(rows + i * shape_.ld_k, rows_.head(row + i));
        rotate_query(rows + i * shape_.ld_k, rows_.token(row + i));
      }
      if (few) continue;
      std::fill(rows + live * shape_.ld_k, rows + ld * shape_.ld_k, 0.0f);
      for (int unit = 0; unit < shape_.units; ++unit) {
        for (int i = 0; i < ld; ++i) panel[unit * ld + i] = rows[i * shape_.ld_k + unit];
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
    return element(tensor.data, offset, params_.kv_dtype);
  }

  // The rows of one head lie far apart in a cache of many heads, where hardware does not prefetch.
  void prefetch_row(const std::byte* row, int head_dim) const {
    const std::int64_t bytes = head_dim * size_of(params_.kv_dtype);
    for (std::int64_t byte = 0; byte < bytes; byte += kCacheLine) __builtin_prefetch(row + byte);
  }

  // The rows of one tile's keys into scratch; the item will go on as far as key `end`.
  void load_keys_and_values(const TileKeys& keys, int end) {
    set_origin(keys.tile_begin);
    for (int key = keys.span.begin; key < keys.span.end; ++key) {
      if (key + kPrefetchKeys < end) {
        prefetch_row(kv_row(params_.k, key + kPrefetchKeys), params_.head_dim_qk);
        prefetch_row(kv_row(params_.v, key + kPrefetchKeys), params_.head_dim_vo);
      }
      float* k = scratch_.k + std::int64_t{key - keys.tile_begin} * shape_.ld_k;
      float* v = scratch_.v + std::int64_t{key - keys.tile_begin} * shape_.ld_v;
      load_units(kv_row(params_.k, key), params_.kv_dtype, k);
      rotate(k, key - keys.tile_begin);
      segment_.isa.widen(params_.kv_dtype, kv_row(params_.v, key), v, params_.head_dim_vo);
      std::fill(v + params_.head_dim_vo, v + shape_.ld_v, 0.0f);
    }
  }

  // One panel of rows against the keys of one tile.
  void attend(const Panel& panel, const TileKeys& tile_keys) const {
    const TileKeys keys = tile_keys.within(touched_keys(keep_.bounds(), rows_.tokens(panel)));
    if (keys.empty()) return;
    const Kept kept = fill_keep(keep_, rows_, panel, keys, scratch_.keep);
    if (kept == Kept::kNone) return;

    const PanelStep step{
        .q = scratch_.q + std::int64_t{panel.row} * shape_.ld_k,
        .few = panel.live <= segment_.most_few,
        .ld = panel.ld,
        .units = shape_.units,
        .rows = panel.live,
        .k = scratch_.k,
        .ld_k = shape_.ld_k,
        .v = scratch_.v,
        .ld_v = shape_.ld_v,
        .vo_vecs = shape_.ld_v / segment_.isa.lanes,
        .key_begin = keys.begin(),
        .key_end = keys.end(),
        .keep = kept == Kept::kAll ? nullptr : scratch_.keep,
        .logits = segment_.logits,
        .bias = bias_.of(panel, rows_, keys.tile_begin, scratch_),
        .skips = params_.skip_factor > 0.0f,
        .margin =
            std::min(std::log2(params_.skip_factor / static_cast<float>(request_.kv_len)), 0.0f),
        .scores = scratch_.scores,
        .rescale = scratch_.rescale,
        .row_max = scratch_.row_max + panel.row,
        .row_sum = scratch_.row_sum + panel.row,
        .o = scratch_.o + std::int64_t{panel.row} * shape_.ld_v,
    };
    (segment_.bf16_pairs ? segment_.isa.attend_bf16_pairs : segment_.isa.attend)(step);
  }

  double left_out_of_logits(int row) const {
    return bias_.left_out(rows_.token(row), rows_.head(row));
  }

  // Normalises a row and writes it where the plan says: to o and lse, or to the item's partials.
  void write_row(int row) const {
    const float sum = scratch_.row_sum[row];
    const bool empty = sum == 0.0f;
    float* o = scratch_.o + std::int64_t{row} * shape_.ld_v;
    // A row without keys may hold 0 * NaN from its neighbours' keys.
    if (empty) std::fill_n(o, params_.head_dim_vo, 0.0f);
    const float scale = empty ? 1.0f : out_scale() / sum;
    const PartialLse lse = row_lse(segment_, scratch_.row_max[row], sum, left_out_of_logits(row));
    const bool final = item_.partial_row == WorkItem::kFinal;
    const std::int64_t place = std::int64_t{item_.partial_row} + row;
    float* normalised = final ? o : params_.partial_o + place * params_.head_dim_vo;
    segment_.isa.narrow(DType::kFloat32, o, scale, normalised, params_.head_dim_vo);
    if (final) {
      write_final(row, o, lse);
    } else {
      params_.partial_lse[place] = lse;
    }
  }

  // Writes a row whose keys are complete, with the head's sink added: as combine() would write its
  // only state, so that the bits do not tell how many chunks the rows beside it have.
  void write_final(int row, const float* o, const PartialLse& keys_lse) const {
    const int head = rows_.head(row);
    const std::optional<PartialLse> keyless = keyless_lse(params_.extras, head);
    const PartialLse states[] = {keys_lse, keyless.value_or(kEmptyLse)};
    const MergedLse merged(2, [&](int state) { return states[state]; });
    float* sum = scratch_.v;  // the values are used up
    const float weight = merged.weight(keys_lse);
    std::fill_n(sum, params_.head_dim_vo, weight == 0.0f ? 0.0f : kNothing);
    if (weight != 0.0f) segment_.isa.accumulate(weight, o, sum, params_.head_dim_vo);
    const std::int64_t qo_row = std::int64_t{request_.qo_begin} + rows_.token(row);
    const std::int64_t offset = qo_row * params_.o.stride_token + head * params_.o.stride_head;
    segment_.isa.narrow(params_.o_dtype, sum, merged.empty() ? 0.0f : 1.0f / merged.sum,
                        element(params_.o.data, offset, params_.o_dtype), params_.head_dim_vo);
    if (params_.lse.data == nullptr) return;
    float* place =
        params_.lse.data + qo_row * params_.lse.stride_token + head * params_.lse.stride_head;
    if (params_.lse.form == LseForm::kLogSum) {
      *place = merged.lse() * params_.lse.scale;
    } else {
      write_max_and_sum(row, place);
    }
  }

  void write_max_and_sum(int row, float* place) const {
    const float sum = scratch_.row_sum[row];
    const double largest = static_cast<double>(scratch_.row_max[row]) * segment_.logits.factor +
                           left_out_of_logits(row);
    place[0] = sum == 0.0f ? -kInfinity : static_cast<float>(largest * params_.lse.scale);
    place[1] = sum;
  }

  const Segment& segment_;
  const ForwardSegment& params_;
  const ScratchShape& shape_;
  const WorkItem& item_;
  const RequestInfo& request_;
  Scratch& scratch_;
  const KeepPolicy keep_;
  const ScoreBias bias_;
  const RowCoordinates rows_;
  const int num_rows_;
  std::optional<std::int64_t> origin_;  // of angles_
  Angles angles_;
};

}  // namespace

LaunchError run_forward(const ForwardParams& params, int num_threads) {
  return guarded([&] {
    std::optional<Segment> segments[kMaxSegments];
    for (int s = 0; s < params.num_segments; ++s) {
      segments[s].emplace(make_segment(*params.kernels[s], params.segments[s]));
    }
    parallel_for(params.num_items, num_threads, [&](int index) {
      const WorkItem& item = params.items[index];
      RequestInfo request = params.requests[item.request];
      const Segment& segment = *segments[request.segment];
      const std::int32_t* kv_lens = params.segments[request.segment].extras.kv_lens;
      if (kv_lens != nullptr) request = with_keys(request, kv_lens[item.request]);
      const ItemTimer timer(params.records == nullptr ? nullptr : params.records + index);
      Item(segment, request, item, Scratch::of_this_thread(segment.shape)).run();
      timer.stop(item);
    });
  });
}

}  // namespace preflash::cpu
