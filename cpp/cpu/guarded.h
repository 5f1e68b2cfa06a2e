// Exceptions stop where the CPU backend is called through a table of functions: a LaunchError is
// all that callers of the table look at.
#pragma once

#include "preflash/variant.h"

namespace preflash::cpu {

// What the exception being handled says. Points into a buffer of the calling thread and is valid
// until that thread's next failing call: whoever receives it copies it at once.
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
