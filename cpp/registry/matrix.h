// The variant matrix as forward.toml spans it: its rows, compiled or not, its axes, and how an id
// spells a variant. The definitions are generated.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "preflash/variant.h"

namespace preflash {

// Every row: lets a miss say whether a fuller build would serve.
std::span<const Variant> every_variant();

// One axis of the matrix as a caller reads it.
struct Axis {
  const char* name;
  bool option;  // one that families may leave to the run time
  std::string (*value)(const Variant&);
  bool (*serves)(const Variant& compiled, const Variant& wanted);
};

// Returns the axes that decide whether a kernel of the wanted family serves; the tile class does
// not.
std::span<const Axis> reported_axes();

// The family and whatever is not the default of its axis, e.g. "sm80_bf16_d128_decode".
std::string id_of(const Variant& variant);

}  // namespace preflash
