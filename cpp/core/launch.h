// A planned batch bound to the strides of its tensors: the hot path between Python's run() and the
// kernel.
#pragma once

#include <cstdint>
#include <memory>

#include "core/device_plan.h"
#include "core/memory_span.h"
#include "preflash/params.h"

namespace preflash {

// Strides of the tensors of one run(), in elements, and the extents of k and v.
struct RunTensors {
  RowTensor q;
  KvTensor k;
  KvTensor v;
  RowTensor o;
  LseTensor lse;
};

// What differs from call to call of a prepared launch.
struct RunArguments {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  void* o = nullptr;
  float* lse = nullptr;
  RunExtras extras;
  void* float_workspace = nullptr;
  void* stream = nullptr;
  int num_threads = 1;  // on the CPU
  float sm_scale = 1.0f;
  float out_scale = 1.0f;
  float lse_scale = 1.0f;
};

// What the tensors of one run() reach, from addresses that each run() brings.
struct TensorSpans {
  MemorySpan q;
  MemorySpan k;
  MemorySpan v;
  MemorySpan o;
  MemorySpan lse;
};

// A plan bound to the strides of its tensors: run() only fills in addresses. The Python wrappers
// keep one per combination of shapes and strides, because checking those costs more than launching.
// Not thread-safe while another thread writes a plan into the place.
class Launch {
 public:
  Launch(std::shared_ptr<const DevicePlan> place, const RunTensors& tensors);

  // Throws std::invalid_argument for a tensor that has no memory behind it or starts at an address
  // that is not a multiple of 16, and for an output that shares memory with anything else. Says
  // whether the launch was captured into a CUDA graph rather than started.
  bool run(const RunArguments& arguments);

 private:
  void bind();
  void check(const RunArguments& arguments) const;

  std::shared_ptr<const DevicePlan> place_;
  std::shared_ptr<const Plan> plan_;  // the one that is bound
  RunTensors tensors_;
  TensorSpans spans_;
  const DeviceServices* services_;
  ForwardParams forward_;
  CombineParams combine_;
};

}  // namespace preflash
