#include "core/page_memory.h"

#include <array>
#include <bit>
#include <mutex>
#include <utility>

#include "core/device.h"

namespace preflash {
namespace {

// A copy of its own costs 3 us on a GPU machine, as much as writing 64 KB once more.
constexpr std::int64_t kWorthACopy = 16384;

// Beside the one that the current plan has: those whose uploads may be in flight (PlanUploader has
// two), and one to write meanwhile.
constexpr int kArraysKept = 3;

}  // namespace

PageArray::PageArray(int device, std::int64_t capacity)
    : services_(&services_of(device)), capacity_(capacity) {
  void* host = nullptr;
  check_launch(services_->pinned_create(device, capacity * sizeof(std::int32_t), &pinned_, &host),
               "memory for page indices");
  data_ = static_cast<std::int32_t*>(host);
}

PageArray::~PageArray() { services_->pinned_destroy(pinned_); }

class PageMemory::FreeArrays {
 public:
  // One that is large enough, or null.
  std::unique_ptr<PageArray> take(std::int64_t count) {
    const std::lock_guard lock(mutex_);
    for (std::unique_ptr<PageArray>& array : arrays_) {
      if (array == nullptr || array->capacity() < count || !array->is_free()) continue;
      return std::exchange(array, nullptr);
    }
    return nullptr;
  }

  // Lists grow: those that are too small by now are soon of no use.
  void drop_smaller_than(std::int64_t count) {
    Arrays dropped;  // once others may go on
    const std::lock_guard lock(mutex_);
    for (int i = 0; i < kArraysKept; ++i) {
      std::unique_ptr<PageArray>& array = arrays_[i];
      if (array != nullptr && array->capacity() < count && array->is_free()) {
        std::swap(array, dropped[i]);
      }
    }
  }

  // Keeps it, or lets the smallest of all go.
  void give_back(std::unique_ptr<PageArray> given) {
    const std::lock_guard lock(mutex_);
    for (std::unique_ptr<PageArray>& array : arrays_) {
      if (array == nullptr || array->capacity() < given->capacity()) std::swap(array, given);
      if (given == nullptr) return;
    }
  }

 private:
  using Arrays = std::array<std::unique_ptr<PageArray>, kArraysKept>;

  std::mutex mutex_;
  Arrays arrays_;
};

PageMemory::PageMemory(int device) : device_(device), free_(std::make_shared<FreeArrays>()) {}

bool PageMemory::pays_for(std::int64_t count) { return count >= kWorthACopy; }

std::shared_ptr<PageArray> PageMemory::find(std::int64_t count) const {
  std::unique_ptr<PageArray> found = free_->take(count);
  return found == nullptr ? nullptr : lend(std::move(found));
}

std::shared_ptr<PageArray> PageMemory::make(std::int64_t count) const {
  free_->drop_smaller_than(count);
  const auto capacity = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
  return lend(std::make_unique<PageArray>(device_, capacity));
}

std::shared_ptr<PageArray> PageMemory::lend(std::unique_ptr<PageArray> array) const {
  return {array.release(), [free = free_](PageArray* returned) {
            free->give_back(std::unique_ptr<PageArray>(returned));
          }};
}

}  // namespace preflash
