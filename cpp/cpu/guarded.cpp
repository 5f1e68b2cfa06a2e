#include "cpu/guarded.h"

#include <cstdio>
#include <exception>
#include <new>

namespace preflash::cpu {
namespace {

thread_local char text[512];

}  // namespace

LaunchError text_of_current_exception() {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return "out of host memory";  // its what() names only a C++ type
  } catch (const std::exception& error) {
    std::snprintf(text, sizeof text, "%s", error.what());
    return text;
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace preflash::cpu
