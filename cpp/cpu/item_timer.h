// Records of work items (ForwardParams::records).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "preflash/params.h"

namespace preflash::cpu {

// Writes the time from construction to stop() to the record, if there is one.
class ItemTimer {
 public:
  explicit ItemTimer(ItemRecord* record)
      : record_(record), begin_ns_(record == nullptr ? 0 : now_ns()) {}

  void stop(const WorkItem& item) const {
    if (record_ == nullptr) return;
    *record_ = {.begin_ns = begin_ns_,
                .end_ns = now_ns(),
                .processor = thread_number(),
                .cta = thread_number(),
                .request = item.request,
                .kv_head = item.kv_head,
                .chunk = item.chunk};
  }

 private:
  static std::int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }
  // Returns the number of this thread among those that have ever recorded an item.
  static std::int32_t thread_number() {
    static std::atomic<std::int32_t> threads{0};
    thread_local const std::int32_t number = threads.fetch_add(1, std::memory_order_relaxed);
    return number;
  }

  ItemRecord* record_;
  std::int64_t begin_ns_;
};

}  // namespace preflash::cpu
