// Records of work items (ForwardParams::records), in builds with PREFLASH_TRACE. In others all of
// this is nothing: no parameter, no register, no instruction.
#pragma once

#include "preflash/params.h"

namespace preflash {

#ifdef PREFLASH_TRACE

inline constexpr Tracing kTracing = Tracing::kItems;

// Times of one item after the other, by one thread of a CTA.
class ItemTimer {
 public:
  // An item begins where the one before it ended, or where nothing runs before it.
  __device__ __forceinline__ void start() { begin_ns_ = now_ns(); }

  template <class Params>
  __device__ __forceinline__ void stop(const Params& params, int record,
                                       const WorkItem& item) const {
    if (params.records == nullptr) return;
    params.records[record] = {.begin_ns = begin_ns_,
                              .end_ns = now_ns(),
                              .processor = sm_id(),
                              .cta = static_cast<std::int32_t>(blockIdx.x),
                              .request = item.request,
                              .kv_head = item.kv_head,
                              .chunk = item.chunk};
  }
  template <class Params, class State>
  __device__ __forceinline__ void stop(const Params& params, const State& state) const {
    stop(params, state.record, state.item);
  }

 private:
  // One clock for all SMs.
  __device__ __forceinline__ static std::int64_t now_ns() {
    std::int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  __device__ __forceinline__ static std::int32_t sm_id() {
    std::int32_t id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
  }

  std::int64_t begin_ns_ = 0;
};

template <class State>
__device__ __forceinline__ void note_record(State& state, int record) {
  state.record = record;
}

#else

inline constexpr Tracing kTracing = Tracing::kNone;

struct ItemTimer {
  __device__ __forceinline__ void start() const {}
  template <class... Where>
  __device__ __forceinline__ void stop(const Where&...) const {}
};

template <class State>
__device__ __forceinline__ void note_record(State&, int) {}

#endif

}  // namespace preflash
