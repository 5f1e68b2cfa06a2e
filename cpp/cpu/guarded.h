// Exceptions stop where the CPU backend is called through a table of functions: a LaunchError is
// all that callers of the table look at.
#pragma once

#include "preflash/variant.h"

namespace preflash::cpu {

// Returns the text of the exception being handled, in a buffer of the calling thread. It is valid
// until the thread's next failing call: the receiver copies it at once.
LaunchError text_of_current_exception();

template <class Body>
LaunchError guarded(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (...) {
    return text_of_current_exception();
  }
}

}  // namespace preflash::cpu
