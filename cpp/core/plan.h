// One planned batch: the kernel that was chosen, and its work list. A Plan is immutable and has no
// place; DevicePlan is the place.
#pragma once

#include <cstdint>
#include <memory>

#include "core/batch.h"
#include "core/device.h"
#include "planner/planner.h"

namespace preflash {

class Plan {
 public:
  // Validates, finds the kernel and counts. Throws std::invalid_argument for bad input and
  // NotCompiledError when `family` has no kernel for it. Launches nothing.
  Plan(Family family, int device, const AttentionOptions& options,
       std::shared_ptr<const Batch> batch, std::int64_t float_workspace_bytes);

  const ForwardKernel& kernel() const { return *kernel_; }
  const PlanSizes& sizes() const { return planner_.sizes(); }
  const PlanLayout& layout() const { return planner_.layout(); }
  const AttentionOptions& options() const { return options_; }
  const Batch& batch() const { return *batch_; }
  int device() const { return device_; }

  // The work list and, behind it, the page indices that are on the host.
  std::int64_t int_bytes() const { return int_bytes_; }
  std::int64_t page_indices_offset() const { return page_indices_offset_; }
  std::int64_t float_bytes() const { return layout().float_bytes; }

  // Fills int_bytes() bytes at `image`, which is 16-byte aligned.
  void write(void* image) const;

 private:
  Problem describe(std::int64_t float_workspace_bytes) const;

  int device_;
  AttentionOptions options_;
  std::shared_ptr<const Batch> batch_;
  const ForwardKernel* kernel_;
  Planner planner_;
  std::int64_t page_indices_offset_ = 0;
  std::int64_t int_bytes_ = 0;
};

}  // namespace preflash
