// Ends a long computation when its caller wants to: a Ctrl-C would otherwise wait for all of it.
#pragma once

namespace preflash::cpu {

// Asked on the calling thread, some times a second. True: what has not begun is left undone, and
// the call fails.
using StopRequested = bool (*)();

// For the calls of this thread while it lives.
class InterruptScope {
 public:
  explicit InterruptScope(StopRequested stop_requested);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  StopRequested before_;
};

}  // namespace preflash::cpu
