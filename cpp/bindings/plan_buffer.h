// Memory of a wrapper's plan, and the CUDA graphs that may also run it.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "bindings/guard.h"
#include "bindings/run_memory.h"
#include "bindings/workspace.h"
#include "core/captured.h"
#include "core/device_plan.h"

namespace preflash {

// Memory for the work list of one plan at a time.
class PlanBuffer : public DevicePlan {
 public:
  PlanBuffer(std::shared_ptr<const Uploader> uploader, std::shared_ptr<const Torch> torch,
             std::shared_ptr<Buffer> buffer);

  // Records that a CUDA graph captured a run: later plans are written where the graph reads them.
  void note_capture(const PerSegment<RunTensors>& tensors, const pybind11::object& partials);

  // Throws std::invalid_argument if graphs that captured a run could not go on with a batch in this
  // segment: tensors that they hold have other memory, or are too small. largest_page: -1 if not
  // known.
  void check_captured(int segment, const Batch& batch, std::int64_t largest_page) const;

  // True if a CUDA graph that captured the plan, or a copied wrapper, may still run it.
  std::atomic<bool> shared = false;
  const std::shared_ptr<const Torch> torch;
  const std::shared_ptr<Buffer> buffer;

  // Tensors whose addresses graphs hold; null: no graph has captured a run.
  std::shared_ptr<PinnedAddresses> held() const {
    const std::lock_guard lock(guard_);
    return held_;
  }

 private:
  mutable Guard guard_;  // guards captured_ and held_
  std::optional<PerSegment<Captured>> captured_;
  std::shared_ptr<PinnedAddresses> held_;
};

}  // namespace preflash
