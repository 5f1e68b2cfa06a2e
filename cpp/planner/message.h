// Refusing an argument: the message is built only when it is needed.
#pragma once

#include <sstream>
#include <stdexcept>

namespace preflash {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

}  // namespace preflash
