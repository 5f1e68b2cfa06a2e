// Where a plan is on a device. Launches bind to the place, not to the plan: planning again writes
// another Plan into the same DevicePlan, whose addresses stay as they are.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "core/memory_claim.h"
#include "core/plan.h"
#include "preflash/params.h"

namespace preflash {

// Pinned staging memory, one per wrapper. Not thread-safe.
class Uploader {
 public:
  // A launch of a wrapper's plans, for as long as the host is busy with it.
  class Running {
   public:
    explicit Running(const Uploader& wrapper)
        : count_(wrapper.num_running_), alone_(count_.fetch_add(1) == 0) {}
    ~Running() { count_.fetch_sub(1); }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

    bool alone() const { return alone_; }

   private:
    std::atomic<int>& count_;
    bool alone_;
  };

  explicit Uploader(int device);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  int device() const { return device_; }
  PlanUploader* get() const { return uploader_; }
  // For the page indices of the wrapper's batches. Thread-safe.
  const PageMemory& page_memory() const { return page_memory_; }

 private:
  int device_;
  const DeviceServices* services_;
  PlanUploader* uploader_;
  PageMemory page_memory_;
  mutable std::atomic<int> num_running_ = 0;
};

// How a plan reaches its place.
struct Upload {
  // Of each segment, on the device; null: those of the batch are uploaded.
  PerSegment<const std::int32_t*> page_indices = {};
  // Of each segment, packed and on the device; null: every run brings its own, or may change it.
  PerSegment<const std::uint8_t*> mask_bits = {};
  void* stream = nullptr;
};

class DevicePlan {
 public:
  // memory: `capacity` bytes on the device, 16-byte aligned; whoever owns it outlives the launches.
  DevicePlan(std::shared_ptr<const Uploader> uploader, void* memory, std::int64_t capacity);

  int device() const { return uploader_->device(); }
  const Uploader& wrapper() const { return *uploader_; }
  // Null before the first write().
  const std::shared_ptr<const Plan>& plan() const { return plan_; }

  // Puts the lengths that the device has in the place of the plan's, whose batch must be one of
  // bounds: of q and of k and v as they are bound. `lengths` lacks what the plan says.
  void set_lengths(RequestLengths lengths, const LaunchTarget& target) const;

  // Writes the plan into pinned memory and starts its copy to the device, and behind it a launch
  // that makes the tile classes of its masks, where the kernel reads them. Throws
  // std::invalid_argument, and changes nothing, where the plan exceeds the capacity. What a CUDA
  // graph may have captured here, a graph_safe() plan, is followed by plans that launch like it.
  void write(std::shared_ptr<const Plan> plan, const Upload& upload);
  // Orders what is launched on another stream than the upload's from now on behind the upload.
  void arrive_before(void* stream) const;

  // Classes the tiles of a segment's mask, for the launches that follow on the stream.
  void class_mask(int segment, const RunExtras& mask, const LaunchTarget& target) const;
  // Of a segment: whether the launch's kernel reads tile classes; the classes that write() made, or
  // null.
  bool uses_classes(int segment) const {
    return plan_->layout().segments[segment].class_begin.present();
  }
  std::uint32_t* mask_classes(int segment) const {
    return plan_->layout().segments[segment].mask_classes.in(memory_);
  }
  bool has_classes(int segment) const { return has_classes_[segment]; }

  // Everything of ForwardParams that no tensor decides.
  ForwardParams params() const;
  // The same of StageParams, for a plan with copies.
  StageParams stage_params() const;
  const MergeItem* merges(int segment) const {
    return plan_->layout().segments[segment].merges.in(memory_);
  }
  const void* memory() const { return memory_; }
  // Whether the plan is no longer there, because another place's was written over it.
  bool overwritten() const { return claim_.lost(); }
  // Where kernels find the page indices of a segment; null: ragged.
  const std::int32_t* page_indices(int segment) const { return page_indices_[segment]; }
  // Whether they are the caller's, who may change them after plan().
  bool page_indices_are_callers(int segment) const { return page_indices_are_callers_[segment]; }

 private:
  void class_masks(const Upload& upload);

  std::shared_ptr<const Uploader> uploader_;
  void* memory_;
  std::int64_t capacity_;
  std::shared_ptr<const Plan> plan_;
  bool has_classes_[kMaxSegments] = {};           // those of the mask that write() was given
  PerSegment<const std::int32_t*> page_indices_;  // null: ragged
  bool page_indices_are_callers_[kMaxSegments] = {};
  MemoryClaim claim_;
};

}  // namespace preflash
