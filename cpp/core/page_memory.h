// Host memory for large lists of page indices, from which they upload directly: plan() copies them
// once.
#pragma once

#include <cstdint>
#include <memory>

#include "preflash/device_services.h"

namespace preflash {

// Pinned host array for the page indices of one batch at a time.
class PageArray {
 public:
  PageArray(int device, std::int64_t capacity);
  ~PageArray();
  PageArray(const PageArray&) = delete;
  PageArray& operator=(const PageArray&) = delete;

  std::int32_t* data() const { return data_; }
  std::int64_t capacity() const { return capacity_; }
  PinnedArray* pinned() const { return pinned_; }
  // True if no upload reads the array any more.
  bool is_free() const { return services_->pinned_is_free(pinned_); }

 private:
  const DeviceServices* services_;
  std::int64_t capacity_;
  PinnedArray* pinned_ = nullptr;
  std::int32_t* data_ = nullptr;
};

// The arrays of one wrapper, which its batches use in turns. A batch's array is free once a later
// plan has replaced the batch (in any thread) and its upload has ended.
class PageMemory {
 public:
  explicit PageMemory(int device);

  // True if this many page indices are worth an upload of their own.
  static bool pays_for(std::int64_t count);
  // Memory for this many, if some is free at once; null: call make(). The memory returns when its
  // last owner is gone, and may outlive this object.
  std::shared_ptr<PageArray> find(std::int64_t count) const;
  // Asks the device's driver, which may take long.
  std::shared_ptr<PageArray> make(std::int64_t count) const;

 private:
  class FreeArrays;

  std::shared_ptr<PageArray> lend(std::unique_ptr<PageArray> array) const;

  int device_;
  std::shared_ptr<FreeArrays> free_;
};

}  // namespace preflash
