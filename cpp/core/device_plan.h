// Fixed device memory for one uploaded plan. Launches bind to the DevicePlan, not to a plan: a new
// plan is written into the same DevicePlan, whose addresses stay.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/memory_claim.h"
#include "core/plan.h"
#include "preflash/params.h"

namespace preflash {

// Pinned staging memory, one per wrapper. Thread-safe but for get().
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
  // To be used under its lock(), which may wait for another thread's upload.
  PlanUploader* get() const { return uploader_; }
  std::unique_lock<std::mutex> lock() const { return std::unique_lock(mutex_); }
  // For the page indices of the wrapper's batches. Thread-safe.
  const PageMemory& page_memory() const { return page_memory_; }

 private:
  int device_;
  const DeviceServices* services_;
  PlanUploader* uploader_;
  PageMemory page_memory_;
  mutable std::atomic<int> num_running_ = 0;
  mutable std::mutex mutex_;
};

// Copy of the caller's host memory to device memory.
struct HostCopy {
  void* to = nullptr;
  const void* from = nullptr;
  std::size_t bytes = 0;
};

// Options of one DevicePlan::write().
struct Upload {
  // Page indices of each segment, on the device; null: those of the batch are uploaded.
  PerSegment<const std::int32_t*> page_indices = {};
  // Custom mask of each segment, packed and on the device; null: every run brings a mask, or may
  // change it.
  PerSegment<const std::uint8_t*> mask_bits = {};
  // Host arrays that are uploaded with the plan; read before write() returns.
  std::vector<HostCopy> copies = {};
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

  // Replaces the plan's lengths by those of the device. The plan's batch must consist of bounds: of
  // q, and of k and v as they are bound. The plan fills in what `lengths` lacks.
  void set_lengths(RequestLengths lengths, const LaunchTarget& target) const;

  // Writes the plan into pinned memory, starts its copy to the device, and behind the copy a launch
  // that finds the full and empty tiles of its masks, if the kernel reads these. If the plan
  // exceeds the capacity, throws std::invalid_argument and changes nothing. After a CUDA graph has
  // captured a graph_safe() plan here, later plans launch in the same way.
  void write(std::shared_ptr<const Plan> plan, const Upload& upload);
  // Orders later launches on a stream other than the upload's behind the upload.
  void arrive_before(void* stream) const;

  // Finds the full and the empty tiles of a segment's mask, for the launches that follow on the
  // stream.
  void find_mask_tiles(int segment, const RunExtras& mask, const LaunchTarget& target) const;
  // True if the kernel reads the full and empty tiles of the segment's mask.
  bool uses_mask_tiles(int segment) const {
    return plan_->layout().segments[segment].mask_tiles_begin.present();
  }
  // Memory for these tiles; null: the kernel reads none.
  std::uint32_t* mask_tiles(int segment) const {
    return plan_->layout().segments[segment].mask_tiles.in(memory_);
  }
  // True if write() found the tiles, of the mask that it was given.
  bool has_mask_tiles(int segment) const { return has_mask_tiles_[segment]; }

  // Everything of ForwardParams that no tensor decides, with the work list of the first round.
  ForwardParams params() const;
  // The work list of a round of the plan: items of a launch, and merges of a segment.
  void set_items(const PlannedRound& round, ForwardParams& params) const;
  void set_merges(const PlannedRound& round, int segment, CombineParams& params) const;
  // The same of PrepassParams, for a plan with copies.
  PrepassParams prepass_params() const;
  const void* memory() const { return memory_; }
  // True if another DevicePlan has overwritten the plan.
  bool overwritten() const { return claim_.lost(); }
  // Page indices that kernels read for a segment; null: ragged.
  const std::int32_t* page_indices(int segment) const { return page_indices_[segment]; }
  // True if the page indices are the caller's, who may change them after plan().
  bool page_indices_are_callers(int segment) const { return page_indices_are_callers_[segment]; }

 private:
  void find_all_mask_tiles(const Upload& upload);
  void join(void* stream) const;

  std::shared_ptr<const Uploader> uploader_;
  void* memory_;
  std::int64_t capacity_;
  std::shared_ptr<const Plan> plan_;
  bool has_mask_tiles_[kMaxSegments] = {};        // those of the mask that write() was given
  PerSegment<const std::int32_t*> page_indices_;  // null: ragged
  bool page_indices_are_callers_[kMaxSegments] = {};
  MemoryClaim claim_;
};

}  // namespace preflash
