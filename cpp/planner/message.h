// Refusing an argument: the message is built only when it is needed.
#pragma once

#include <concepts>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>

namespace preflash {
namespace message {

// Not a stream: its locale may come from another C++ runtime of the process, which crashes.
inline void append(std::string& text, std::string_view part) { text += part; }

template <std::integral Number>
void append(std::string& text, Number part) {
  text += std::to_string(part);
}

inline void append(std::string& text, double part) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.9g", part);
  text += digits;
}

}  // namespace message

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::string text;
  (message::append(text, parts), ...);
  throw std::invalid_argument(text);
}

}  // namespace preflash
