// The whole variant matrix, compiled or not: lets a miss say whether a fuller build would serve.
#pragma once

#include <span>

#include "preflash/variant.h"

namespace preflash {

// Every row of cpp/variants; the definition is generated.
std::span<const Variant> every_variant();

}  // namespace preflash
