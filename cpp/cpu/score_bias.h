// Bias that a position encoding adds to scores. The loops know only a LinearBias and the part left
// out of a row's logits; this file decides which encodings have a bias, and which bias.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/forward_mask.h"
#include "cpu/isa.h"
#include "cpu/partial_lse.h"
#include "cpu/scratch.h"
#include "preflash/alibi.h"
#include "preflash/mask_range.h"
#include "preflash/params.h"

namespace preflash::cpu {

// The bias of ALiBi for the rows of one item, or none. Only differences between keys move the
// output, so that distances are counted from a row's reference key, the last that its bounds keep:
// where weights are large the bias is small and keeps its bits, however long the request. The LSE
// gets the rest, slope * (reference - token).
class ScoreBias {
 public:
  ScoreBias(const ForwardSegment& params, const MaskBounds& bounds)
      : bounds_(bounds),
        num_heads_(params.num_qo_heads),
        form_(params.lse.form),
        present_(has_bias(params)) {}

  // Scores are logits divided by a factor: a bias, too, which may not make it overflow.
  static bool allows_factor(const ForwardSegment& params, float factor) {
    return !has_bias(params) || factor >= kSmallestFactor;
  }

  // Fills the slopes of `live` rows for a factor that allows_factor() accepts; 0 in the lanes of a
  // panel that have no row.
  void fill_slopes(const RowCoordinates& rows, int live, float factor, const ScratchShape& shape,
                   Scratch& scratch) const {
    if (!present_) return;
    for (int row = 0; row < live; ++row) {
      scratch.slope[row] = static_cast<float>(slope_of(rows.head(row)) / factor);
    }
    std::fill(scratch.slope + live, scratch.slope + shape.tile_rows, 0.0f);
  }

  // Returns the bias of a panel in the tile that begins at key `tile_begin`.
  LinearBias of(const Panel& panel, const RowCoordinates& rows, int tile_begin,
                Scratch& scratch) const {
    if (!present_) return {};
    float* distance = scratch.distance;
    for (int i = 0; i < panel.live; ++i) {
      const int token = rows.token(panel.row + i);
      distance[i] = static_cast<float>(std::int64_t{tile_begin} - reference_key(token));
    }
    std::fill(distance + panel.live, distance + panel.ld, 0.0f);
    return {.slope = scratch.slope + panel.row, .distance = distance};
  }

  // Returns what a row's base-2 logits lack, counted from its token; from key 0 with kMaxAndSum.
  double left_out(int token, int head) const {
    if (!present_) return 0.0;
    const int origin = form_ == LseForm::kLogSum ? token : 0;
    return slope_of(head) * (std::int64_t{reference_key(token)} - origin);
  }

 private:
  static constexpr float kSmallestFactor = 0x1p-60f;

  static bool has_bias(const ForwardSegment& params) { return params.position == Position::kAlibi; }

  // Base-2 logits per key.
  double slope_of(int head) const { return alibi_slope(head, num_heads_) * kLog2E; }
  int reference_key(int token) const { return bounds_.end_key(token) - 1; }

  const MaskBounds bounds_;
  const int num_heads_;
  const LseForm form_;
  const bool present_;
};

}  // namespace preflash::cpu
