// The sentence for a request that no compiled kernel serves.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "preflash/variant.h"

namespace preflash {

// Says what was asked, what is compiled for that family, and what would work. `compiled` holds the
// variants of the wanted family; `elsewhere` the families, if any, whose kernels serve the request.
std::string describe_not_compiled(const Variant& wanted, std::span<const Variant> compiled,
                                  const std::vector<Family>& elsewhere);

// The same for a family that has no library here; `why` says what is missing.
std::string describe_absent(const Variant& wanted, const std::string& why,
                            const std::vector<Family>& elsewhere);

// For two segments of a family that has no kernel for both in one launch; `elsewhere` holds the
// families that run any two.
std::string describe_separate(const Variant& first, const Variant& second,
                              const std::vector<Family>& elsewhere);

}  // namespace preflash
