// Tracks which plan a piece of memory holds: the plan written last. If two wrappers share an int
// workspace, the work list in it belongs to one of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace preflash {

// Claim of one DevicePlan on its memory. Every plan() takes the memory again. Thread-safe.
class MemoryClaim {
 public:
  explicit MemoryClaim(int device) : device_(device) {}
  ~MemoryClaim() { release(); }
  MemoryClaim(const MemoryClaim&) = delete;
  MemoryClaim& operator=(const MemoryClaim&) = delete;

  // Every other claim on a part of this memory is lost.
  void take(const void* memory, std::int64_t bytes);
  // True if another claim has taken a part of the memory since.
  bool lost() const { return lost_.load(std::memory_order_acquire); }

 private:
  class Ledger;

  void release();

  int device_;
  std::uintptr_t begin_ = 0;
  std::uintptr_t end_ = 0;  // the ledger has it where it is not empty
  std::atomic<bool> lost_ = false;
};

}  // namespace preflash
