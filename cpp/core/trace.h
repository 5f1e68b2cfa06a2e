// Records of work items, for `python -m preflash bench --trace`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/plan.h"
#include "preflash/item_record.h"

namespace preflash {

// One launch that was recorded: where its records lie.
struct TracedLaunch {
  std::string kernel_id;
  std::int64_t first_record = 0;
  std::int64_t num_records = 0;
};

// Between start() and stop() every launch of the thread that started it records its items, one
// launch behind the other. Used by that thread alone.
class Trace {
 public:
  // records: [capacity], zeroed memory of `device`, which outlives the trace and its launches.
  Trace(ItemRecord* records, std::int64_t capacity, int device);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  void start();
  void stop();

  // Null: this thread records nothing.
  static Trace* of_this_thread();

  // Reserves the next launch's records. Throws std::invalid_argument if the plan is for another
  // device, if its kernel records nothing, or if the records do not fit.
  ItemRecord* take(const Plan& plan);

  const std::vector<TracedLaunch>& launches() const { return launches_; }

 private:
  ItemRecord* records_;
  std::int64_t capacity_;
  int device_;
  std::int64_t taken_ = 0;
  std::vector<TracedLaunch> launches_;
};

}  // namespace preflash
