// Plan of one launch: a batch, or two side by side, the kernels that were chosen, and their work
// list. A Plan is immutable and owns no device memory; DevicePlan holds the uploaded copy.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/batch.h"
#include "core/device.h"
#include "core/prepass.h"
#include "planner/planner.h"

namespace preflash {

// Request to plan one segment.
struct PlanRequest {
  AttentionOptions options;
  std::shared_ptr<const Batch> batch;
  std::int32_t graph_max_rows = 0;    // SegmentProblem::graph_max_rows
  std::int64_t graph_mask_bytes = 0;  // SegmentProblem::graph_mask_bytes
};

// One segment as planned.
struct PlannedSegment {
  AttentionOptions options;  // of the caller's tensors
  std::shared_ptr<const Batch> batch;
  const ForwardKernel* kernel = nullptr;
  std::int64_t page_indices_offset = 0;  // in the plan's image, of those that are on the host
  // Null: the kernel reads the caller's tensors.
  std::shared_ptr<const PrepassForm> prepass = {};
  std::int64_t page_begin_offset = 0;  // in the plan's image: PrepassParams::page_begin
  std::int64_t copies_offset = 0;      // in the float workspace

  const AttentionOptions& kernel_options() const { return prepass ? prepass->options() : options; }
};

// The work list of one launch. A plan has several where a fixed split has more partial results than
// the float workspace holds: they run one after the other over the same workspace.
struct PlannedRound {
  Planner planner;
  std::int64_t image_offset = 0;
};

class Plan {
 public:
  // Validates, finds the kernels and counts. Throws std::invalid_argument for bad input and
  // NotCompiledError when `family` has no kernel for it. Launches nothing.
  Plan(Family family, int device, const PerSegment<PlanRequest>& requests,
       std::int64_t float_workspace_bytes);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Id of the kernel, or of both joined by "+", after "prepass+" if there is a pre-pass.
  const std::string& id() const { return id_; }
  const PerSegment<PlannedSegment>& segments() const { return segments_; }
  // Runs all segments: the only segment's kernel, the one for both, or both in one launch.
  const ForwardKernel& kernel() const { return kernel_; }
  const std::vector<PlannedRound>& rounds() const { return rounds_; }
  // Sizes and layout of the first round, whose requests serve the others, too.
  const PlanSizes& sizes() const { return rounds_[0].planner.sizes(); }
  const PlanLayout& layout() const { return rounds_[0].planner.layout(); }
  // Sums over all rounds of items, KV tiles and merges; the rest is the first round's.
  PlanSizes total_sizes() const;
  int device() const { return device_; }

  // The work list and, behind it, the page indices that are on the host.
  std::int64_t int_bytes() const { return int_bytes_; }
  // The part that write() fills. Behind it are page indices with an upload of their own.
  std::int64_t image_bytes() const { return image_bytes_; }
  // The partials and, behind them, the copies of a segment that has some.
  std::int64_t float_bytes() const { return float_bytes_; }
  bool has_prepass() const { return segments_[0].prepass != nullptr; }
  // The number of a segment's first request among those of the launch.
  int first_request(int segment) const;

  // True if every plan for a batch of this size has these sizes: a CUDA graph may then hold a
  // launch of this plan while others are written into the same DevicePlan.
  bool graph_safe() const { return graph_safe_; }
  // True if a captured launch of one plan also runs the other in the same DevicePlan: no value that
  // a CUDA graph holds differs.
  bool launches_like(const Plan& other) const;

  // Fills image_bytes() bytes at `image`, which is 16-byte aligned.
  void write(void* image) const;

 private:
  // Chosen kernels and the problem that they compute: with a pre-pass, the one on copies.
  struct Choice {
    SegmentKernels kernels;
    Problem problem;
    std::shared_ptr<const PrepassForm> prepass;  // of the only segment
  };

  Plan(int device, const PerSegment<PlanRequest>& requests, const Choice& choice);
  static Choice choose(Family family, int device, const PerSegment<PlanRequest>& requests,
                       std::int64_t float_workspace_bytes);
  static std::vector<PlannedRound> plan_rounds(int device, const Choice& choice);
  void place_copies(const std::shared_ptr<const PrepassForm>& prepass);
  void place_page_indices();

  int device_;
  SegmentKernels kernels_;
  std::string id_;
  ForwardKernel kernel_;
  std::vector<PlannedRound> rounds_;
  bool graph_safe_;
  std::int64_t int_bytes_;
  std::int64_t image_bytes_;
  std::int64_t float_bytes_;
  PerSegment<PlannedSegment> segments_;
};

}  // namespace preflash
