// The planner: turns a caller's problem and the properties of the machine into a work list. Host
// only; everything that a launch does is decided here and nowhere else.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "planner/arena.h"
#include "planner/assign.h"
#include "planner/order.h"
#include "planner/split.h"
#include "planner/work.h"
#include "preflash/device_services.h"
#include "preflash/plan.h"
#include "preflash/problem.h"
#include "preflash/variant.h"

namespace preflash {

using SegmentKernels = PerSegment<const ForwardKernel*>;

// Lengths up to 2^30 keep every index of one request, and sums of two of them, inside int32.
inline constexpr std::int32_t kMaxRequestLength = 1 << 30;

// Checks the values of options and lengths; Python checks forms and page indices, Launch checks
// memory. Throws std::invalid_argument with a message that names the argument, its value, the rule
// and the way out, and the segment where there are two. Arguments have the names of Python's calls,
// options those of AttentionOptions where the two differ (head_dim_qk for a call's head_dim).
void validate(const Problem& problem);

// The tile class of a segment.
//   * kDecode when every request's packed rows fit a short tile of the family, or most of the work
//     is in such requests; over 16 bits, where short tiles have bits of their own, when every
//     request's rows fit half of one.
//   * With a fixed or disabled split a request's bits must not depend on its batch, so kDecode only
//     where short tiles have the same bits as tall ones, and only when every request is short. A
//     short request is one query tile in either class, and tile n is the same in both: the same KV
//     tiles cut into the same chunks, and rows do not see each other in a kernel. A taller one is
//     two tiles or more in short tiles: its rows then meet other KV tiles and other chunks, which
//     only add zeros, but not always in the same places (combine adds from the first chunk that a
//     tile touches, and a window moves that one).
//   * With graph_max_rows it looks at that maximum alone, so that it is the same for every plan.
TileClass choose_tile_class(const SegmentProblem& problem, const FamilyTraits& family);

struct PlannerOptions {
  Schedule schedule = Schedule::kAuto;
  std::int64_t first_tile = 0;  // query tiles of a KV head before it belong to earlier launches
};

// Never kAuto: the family's own schedule, unless a CUDA graph needs a fixed grid.
Schedule schedule_for(const FamilyTraits& family, const Problem& problem,
                      PlannerOptions options = {});

class Planner {
 public:
  // Decides and counts. Throws std::invalid_argument for a fixed split or a CUDA graph that its
  // workspace cannot hold. Keeps no reference to its arguments.
  //
  // A fixed split may have more partial rows than the float workspace holds. Without a CUDA graph a
  // plan of one segment then has several launches, one after the other over the same workspace, and
  // a Planner for each: it takes the query tiles from options.first_tile on that its workspace
  // holds, up to end_tile().
  // problem: accepted by validate(), which the caller has called before it chose the kernels.
  // kernels: of each segment, all of one family.
  Planner(const Problem& problem, const DeviceFacts& facts, const SegmentKernels& kernels,
          PlannerOptions options = {});

  // True if no query tile is left for another launch.
  bool is_last() const { return end_tile_ == kAllTiles; }
  std::int64_t end_tile() const { return end_tile_; }

  const PlanLayout& layout() const { return layout_; }

  // With graph_max_rows, num_ctas and num_merges are the same for every plan of one batch size
  // (surplus CTAs have empty lists, surplus merges have num_chunks == 0) and so is the layout.
  const PlanSizes& sizes() const { return sizes_; }

  // Fills layout().int_bytes bytes at `image`, which is 16-byte aligned.
  void write(void* image) const;

 private:
  struct CtaSlots {
    std::int64_t all = 1;   // CTAs that the machine holds at once
    std::int64_t full = 1;  // SplitProblem::full_slots
  };
  // Data of a segment that write() needs.
  struct Segment {
    std::int32_t first_request = 0;
    std::int32_t num_requests = 0;
    std::int32_t num_kv_heads = 0;
    std::int32_t head_dim_vo = 0;
    Mask mask = Mask::kBounds;
    TileExtent tile;
    SegmentLimits capacity = {};  // room: what is used, or the most that a CUDA graph may use
    std::vector<std::int64_t> mask_tiles_begin = {};  // [num_requests + 1]; empty: not read
    std::int64_t mask_tiles_capacity = 0;
  };

  void read_segment(const SegmentProblem& problem, const ForwardKernel& kernel);
  void count_mask_tiles(const SegmentProblem& problem, Segment& segment) const;
  void split(const Problem& problem, CtaSlots slots, const SegmentKernels& kernels,
             std::int64_t first_tile);
  void take_tiles(const Problem& problem, std::int64_t first_tile, std::vector<QueryTile>& tiles,
                  SplitProblem& decision);
  void cut_into_chunks(const Problem& problem, std::span<const SegmentPlan> plans,
                       const SplitProblem& decision);
  void reserve(const Problem& problem, const SplitLimits& limits);
  void schedule(const Problem& problem, const DeviceFacts& facts, std::int64_t cta_slots,
                Schedule schedule);
  void count();
  void lay_out(Arena& ints, Arena& floats, PlanLayout& layout) const;
  void write_items(WorkItem* items) const;
  void write_lists_in_turns(std::int32_t heads, WorkItem* items) const;
  void write_merges(const Segment& segment, const SegmentWork& work, MergeItem* merges) const;

  static constexpr std::int64_t kAllTiles = std::numeric_limits<std::int64_t>::max();

  bool is_first_;  // holds the requests and mask tiles that all launches of its plan read
  std::vector<RequestInfo> requests_;
  PerSegment<Segment> segments_;
  std::int64_t end_tile_ = kAllTiles;
  WorkList work_;
  std::int64_t item_capacity_ = 0;
  std::vector<OrderedUnit> order_;
  Assignment assignment_;  // empty without a persistent schedule
  PlanLayout layout_;
  PlanSizes sizes_;
};

}  // namespace preflash
