#include "core/trace.h"

#include <stdexcept>

namespace preflash {
namespace {

thread_local Trace* active = nullptr;

}  // namespace

Trace::Trace(ItemRecord* records, std::int64_t capacity, int device)
    : records_(records), capacity_(capacity), device_(device) {}

Trace::~Trace() { stop(); }

void Trace::start() { active = this; }

void Trace::stop() {
  if (active == this) active = nullptr;
}

Trace* Trace::of_this_thread() { return active; }

ItemRecord* Trace::take(const Plan& plan) {
  const ForwardKernel& kernel = plan.kernel();
  if (plan.device() != device_) {
    throw std::invalid_argument("the trace's records are on device " + std::to_string(device_) +
                                ", the launch on " + std::to_string(plan.device()) +
                                ": trace each device by itself");
  }
  if (kernel.tracing == Tracing::kNone) {
    throw std::invalid_argument(
        std::string(kernel.id) +
        " was compiled without timestamps: build the kernel libraries with them, by cmake "
        "-DPREFLASH_TRACE=ON or pip install . -C cmake.define.PREFLASH_TRACE=ON");
  }
  const std::int64_t needed = std::int64_t{plan.total_sizes().num_items} * kernel.ctas_per_item;
  if (needed > capacity_ - taken_) {
    throw std::invalid_argument("the trace has room for " + std::to_string(capacity_ - taken_) +
                                " more records, the launch needs " + std::to_string(needed) +
                                ": trace a smaller batch or fewer launches");
  }
  launches_.push_back({.kernel_id = kernel.id, .first_record = taken_, .num_records = needed});
  taken_ += needed;
  return records_ + launches_.back().first_record;
}

}  // namespace preflash
