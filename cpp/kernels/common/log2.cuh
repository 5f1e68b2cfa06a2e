// From natural logarithms, of logits as callers mean them, to those of base 2.
#pragma once

namespace preflash {

inline constexpr float kLog2E = 1.4426950408889634f;

}  // namespace preflash
