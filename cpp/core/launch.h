// A plan bound to the strides of its tensors: the hot path between Python's run() and the kernel.
#pragma once

#include <cstdint>
#include <memory>

#include "core/device_plan.h"
#include "core/tensor_spans.h"
#include "preflash/params.h"

namespace preflash {

// Strides of the tensors of one segment, in elements, the extents of k and v, and the rows of q, of
// which out and lse have as many.
struct RunTensors {
  RowTensor q;
  KvTensor k;
  KvTensor v;
  RowTensor o;
  LseTensor lse;
};

// What differs from call to call of a prepared launch, for one segment.
struct SegmentArguments {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;
  float* lse = nullptr;
  RunExtras extras;
  float sm_scale = 1.0f;
  float out_scale = 1.0f;
  float lse_scale = 1.0f;
};

struct RunArguments {
  PerSegment<SegmentArguments> segments;
  void* float_workspace = nullptr;
  std::int64_t float_workspace_bytes = 0;
  void* stream = nullptr;
  int num_threads = 1;  // on the CPU
};

// A plan bound to the strides of its tensors: run() only fills in addresses. The Python wrappers
// keep one per combination of shapes and strides, because checking those costs more than launching.
// Not thread-safe while another thread writes a plan into the place.
class Launch {
 public:
  // Throws std::invalid_argument for tensors of more or fewer segments than the plan has.
  Launch(std::shared_ptr<const DevicePlan> place, const PerSegment<RunTensors>& tensors);

  // Throws std::invalid_argument for a tensor that has no memory behind it or starts at an address
  // that is not a multiple of 16, for an output or a float workspace that shares memory with
  // anything else, for a float workspace that is too small by now, for a place that another plan
  // was written over, and on the CPU for page indices that the cache does not have. Says whether
  // the launch was captured into a CUDA graph rather than started.
  //
  // On the CPU, where no stream puts the launches of several threads in order, one that begins
  // while another of its wrapper computes has a float workspace of its own.
  bool run(const RunArguments& arguments);

 private:
  bool start(const RunArguments& arguments) const;
  void bind();
  void bind_segment(int index);
  void bind_copies();
  void check(const RunArguments& arguments) const;
  void check_addresses(int index, const RunArguments& arguments) const;
  // What plan() counted on and others may have changed since.
  void check_workspaces(const RunArguments& arguments) const;
  void check_mask(int index, const RunExtras& extras) const;
  void check_page_indices(int index) const;
  // What one segment reads against the copies and partial results that the launch writes.
  void check_inputs(int index, const RunArguments& arguments) const;
  // What one segment writes against what it or the other one reads and writes.
  void check_outputs(int index, int other_index, const RunArguments& arguments) const;
  // Where the kernel reads the mask's tile classes: those of the plan's own mask, which
  // plan() made, or of one that the run brings or that may have changed since, which a launch makes
  // now.
  void class_mask(int index, ForwardSegment& segment, const LaunchTarget& target) const;
  // Makes the copies and points the kernel's segment at them.
  void stage(const RunArguments& arguments, ForwardSegment& segment,
             const LaunchTarget& target) const;
  void combine(int index, const ForwardSegment& segment, const LaunchTarget& target) const;

  std::shared_ptr<const DevicePlan> place_;
  std::shared_ptr<const Plan> plan_;  // the one that is bound
  PerSegment<RunTensors> tensors_;
  TensorSpans spans_[kMaxSegments];
  const DeviceServices* services_;
  ForwardParams forward_;
  StageParams stage_;  // of a plan with copies
  CombineParams combine_[kMaxSegments];
};

}  // namespace preflash
