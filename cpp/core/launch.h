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

// Arguments of one segment that differ from run to run of a bound launch.
struct SegmentArguments {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;
  float* lse = nullptr;
  RunExtras extras;
  float skip_factor = 0.0f;  // instead of the plan's; 0: the plan's
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

// A plan bound to the strides of its tensors: run() only fills in addresses. Wrappers keep one for
// each combination of shapes and strides, because checking these takes longer than launching. Not
// thread-safe while another thread writes a plan into the place.
class Launch {
 public:
  // Throws std::invalid_argument for tensors of more or fewer segments than the plan has.
  Launch(std::shared_ptr<const DevicePlan> place, const PerSegment<RunTensors>& tensors);

  // Throws std::invalid_argument for a tensor without memory or at an address that is no multiple
  // of 16, for an output that overlaps another tensor or a workspace (it may be exactly q), for a
  // float workspace that has become too small, for a place that another plan has overwritten, and
  // on the CPU for page indices outside of the cache. Returns whether the launch was captured into
  // a CUDA graph instead of started.
  //
  // On the CPU no stream orders the launches of several threads: a launch that begins while another
  // one of its wrapper computes gets a float workspace of its own.
  bool run(const RunArguments& arguments);

 private:
  bool start(const RunArguments& arguments) const;
  void bind();
  void bind_segment(int index);
  void bind_copies();
  void check(const RunArguments& arguments) const;
  void check_addresses(int index, const RunArguments& arguments) const;
  // Checks workspaces that plan() relied on and callers may have changed.
  void check_workspaces(const RunArguments& arguments) const;
  void check_mask(int index, const RunExtras& extras) const;
  void check_page_indices(int index) const;
  // Checks what a segment reads against the copies and partial results that the launch writes.
  void check_inputs(int index, const RunArguments& arguments) const;
  // Checks what a segment writes against what both segments read and write.
  void check_outputs(int index, int other_index, const RunArguments& arguments) const;
  // Sets the mask tiles that the kernel reads. plan() found those of its own mask; for a mask that
  // the run brings, or that may have changed, they are found here, on the launch's stream.
  void find_mask_tiles(int index, ForwardSegment& segment, const LaunchTarget& target) const;
  // Makes the copies and points the kernel's segment at them.
  void run_prepass(const RunArguments& arguments, ForwardSegment& segment,
                   const LaunchTarget& target) const;
  // Returns whether the launch was captured. Points `forward` at the round's work list.
  bool start_round(const PlannedRound& round, void* float_workspace, ForwardParams& forward,
                   const LaunchTarget& target) const;
  void combine(const PlannedRound& round, int index, const ForwardSegment& segment,
               const LaunchTarget& target) const;

  std::shared_ptr<const DevicePlan> place_;
  std::shared_ptr<const Plan> plan_;  // the one that is bound
  PerSegment<RunTensors> tensors_;
  TensorSpans spans_[kMaxSegments];
  const DeviceServices* services_;
  ForwardParams forward_;
  PrepassParams prepass_;  // of a plan with copies
  CombineParams combine_[kMaxSegments];
};

}  // namespace preflash
