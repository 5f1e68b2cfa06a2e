#include "core/memory_claim.h"

#include <map>
#include <mutex>
#include <utility>

namespace preflash {

// Claims that are in force. No two of them overlap. Locked by plan() and where a place ends, for as
// long as it takes to look up an address: run() looks at its own claim alone.
class MemoryClaim::Ledger {
 public:
  // Never destroyed: places may end after static objects.
  static Ledger& instance() {
    static Ledger* const ledger = new Ledger;
    return *ledger;
  }

  void take(MemoryClaim& claim, std::uintptr_t begin, std::uintptr_t end) {
    const std::lock_guard lock(mutex_);
    erase(claim);
    claim.lost_.store(false, std::memory_order_release);
    if (begin == end) return;
    auto other = claims_.lower_bound({claim.device_, begin});
    if (other != claims_.begin()) {
      const auto before = std::prev(other);
      if (before->first.first == claim.device_ && before->second->end_ > begin) other = before;
    }
    while (other != claims_.end() && other->first < Key{claim.device_, end}) {
      MemoryClaim& loser = *other->second;
      loser.lost_.store(true, std::memory_order_release);
      loser.begin_ = loser.end_ = 0;
      other = claims_.erase(other);
    }
    claim.begin_ = begin;
    claim.end_ = end;
    claims_.emplace(Key{claim.device_, begin}, &claim);
  }

  void release(MemoryClaim& claim) {
    const std::lock_guard lock(mutex_);
    erase(claim);
  }

 private:
  using Key = std::pair<int, std::uintptr_t>;  // device, first byte

  void erase(MemoryClaim& claim) {
    if (claim.begin_ != claim.end_) claims_.erase({claim.device_, claim.begin_});
    claim.begin_ = claim.end_ = 0;
  }

  std::mutex mutex_;
  std::map<Key, MemoryClaim*> claims_;
};

void MemoryClaim::take(const void* memory, std::int64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  Ledger::instance().take(*this, begin, begin + static_cast<std::uintptr_t>(bytes));
}

void MemoryClaim::release() { Ledger::instance().release(*this); }

}  // namespace preflash
