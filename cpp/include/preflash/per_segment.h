// One T for each segment of a launch. A launch runs one segment, or two side by side: prefill
// beside decode.
#pragma once

#include <stdexcept>
#include <utility>

namespace preflash {

inline constexpr int kMaxSegments = 2;

template <class T>
class PerSegment {
 public:
  PerSegment() = default;
  PerSegment(T only) : items_{std::move(only)}, size_(1) {}  // NOLINT: one segment is the rule

  T& add(T item) {
    if (size_ == kMaxSegments) throw std::length_error("a launch has at most two segments");
    return items_[size_++] = std::move(item);
  }

  int size() const { return size_; }
  T& operator[](int segment) { return items_[segment]; }
  const T& operator[](int segment) const { return items_[segment]; }

  T* begin() { return items_; }
  T* end() { return items_ + size_; }
  const T* begin() const { return items_; }
  const T* end() const { return items_ + size_; }

  friend bool operator==(const PerSegment&, const PerSegment&) = default;

 private:
  T items_[kMaxSegments] = {};
  int size_ = 0;
};

}  // namespace preflash
