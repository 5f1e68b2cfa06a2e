// Which plan a piece of memory holds: the one that was written there last. Two wrappers may be
// given one int workspace; the work list that is there is then the other one's for one of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace preflash {

// Of one place for plans. Every plan() takes the memory again. Thread-safe.
class MemoryClaim {
 public:
  explicit MemoryClaim(int device) : device_(device) {}
  ~MemoryClaim() { release(); }
  MemoryClaim(const MemoryClaim&) = delete;
  MemoryClaim& operator=(const MemoryClaim&) = delete;

  // Whoever else had a part of it has lost it.
  void take(const void* memory, std::int64_t bytes);
  // Whether another one took a part of it since.
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
