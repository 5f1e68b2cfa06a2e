// What one launch computes: a planned batch, or two side by side, the kernels that were chosen, and
// their work list. A Plan is immutable and has no place; DevicePlan is the place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/batch.h"
#include "core/device.h"
#include "core/staging.h"
#include "planner/planner.h"

namespace preflash {

// What is asked of one segment.
struct PlanRequest {
  AttentionOptions options;
  std::shared_ptr<const Batch> batch;
  std::int32_t graph_max_rows = 0;    // SegmentProblem::graph_max_rows
  std::int64_t graph_mask_bytes = 0;  // SegmentProblem::graph_mask_bytes
};

// What was made of it.
struct PlannedSegment {
  AttentionOptions options;  // of the caller's tensors
  std::shared_ptr<const Batch> batch;
  const ForwardKernel* kernel = nullptr;
  std::int64_t page_indices_offset = 0;  // in the plan's image, of those that are on the host
  // Null: the kernel reads the caller's tensors.
  std::shared_ptr<const StagedForm> staged = {};
  std::int64_t page_begin_offset = 0;  // in the plan's image: StageParams::page_begin
  std::int64_t copies_offset = 0;      // in the float workspace

  const AttentionOptions& kernel_options() const { return staged ? staged->options() : options; }
};

class Plan {
 public:
  // Validates, finds the kernels and counts. Throws std::invalid_argument for bad input and
  // NotCompiledError when `family` has no kernel for it. Launches nothing.
  Plan(Family family, int device, const PerSegment<PlanRequest>& requests,
       std::int64_t float_workspace_bytes);
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // Of the launch: its kernel, or both, behind the copies that are made for it.
  const std::string& id() const { return id_; }
  const PerSegment<PlannedSegment>& segments() const { return segments_; }
  // What runs them all: the kernel of the one segment or of both, or both kernels as one launch.
  const ForwardKernel& kernel() const { return kernel_; }
  const PlanSizes& sizes() const { return planner_.sizes(); }
  const PlanLayout& layout() const { return planner_.layout(); }
  int device() const { return device_; }

  // The work list and, behind it, the page indices that are on the host.
  std::int64_t int_bytes() const { return int_bytes_; }
  // So much of it as write() fills. Behind it are page indices that go there by themselves.
  std::int64_t image_bytes() const { return image_bytes_; }
  // The partials and, behind them, the copies of a segment that has some.
  std::int64_t float_bytes() const { return float_bytes_; }
  bool staged() const { return segments_[0].staged != nullptr; }

  // Whether its sizes are those of every plan for a batch of this size: a CUDA graph may hold a
  // launch of it while the place gets other plans.
  bool graph_safe() const { return graph_safe_; }
  // Whether a launch of the one, in the same place, is a launch of the other: nothing that a CUDA
  // graph holds by value differs.
  bool launches_like(const Plan& other) const;

  // Fills image_bytes() bytes at `image`, which is 16-byte aligned.
  void write(void* image) const;

 private:
  // What runs a problem: the problem on copies, if there is one.
  struct Choice {
    SegmentKernels kernels;
    Problem problem;
    std::shared_ptr<const StagedForm> staged;  // of the only segment
  };

  Plan(int device, const PerSegment<PlanRequest>& requests, const Choice& choice);
  static Choice choose(Family family, int device, const PerSegment<PlanRequest>& requests,
                       std::int64_t float_workspace_bytes);
  void place_copies(const std::shared_ptr<const StagedForm>& staged);
  void place_page_indices();

  int device_;
  SegmentKernels kernels_;
  std::string id_;
  ForwardKernel kernel_;
  Planner planner_;
  bool graph_safe_;
  std::int64_t int_bytes_;
  std::int64_t image_bytes_;
  std::int64_t float_bytes_;
  PerSegment<PlannedSegment> segments_;
};

}  // namespace preflash
