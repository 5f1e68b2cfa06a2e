// One pass over a workspace: hands out aligned places and, when it stands on real memory, has them
// filled. Run without memory it counts; counting and filling are therefore the same code.
#pragma once

#include <cstdint>

#include "preflash/plan.h"

namespace preflash {

class Arena {
 public:
  static constexpr std::int64_t kAlignment = 16;

  explicit Arena(void* base = nullptr) : base_(base) {}

  // Reserves `count` elements. `fill(T*)` is called only when there is memory behind the arena.
  template <class T, class Fill>
  Offset<T> take(std::int64_t count, Fill&& fill) {
    static_assert(alignof(T) <= kAlignment);
    Offset<T> place{bytes_};
    bytes_ += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), kAlignment) * kAlignment;
    if (base_ != nullptr) fill(place.in(base_));
    return place;
  }

  // A place that the host never writes.
  template <class T>
  Offset<T> take(std::int64_t count) {
    return take<T>(count, [](T*) {});
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  void* base_;
  std::int64_t bytes_ = 0;
};

}  // namespace preflash
