// One planned batch: the kernel that was chosen, where its work list lies on the device, and the
// launches prepared for it. Built completely before the wrapper gives up the plan it had.
#pragma once

#include <cstdint>
#include <memory>

#include "bindings/batch.h"
#include "bindings/device.h"
#include "bindings/memory_span.h"
#include "planner/planner.h"
#include "preflash/params.h"

namespace preflash {

// Pinned staging memory, one per wrapper. Not thread-safe.
class Uploader {
 public:
  explicit Uploader(int device);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  int device() const { return device_; }
  PlanUploader* get() const { return uploader_; }

 private:
  int device_;
  const DeviceServices* services_;
  PlanUploader* uploader_;
};

// Where a plan goes, and how.
struct UploadTarget {
  void* int_workspace = nullptr;
  std::int64_t int_workspace_bytes = 0;
  const std::int32_t* page_indices =
      nullptr;  // on the device; null: those of the batch are uploaded
  void* stream = nullptr;
  bool blocking = false;
};

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
  std::int64_t float_bytes() const { return layout().float_bytes; }
  const void* int_workspace() const { return int_workspace_; }

  // Writes the work list into pinned memory and copies it to the workspace. Once only.
  void upload(const Uploader& uploader, const UploadTarget& target);

  // Everything of ForwardParams that no tensor decides.
  ForwardParams params() const;
  const MergeItem* merges() const { return layout().merges.in(int_workspace_); }

 private:
  Problem describe(std::int64_t float_workspace_bytes) const;

  int device_;
  AttentionOptions options_;
  std::shared_ptr<const Batch> batch_;
  const ForwardKernel* kernel_;
  Planner planner_;
  std::int64_t page_indices_offset_ = 0;
  std::int64_t int_bytes_ = 0;
  void* int_workspace_ = nullptr;
  const std::int32_t* page_indices_ = nullptr;
};

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
class Launch {
 public:
  Launch(std::shared_ptr<const Plan> plan, const RunTensors& tensors);

  // Throws std::invalid_argument for a tensor that has no memory behind it or starts at an address
  // that is not a multiple of 16, and for an output that shares memory with anything else. Says
  // whether the launch was captured into a CUDA graph rather than started.
  bool run(const RunArguments& arguments) const;

 private:
  void check(const RunArguments& arguments) const;

  std::shared_ptr<const Plan> plan_;
  TensorSpans spans_;
  const DeviceServices* services_;
  ForwardParams forward_;
  CombineParams combine_;
};

}  // namespace preflash
